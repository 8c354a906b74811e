"""How programs of the backward's last stage walk over all chunks, and what they read of each.

There are as many programs as processors. Each walks over all chunks in steps as wide as their number, so that copies
go on from chunk to chunk. Two warpgroups compute, with half of the key channels each, and a third copies.

Tiles come in sets with a barrier each, so that a tile's place is free as soon as it is read: `rows` (numbers a token
or, as `ends`, a key channel), `near` (dO, dW, R; in linear attention dO, V), `states`, `d_states`, `keys` (q, k, k~,
and an erase gate of one number a key channel).
"""

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.common.kernel_shape import CHUNK, KernelShape
from pallas_kernels.common.mosaic_gpu import (
    SIDE,
    arrive,
    barrier,
    begin_copy,
    column_numbers,
    fence_smem,
    launch,
    load_column,
    matrix_buffer,
    number_buffer,
    quotient,
    remainder,
    row_numbers,
    spread_columns,
    spread_rows,
    store,
    store_across,
    use_registers,
    wait,
    wait_for_stores,
    wide_buffer,
    zero,
)
from pallas_kernels.delta_rule.mosaic_gpu.pipeline import chunk_at, tokens

_SETS = ("near", "states", "d_states", "rows", "keys")  # in the order in which a chunk's tiles are freed
KEYS = ("q", "k", "write_key")
Structs = dict[str, jax.ShapeDtypeStruct | None]
_GATE = "erase"
_REGISTERS = 240, 24


class GradientArrays(NamedTuple):
    """What the kernel reads. N is the number of chunks, C = 64.

    Attributes:
        q: `[B, T, H, K]`.
        k: `[B, T, H, K]`.
        write_key: likewise, or None.
        d_out: `[B, T, HV, V]`.
        d_values: `dW` as the reverse pass stores it, `[B, T, HV, V]`; None for linear attention.
        states: before each chunk, transposed, `[B, HV, N, V, K]`.
        d_states: gradient of the state after each chunk, `[B, HV, N, V, K]`.
        residuals: R, transposed, `[B, HV, N, V, C]`; None for linear attention.
        ratio: what turns `dW` as stored to the gradient of what reads, `[B, T, HV]` float32; None for 1.
        erase: the erase gate if it is one number a key channel, `[B, T, HV, K]` bfloat16 or float32, else None.
        log_decay: `[B, T, HV]`, `[B, T, HV, K]`, or None.
        resets: 1 at each token that starts a document, `[B, T]`; None without.
        read_rows: `scale * exp(G)`, `[B, HV, T]` float32; None without decay, and where it is channel-wise.
        written_rows: `exp(G_C - G)` likewise.
        kept: `exp(G_C)`, `[B, HV, N]` likewise, or `[B, HV, N, K]`.
        front: `exp(G_m)` of a channel-wise decay, `[B, HV, N, K]` float32, with `m` the chunk's middle; else None.
        tail: `exp(G_C - G_m)` likewise.
        values: linear attention's R, `[B, T, HV, V]`; else None.
        rests: there, what rounding left of the states, `rests_struct`; else None.
        d_rests: there, of `d_states`.
    """

    q: Array
    k: Array
    write_key: Array | None
    d_out: Array
    d_values: Array | None
    states: Array
    d_states: Array
    residuals: Array | None
    ratio: Array | None
    erase: Array | None
    log_decay: Array | None
    resets: Array | None
    read_rows: Array | None
    written_rows: Array | None
    kept: Array | None
    front: Array | None = None
    tail: Array | None = None
    values: Array | None = None
    rests: Array | None = None
    d_rests: Array | None = None


class TileScheduler(NamedTuple):
    """A program's way through all chunks.

    Attributes:
        kernel_shape: static facts.
        rows: names of the numbers a token, in the order in which they are stored.
        ends: names of the numbers a key channel, likewise.
        depths: places of each set of tiles.
        num_ctas: number of programs.
        full: by set, barriers of its places: the tiles are there.
        free: by set, barriers of its places: the tiles have been read.
    """

    kernel_shape: KernelShape
    rows: tuple[str, ...]
    ends: tuple[str, ...]
    depths: dict[str, int]
    num_ctas: int
    full: dict[str, Any]
    free: dict[str, Any]

    @property
    def chunks(self) -> int:
        """Chunks of all heads."""
        p = self.kernel_shape
        return p.batch * p.value_heads * p.chunks

    @property
    def count(self) -> Any:
        """Chunks of this program."""
        return quotient(self.chunks - lax.axis_index("program") + (self.num_ctas - 1), self.num_ctas)

    def at(self, m: Any) -> tuple[Any, Any, Any]:
        """Batch, chunk and value head of the program's m-th chunk."""
        return chunk_at(self.kernel_shape, lax.axis_index("program") + m * self.num_ctas)

    def place(self, name: str, m: Any) -> Any:
        """The place of a set of tiles that the m-th chunk takes."""
        depth = self.depths[name]
        return zero(m) if depth == 1 else remainder(m, depth)

    def wait(self, name: str, m: Any) -> None:
        """Waits for the m-th chunk's tiles."""
        wait(self.full[name].at[self.place(name, m)])

    def row(self, tiles: Any, name: str, m: Any, load: Callable[[Any], Array] = load_column) -> Any:
        """One number a token, for a matrix whose rows are tokens unless `load` says otherwise; None for 1."""
        return load(tiles.rows.at[self.place("rows", m), self.rows.index(name)]) if name in self.rows else None

    def release(self, name: str, m: Any) -> None:
        """Lets their place be filled again."""
        arrive(self.free[name].at[self.place(name, m)])


def copy_tiles(r: Any, tiles: Any, scheduler: TileScheduler) -> None:
    """Copies the tiles of all chunks, in the order in which their places become free."""
    p, count = scheduler.kernel_shape, scheduler.count

    def sources(name, m):
        """Pairs of a part of an array and the place that it is copied to."""
        b, n, h = scheduler.at(m)
        place = scheduler.place(name, m)
        if name == "rows":
            if r.rows is not None:
                yield r.rows.at[b, h, n], tiles.rows.at[place]
            for i, key in enumerate(scheduler.ends):
                yield getattr(r, key).at[b, h, n], tiles.ends.at[place, i]
        if name == "near":
            for j, x in enumerate((r.d_out, r.values if r.d_values is None else r.d_values)):
                yield x.at[b, tokens(n), h], tiles.near.at[place, j]
            if r.residuals is not None:
                yield r.residuals.at[b, h, n], tiles.residuals.at[place]
        for half in (0, 1):
            channels = pl.ds(half * SIDE, SIDE)
            if name in ("states", "d_states"):
                values = pl.ds(0, p.value_size)
                yield getattr(r, name).at[b, h, n, values, channels], getattr(tiles, name).at[place, half]
            if name == "keys":
                for key in (*KEYS, _GATE):
                    x = getattr(r, key)
                    if hasattr(tiles, key):
                        head = quotient(h, p.value_heads // x.shape[2])
                        yield x.at[b, tokens(n), head, channels], getattr(tiles, key).at[place, half]

    def fetch(name, m):
        for source, target in sources(name, m):
            begin_copy(source, target, scheduler.full[name].at[scheduler.place(name, m)])

    for m in range(max(scheduler.depths.values()) - 1):  # what need not wait for a place
        for name, depth in scheduler.depths.items():
            if m < depth - 1:

                @pl.when(m < count)
                def _(name=name, m=m):
                    fetch(name, jnp.int32(m))

    @pl.loop(0, count)
    def _(j):
        for name, depth in scheduler.depths.items():
            m = j + depth - 1

            @pl.when(m < count)
            def _(name=name, m=m):
                pl.when(j > 0)(lambda: wait(scheduler.free[name].at[scheduler.place(name, m)]))
                fetch(name, m)

    for name, depth in scheduler.depths.items():  # a program ends when nothing is on its way any more

        @pl.loop(jnp.maximum(count - depth, 0), count)
        def _(j, name=name):
            wait(scheduler.free[name].at[scheduler.place(name, j)])


class KeyTiles(NamedTuple):
    """The tiles of q, k and k~ of one warpgroup's key channels, through which their gradients leave.

    In float32, by value head, gradients leave directly instead. Through the gate's tile leaves its gradient.

    Attributes:
        refs: the kernel's arrays.
        tiles: all tiles.
        scheduler: the program's way.
        half: the warpgroup's half of the channels.
        is_across: whether gradients are held transposed, channels by tokens.
    """

    refs: Any
    tiles: Any
    scheduler: TileScheduler
    half: Any
    is_across: bool = False

    @property
    def through(self) -> list[str]:
        """Names of those whose gradients leave through their tiles."""
        targets = {key: getattr(self.refs, f"d_{key}") for key in KEYS}
        return [key for key, target in targets.items() if target is not None and target.dtype == jnp.bfloat16]

    @property
    def holds_gate(self) -> bool:
        """Whether there is a tile of the erase gate."""
        return hasattr(self.tiles, _GATE)

    def of(self, m: Any) -> tuple[Any, Any, Any]:
        """The tiles of q, k and k~ of the program's m-th chunk."""
        q, k = self._tile("q", m), self._tile("k", m)
        return q, k, k if self.refs.write_key is None else self._tile("write_key", m)

    def release_before(self, m: Any) -> None:
        """Waits until all that is stored of the chunk before the m-th has left, and lets its place be filled."""

        def release():
            wait_for_stores()
            if self.through or self.holds_gate:
                self.scheduler.release("keys", m - 1)

        pl.when(m > 0)(release)

    def store(self, m: Any, gradients: Mapping[str, Array]) -> None:
        """Stores the gradients that are wanted. The tiles are no longer read."""
        b, n, h = self.scheduler.at(m)
        channels, through = pl.ds(self.half * SIDE, SIDE), self.through
        targets = {key: getattr(self.refs, f"d_{key}") for key in KEYS}
        targets = {key: x.at[b, tokens(n), h, channels] for key, x in targets.items() if x is not None}
        for key, target in targets.items():
            if key in through:
                tile = self._tile(key, m)
                (tile.T if self.is_across else tile)[...] = gradients[key].astype(jnp.bfloat16)
            elif self.is_across:
                store_across(target, gradients[key])
            else:
                target[...] = gradients[key]
        fence_smem()
        for key in through:
            store(self._tile(key, m), targets[key], last=key == through[-1])
        if not (through or self.holds_gate):
            self.scheduler.release("keys", m)

    def gate_of(self, m: Any) -> Any:
        """The tile of the erase gate of the program's m-th chunk."""
        return self._tile(_GATE, m)

    def _tile(self, key: str, m: Any) -> Any:
        return getattr(self.tiles, key).at[self.scheduler.place("keys", m), self.half]


def scaled_pairs(pairs: Array, half: Any, scale: float, ratio: Array | None) -> Array:
    """`dO R^T` times the scale in the first warpgroup, `dW R^T` times `-ratio` in the second, not yet masked."""
    if ratio is None:
        return pairs * jnp.where(half == 0, scale, -1.0)
    is_first = (half == 0).astype(jnp.float32)
    return pairs * spread_rows(is_first * scale - (1.0 - is_first) * ratio)


def diagonal(x: Array, m: Any = None) -> Array:
    """The diagonal of a matrix `[C, C]`, one number a row; `m` as in `row_numbers`."""
    return jnp.sum(jnp.where(spread_rows(row_numbers(m)) == spread_columns(column_numbers()), x, 0.0), axis=1)


def call(
    compute: Callable[[Any, Any, Any, TileScheduler], None],
    name: str,
    kernel_shape: KernelShape,
    x: GradientArrays,
    rows: Mapping[str, Array],
    ends: Mapping[str, Array],
    outputs: Mapping[str, jax.ShapeDtypeStruct | None],
    buffers: Mapping[str, Any],
    *,
    more: Mapping[str, Array | None],
    num_key_stages: int,
    num_ctas: int,
) -> dict[str, Array | None]:
    """Runs `compute(refs, tiles, buffers, scheduler)` in two warpgroups of each program, and the copies in a third.

    Args:
        compute: the loop over a program's chunks.
        name: the kernel's name in profiles.
        kernel_shape: static facts.
        x: arrays whose tiles are copied.
        rows: numbers a token, `[B, HV, T]` float32.
        ends: numbers a key channel, `[B, HV, N, K]` float32.
        outputs: as `launch` takes them.
        buffers: other shared memory.
        more: arrays that are read from global memory.
        num_key_stages: chunks whose queries and keys are in shared memory.
        num_ctas: at most; the number of processors.
    """
    p, count = kernel_shape, len(rows)
    depths = {name: num_key_stages if name == "keys" else 2 if name == "rows" else 1 for name in _SETS}
    if not count and not ends:
        del depths["rows"]
    keys = KEYS[: 2 if x.write_key is None else 3]
    # Beside a write key there is no room for it in float32.
    copies_gate = x.erase is not None and (x.write_key is None or x.erase.dtype == jnp.bfloat16)
    num_ctas = min(num_ctas, p.batch * p.value_heads * p.chunks)
    by_chunk = (p.batch, p.value_heads, p.chunks, CHUNK)
    copied = (*KEYS, _GATE, "d_out", "d_values", "states", "d_states", "residuals", "values")
    inputs = {name: getattr(x, name) for name in copied} | dict(more)
    inputs["rows"] = jnp.stack([row.reshape(by_chunk) for row in rows.values()], axis=3) if rows else None
    inputs |= ends
    gate_buffer = matrix_buffer if copies_gate and x.erase.dtype == jnp.bfloat16 else wide_buffer  # type: ignore[union-attr]
    tiles = {
        "near": matrix_buffer(1, 2, CHUNK, p.value_size),
        **({} if x.residuals is None else {"residuals": matrix_buffer(1, p.value_size, CHUNK)}),
        "states": matrix_buffer(1, 2, p.value_size, SIDE),
        "d_states": matrix_buffer(1, 2, p.value_size, SIDE),
        **{key: matrix_buffer(num_key_stages, 2, CHUNK, SIDE) for key in keys},
        **({_GATE: gate_buffer(num_key_stages, 2, CHUNK, SIDE)} if copies_gate else {}),
        **({"rows": number_buffer(2, count, CHUNK)} if rows else {}),
        **({"ends": number_buffer(2, len(ends), p.key_size)} if ends else {}),
    }
    arrivals = {
        "near": 2 + (x.residuals is not None),
        "states": 2,
        "d_states": 2,
        "rows": bool(rows) + len(ends),
    }
    arrivals["keys"] = 2 * (len(keys) + copies_gate)
    memory = {
        "tiles": tuple(tiles.values()),
        "full": tuple(barrier(arrivals[name], depth) for name, depth in depths.items()),
        "free": tuple(barrier(2, depth) for depth in depths.values()),
        **buffers,
    }

    def program(r, memory):
        there = SimpleNamespace(**dict(zip(tiles, memory.tiles)))
        by_set = dict(zip(depths, memory.full)), dict(zip(depths, memory.free))
        scheduler = TileScheduler(p, tuple(rows), tuple(ends), depths, num_ctas, *by_set)
        warpgroup = lax.axis_index("warpgroup")
        computing, copying = _REGISTERS

        @pl.when(warpgroup < 2)
        def _():
            use_registers(computing, more=True)
            compute(r, there, memory, scheduler)

        @pl.when(warpgroup == 2)
        def _():
            use_registers(copying, more=False)
            copy_tiles(r, there, scheduler)

    return launch(program, name, inputs, outputs, memory, grid={"program": num_ctas}, warpgroups=3)


def parts_struct(kernel_shape: KernelShape) -> jax.ShapeDtypeStruct:
    """Of a gradient of one number a token: a part for each half of the key channels, `[2, B, HV, T]` float32."""
    return jax.ShapeDtypeStruct((2, kernel_shape.batch, kernel_shape.value_heads, kernel_shape.length), jnp.float32)


def gradient_structs(
    kernel_shape: KernelShape, x: GradientArrays, *, with_erase: bool, write_key_dtype: Any
) -> Structs:
    """Gradients by value head but the log decay's, None where not wanted.

    Args:
        kernel_shape: static facts.
        x: what the kernel reads.
        with_erase: whether the gradient of an erase gate of one number a token is wanted.
        write_key_dtype: of the write key's gradient; None is the write key's.

    Returns:
        `d_q`, `d_k`, `d_write_key`, and `d_erase` of a gate of one number a key channel, `[B, T, HV, K]`, in the
        argument's dtype, or in float32 where value heads share a key head. `d_erase` of a gate of one number a token,
        times the gate: `parts_struct`.
    """
    shape = (kernel_shape.batch, kernel_shape.length, kernel_shape.value_heads, kernel_shape.key_size)

    def of_key(like: Array | None, dtype: Any = None) -> jax.ShapeDtypeStruct | None:
        if like is None:
            return None
        dtype = (dtype or like.dtype) if like.shape[2] == kernel_shape.value_heads else jnp.float32
        return jax.ShapeDtypeStruct(shape, dtype)

    return {
        "d_q": of_key(x.q),
        "d_k": of_key(x.k),
        "d_write_key": of_key(x.write_key, write_key_dtype),
        "d_erase": parts_struct(kernel_shape) if with_erase else of_key(x.erase),
    }

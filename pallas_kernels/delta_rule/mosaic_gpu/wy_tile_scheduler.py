"""How programs of the first stage walk over all chunks.

There are as many programs as processors. Each warpgroup that computes has chunks of its own, one after another, and
goes over each in one or more blocks of key channels; one more warpgroup copies for all. Each has its own part of shared
memory: tiles in slots that are free again once the warpgroup says so, and numbers a token.
"""

import functools
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.common.kernel_shape import CHUNK, KernelShape
from pallas_kernels.common.mosaic_gpu import (
    WARPS,
    arrive,
    barrier,
    begin_column,
    begin_copy,
    either_buffer,
    fence_smem,
    launch,
    load_channels,
    load_column,
    matrix_buffer,
    number_buffer,
    quotient,
    row_numbers,
    store,
    total,
    use_registers,
    wait,
    wait_for_stores,
    wide_buffer,
    zero,
)
from pallas_kernels.delta_rule.mosaic_gpu.pipeline import chunk_at, tokens
from pallas_kernels.delta_rule.mosaic_gpu.triangular_inverse import unit_lower_inverse

# Registers of a thread in a warpgroup that computes and in the one that copies, by the number of those that compute.
_REGISTERS = {2: (232, 40), 3: (160, 32)}


class WYTileScheduler(NamedTuple):
    """A warpgroup's way through its chunks, and in each of these through blocks of key channels.

    Attributes:
        kernel_shape: static facts.
        keys: names of what there are tiles of.
        gates: names of arrays of one number a token.
        rows: names of other numbers a token, in the order in which they are stored.
        num_compute_warpgroups: warpgroups of a program that compute.
        num_ctas: number of programs.
        parts: blocks of key channels.
        num_stages: blocks whose tiles are in shared memory at once: all of a chunk's, or one.
        group: the warpgroup, among those that compute.
        barriers: `full` and `free`, of all warpgroups' slots; `rows_full`, `rows_free`, `gates_full`, `gates_free`.
    """

    kernel_shape: KernelShape
    keys: tuple[str, ...]
    gates: tuple[str, ...]
    rows: tuple[str, ...]
    num_compute_warpgroups: int
    num_ctas: int
    parts: int
    num_stages: int
    group: Any
    barriers: Any

    @property
    def count(self) -> Any:
        """Chunks of this warpgroup."""
        p, step = self.kernel_shape, self.num_ctas * self.num_compute_warpgroups
        return quotient(p.batch * p.value_heads * p.chunks - self._first + (step - 1), step)

    @property
    def _first(self) -> Any:
        return lax.axis_index("program") + self.num_ctas * self.group

    def at(self, m: Any) -> tuple[Any, Any, Any]:
        """Batch, chunk and value head of the warpgroup's m-th chunk."""
        return chunk_at(self.kernel_shape, self._first + m * (self.num_ctas * self.num_compute_warpgroups))

    def own(self, m: Any) -> Any:
        """The warpgroup as an expression of m: addresses that follow from a constant would all be kept in registers."""
        return self.group + zero(m)

    def channels(self, part: int) -> Any:
        """Key channels of a block."""
        width = self.kernel_shape.key_size // self.parts
        return pl.ds(part * width, width)

    def row(self, tiles: Any, name: str, m: Any, load: Callable[[Any], Array] = load_column) -> Any:
        """One number a token, for a matrix whose rows are tokens unless `load` says otherwise; None for 1."""
        return load(tiles.rows.at[self.own(m), self.rows.index(name)]) if name in self.rows else None

    def passes(self, tiles: Any, m: Any) -> Any:
        """1 where no document starts in a chunk, else 0; as one number."""
        if "run" not in self.rows:
            return 1.0
        return jnp.where(tiles.rows[self.own(m), self.rows.index("run"), CHUNK - 1] == 0.0, 1.0, 0.0)

    def gate(self, tiles: Any, name: str, m: Any) -> Any:
        """A chunk's numbers a token of one of `gates`, for a matrix whose rows are tokens; None for an absent one."""
        return load_column(tiles.gates.at[self.own(m), self.gates.index(name)]) if name in self.gates else None

    def wait_for_rows(self, m: Any) -> None:
        """Waits for a chunk's numbers a token."""
        if self.rows:
            wait(self.barriers.rows_full.at[self.own(m)])
        if self.gates:
            wait(self.barriers.gates_full.at[self.own(m)])

    def release_rows(self, m: Any) -> None:
        """Lets their place be filled again. Before it comes `fence_smem`."""
        if self.rows:
            arrive(self.barriers.rows_free.at[self.own(m)])
        if self.gates:
            arrive(self.barriers.gates_free.at[self.own(m)])

    def wait(self, m: Any, part: int = 0) -> Any:
        """The slot of a block's tiles, once they are there."""
        slot = self.slot(m, part)
        wait(self.barriers.full.at[slot])
        return slot

    def release(self, m: Any, part: int = 0) -> None:
        """Lets their slot be filled again, likewise."""
        arrive(self.barriers.free.at[self.slot(m, part)])

    def slot(self, m: Any, part: int) -> Any:
        """The slot, of all warpgroups', of a block."""
        return self.own(m) * self.num_stages + part % self.num_stages

    def fetch(self, r: Any, tiles: Any, m: Any, part: int) -> None:
        """Copies a block's tiles, and with the first of them the chunk's numbers a token."""
        b, n, h = self.at(m)
        at = self.barriers
        if part == 0 and self.rows:
            place = self.own(m)
            pl.when(m > 0)(lambda: wait(at.rows_free.at[place]))
            begin_copy(r.rows.at[b, h, n], tiles.rows.at[place], at.rows_full.at[place])
        slot = self.slot(m, part)
        pl.when((m > 0) | (part >= self.num_stages))(lambda: wait(at.free.at[slot]))
        for name in self.keys:
            x = getattr(r, name)
            head = quotient(h, self.kernel_shape.value_heads // x.shape[2])
            source = x.at[b, tokens(n), head, self.channels(part)]
            begin_copy(source, getattr(tiles, name).at[slot], at.full.at[slot])
        if part == 0 and self.gates:  # a number a head lies apart from the next token's, and the copy engine takes none
            place = self.own(m)
            loads = [begin_column(getattr(r, name).at[b, tokens(n), h]) for name in self.gates]
            pl.when(m > 0)(lambda: wait(at.gates_free.at[place]))
            for i, x in enumerate(loads):
                tiles.gates.at[place, i][...] = x.astype(jnp.float32)
            fence_smem()
            arrive(at.gates_full.at[place])

    def finish(self) -> None:
        """Waits until nothing is on its way any more."""
        for part in range(self.parts - self.num_stages, self.parts):
            slot = self.slot(jnp.maximum(self.count - 1, 0), part)
            pl.when(self.count > 0)(functools.partial(wait, self.barriers.free.at[slot]))
        for name in ("rows", "gates"):
            if getattr(self, name):
                free = getattr(self.barriers, f"{name}_free").at[self.group]
                pl.when(self.count > 0)(functools.partial(wait, free))


def store_growth(r: Any, scheduler: WYTileScheduler, m: Any, own: Array, line: Any) -> None:
    """Stores a chunk's `growth`, if it is wanted.

    Args:
        r: the kernel's arrays.
        scheduler: the warpgroup's way.
        m: the chunk.
        own: what each token erases of its own key, `[C]`.
        line: shared memory for 128 numbers, which is not read any more.
    """
    if r.growth is None:
        return
    left = jnp.log(jnp.maximum(jnp.abs(1.0 - own), 1.0))
    fence_smem()
    line.at[pl.ds(0, CHUNK)][...] = left
    line.at[pl.ds(CHUNK, CHUNK)][...] = 0.0 * left
    fence_smem()
    b, n, h = scheduler.at(m)
    r.growth[b, h, n] = reduced(line, total)


def store_inverse(r: Any, memory: Any, scheduler: WYTileScheduler, m: Any, lower: Array, parts: Any) -> None:
    """Stores A for the pairs that are inverted, `[C, C]`, below the diagonal, by way of `memory.pairs`.

    `parts` is shared memory for two bfloat16 matrices `[C, C]`.
    """
    b, n, h = scheduler.at(m)
    pairs = memory.pairs.at[scheduler.own(m)]
    inverse = unit_lower_inverse(lower, row_numbers(m), parts.at[0], parts.at[1])
    if r.scores is not None:  # they leave through the same buffer
        wait_for_stores()
    pairs[...] = inverse
    fence_smem()
    store(pairs, r.inverse.at[b, h, n])


def pair_buffer(num_compute_warpgroups: int) -> Any:
    """Shared memory for a matrix `[C, C]` of each warpgroup, through which results leave: `memory.pairs`."""
    return matrix_buffer(num_compute_warpgroups, CHUNK, CHUNK)


def parts_buffer(count: int) -> Any:
    """Shared memory for two bfloat16 matrices of 64 rows and columns, so many times."""
    return matrix_buffer(count, 2, CHUNK, CHUNK)


def reduced(line: Any, reduce: Callable[[Array, Any], Array]) -> Array:
    """`maximum` or `total` of 128 numbers in shared memory, whose place is free then."""
    loaded = load_channels(line)
    fence_smem()
    return reduce(loaded, line.at[pl.ds(0, WARPS)])


def _copy_tiles(r: Any, tiles: Any, walks: list[WYTileScheduler]) -> None:
    """Copies the tiles of all warpgroups, a block of each by turns."""

    @pl.loop(0, walks[0].count)
    def _(m):
        for part in range(walks[0].parts):
            for scheduler in walks:
                pl.when(m < scheduler.count)(functools.partial(scheduler.fetch, r, tiles, m, part))

    for scheduler in walks:  # a program ends when nothing is on its way any more
        scheduler.finish()


def call(
    compute: Callable[[Any, Any, Any, WYTileScheduler], None],
    name: str,
    kernel_shape: KernelShape,
    keys: Mapping[str, Array | None],
    gates: Mapping[str, Array | None],
    rows: Mapping[str, Array],
    constants: Mapping[str, Array],
    outputs: Mapping[str, jax.ShapeDtypeStruct | None],
    buffers: Callable[[int], Mapping[str, Any]],
    *,
    num_compute_warpgroups: int,
    parts: int,
    num_stages: int,
    num_ctas: int,
    with_written: bool = False,
) -> dict[str, Array | None]:
    """Runs `compute(refs, tiles, memory, scheduler)` in each warpgroup but the one that copies.

    Args:
        compute: the loop over a warpgroup's chunks.
        name: the kernel's name in profiles.
        kernel_shape: static facts.
        keys: arrays by token, head and key channel whose tiles are copied; None for an absent one. Once a tile of
            float32 numbers is read, two bfloat16 matrices have room in its place, under its name and `_parts`.
        gates: numbers a token, `[B, T, HV]`; None for an absent one.
        rows: others, `[B, HV, T]` float32.
        constants: bfloat16 matrices that each program copies before all else, as `memory.NAME[0]`.
        outputs: as `launch` takes them.
        buffers: from the number of warpgroups to other shared memory, whose first axis they are.
        num_compute_warpgroups: warpgroups of a program that compute.
        parts: blocks of key channels.
        num_stages: as many, or 1.
        num_ctas: at most; the number of processors.
        with_written: whether there is a bfloat16 tile that nothing is copied to, `written`.
    """
    p = kernel_shape
    given = {key: x for key, x in keys.items() if x is not None}
    width = p.key_size // parts

    slots = num_compute_warpgroups * num_stages
    wide = tuple(key for key, x in given.items() if x.dtype == jnp.float32)

    def tile(key):
        if key not in wide:
            return matrix_buffer(slots, CHUNK, width)
        return either_buffer(wide_buffer(slots, CHUNK, width), parts_buffer(slots), by_group=True)

    by_chunk = (p.batch, p.value_heads, p.chunks, CHUNK)
    stacked = jnp.stack([row.reshape(by_chunk) for row in rows.values()], axis=3) if rows else None
    tiles = {key: tile(key) for key in given}
    if with_written:
        tiles["written"] = tile("written")
    barriers = {"full": barrier(len(given), slots), "free": barrier(1, slots)}
    if constants:
        barriers["begun"] = barrier(len(constants))
    if rows:
        tiles["rows"] = number_buffer(num_compute_warpgroups, len(rows), CHUNK)
        barriers |= {"rows_full": barrier(1, num_compute_warpgroups), "rows_free": barrier(1, num_compute_warpgroups)}
    own_gates = tuple(key for key, x in gates.items() if x is not None)
    if own_gates:
        tiles["gates"] = number_buffer(num_compute_warpgroups, len(own_gates), CHUNK)
        barriers |= {"gates_full": barrier(1, num_compute_warpgroups), "gates_free": barrier(1, num_compute_warpgroups)}
    memory = {
        "tiles": tuple(tiles.values()),
        "barriers": tuple(barriers.values()),
        **{key: matrix_buffer(1, *x.shape) for key, x in constants.items()},
        **buffers(num_compute_warpgroups),
    }
    num_ctas = min(num_ctas, p.batch * p.value_heads * p.chunks)

    def program(r, memory):
        refs = dict(zip(tiles, memory.tiles))
        for key in wide:
            refs[key], refs[f"{key}_parts"] = refs[key]
        there = SimpleNamespace(**refs)
        at = SimpleNamespace(**dict(zip(barriers, memory.barriers)))
        warpgroup = lax.axis_index("warpgroup")
        computing, copying = _REGISTERS[num_compute_warpgroups]

        def scheduler(group):
            return WYTileScheduler(
                p, tuple(given), own_gates, tuple(rows), num_compute_warpgroups, num_ctas, parts, num_stages, group, at
            )

        @pl.when(warpgroup < num_compute_warpgroups)
        def _():
            use_registers(computing, more=True)
            if constants:
                wait(at.begun)
            compute(r, there, memory, scheduler(warpgroup))

        @pl.when(warpgroup == num_compute_warpgroups)
        def _():
            use_registers(copying, more=False)
            for key in constants:
                begin_copy(getattr(r, key), getattr(memory, key).at[0], at.begun)
            _copy_tiles(r, there, [scheduler(jnp.int32(group)) for group in range(num_compute_warpgroups)])

    inputs = {**keys, **gates, **constants, "rows": stacked}
    return launch(
        program, name, inputs, outputs, memory, grid={"program": num_ctas}, warpgroups=num_compute_warpgroups + 1
    )

"""What the passes over chunks read, where a program finds its part, and the ring of shared memory it goes through.

`call` starts a program's warpgroups: the last one copies the tiles of each chunk into a ring of slots in shared memory,
the others compute. A slot's barrier `full` is awaited before its tiles are read. When a computing warpgroup has read
them it says so by `release`. Tiles that a step reads at its end may have a ring of one slot.

The residuals R are rounded for the products that take them. The gradient of a gate that both erases and writes is a sum
over their channels, which has no other error as large as theirs. With two more binary digits of each number, an eighth
of the bytes of a second bfloat16 part, that error is a quarter of it: `rounded_and_digits`, `refined`.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.common.kernel_shape import CHUNK, KernelShape, split_range
from pallas_kernels.common.mosaic_gpu import (
    SIDE,
    arrive,
    barrier,
    begin_copy,
    column_numbers,
    launch,
    load_column,
    load_row,
    load_state,
    load_turned,
    matrix_buffer,
    number_buffer,
    plain_buffer,
    quotient,
    remainder,
    row_numbers,
    scale_columns,
    spread_columns,
    spread_rows,
    use_registers,
    wait,
    wait_for_readers,
    wide_buffer,
    zeros,
)

# Registers of a thread in a warpgroup that computes and in the one that copies, by the number of those that compute.
_REGISTERS = {1: (240, 24), 2: (232, 40)}
# Likewise where one more warpgroup, whose number comes last, finds scores, or all factors.
_REGISTERS_WITH_SCORES = {2: (200, 24, 88)}
REGISTERS_WITH_FACTORS = {2: (200, 24, 88)}


@dataclass(frozen=True)
class Tile:
    """What a slot of the ring has of one array: of a matrix, or of float32 numbers if it has one axis.

    Attributes:
        shape: of the part of one chunk.
        source: from the kernel's namespace of references, the program's place and the chunk's number to that part.
        dtype: of a matrix, bfloat16, float32 or int16.
        is_swizzled: whether it is a matrix for products; else it is several rows of float32 numbers.
        parts: 0, or how many such matrices there are, one for each computing warpgroup; `source` then takes a part's
            number, too. Through its own part a warpgroup can store what it has.
    """

    shape: tuple[int, ...]
    source: Callable[..., Any]
    dtype: Any = jnp.bfloat16
    is_swizzled: bool = True
    parts: int = 0

    def buffer(self, num_stages: int) -> Any:
        """Shared memory for so many slots."""
        if len(self.shape) == 1 or not self.is_swizzled:
            return number_buffer(num_stages, *self.shape)
        if self.dtype == jnp.int16:
            return plain_buffer(num_stages, *self.shape)
        shape = (num_stages, *[self.parts] * (self.parts > 0), *self.shape)
        return (wide_buffer if self.dtype == jnp.float32 else matrix_buffer)(*shape)

    @property
    def copies(self) -> int:
        """Copies that fill a slot."""
        return max(1, self.parts)

    def begin(self, refs: Any, place: "Place", chunk: Any, slot: Any, at: Any) -> None:
        """Begins to fill a slot with a chunk's part of the array; each copy arrives at a barrier."""
        for part in range(self.parts):
            begin_copy(self.source(refs, place, chunk, part), slot.at[part], at)
        if not self.parts:
            begin_copy(self.source(refs, place, chunk), slot, at)


@dataclass(frozen=True)
class Place:
    """Where a warpgroup is.

    Attributes:
        block: the program's block of value channels, or of what else the grid's first axis goes over.
        head: value head.
        batch: row of the batch.
        split: split of the row.
        group: the warpgroup among those that compute.
        num_compute_warpgroups: number of those.
    """

    block: Any
    head: Any
    batch: Any
    split: Any
    group: Any
    num_compute_warpgroups: int

    @property
    def own(self) -> Any:
        """This warpgroup's channels among the program's."""
        return pl.ds(self.group * SIDE, SIDE)

    @property
    def part(self) -> Any:
        """Number of this warpgroup's channels among all, in blocks of 64."""
        return self.block * self.num_compute_warpgroups + self.group

    @property
    def channels(self) -> Any:
        """This warpgroup's channels among all."""
        return pl.ds(self.part * SIDE, SIDE)


@dataclass(frozen=True)
class SmemPipeline:
    """The slots of shared memory that tiles go through.

    Attributes:
        full: a barrier for each slot: its tiles are there.
        free: a barrier for each slot: its tiles have been read.
        num_stages: number of slots.
        single_stage: the ring of the tiles that have one slot; None where there are none.
    """

    full: Any
    free: Any
    num_stages: int
    single_stage: "SmemPipeline | None" = None

    def wait(self, step: Any) -> Any:
        """The slot of a step of the loop, once its tiles are there."""
        slot = remainder(step, self.num_stages)
        wait(self.full.at[slot])
        return slot

    def release(self, slot: Any) -> None:
        """Lets the slot be filled again. Before it comes `fence_smem`, which ends this warpgroup's own reads of it."""
        arrive(self.free.at[slot])


class Keys(NamedTuple):
    """Queries or keys.

    Attributes:
        array: `[B, T, H, K]`, or `[B, HV, T, K]` as the first stage leaves them.
        by_head: whether it is the latter.
    """

    array: Array
    by_head: bool


class PassArrays(NamedTuple):
    """Arrays of the passes over chunks; see `WYFactors` in `pallas_kernels.delta_rule` for those of its fields.

    Attributes:
        written: keys that are written.
        erased: keys that are erased; None where they are the same.
        read: queries; None where nothing is read.
        v: values `[B, T, HV, V]`; None where no values take part.
        inverse: A, `[B, HV, N, C, C]`; None for linear attention.
        scores: P, likewise; None where nothing is read.
        write: the write gate if it is one number a channel, `[B, T, HV, V]` bfloat16 or float32, else None.
        write_rows: the write gate if it is one number a token, `[B, HV, T]` float32, else None.
        erased_rows: likewise, see `WYFactors`.
        written_rows: likewise.
        read_rows: likewise.
        kept: `[B, HV, N]` or `[B, HV, N, K]`; None without decay.
        decay_sums: where scores are found in the pass, the log decay to each token, multiples of 1/16 and the rest,
            `[B, HV, N, 2 * C]` float32; else None.
        run: likewise, see `run_rows`; None where no segments start.
    """

    written: Keys
    erased: Keys | None
    read: Keys | None
    v: Array | None
    inverse: Array | None
    scores: Array | None
    write: Array | None
    write_rows: Array | None
    erased_rows: Array | None
    written_rows: Array | None
    read_rows: Array | None
    kept: Array | None
    decay_sums: Array | None = None
    run: Array | None = None

    def by_name(self) -> dict[str, Array | None]:
        """The arrays alone."""
        return {name: x.array if isinstance(x, Keys) else x for name, x in self._asdict().items()}


ROWS = ("write_rows", "erased_rows", "written_rows", "read_rows", "run")


def tokens(chunk: Any) -> Any:
    """A chunk's tokens."""
    return pl.ds(chunk * CHUNK, CHUNK)


def run_rows(kernel_shape: KernelShape, resets: Array | None) -> dict[str, Array]:
    """Numbers a token of rows in which documents start, `[B, HV, T]` float32; none without.

    `goes_on` is 0 at a start, `run` counts starts in the chunk, `sees` is 1 where the state before the chunk is read,
    `reaches` where a write is left at the chunk's end.
    """
    p = kernel_shape
    if resets is None:
        return {}
    resets = resets.reshape(p.batch, p.chunks, CHUNK)
    run = jnp.cumsum(resets, axis=2)
    by_token = {"goes_on": resets == 0, "run": run, "sees": run == 0, "reaches": run == run[:, :, -1:]}
    shape = (p.batch, p.value_heads, p.length)
    by_token = {name: row.reshape(p.batch, 1, p.length).astype(jnp.float32) for name, row in by_token.items()}
    return {name: jnp.broadcast_to(row, shape) for name, row in by_token.items()}


def weigh_pairs(m: Any, decay_sums: Sequence[Any] | None, run: Any, *pairs: Array) -> list[Array]:
    """Pairs that are causal and of one run, times `exp(G_r - G_s)`; zero elsewhere.

    Args:
        m: the loop's variable, see `row_numbers`.
        decay_sums: shared memory with the log decay to each token, multiples of 1/16 and the rest; None without decay.
        run: shared memory with the runs' numbers; None where no segments start.
        *pairs: matrices `[C, C]`.
    """
    is_near = near_pairs(m, run)
    if decay_sums is None:
        return [jnp.where(is_near, x, 0.0) for x in pairs]
    coarse, fine = (spread_rows(load_column(x)) - spread_columns(load_row(x)) for x in decay_sums)
    weight = jnp.exp(jnp.where(is_near, coarse + fine, -jnp.inf))
    return [weight * x for x in pairs]


def near_pairs(m: Any, run: Any) -> Array:
    """Which pairs are causal and of one run; see `weigh_pairs`."""
    rows, columns = spread_rows(row_numbers(m)), spread_columns(column_numbers())
    is_near = rows >= columns
    if run is not None:
        is_near &= spread_rows(load_column(run)) == spread_columns(load_row(run))
    return is_near


def chunk_at(kernel_shape: KernelShape, i: Any) -> tuple[Any, Any, Any]:
    """Batch, chunk and value head of the i-th of all chunks. Heads are neighbours in memory."""
    p = kernel_shape
    rest, head = quotient(i, p.value_heads), remainder(i, p.value_heads)
    return quotient(rest, p.chunks), remainder(rest, p.chunks), head


def chunk_tiles(kernel_shape: KernelShape, x: PassArrays, num_compute_warpgroups: int) -> dict[str, Tile]:
    """The parts of the arrays that one step of a pass takes."""
    tiles: dict[str, Tile] = {}
    for name in ("written", "erased", "read"):
        keys = getattr(x, name)
        if keys is not None:
            tiles[name] = _key_tile(kernel_shape, name, keys)
    if x.v is not None:
        tiles["v"] = value_tile("v", num_compute_warpgroups)
        if x.write is not None:
            tiles["write"] = replace(value_tile("write", num_compute_warpgroups), dtype=x.write.dtype)
    for name in ("inverse", "scores"):
        if getattr(x, name) is not None:
            tiles[name] = Tile((CHUNK, CHUNK), lambda r, at, n, name=name: getattr(r, name).at[at.batch, at.head, n])
    for name in ROWS:
        if getattr(x, name) is not None:
            tiles[name] = Tile((CHUNK,), lambda r, at, n, name=name: getattr(r, name).at[at.batch, at.head, tokens(n)])
    if x.decay_sums is not None:
        tiles["decay_sums"] = Tile((2 * CHUNK,), lambda r, at, n: r.decay_sums.at[at.batch, at.head, n])
    if x.kept is not None and x.kept.ndim == 4:
        tiles["kept"] = Tile((kernel_shape.key_size,), lambda r, at, n: r.kept.at[at.batch, at.head, n])
    return tiles


def _key_tile(kernel_shape: KernelShape, name: str, keys: Keys) -> Tile:
    group = kernel_shape.value_heads // keys.array.shape[2]

    def source(r, at, n):
        if keys.by_head:
            return getattr(r, name).at[at.batch, at.head, tokens(n)]
        return getattr(r, name).at[at.batch, tokens(n), quotient(at.head, group)]

    return Tile((CHUNK, kernel_shape.key_size), source)


def value_tile(name: str, num_compute_warpgroups: int) -> Tile:
    """Values, or something like them, of the program's block of channels."""
    width = SIDE * num_compute_warpgroups

    def source(r, at, n):
        return getattr(r, name).at[at.batch, tokens(n), at.head, pl.ds(at.block * width, width)]

    return Tile((CHUNK, width), source)


def parted_value_tile(name: str, num_compute_warpgroups: int, dtype: Any = jnp.bfloat16) -> Tile:
    """The same with a matrix for each warpgroup, `own_values`."""

    def source(r, at, n, part):
        channels = pl.ds((at.block * num_compute_warpgroups + part) * SIDE, SIDE)
        return getattr(r, name).at[at.batch, tokens(n), at.head, channels]

    return Tile((CHUNK, SIDE), source, dtype, parts=num_compute_warpgroups)


def own_values(tile: Any, slot: Any, place: Place) -> Any:
    """A warpgroup's own channels of a tile of values, `[C, 64]`."""
    return tile.at[slot, place.group] if len(tile.shape) == 4 else tile.at[slot, :, place.own]


def residual_tile(num_compute_warpgroups: int) -> Tile:
    """What a chunk's tokens write, transposed, of the program's block of channels."""
    return _channel_tile("residuals", num_compute_warpgroups, CHUNK, jnp.bfloat16)


def digit_tile(num_compute_warpgroups: int) -> Tile:
    """Further digits of what `residual_tile` has."""
    return _channel_tile("digits", num_compute_warpgroups, DIGIT_COLUMNS, jnp.int16)


def _channel_tile(name: str, num_compute_warpgroups: int, columns: int, dtype: Any) -> Tile:
    """A chunk's part of an array `[B, HV, N, V, columns]`, of the program's block of channels."""
    width = SIDE * num_compute_warpgroups

    def source(r, at, n):
        return getattr(r, name).at[at.batch, at.head, n, pl.ds(at.block * width, width)]

    return Tile((width, columns), source, dtype)


def load_kept(r: Any, tiles: Any, place: Any, slot: Any, chunk: Any) -> Array | None:
    """What a chunk keeps of the state: a number, one for each key channel, or None for 1."""
    if hasattr(tiles, "kept"):
        return load_row(tiles.kept.at[slot]) if tiles.kept.ndim == 2 else tiles.kept[slot]
    return None if r.kept is None else r.kept[place.batch, place.head, chunk]


def keep(state: Array, kept: Any) -> Array:
    """The state after a chunk's decay."""
    if kept is None:
        return state
    return state * kept if kept.ndim == 0 else scale_columns(state, kept)


def load_written(tiles: Any, slot: Any, own: Any) -> Array:
    """A chunk's values times the write gate, Z, transposed, of a warpgroup's own channels of the program's."""
    values = load_turned(tiles.v.at[slot, :, own])
    if hasattr(tiles, "write"):
        return values * load_turned(tiles.write.at[slot, :, own])
    return scale_columns(values, row_of(tiles, "write_rows", slot))


def row_of(tiles: Any, name: str, slot: Any) -> Array | None:
    """One of `ROWS` of a chunk; None where the pass has none."""
    return load_row(getattr(tiles, name).at[slot]) if hasattr(tiles, name) else None


def start_state(states: Any, place: Place, key_size: int) -> Array:
    """The state, or its gradient, that a program's loop starts from: its part of `[B, HV, P, V, K]`; zero for None."""
    if states is None:
        return zeros(SIDE, key_size)
    return load_state(states.at[place.batch, place.head, place.split, place.channels])


def call(
    kernel: Callable[..., None],
    name: str,
    kernel_shape: KernelShape,
    inputs: Mapping[str, Array | None],
    outputs: Mapping[str, jax.ShapeDtypeStruct | None],
    tiles: Mapping[str, Tile],
    buffers: Mapping[str, Any],
    *,
    num_compute_warpgroups: int,
    num_stages: int,
    single_stage: Mapping[str, Tile] = MappingProxyType({}),
    reverse: bool = False,
    blocks: int | None = None,
    span: Callable[..., tuple[Any, ...]] | None = None,
    scores: Callable[..., None] | None = None,
    registers: Mapping[int, tuple[int, ...]] | None = None,
    **static: Any,
) -> dict[str, Array | None]:
    """Runs `kernel` for each block of value channels, value head, and split of each row.

    A computing warpgroup runs `kernel(refs, tiles, buffers, pipeline, place, chunks, **options)`, options being static.
    The first three are namespaces of what `inputs` and `outputs`, `tiles` and `buffers` name, None for an absent array.
    `chunks` is what `span` returns, or the split's first chunk and its number of chunks.

    Args:
        kernel: the loop.
        name: its name in profiles.
        kernel_shape: static facts.
        inputs: arrays in global memory; None is passed on as None.
        outputs: likewise; None is not written.
        tiles: what the ring copies of each chunk.
        buffers: other shared memory.
        num_compute_warpgroups: warpgroups that compute, 64 value channels each.
        num_stages: of the ring.
        single_stage: what a ring of one slot has of each chunk.
        reverse: whether the loop goes from the last chunk to the first.
        blocks: length of the grid's first axis; None for the blocks of value channels.
        span: from `(refs, buffers, place, kernel_shape)` to the first chunk, the number of chunks, and what else the
            kernel needs. Each warpgroup calls it before the loop.
        scores: what one more warpgroup runs, with the same arguments; it arrives at `buffers.scored` for a slot.
        registers: of a thread, by the number of warpgroups that compute; None for those of the passes.
        **static: passed to the kernel.

    Returns:
        The outputs by name, None where none was asked for.
    """
    registers = registers or (_REGISTERS if scores is None else _REGISTERS_WITH_SCORES)
    computing, copying, *scoring = registers[num_compute_warpgroups]
    sets = [(tiles, num_stages), (single_stage, 1)] if single_stage else [(tiles, num_stages)]

    def program(refs, memory):
        there = SimpleNamespace(**dict(zip([*tiles, *single_stage], memory.tiles)))
        own = SimpleNamespace(**dict(zip(buffers, memory.buffers)))
        row, group = lax.axis_index("row"), lax.axis_index("warpgroup")
        split = remainder(row, kernel_shape.num_splits)
        batch = quotient(row, kernel_shape.num_splits)
        place = Place(lax.axis_index("block"), lax.axis_index("head"), batch, split, group, num_compute_warpgroups)
        chunks = split_span(kernel_shape, split) if span is None else span(refs, own, place, kernel_shape)
        first, count = chunks[:2]
        pipelines = [SmemPipeline(full, free, n) for full, free, (_, n) in zip(memory.full, memory.free, sets)]
        pipeline = replace(pipelines[0], single_stage=pipelines[1] if single_stage else None)

        @pl.when(group < num_compute_warpgroups)
        def _():
            use_registers(computing, more=True)
            kernel(refs, there, own, pipeline, place, chunks, kernel_shape=kernel_shape, **static)

        @pl.when(group == num_compute_warpgroups)
        def _():
            use_registers(copying, more=False)

            @pl.loop(0, count)
            def _(step):
                chunk = first + (count - 1 - step if reverse else step)
                for at, (copied, _) in zip(pipelines, sets):
                    slot = remainder(step, at.num_stages)
                    pl.when(step >= at.num_stages)(functools.partial(wait, at.free.at[slot]))
                    for key, tile in copied.items():
                        tile.begin(refs, place, chunk, getattr(there, key).at[slot], at.full.at[slot])

            for at in pipelines:
                wait_for_readers(at.free, at.num_stages, count)

        if scores is not None:

            @pl.when(group == num_compute_warpgroups + 1)
            def _():
                use_registers(scoring[0], more=False)
                scores(refs, there, own, pipeline, place, chunks, kernel_shape=kernel_shape, **static)

    memory = {
        "tiles": tuple(tile.buffer(n) for copied, n in sets for tile in copied.values()),
        "buffers": tuple(buffers.values()),
        "full": tuple(barrier(sum(tile.copies for tile in copied.values()), n) for copied, n in sets),
        "free": tuple(barrier(num_compute_warpgroups, n) for _, n in sets),
    }
    grid = {
        "block": kernel_shape.value_size // (SIDE * num_compute_warpgroups) if blocks is None else blocks,
        "head": kernel_shape.value_heads,
        "row": kernel_shape.batch * kernel_shape.num_splits,
    }
    return launch(
        program, name, inputs, outputs, memory, grid=grid, warpgroups=num_compute_warpgroups + 1 + len(scoring)
    )


def split_span(kernel_shape: KernelShape, split: Any) -> tuple[Any, Any]:
    """`split_range` in 32 bits, whatever the program around the kernel counts in."""
    first, count = split_range(kernel_shape, split)
    return first, jnp.asarray(count, jnp.int32)


DIGIT_COLUMNS = 8
"""Columns of the digits. Of a matrix, a thread holds the same ones of each eight columns."""
_PARTS = SIDE // DIGIT_COLUMNS
_BEYOND = 14  # the place of the two digits among the bits of a float32 number


def rounded_and_digits(x: Array) -> tuple[Array, Array]:
    """A matrix `[64, 64]` rounded to bfloat16, and the digits, `[64, 8]` int16.

    Column j of the digits has those of columns j, j + 8, ..., j + 56. `refined` is off by at most an eighth of
    bfloat16's last digit.

    Args:
        x: float32.
    """
    bits = lax.bitcast_convert_type(x, jnp.int32)
    # Halves are rounded up, always: so the digits alone tell which way a number was rounded.
    high = (bits + jnp.int32(1 << 15)) & jnp.int32(-(1 << 16))
    digits = jnp.zeros((SIDE, DIGIT_COLUMNS), jnp.int32)
    for part in range(_PARTS):
        own = bits[:, part * DIGIT_COLUMNS : (part + 1) * DIGIT_COLUMNS]
        digits = digits | (lax.shift_right_logical(own, jnp.int32(_BEYOND - 2 * part)) & jnp.int32(3 << 2 * part))
    return lax.bitcast_convert_type(high, jnp.float32).astype(jnp.bfloat16), digits.astype(jnp.int16)


def refined(rounded: Array, digits: Array) -> Array:
    """The matrix `[64, 64]` in float32, from what `rounded_and_digits` makes of it."""
    bits = lax.bitcast_convert_type(rounded.astype(jnp.float32), jnp.int32)
    # Digits 00 and 01 are half a quarter and three halves of one above the rounded number; 10 and 11 were rounded up,
    # and are as much below it. So the first digit is turned, and two quarters are taken away, but for the half.
    turned = digits.astype(jnp.int32) ^ jnp.int32(0b10_10_10_10_10_10_10_10)
    quarters = [
        lax.shift_left(turned, jnp.int32(_BEYOND - 2 * part)) & jnp.int32(3 << _BEYOND) for part in range(_PARTS)
    ]
    below = jnp.int32((3 << _BEYOND) // 2)
    return lax.bitcast_convert_type(bits + (jnp.concatenate(quarters, axis=1) - below), jnp.float32)

"""Linear attention: sums over earlier (or later) tokens, one kernel for the output and for each gradient.

With `G_r` the inclusive cumulative log decay, one number a token, output and gradients are one sum,
`out_r = scale * sum_s exp(-|G_r - G_s|) (reader_r . key_s) value_s`, with other arrays in the three places: see
`pallas_kernels.triton.linear_attention.sums`.

A program has 64 or 128 value channels of one head and goes over the chunks of one part of a sequence. Each warpgroup
that computes keeps 64 rows of the transposed state, `[64, A]`, in registers. One more finds the pairs of the chunks to
come, which go through shared memory, since the product with them takes them from there. With C tokens of a chunk and A
channels of readers and keys, a chunk takes

    pairs = weight * (reader key^T)                             [C, C], bfloat16, once a program
    out^T = reads * (state^T reader^T) + value^T pairs^T        [64, C], each warpgroup that computes
    state^T = kept * state^T + (writes * value^T) key           [64, A], likewise

`2 C C A` operations and `2 C (C 64 + 2 * 64 A)` for each 64 value channels, and reads reader, key and value once.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.common.kernel_shape import CHUNK, KernelShape, cdiv
from pallas_kernels.common.mosaic_gpu import (
    SIDE,
    added,
    arrive,
    awaited,
    barrier,
    column_numbers,
    column_sums,
    fence_smem,
    load_across,
    load_column,
    load_matrix,
    load_row,
    load_state,
    load_turned,
    matrix_buffer,
    multiply,
    put,
    row_numbers,
    scale_columns,
    spread_columns,
    spread_rows,
    store,
    store_across,
    sum_buffer,
    wait,
    wait_for_stores,
    with_accumulators,
)
from pallas_kernels.common.mosaic_gpu import quotient as floor_divide
from pallas_kernels.delta_rule.mosaic_gpu.pipeline import Tile, call, start_state, tokens
from pallas_kernels.linear_attention.mosaic_gpu.decay import Factors

STATES_EVERY = 4
"""Chunks from one stored state to the next."""
_REGISTERS = {1: (240, 24, 160), 2: (184, 24, 120)}
"""Of a thread in warpgroups that compute, that copies and that finds pairs, by the number of those that compute."""


class Places(NamedTuple):
    """The arrays of one sum.

    Attributes:
        reader: `[B, T, heads, A]` bfloat16.
        key: `[B, T, heads, A]`.
        value: `[B, T, heads, D]`.
    """

    reader: Array
    key: Array
    value: Array


class Wanted(NamedTuple):
    """What a sum leaves beside its result. `other` is `[B, T, heads, D]`.

    Attributes:
        pairs: `other . out` within the chunk pair by pair, in float32: added up by the token that reads and by the one
            that is read, without a token's pair with itself, on which no decay acts.
        far: `other . out` of other chunks.
        total: `other . out`.
        end: what all tokens add up to.
        diagonal: `other . out` of a token's pairs with itself, without the diagonal's factor.
        states: the state before each fourth chunk.
        crossed: the product of another sum's states with this one's at the end of their chunk.
    """

    pairs: bool = False
    far: bool = False
    total: bool = False
    end: bool = False
    diagonal: bool = False
    states: bool = False
    crossed: bool = False


class Sums(NamedTuple):
    """Results of one sum; None where not wanted.

    D is the number of value channels, J of blocks of 64 of them, P of programs' blocks.

    Attributes:
        out: `[B, T, HV, D]` bfloat16.
        end: what all tokens add up to, `[B, HV, A, D]` float32.
        pairs_read: `Wanted.pairs` by the token that reads, `[P, B, HV, T]` float32, to be added up over P.
        pairs_written: the same by the token that is read.
        far: see `Wanted`, `[J, B, HV, T]` float32, to be added up over J.
        total: likewise.
        diagonal: as `pairs_read`.
        states: transposed, `[B, HV, N / 4, D, A]` float32.
        crossed: `[J, B, HV, N / 4, 64]` float32, to be added up.
    """

    out: Array
    end: Array | None
    pairs_read: Array | None
    pairs_written: Array | None
    far: Array | None
    total: Array | None
    diagonal: Array | None
    states: Array | None
    crossed: Array | None


class Lines(NamedTuple):
    """The numbers a token that a step has in shared memory.

    Attributes:
        names: in their order.
        diagonal_size: rows of a token, where there is a diagonal.
    """

    names: tuple[str, ...]
    diagonal_size: int = 1

    def of(self, tiles: Any, slot: Any, name: str) -> Any:
        """One line's place; None where the call has none."""
        if name not in self.names:
            return None
        return tiles.lines.at[slot, self.names.index(name)]

    def row(self, tiles: Any, slot: Any, name: str) -> Array | None:
        """One number a column; None for 1."""
        line = self.of(tiles, slot, name)
        return None if line is None else load_row(line)


def _is_own(m: Any, lines: Lines) -> Array:
    """The pairs of a token with itself, `[C, C]`."""
    rows, columns = _tokens(m, lines)
    return rows == columns


def _tokens(m: Any, lines: Lines) -> tuple[Array, Array]:
    """Numbers that grow with the token, of the rows and of the columns of pairs."""
    rows, columns = row_numbers(m), column_numbers()
    if lines.diagonal_size > 1:  # the first of the token's rows: sizes are powers of two
        rows, columns = (x & jnp.int32(-lines.diagonal_size) for x in (rows, columns))
    return spread_rows(rows), spread_columns(columns)


def _weights(tiles: Any, slot: Any, m: Any, lines: Lines, reverse: bool, scale: float) -> Array:
    """What each pair of a chunk is multiplied by, `[C, C]`, rows for the tokens that read; zero where it is none.

    Where there is a diagonal a token's pairs with itself are multiplied by the scale alone.
    """
    has_diagonal = "diagonal" in lines.names
    rows, columns = _tokens(m, lines)
    is_pair = rows <= columns if reverse else rows >= columns
    if has_diagonal:
        is_pair = rows < columns if reverse else rows > columns

    def difference(name):
        line = lines.of(tiles, slot, name)
        along_rows, along_columns = spread_rows(load_column(line)), spread_columns(load_row(line))
        return along_columns - along_rows if reverse else along_rows - along_columns

    if "run" in lines.names:
        is_pair &= difference("run") == 0.0
    if "coarse" in lines.names:
        weight = scale * jnp.exp(jnp.where(is_pair, difference("coarse") + difference("fine"), -jnp.inf))
    else:
        weight = jnp.where(is_pair, scale, 0.0)
    gate = lines.of(tiles, slot, "gate")
    if gate is not None:
        weight = weight * (spread_rows(load_column(gate)) if reverse else spread_columns(load_row(gate)))
    return jnp.where(_is_own(m, lines), scale, weight) if has_diagonal else weight


def _sums_kernel(
    r,
    tiles,
    buffers,
    pipeline,
    place,
    chunks,
    *,
    kernel_shape: KernelShape,
    lines: Lines,
    wanted: Wanted,
    is_reverse: bool,
    is_turned: bool,
):
    first, count = chunks

    def sum_channels(name, n, x):
        """Stores the sums over this warpgroup's channels, one for each token."""
        sums = column_sums(x, buffers.sums.at[place.group])
        getattr(r, name)[place.part, place.batch, place.head, tokens(n)] = sums

    def step(m, state):
        n = first + (count - 1 - m if is_reverse else m)
        slot = pipeline.wait(m)
        left = state.astype(jnp.bfloat16)
        value = tiles.value.at[slot, :, place.own]

        def body(far):
            multiply(far, left, tiles.reader.at[slot].T)
            writes = lines.row(tiles, slot, "writes")
            written = left_value = load_matrix(value.T)
            if writes is not None:
                written = scale_columns(left_value.astype(jnp.float32), writes).astype(jnp.bfloat16)
            found, reads = awaited(far), lines.row(tiles, slot, "reads")
            if reads is None:
                return left_value, written, found * kernel_shape.scale
            return left_value, written, scale_columns(found, kernel_shape.scale * reads)

        left_value, written, far = with_accumulators(body, CHUNK)
        if wanted.far:
            sum_channels("far", n, far * load_turned(tiles.other.at[slot, :, place.own]))
        if wanted.states or wanted.crossed:
            keep_or_cross(n, state)
        after = state if r.kept is None else state * r.kept[place.batch, place.head, n]

        def add(out, state):
            multiply(state, written, tiles.key.at[slot])
            wait(buffers.scored.at[slot])
            multiply(out, left_value, buffers.pairs.at[slot].T)
            wait_for_stores()

        out, state = added(add, far, after)
        if wanted.total:
            sum_channels("total", n, out * load_turned(tiles.other.at[slot, :, place.own]))
        out = scale_columns(out, lines.row(tiles, slot, "rest"))
        buffers.out.at[place.group].T[...] = out.astype(jnp.bfloat16)
        fence_smem()
        pipeline.release(slot)
        store(buffers.out.at[place.group], r.out.at[place.batch, tokens(n), place.head, place.channels])
        return state

    def keep_or_cross(n, state):
        fourth = floor_divide(n, STATES_EVERY)

        @pl.when(lax.rem(n, jnp.int32(STATES_EVERY)) == 0)
        def _():
            at = place.batch, place.head, fourth, place.channels
            if wanted.states:
                r.states[at] = state
            if wanted.crossed:
                products = jnp.sum(state * load_state(r.states_before.at[at]), axis=1)
                put(r.crossed.at[place.part, place.batch, place.head, fourth], products)

    if is_turned:
        state = load_across(r.split_states.at[place.batch, place.head, place.split, :, place.channels])
    else:
        state = start_state(r.split_states, place, kernel_shape.key_size)
    state = lax.fori_loop(0, count, step, state)

    if wanted.end:

        @pl.when(place.split == (0 if is_reverse else kernel_shape.num_splits - 1))
        def _():
            store_across(r.end.at[place.batch, place.head, :, place.channels], state)

    wait_for_stores(only_read=False)


def _find_pairs(
    r,
    tiles,
    buffers,
    pipeline,
    place,
    chunks,
    *,
    kernel_shape: KernelShape,
    lines: Lines,
    wanted: Wanted,
    is_reverse: bool,
    is_turned: bool,
):
    """Each chunk's pairs, ahead of the warpgroups that multiply with them; a slot's are free when its tiles are."""
    del is_turned
    first, count = chunks

    def step(m, carry):
        n = first + (count - 1 - m if is_reverse else m)
        slot = pipeline.wait(m)

        def product(total):
            multiply(total, tiles.other.at[slot], tiles.value.at[slot].T)
            return awaited(total)

        def body(scores):
            multiply(scores, tiles.reader.at[slot], tiles.key.at[slot].T)
            return _weights(tiles, slot, m, lines, is_reverse, kernel_shape.scale) * awaited(scores)

        weighed = with_accumulators(body, CHUNK)
        diagonal, by_reader = lines.of(tiles, slot, "diagonal"), weighed
        if diagonal is not None:
            own = spread_columns(load_row(diagonal)) if is_reverse else spread_rows(load_column(diagonal))
            by_reader = jnp.where(_is_own(m, lines), own * weighed, weighed)
        buffers.pairs[slot] = by_reader.astype(jnp.bfloat16)
        if wanted.pairs or wanted.diagonal:
            at = place.block, place.batch, place.head, tokens(n)
            by_pair, is_own = weighed * with_accumulators(product, CHUNK), _is_own(m, lines)
            if wanted.diagonal:
                r.diagonal[at] = jnp.sum(jnp.where(is_own, by_pair, 0.0), axis=1)
            if wanted.pairs:
                by_pair = jnp.where(is_own, 0.0, by_pair)
                r.pairs_written[at] = column_sums(by_pair, buffers.sums.at[place.num_compute_warpgroups])
                r.pairs_read[at] = jnp.sum(by_pair, axis=1)
        fence_smem()
        arrive(buffers.scored.at[slot])
        return carry

    lax.fori_loop(0, count, step, jnp.int32(0))


def chunk_tiles(
    kernel_shape: KernelShape, places: Places, lines: tuple[int, int] | None, num_compute_warpgroups: int
) -> dict[str, Tile]:
    """The parts of reader, key, value and, of a first one on, so many lines that one step takes."""
    p = kernel_shape

    def of_head(name, x):
        share = p.value_heads // x.shape[2]
        width = x.shape[3]

        def source(r, at, n):
            return getattr(r, name).at[at.batch, tokens(n), floor_divide(at.head, share)]

        return Tile((CHUNK, width), source)

    tiles = {
        "reader": of_head("reader", places.reader),
        "key": of_head("key", places.key),
        "value": _block_tile(p, "value", places.value, num_compute_warpgroups),
    }
    if lines:

        def of_lines(r, at, n):
            return r.lines.at[at.batch, at.head, n, pl.ds(*lines)]

        tiles["lines"] = Tile((lines[1], CHUNK), of_lines, is_swizzled=False)
    return tiles


def _block_tile(kernel_shape: KernelShape, name: str, x: Array, num_compute_warpgroups: int) -> Tile:
    """A program's block of channels of an array whose heads may be shared."""
    share, width = kernel_shape.value_heads // x.shape[2], SIDE * num_compute_warpgroups

    def source(r, at, n):
        return getattr(r, name).at[at.batch, tokens(n), floor_divide(at.head, share), pl.ds(at.block * width, width)]

    return Tile((CHUNK, width), source)


def sums(
    kernel_shape: KernelShape,
    places: Places,
    factors: Factors,
    split_states: Array | None,
    *,
    reverse: bool = False,
    is_turned: bool = False,
    wanted: Wanted = Wanted(),  # noqa: B008
    other: Array | None = None,
    states: Array | None = None,
    diagonal_size: int = 1,
    num_compute_warpgroups: int,
    num_stages: int,
) -> Sums:
    """One sum over all tokens.

    Args:
        kernel_shape: static facts; `key_size` and `value_size` are A and D of `places`.
        places: the arrays.
        factors: what reads and writes are multiplied by in this direction.
        split_states: states at the splits' starts (`reverse`: ends), transposed, `[B, HV, P, D, A]` float32; None for
            zero.
        reverse: over later tokens; else over earlier ones.
        is_turned: whether `split_states` is `[B, HV, P, A, D]`.
        wanted: what is left beside it.
        other: `[B, T, heads, D]`, see `Wanted`.
        states: `Sums.states` of another sum, for `Wanted.crossed`.
        diagonal_size: rows of a token, where there is a diagonal.
        num_compute_warpgroups: blocks of 64 value channels of a program.
        num_stages: chunks whose tiles are in shared memory.
    """
    p = kernel_shape
    lines = (0, len(factors.names)) if factors.names else None
    tiles = chunk_tiles(p, places, lines, num_compute_warpgroups)
    blocks, some = p.value_size // SIDE, cdiv(p.chunks, STATES_EVERY)
    products, of_pairs = (
        jax.ShapeDtypeStruct((n, p.batch, p.value_heads, p.length), jnp.float32)
        for n in (blocks, blocks // num_compute_warpgroups)
    )
    outputs = {
        "out": jax.ShapeDtypeStruct((p.batch, p.length, p.value_heads, p.value_size), jnp.bfloat16),
        "end": p.per_head(p.key_size, p.value_size, dtype=jnp.float32) if wanted.end else None,
        "pairs_read": of_pairs if wanted.pairs else None,
        "pairs_written": of_pairs if wanted.pairs else None,
        "far": products if wanted.far else None,
        "total": products if wanted.total else None,
        "diagonal": of_pairs if wanted.diagonal else None,
        "states": p.per_head(some, p.value_size, p.key_size, dtype=jnp.float32) if wanted.states else None,
        "crossed": None,
    }
    if wanted.crossed:
        outputs["crossed"] = jax.ShapeDtypeStruct((blocks, p.batch, p.value_heads, some, SIDE), jnp.float32)
    buffers = {
        "out": matrix_buffer(num_compute_warpgroups, CHUNK, SIDE),
        "pairs": matrix_buffer(num_stages, CHUNK, CHUNK),
        "scored": barrier(1, num_stages),
    }
    if other is not None:
        tiles["other"] = _block_tile(p, "other", other, num_compute_warpgroups)
        buffers["sums"] = sum_buffer(num_compute_warpgroups + 1)
    results = call(
        _sums_kernel,
        "linear_sums",
        p,
        {
            **places._asdict(),
            "lines": factors.lines,
            "kept": factors.kept,
            "split_states": split_states,
            "other": other,
            "states_before": states,
        },
        outputs,
        tiles,
        buffers,
        num_compute_warpgroups=num_compute_warpgroups,
        num_stages=num_stages,
        reverse=reverse,
        scores=_find_pairs,
        registers=_REGISTERS,
        is_reverse=reverse,
        is_turned=is_turned and split_states is not None,
        lines=Lines(factors.names, diagonal_size),
        wanted=wanted,
    )
    return Sums(**results)  # type: ignore[arg-type]

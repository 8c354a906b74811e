"""The affine maps `S -> M S + N` of segments, which run side by side.

A program has value channels or key channels. With value channels it starts from zero and ends with rows of N,
transposed. With key channels it starts from rows of the unit matrix, writes no values, and ends with rows of M,
transposed. Where almost nothing of a state survives a segment, M counts as zero, and its programs have nothing to do.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.common.decay import FORGOTTEN
from pallas_kernels.common.mosaic_gpu import (
    SIDE,
    added,
    load_channels,
    maximum,
    maximum_buffer,
    multiply,
    publish,
    put,
    scale_columns,
    split,
    unit_rows,
)
from pallas_kernels.common.problem import Problem, cdiv
from pallas_kernels.delta_rule.mosaic_gpu.fwd import residuals
from pallas_kernels.delta_rule.mosaic_gpu.pipeline import (
    PassArrays,
    Place,
    Tile,
    call,
    chunk_tiles,
    load_kept,
    row_of,
    segment_span,
)

_AHEAD = 16  # loads that are begun together


def _survival(r: Any, buffers: Any, place: Place, problem: Problem, first: Any, count: Any) -> Array:
    """Log of what a segment leaves of a state: of its slowest channel's decay, and of writes."""
    width = min(_AHEAD, problem.chunks_per_segment)
    has_channels = len(r.kept.shape) == 4

    def part(m, logs):
        steps = [m * width + i for i in range(width)]
        chunks = [jnp.minimum(first + step, problem.chunks - 1) for step in steps]
        if has_channels:
            kept = [load_channels(r.kept.at[place.batch, place.head, n]) for n in chunks]
        else:
            kept = [r.kept[place.batch, place.head, n] for n in chunks]
        growth = [None if r.growth is None else r.growth[place.batch, place.head, n] for n in chunks]
        for step, factor, more in zip(steps, kept, growth):
            log = jnp.log(jnp.maximum(factor, 1e-37))
            logs = logs + jnp.where(step < count, log if more is None else log + more, 0.0)
        return logs

    parts, zero = cdiv(problem.chunks_per_segment, width), jnp.float32(0)
    logs = part(0, zero)
    if parts > 1:
        logs = lax.fori_loop(1, parts, part, logs)
    return maximum(logs, buffers.maximum.at[place.group]) if has_channels else logs


def _of_values(place: Place, problem: Problem) -> tuple[Any, Place]:
    """Whether a program has value channels; and its place among those that have the same kind of channels."""
    blocks = problem.value_size // (SIDE * place.groups)
    is_value = place.block < blocks
    return is_value, dataclasses.replace(place, block=jnp.where(is_value, place.block, place.block - blocks))


def _span(r: Any, buffers: Any, place: Place, problem: Problem) -> tuple[Any, Any, Any]:
    """A segment's first chunk, its number of chunks, and whether the program has nothing to do; stores `survival`."""
    first, count = segment_span(problem, place.segment)
    if r.survival is None:
        return first, count, None
    is_value, own = _of_values(place, problem)

    def of_keys():
        survival = _survival(r, buffers, place, problem, first, count)

        @pl.when((own.block == 0) & (place.group == 0))
        def _():
            r.survival[place.batch, place.head, place.segment] = survival

        return survival <= FORGOTTEN

    is_forgotten = lax.cond(is_value, lambda: jnp.bool_(False), of_keys)
    return first, jnp.where(is_forgotten, 0, count), is_forgotten


def _maps_kernel(r, tiles, buffers, ring, place, chunks, *, problem: Problem):
    first, count, is_forgotten = chunks
    is_value, own = _of_values(place, problem)

    def step(m, state):
        slot = ring.wait(m)
        kept = load_kept(r, tiles, place, slot, first + m)
        residual, after = residuals(tiles, slot, place.own, state, kept, False, is_value=is_value)
        written = scale_columns(residual, row_of(tiles, "written_rows", slot)).astype(jnp.bfloat16)

        def add(state):
            multiply(state, written, tiles.written.at[slot])
            publish()

        (state,) = added(add, after)
        ring.release(slot)
        return state

    is_zero = is_value if is_forgotten is None else is_value | is_forgotten
    row = jnp.where(is_zero, problem.key_size, own.part * SIDE)
    state = lax.fori_loop(0, count, step, unit_rows(row, problem.key_size))

    @pl.when(is_value)
    def _():
        r.offset[own.batch, own.head, own.segment, own.channels] = state

    @pl.when(jnp.logical_not(is_value))
    def _():
        high, rest = split(state)
        put(r.transition.at[own.batch, own.head, own.segment, own.channels], high)
        put(r.transition_rest.at[own.batch, own.head, own.segment, own.channels], rest)


def _value_tile(problem: Problem, tile: Tile) -> Tile:
    """A tile of values or of their gate; programs that have key channels read some and drop them."""
    return dataclasses.replace(tile, source=lambda r, at, n: tile.source(r, _of_values(at, problem)[1], n))


def segment_maps(
    problem: Problem, arrays: PassArrays, growth: Array | None, *, groups: int, slots: int
) -> dict[str, Array | None]:
    """M and N of each segment, transposed. P is the number of segments.

    Args:
        problem: static facts.
        arrays: what a pass reads.
        growth: log of how far each chunk's writes can enlarge a state, `[B, HV, N]` float32; None for 0.
        groups: blocks of 64 value channels, or key channels, of a program.
        slots: chunks whose tiles are in shared memory.

    Returns:
        `offset` `[B, HV, P, V, K]` float32, N; `transition` and `transition_rest` `[B, HV, P, K, K]`, bfloat16 parts of
        M; `survival` `[B, HV, P]` float32, log of the most that a segment leaves of a state, None without decay.
    """
    p = problem
    arrays = arrays._replace(read=None, scores=None, read_rows=None)
    width, has_decay = SIDE * groups, arrays.kept is not None
    transition = p.per_head(p.segments, p.key_size, p.key_size)
    tiles = chunk_tiles(p, arrays, groups)
    return call(
        _maps_kernel,
        "delta_segment_maps",
        p,
        {**arrays.by_name(), "growth": growth if has_decay else None},
        {
            "offset": p.per_head(p.segments, p.value_size, p.key_size, dtype=jnp.float32),
            "transition": transition,
            "transition_rest": transition,
            "survival": p.per_head(p.segments, dtype=jnp.float32) if has_decay else None,
        },
        {name: _value_tile(p, tile) if name in ("v", "write") else tile for name, tile in tiles.items()},
        {"maximum": maximum_buffer(groups)} if has_decay and arrays.kept.ndim == 4 else {},  # type: ignore[union-attr]
        groups=groups,
        slots=slots,
        blocks=p.value_size // width + p.key_size // width,
        span=_span,
    )

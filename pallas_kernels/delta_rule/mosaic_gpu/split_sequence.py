"""The affine maps `S -> M S + N` of splits, which run side by side.

A program has value channels or key channels. With value channels it starts from zero and ends with rows of N,
transposed. With key channels it starts from rows of the unit matrix, writes no values, and ends with rows of M,
transposed. Where almost nothing of a state survives a split, M counts as zero, and its programs have nothing to do.
Linear attention's M is a diagonal, the product of the chunks' decays, and no program has key channels.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.common.decay import FORGOTTEN
from pallas_kernels.common.kernel_shape import KernelShape, cdiv
from pallas_kernels.common.mosaic_gpu import (
    SIDE,
    added,
    fence_smem,
    load_channels,
    maximum,
    maximum_buffer,
    multiply,
    put,
    scale_columns,
    split,
    unit_rows,
)
from pallas_kernels.delta_rule.mosaic_gpu.fwd import residuals, values_written
from pallas_kernels.delta_rule.mosaic_gpu.pipeline import (
    PassArrays,
    Place,
    Tile,
    call,
    chunk_tiles,
    load_kept,
    row_of,
    split_span,
    start_state,
)

_AHEAD = 16  # loads that are begun together
_SMALLEST = 1e-37


def _survival(r: Any, buffers: Any, place: Place, kernel_shape: KernelShape, first: Any, count: Any) -> Array:
    """Log of what a split leaves of a state: of its slowest channel's decay, and of writes."""
    width = min(_AHEAD, kernel_shape.chunks_per_split)
    has_channels = len(r.kept.shape) == 4

    def part(m, logs):
        steps = [m * width + i for i in range(width)]
        chunks = [jnp.minimum(first + step, kernel_shape.chunks - 1) for step in steps]
        if has_channels:
            kept = [load_channels(r.kept.at[place.batch, place.head, n]) for n in chunks]
        else:
            kept = [r.kept[place.batch, place.head, n] for n in chunks]
        growth = [None if r.growth is None else r.growth[place.batch, place.head, n] for n in chunks]
        for step, factor, more in zip(steps, kept, growth):
            log = jnp.log(jnp.maximum(factor, _SMALLEST))
            logs = logs + jnp.where(step < count, log if more is None else log + more, 0.0)
        return logs

    parts, zero = cdiv(kernel_shape.chunks_per_split, width), jnp.float32(0)
    logs = part(0, zero)
    if parts > 1:
        logs = lax.fori_loop(1, parts, part, logs)
    return maximum(logs, buffers.maximum.at[place.group]) if has_channels else logs


def _of_values(place: Place, kernel_shape: KernelShape) -> tuple[Any, Place]:
    """Whether a program has value channels; and its place among those that have the same kind of channels."""
    blocks = kernel_shape.value_size // (SIDE * place.num_compute_warpgroups)
    is_value = place.block < blocks
    return is_value, dataclasses.replace(place, block=jnp.where(is_value, place.block, place.block - blocks))


def _span(r: Any, buffers: Any, place: Place, kernel_shape: KernelShape) -> tuple[Any, Any, Any]:
    """A split's first chunk, its number of chunks, and whether the program has nothing to do; stores `survival`."""
    first, count = split_span(kernel_shape, place.split)
    if r.survival is None:
        return first, count, None
    is_value, own = _of_values(place, kernel_shape)

    def of_keys():
        survival = _survival(r, buffers, place, kernel_shape, first, count)

        @pl.when((own.block == 0) & (place.group == 0))
        def _():
            r.survival[place.batch, place.head, place.split] = survival

        return survival <= FORGOTTEN

    is_forgotten = lax.cond(is_value, lambda: jnp.bool_(False), of_keys)
    return first, jnp.where(is_forgotten, 0, count), is_forgotten


def _with_written(tiles: Any, slot: Any, pipeline: Any, written: Array, after: Array) -> Array:
    """The state after a chunk, from what its decay leaves and what its tokens write; gives the slot back."""

    def add(state):
        multiply(state, written, tiles.written.at[slot])
        fence_smem()

    (state,) = added(add, after)
    pipeline.release(slot)
    return state


def _maps_kernel(r, tiles, buffers, pipeline, place, chunks, *, kernel_shape: KernelShape):
    first, count, is_forgotten = chunks
    is_value, own = _of_values(place, kernel_shape)

    def step(m, state):
        slot = pipeline.wait(m)
        kept = load_kept(r, tiles, place, slot, first + m)
        residual, after = residuals(tiles, slot, place.own, state, kept, False, is_value=is_value)
        written = scale_columns(residual, row_of(tiles, "written_rows", slot)).astype(jnp.bfloat16)
        return _with_written(tiles, slot, pipeline, written, after)

    is_zero = is_value if is_forgotten is None else is_value | is_forgotten
    row = jnp.where(is_zero, kernel_shape.key_size, own.part * SIDE)
    state = lax.fori_loop(0, count, step, unit_rows(row, kernel_shape.key_size))

    @pl.when(is_value)
    def _():
        r.offset[own.batch, own.head, own.split, own.channels] = state

    @pl.when(jnp.logical_not(is_value))
    def _():
        high, rest = split(state)
        put(r.transition.at[own.batch, own.head, own.split, own.channels], high)
        put(r.transition_rest.at[own.batch, own.head, own.split, own.channels], rest)


def _value_tile(kernel_shape: KernelShape, tile: Tile) -> Tile:
    """A tile of values or of their gate; programs that have key channels read some and drop them."""
    return dataclasses.replace(tile, source=lambda r, at, n: tile.source(r, _of_values(at, kernel_shape)[1], n))


def split_transitions(
    kernel_shape: KernelShape, arrays: PassArrays, growth: Array | None, *, num_compute_warpgroups: int, num_stages: int
) -> dict[str, Array | None]:
    """M and N of each split, transposed. P is the number of splits.

    Args:
        kernel_shape: static facts.
        arrays: what a pass reads.
        growth: log of how far each chunk's writes can enlarge a state, `[B, HV, N]` float32; None for 0.
        num_compute_warpgroups: blocks of 64 value channels, or key channels, of a program.
        num_stages: chunks whose tiles are in shared memory.

    Returns:
        `offset` `[B, HV, P, V, K]` float32, N; `transition` and `transition_rest` `[B, HV, P, K, K]`, bfloat16 parts of
        M; `survival` `[B, HV, P]` float32, log of the most that a split leaves of a state, None without decay.
    """
    p = kernel_shape
    arrays = arrays._replace(read=None, scores=None, read_rows=None)
    width, has_decay = SIDE * num_compute_warpgroups, arrays.kept is not None
    transition = p.per_head(p.num_splits, p.key_size, p.key_size)
    tiles = chunk_tiles(p, arrays, num_compute_warpgroups)
    return call(
        _maps_kernel,
        "delta_segment_maps",
        p,
        {**arrays.by_name(), "growth": growth if has_decay else None},
        {
            "offset": p.per_head(p.num_splits, p.value_size, p.key_size, dtype=jnp.float32),
            "transition": transition,
            "transition_rest": transition,
            "survival": p.per_head(p.num_splits, dtype=jnp.float32) if has_decay else None,
        },
        {name: _value_tile(p, tile) if name in ("v", "write") else tile for name, tile in tiles.items()},
        {"maximum": maximum_buffer(num_compute_warpgroups)} if has_decay and arrays.kept.ndim == 4 else {},  # type: ignore[union-attr]
        num_compute_warpgroups=num_compute_warpgroups,
        num_stages=num_stages,
        blocks=p.value_size // width + p.key_size // width,
        span=_span,
    )


def _increments_kernel(r, tiles, buffers, pipeline, place, chunks, *, kernel_shape: KernelShape):
    first, count = chunks

    def step(m, state):
        slot = pipeline.wait(m)
        kept = load_kept(r, tiles, place, slot, first + m)
        written, after = values_written(tiles, slot, place.own, state, kept)
        return _with_written(tiles, slot, pipeline, written, after)

    state = lax.fori_loop(0, count, step, start_state(None, place, kernel_shape.key_size))
    r.offset[place.batch, place.head, place.split, place.channels] = state


def linear_split_transitions(
    kernel_shape: KernelShape, arrays: PassArrays, *, num_compute_warpgroups: int, num_stages: int
) -> dict[str, Array | None]:
    """M and N of each split under linear attention's decay of one number a channel; XLA multiplies the decays.

    Args:
        kernel_shape: static facts.
        arrays: what a pass reads.
        num_compute_warpgroups: blocks of 64 value channels of a program.
        num_stages: chunks whose tiles are in shared memory.

    Returns:
        As `split_transitions`, but `transition` is the diagonal of M, `[B, HV, P, K]` float32, and has no rest.
    """
    p, kept = kernel_shape, arrays.kept
    assert kept is not None
    arrays = arrays._replace(read=None, scores=None, read_rows=None)
    found = call(
        _increments_kernel,
        "delta_segment_maps",
        p,
        arrays.by_name(),
        {"offset": p.per_head(p.num_splits, p.value_size, p.key_size, dtype=jnp.float32)},
        chunk_tiles(p, arrays, num_compute_warpgroups),
        {},
        num_compute_warpgroups=num_compute_warpgroups,
        num_stages=num_stages,
    )
    absent = p.num_splits * p.chunks_per_split - p.chunks  # of the last split
    kept = jnp.pad(kept, ((0, 0), (0, 0), (0, absent), (0, 0)), constant_values=1.0)
    kept = kept.reshape(p.batch, p.value_heads, p.num_splits, p.chunks_per_split, p.key_size)
    transition = jnp.prod(kept, axis=3)
    survival = jnp.log(jnp.maximum(jnp.max(transition, axis=3), _SMALLEST))
    return {**found, "transition": transition, "transition_rest": None, "survival": survival}

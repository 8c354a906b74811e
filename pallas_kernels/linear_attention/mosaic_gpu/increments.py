"""What parts of a sequence, which run side by side, add to the state of linear attention."""

import functools
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.common.kernel_shape import KernelShape
from pallas_kernels.common.mosaic_gpu import (
    SIDE,
    added,
    fence_smem,
    load_matrix,
    load_row,
    multiply,
    scale_columns,
    zeros,
)
from pallas_kernels.delta_rule.mosaic_gpu.pipeline import call, split_span
from pallas_kernels.linear_attention.mosaic_gpu.decay import Factors
from pallas_kernels.linear_attention.mosaic_gpu.sums import Places, chunk_tiles


def _increments_kernel(
    r, tiles, buffers, pipeline, place, chunks, *, kernel_shape: KernelShape, has_writes: bool, is_reverse: bool
):
    """What one part of a sequence adds to the state, and what it leaves of the state before it."""
    first, count = chunks

    def step(m, carry):
        state, left = carry
        n = first + (count - 1 - m if is_reverse else m)
        slot = pipeline.wait(m)
        value = load_matrix(tiles.value.at[slot, :, place.own].T)
        if has_writes:
            value = scale_columns(value.astype(jnp.float32), load_row(tiles.lines.at[slot, 0])).astype(jnp.bfloat16)
        if r.kept is not None:
            kept = r.kept[place.batch, place.head, n]
            state, left = state * kept, left * kept
        (state,) = added(lambda state: multiply(state, value, tiles.key.at[slot]), state)
        fence_smem()
        pipeline.release(slot)
        return state, left

    start = zeros(SIDE, kernel_shape.key_size), jnp.float32(1)
    state, left = lax.fori_loop(0, count, step, start)

    @pl.when(_is_needed(kernel_shape, place.split, is_reverse))
    def _():
        part = place.split - (1 if is_reverse else 0)
        r.added[place.batch, place.head, part, place.channels] = state
        if r.kept_of_part is not None:

            @pl.when((place.block == 0) & (place.group == 0))
            def _():
                r.kept_of_part[place.batch, place.head, part] = left


def _is_needed(kernel_shape: KernelShape, split: Any, reverse: bool) -> Any:
    """Whether any part comes after this one."""
    return split > 0 if reverse else split < kernel_shape.num_splits - 1


def _span_of_needed(r: Any, buffers: Any, place: Any, kernel_shape: KernelShape, *, reverse: bool) -> tuple[Any, Any]:
    first, count = split_span(kernel_shape, place.split)
    return first, jnp.where(_is_needed(kernel_shape, place.split, reverse), count, 0)


def increments(
    kernel_shape: KernelShape,
    key: Array,
    value: Array,
    factors: Factors,
    *,
    reverse: bool,
    num_compute_warpgroups: int,
) -> tuple[Array, Array | None]:
    """What each part of a sequence adds to the state, all but the last part (`reverse`: the first).

    Arguments as `sums`.

    Returns:
        Transposed, `[B, HV, P - 1, D, A]` float32, and what is left over a part of the state before it,
        `[B, HV, P - 1]` float32, None for all.
    """
    p, parts, has_writes = kernel_shape, kernel_shape.num_splits - 1, "writes" in factors.names
    line = (factors.names.index("writes"), 1) if has_writes else None
    tiles = chunk_tiles(p, Places(key, key, value), line, num_compute_warpgroups)
    del tiles["reader"]
    results = call(
        _increments_kernel,
        "linear_increments",
        p,
        {"key": key, "value": value, "lines": factors.lines if has_writes else None, "kept": factors.kept},
        {
            "added": p.per_head(parts, p.value_size, p.key_size, dtype=jnp.float32),
            "kept_of_part": None if factors.kept is None else p.per_head(parts, dtype=jnp.float32),
        },
        tiles,
        {},
        num_compute_warpgroups=num_compute_warpgroups,
        num_stages=4,
        reverse=reverse,
        span=functools.partial(_span_of_needed, reverse=reverse),
        is_reverse=reverse,
        has_writes=has_writes,
    )
    return results["added"], results["kept_of_part"]  # type: ignore[return-value]

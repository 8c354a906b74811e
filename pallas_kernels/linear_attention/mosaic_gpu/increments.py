"""What parts of a sequence, which run side by side, add to the state of linear attention."""

import dataclasses
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

_FEWEST_CHUNKS = 4
"""Of a piece: what each adds is written and read once more."""


def _increments_kernel(
    r, tiles, buffers, pipeline, place, chunks, *, kernel_shape: KernelShape, has_writes: bool, is_reverse: bool
):
    """What one piece of a sequence adds to the state, and what it leaves of the state before it."""
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
    r.added[place.batch, place.head, place.split, place.channels] = state
    if r.kept_of_piece is not None:

        @pl.when((place.block == 0) & (place.group == 0))
        def _():
            r.kept_of_piece[place.batch, place.head, place.split] = left


def _pieces(kernel_shape: KernelShape, parts: int, num_compute_warpgroups: int, processors: int) -> int:
    """Equal pieces of a part whose increments are found side by side: no processor has two programs.

    The last part adds to no other, so that with two parts half of the processors would have nothing to do.
    """
    p, pieces = kernel_shape, 1
    programs = p.batch * p.value_heads * (p.value_size // (SIDE * num_compute_warpgroups)) * parts
    while 2 * pieces * programs <= processors:
        finer = dataclasses.replace(p, num_splits=2 * pieces * p.num_splits)
        if finer.chunks_per_split < _FEWEST_CHUNKS or 2 * pieces * finer.chunks_per_split != p.chunks_per_split:
            break
        pieces *= 2
    return pieces


def increments(
    kernel_shape: KernelShape,
    key: Array,
    value: Array,
    factors: Factors,
    *,
    reverse: bool,
    num_compute_warpgroups: int,
    processors: int,
    of_last: bool = False,
) -> tuple[Array, Array | None]:
    """What each part of a sequence adds to the state, all but the last part (`reverse`: the first).

    Arguments as `sums`, the number of the card's multiprocessors, and whether the last part is asked for too.

    Returns:
        Transposed, `[B, HV, P - 1, D, A]` float32, and what is left over a part of the state before it,
        `[B, HV, P - 1]` float32, None for all; P of both with `of_last`. Where parts are cut into pieces, as many times
        more of both.
    """
    parts = kernel_shape.num_splits - (0 if of_last else 1)
    pieces = _pieces(kernel_shape, parts, num_compute_warpgroups, processors)
    in_pieces = dataclasses.replace(kernel_shape, num_splits=kernel_shape.num_splits * pieces)
    # Programs are started for those alone that a later part reads.
    count, has_writes = parts * pieces, "writes" in factors.names
    p = dataclasses.replace(kernel_shape, num_splits=count)

    def span(r: Any, buffers: Any, place: Any, kernel_shape: KernelShape) -> tuple[Any, Any]:
        return split_span(in_pieces, place.split + (in_pieces.num_splits - count if reverse else 0))

    line = (factors.names.index("writes"), 1) if has_writes else None
    tiles = chunk_tiles(p, Places(key, key, value), line, num_compute_warpgroups)
    del tiles["reader"]
    results = call(
        _increments_kernel,
        "linear_increments",
        p,
        {"key": key, "value": value, "lines": factors.lines if has_writes else None, "kept": factors.kept},
        {
            "added": p.per_head(count, p.value_size, p.key_size, dtype=jnp.float32),
            "kept_of_piece": None if factors.kept is None else p.per_head(count, dtype=jnp.float32),
        },
        tiles,
        {},
        num_compute_warpgroups=num_compute_warpgroups,
        num_stages=4,
        reverse=reverse,
        span=span,
        is_reverse=reverse,
        has_writes=has_writes,
    )
    return results["added"], results["kept_of_piece"]  # type: ignore[return-value]

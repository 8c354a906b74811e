"""Passes over the chunks of a sequence, first to last, with the state in registers.

    R = A (Z - Ebar S_0)      O = Q_G S_0 + P R      S_C = Diag(exp(G_C)) S_0 + K_tail^T R

All matrices but keys and queries are transposed: R^T is `[V, C]`, the state `[V, K]`.

Linear attention erases nothing, and R is the values: no product comes before the state's.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.common.kernel_shape import CHUNK, KernelShape
from pallas_kernels.common.mosaic_gpu import (
    SIDE,
    added,
    arrive,
    awaited,
    barrier,
    fence_smem,
    left_parts,
    load_matrix,
    matrix_buffer,
    multiply,
    put,
    remainder,
    scale_columns,
    store,
    store_across,
    wait,
    wait_for_stores,
    with_accumulators,
)
from pallas_kernels.delta_rule.mosaic_gpu.pipeline import (
    DIGIT_COLUMNS,
    PassArrays,
    Place,
    call,
    chunk_tiles,
    keep,
    load_kept,
    load_written,
    rounded_and_digits,
    row_of,
    start_state,
    tokens,
    weigh_pairs,
)
from pallas_kernels.delta_rule.mosaic_gpu.rounded_rests import WIDTH, rests_struct, rounded_and_rests


def residuals(
    tiles: Any,
    slot: Any,
    own: Any,
    state: Array,
    kept: Any,
    is_exact: bool,
    scaled: Callable | None = None,
    is_value: Any = None,
    reads_first: bool = False,
    meanwhile: Callable[[], None] | None = None,
    values_of: Callable[[], Array] | None = None,
) -> tuple[Array, ...]:
    """A chunk from the state `[V, K]` before it: R^T, the state after its decay and, with `scaled`, `scaled(S_0 Q^T)`.

    With `is_exact`, `Z - Ebar S_0` is not rounded before it goes through the inverse. Where `is_value` is false, the
    values Z count as zero. With `reads_first` both of the state's products are awaited before values are loaded. That
    takes fewer registers: with less than 224 a thread the assembler has all products wait for one another otherwise,
    and beside a fence in `values_of` it spills. `meanwhile` is called while the first product runs. `values_of` loads
    values Z that are not in the slot.
    """
    left = state.astype(jnp.bfloat16)
    erased = getattr(tiles, "erased", tiles.written)

    def body(recalled, residual, *reads):
        multiply(recalled, left, erased.at[slot].T)
        if meanwhile is not None:
            meanwhile()
        for read in reads:
            multiply(read, left, tiles.read.at[slot].T)
        outs: list[Array] = []
        if reads_first:
            recalled, outs = awaited(recalled), [scaled(awaited(read)) for read in reads]  # type: ignore[misc]
        values = load_written(tiles, slot, own) if values_of is None else values_of()
        if is_value is not None:
            values = jnp.where(is_value, values, 0.0)
        erase = row_of(tiles, "erased_rows", slot)
        new = values - scale_columns(recalled if reads_first else awaited(recalled, running=len(reads)), erase)
        parts = left_parts(new, is_exact)
        for part in parts:
            multiply(residual, part, tiles.inverse.at[slot].T)
        after = keep(state, kept)
        if not reads_first:
            outs = [scaled(awaited(read, running=len(parts))) for read in reads]  # type: ignore[misc]
        return awaited(residual), after, *outs

    return with_accumulators(body, *[CHUNK] * (2 if scaled is None else 3))


def values_written(
    tiles: Any, slot: Any, own: Any, state: Array, kept: Any, scaled: Callable | None = None
) -> tuple[Array, ...]:
    """Linear attention's `residuals`, whose first is rounded: the values as they are."""
    values = load_matrix(tiles.v.at[slot, :, own].T)
    if scaled is None:
        return values, keep(state, kept)
    left = state.astype(jnp.bfloat16)

    def body(read):
        multiply(read, left, tiles.read.at[slot].T)
        return keep(state, kept), scaled(awaited(read))

    return values, *with_accumulators(body, CHUNK)


def store_out(r: Any, buffers: Any, pipeline: Any, place: Any, first: Any, m: Any) -> None:
    """Stores the output of the m-th chunk from `first` on, transposed, and lets its slot be filled again."""
    fence_smem()

    @pl.when(m >= 0)
    def _():
        pipeline.release(remainder(m, pipeline.num_stages))
        store(buffers.out.at[place.group], r.out.at[place.batch, tokens(first + m), place.head, place.channels])


def output_kernel(r, tiles, buffers, pipeline, place, chunks, *, kernel_shape: KernelShape, is_exact: bool):
    """Outputs and final state; the loop of a warpgroup that carries the state, with `call`'s arguments.

    Where another warpgroup finds the scores they are `buffers.scores`, else a tile.
    """
    first, count = chunks
    finds_scores = hasattr(buffers, "scores")
    scores = buffers.scores if finds_scores else tiles.scores
    single_stage = pipeline.single_stage
    finish = functools.partial(store_out, r, buffers, pipeline, place, first)

    def load_values(m):
        """Z of the m-th chunk from the slot that values and write gate have for all, which is filled again at once."""
        slot = single_stage.wait(m)
        values = load_written(tiles, slot, place.own)
        fence_smem()
        single_stage.release(slot)
        return values

    def put_out(out):
        wait_for_stores()
        buffers.out.at[place.group].T[...] = out.astype(jnp.bfloat16)

    def step(m, state):
        n = first + m
        slot = pipeline.wait(m)
        kept = load_kept(r, tiles, place, slot, n)

        def scaled(out):
            factors = row_of(tiles, "read_rows", slot)
            return out * kernel_shape.scale if factors is None else scale_columns(out, factors)

        if kernel_shape.online:
            residual, after, out = residuals(
                tiles,
                slot,
                place.own,
                state,
                kept,
                is_exact,
                scaled,
                reads_first=finds_scores or single_stage is not None,
                meanwhile=functools.partial(finish, m - 1) if finds_scores else None,
                values_of=None if single_stage is None else lambda: load_values(m),
            )
            written = scale_columns(residual, row_of(tiles, "written_rows", slot)).astype(jnp.bfloat16)
            residual = residual.astype(jnp.bfloat16)
        else:
            residual, after, out = values_written(tiles, slot, place.own, state, kept, scaled)
            written = residual

        def add(state, out):
            if not finds_scores:
                multiply(state, written, tiles.written.at[slot])
                multiply(out, residual, scores.at[slot].T)
                return
            wait(buffers.scored.at[slot])
            multiply(out, residual, scores.at[slot].T)
            multiply(state, written, tiles.written.at[slot])
            put_out(awaited(out, running=1))

        state, out = added(add, after, out)
        if not finds_scores:
            put_out(out)
            finish(m)
        return state

    state = lax.fori_loop(0, count, step, start_state(r.split_states, place, kernel_shape.key_size))
    if finds_scores:
        finish(count - 1)

    @pl.when(place.split == kernel_shape.num_splits - 1)
    def _():
        store_across(r.final_state.at[place.batch, place.head, :, place.channels], state)

    wait_for_stores(only_read=False)


def _find_scores(r, tiles, buffers, pipeline, place, chunks, *, kernel_shape: KernelShape, is_exact: bool):
    """P of each chunk, ahead of the warpgroups that multiply with it; a slot's is free when its tiles are."""
    del is_exact
    first, count = chunks

    def step(m, carry):
        slot = pipeline.wait(m)

        def body(scores):
            multiply(scores, tiles.read.at[slot], tiles.written.at[slot].T)
            return awaited(scores)

        scores = with_accumulators(body, CHUNK)
        sums = (
            [tiles.decay_sums.at[slot, pl.ds(i * CHUNK, CHUNK)] for i in (0, 1)] if r.decay_sums is not None else None
        )
        run = tiles.run.at[slot] if r.run is not None else None
        (scores,) = weigh_pairs(m, sums, run, scores)
        if r.scores is not None:
            wait_for_stores()
        buffers.scores[slot] = (kernel_shape.scale * scores).astype(jnp.bfloat16)
        fence_smem()
        arrive(buffers.scored.at[slot])
        if r.scores is not None:  # the programs of all blocks of value channels find the same

            @pl.when(place.block == 0)
            def _():
                store(buffers.scores.at[slot], r.scores.at[place.batch, place.head, first + m])

        return carry

    lax.fori_loop(0, count, step, jnp.int32(0))
    wait_for_stores(only_read=False)


def stored_state(rests: Any, place: Place, chunk: Any, state: Array) -> Array:
    """A state, or its gradient, rounded; stores what rounding leaves in `rests` `[B, HV, N, V, K / 8]` unless None."""
    if rests is None:
        return state.astype(jnp.bfloat16)
    rounded, parts = rounded_and_rests(state)
    for i, part in enumerate(parts):
        put(rests.at[place.batch, place.head, chunk, place.channels, pl.ds(i * WIDTH, WIDTH)], part)
    return rounded


def _states_kernel(r, tiles, buffers, pipeline, place, chunks, *, kernel_shape: KernelShape):
    first, count = chunks

    def step(m, state):
        n = first + m
        wait_for_stores()
        buffers.states[place.group] = stored_state(r.rests, place, n, state)
        slot = pipeline.wait(m)
        kept = load_kept(r, tiles, place, slot, n)
        if kernel_shape.online:
            residual, after = residuals(tiles, slot, place.own, state, kept, True)
            written = scale_columns(residual, row_of(tiles, "written_rows", slot)).astype(jnp.bfloat16)
        else:
            written, after = values_written(tiles, slot, place.own, state, kept)

        def add(state):
            multiply(state, written, tiles.written.at[slot])
            if r.residuals is None:
                fence_smem()
                store(buffers.states.at[place.group], r.states.at[place.batch, place.head, n, place.channels])
                return
            if r.digits is None:
                rounded = residual.astype(jnp.bfloat16)
            else:
                rounded, digits = rounded_and_digits(residual)
                put(r.digits.at[place.batch, place.head, n, place.channels], digits)
            buffers.residuals[place.group] = rounded
            fence_smem()
            store(buffers.states.at[place.group], r.states.at[place.batch, place.head, n, place.channels], last=False)
            store(buffers.residuals.at[place.group], r.residuals.at[place.batch, place.head, n, place.channels])

        (state,) = added(add, after)
        pipeline.release(slot)
        return state

    lax.fori_loop(0, count, step, start_state(r.split_states, place, kernel_shape.key_size))
    wait_for_stores(only_read=False)


def fwd_o(
    kernel_shape: KernelShape,
    arrays: PassArrays,
    split_states: Array | None,
    *,
    is_exact: bool,
    num_compute_warpgroups: int,
    num_stages: int,
    keeps_scores: bool = False,
) -> tuple[Array, Array, Array | None]:
    """Output `[B, T, HV, V]`, final state `[B, HV, K, V]` float32, and the scores that it finds.

    Where `arrays` has no scores, one more warpgroup finds each chunk's: queries and keys are there anyway, and what it
    finds does not leave the processor but for the backward.

    Args:
        kernel_shape: static facts.
        arrays: what a pass reads.
        split_states: states at the splits' starts, transposed, `[B, HV, P, V, K]` float32; None for zero.
        is_exact: whether what goes through the inverse is not rounded before.
        num_compute_warpgroups: blocks of 64 value channels of a program.
        num_stages: chunks whose tiles are in shared memory.
        keeps_scores: whether scores that are found here are returned.
    """
    p = kernel_shape
    buffers, finds_scores = {"out": matrix_buffer(num_compute_warpgroups, CHUNK, SIDE)}, arrays.scores is None
    if finds_scores:
        buffers |= {"scores": matrix_buffer(num_stages, CHUNK, CHUNK), "scored": barrier(1, num_stages)}
    tiles, single_stage = chunk_tiles(p, arrays, num_compute_warpgroups), {}
    if arrays.write is not None and num_compute_warpgroups > 1:
        # Read in the middle of a step, they are there again in the next one's. Two slots have no room in float32.
        single_stage = {name: tiles.pop(name) for name in ("v", "write")}
    results = call(
        output_kernel,
        "delta_output",
        p,
        {**arrays.by_name(), "split_states": split_states},
        {
            "out": jax.ShapeDtypeStruct((p.batch, p.length, p.value_heads, p.value_size), p.dtype),
            "final_state": p.per_head(p.key_size, p.value_size, dtype=jnp.float32),
            **({"scores": p.per_head(p.chunks, CHUNK, CHUNK)} if keeps_scores else {}),
        },
        tiles,
        buffers,
        num_compute_warpgroups=num_compute_warpgroups,
        num_stages=num_stages,
        single_stage=single_stage,
        scores=_find_scores if finds_scores else None,
        is_exact=is_exact,
    )
    return results["out"], results["final_state"], results.get("scores")  # type: ignore[return-value]


def fwd_h(
    kernel_shape: KernelShape,
    arrays: PassArrays,
    split_states: Array | None,
    *,
    with_digits: bool,
    num_compute_warpgroups: int,
    num_stages: int,
) -> tuple[Array, Array | None, Array | None]:
    """For the backward: the state before each chunk `[B, HV, N, V, K]` and the residuals `[B, HV, N, V, C]`.

    `with_digits`, the third result has two further digits of the residuals, `[B, HV, N, V, 8]` (`rounded_and_digits`).
    Linear attention has no residuals, since they are the values; its third result is what rounding leaves of the
    states, `rests_struct`.
    """
    p = kernel_shape
    arrays = arrays._replace(read=None, scores=None, read_rows=None)
    residual = p.per_head(p.chunks, p.value_size, CHUNK) if p.online else None
    buffers = {"states": matrix_buffer(num_compute_warpgroups, SIDE, p.key_size)}
    if residual is not None:
        buffers["residuals"] = matrix_buffer(num_compute_warpgroups, SIDE, CHUNK)
    results = call(
        _states_kernel,
        "delta_states",
        p,
        {**arrays.by_name(), "split_states": split_states},
        {
            "states": p.per_head(p.chunks, p.value_size, p.key_size),
            "residuals": residual,
            "digits": p.per_head(p.chunks, p.value_size, DIGIT_COLUMNS, dtype=jnp.int16) if with_digits else None,
            "rests": None if p.online else rests_struct(p),
        },
        chunk_tiles(p, arrays, num_compute_warpgroups),
        buffers,
        num_compute_warpgroups=num_compute_warpgroups,
        num_stages=num_stages,
    )
    return results["states"], results["residuals"], results["digits" if p.online else "rests"]  # type: ignore[return-value]

"""The whole forward in one kernel, where rows and heads fill the card and nothing is kept for a backward.

A program has a head of a row. Two warpgroups carry the state, 64 value channels each, as in `fwd`, and find half of the
scores' columns each. One more finds the inverse and the factors on rows, as `wy` does, of the chunk after theirs. Its
chain of small steps is the longest, so it does nothing else. None of it leaves shared memory. The last one copies.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.common.decay import LOG2_E, MIN_LOG_DECAY
from pallas_kernels.common.kernel_shape import CHUNK, KernelShape
from pallas_kernels.common.mosaic_gpu import (
    SIDE,
    added,
    arrive,
    awaited,
    barrier,
    begin_column,
    column_numbers,
    fence_smem,
    halved_buffer,
    left_parts,
    load_column,
    load_row,
    load_turned,
    matrix_buffer,
    meet,
    multiply,
    number_buffer,
    row_numbers,
    scale_columns,
    spread_columns,
    spread_rows,
    store_across,
    wait,
    wait_for_stores,
    with_accumulators,
    zero,
)
from pallas_kernels.delta_rule.inputs import Inputs
from pallas_kernels.delta_rule.mosaic_gpu.fwd import store_out
from pallas_kernels.delta_rule.mosaic_gpu.pipeline import (
    REGISTERS_WITH_FACTORS,
    Keys,
    PassArrays,
    call,
    chunk_tiles,
    keep,
    row_of,
    start_state,
    tokens,
)
from pallas_kernels.delta_rule.mosaic_gpu.prefix_sum import prefix_sums
from pallas_kernels.delta_rule.mosaic_gpu.triangular_inverse import unit_lower_inverse

_GATES = "log_decay", "erase", "write"
_HALF = CHUNK // 2


def _forward_kernel(r, tiles, buffers, pipeline, place, chunks, *, kernel_shape: KernelShape, is_exact: bool):
    """The pass over chunks of a warpgroup that carries the state.

    Accumulators are zero from where their scope begins, so scopes are as short as they can be.
    """
    first, count = chunks
    has_decay = r.log_decay is not None
    own_scores = pl.ds(place.group * _HALF, _HALF)
    finish = functools.partial(store_out, r, buffers, pipeline, place, first)
    # The scores' scale: a summand of a decay's exponent, or a factor.
    shift, factor = 0.0, kernel_shape.scale
    if has_decay and factor > 0:
        shift, factor = math.log2(factor), 1.0

    def weighed(m, slot, scores):
        """This warpgroup's columns of the scores, `[C, C / 2]`."""

        def spread(x, axis):
            return lax.broadcast_in_dim(x, (CHUNK, _HALF), [axis])

        # An expression of m, see `row_numbers`.
        columns = column_numbers(_HALF) + (place.group * _HALF + zero(m))
        near = spread(row_numbers(m), 0) >= spread(columns, 1)
        if not has_decay:
            return jnp.where(near, factor * awaited(scores, running=1), 0.0)
        wait(buffers.summed.at[slot])
        sums = buffers.sums.at[slot]
        exponent = spread(load_column(sums) + shift, 0) - spread(load_row(sums.at[own_scores]), 1)
        weight = jnp.exp2(jnp.where(near, exponent, -jnp.inf))
        scores = awaited(scores, running=1)
        return factor * weight * scores if factor != 1.0 else weight * scores

    def step(m, state):
        slot = pipeline.wait(m)
        left = state.astype(jnp.bfloat16)

        def find_scores(scores, recalled):
            multiply(scores, tiles.read.at[slot], tiles.written.at[slot, own_scores].T)
            multiply(recalled, left, tiles.written.at[slot].T)
            buffers.scores[slot, :, own_scores] = weighed(m, slot, scores).astype(jnp.bfloat16)
            finish(m - 1)
            arrive(buffers.scored.at[slot])

            def read_state(read):
                multiply(read, left, tiles.read.at[slot].T)
                wait(buffers.found.at[slot])
                # Both before values are loaded: see `fwd.residuals`.
                return awaited(recalled), awaited(read)

            return with_accumulators(read_state, CHUNK)

        recalled, read = with_accumulators(find_scores, _HALF, CHUNK)
        factors = row_of(buffers, "read_rows", slot)
        out = read * kernel_shape.scale if factors is None else scale_columns(read, factors)
        values = scale_columns(load_turned(tiles.v.at[slot, :, place.own]), row_of(buffers, "write_rows", slot))
        new = values - scale_columns(recalled, row_of(buffers, "erased_rows", slot))

        def invert(residual):
            for part in left_parts(new, is_exact, rounds=False):
                multiply(residual, part, buffers.inverse.at[slot].T)
            return keep(state, buffers.kept[slot] if has_decay else None), awaited(residual)

        after, residual = with_accumulators(invert, CHUNK)
        written = scale_columns(residual, row_of(buffers, "written_rows", slot)).astype(jnp.bfloat16)
        residual = residual.astype(jnp.bfloat16)

        def add(state, out):
            wait(buffers.scored.at[slot])
            multiply(out, residual, buffers.scores.at[slot].T)
            multiply(state, written, tiles.written.at[slot])
            out = awaited(out, running=1)
            wait_for_stores()
            buffers.out.at[place.group].T[...] = out.astype(jnp.bfloat16)

        state, _ = added(add, after, out)
        return state

    state = lax.fori_loop(0, count, step, start_state(r.split_states, place, kernel_shape.key_size))
    finish(count - 1)
    store_across(r.final_state.at[place.batch, place.head, :, place.channels], state)
    wait_for_stores(only_read=False)


def _find_factors(r, tiles, buffers, pipeline, place, chunks, *, kernel_shape: KernelShape, is_exact: bool):
    """The inverse and the factors on rows, a chunk ahead of the state; a slot's is free when its tiles are."""
    del is_exact
    first, count = chunks
    has_decay = r.log_decay is not None
    names = [name for name in _GATES if getattr(r, name) is not None]

    def begin_gates(m):
        n = first + jnp.minimum(m, count - 1)
        return tuple(begin_column(getattr(r, name).at[place.batch, tokens(n), place.head]) for name in names)

    def sum_decay(m, slot, log_decay):
        """The log decay added up to each token, base 2. What is rounded here is far below the pairs' rounding."""
        step = jnp.maximum(log_decay, MIN_LOG_DECAY) * LOG2_E
        (decay,) = prefix_sums(m, [step], buffers.in_warp, meet)
        buffers.sums.at[slot][...] = decay
        meet()
        arrive(buffers.summed.at[slot])
        return decay

    def store_rows(slot, decay, erase, write):
        """The factors on rows, and the chunk's."""
        if hasattr(buffers, "write_rows"):
            buffers.write_rows.at[slot][...] = write
        if not has_decay:
            if erase is not None:
                buffers.erased_rows.at[slot][...] = erase
            return
        last = buffers.sums[slot, CHUNK - 1]
        from_start = jnp.exp2(decay)
        buffers.read_rows.at[slot][...] = kernel_shape.scale * from_start
        buffers.erased_rows.at[slot][...] = from_start if erase is None else erase * from_start
        buffers.written_rows.at[slot][...] = jnp.exp2(last - decay)
        buffers.kept[slot] = jnp.exp2(last)

    def step(m, loaded):
        slot = pipeline.wait(m)
        gates = {name: x.astype(jnp.float32) for name, x in zip(names, loaded)}
        erase = gates.get("erase")
        inverse = buffers.inverse.at[slot]

        def find_erased(erased):
            multiply(erased, tiles.written.at[slot], tiles.written.at[slot].T)
            decay: Any = sum_decay(m, slot, gates["log_decay"]) if has_decay else None
            # Far from the next fence, which waits for all that is on its way.
            following = begin_gates(m + 1)
            store_rows(slot, decay, erase, gates.get("write", erase))
            # What is above the diagonal does not count.
            weight: Any = 1.0
            if has_decay:
                weight = jnp.exp2(spread_rows(decay) - spread_columns(load_row(buffers.sums.at[slot])))
            lower = weight * awaited(erased)
            if erase is not None:
                lower = spread_rows(erase) * lower
            # What is inverted lies where the result goes.
            inverse[...] = unit_lower_inverse(lower, row_numbers(m), inverse, buffers.blocks)
            return following

        following = with_accumulators(find_erased, CHUNK)
        fence_smem()
        arrive(buffers.found.at[slot])
        return following

    lax.fori_loop(0, count, step, begin_gates(jnp.int32(0)))


def forward(
    kernel_shape: KernelShape, inputs: Inputs, split_states: Array | None, *, num_stages: int
) -> tuple[Array, Array]:
    """Output `[B, T, HV, V]` and final state `[B, HV, K, V]` float32, of sequences that are not split.

    Args:
        kernel_shape: static facts.
        inputs: arguments; decay and gates are one number a token, or absent, and no documents start.
        split_states: the states before the first chunk, transposed, `[B, HV, 1, V, K]` float32; None for zero.
        num_stages: chunks whose tiles are in shared memory.
    """
    p, x = kernel_shape, inputs
    groups, has_decay = p.value_size // SIDE, x.log_decay is not None
    names = ["read_rows", "written_rows", "erased_rows"] if has_decay else ["erased_rows"] * (x.erase is not None)
    names += ["write_rows"] * (x.write is not None)
    buffers = {
        "out": matrix_buffer(groups, CHUNK, SIDE),
        "scores": halved_buffer(num_stages, CHUNK, CHUNK),
        "inverse": matrix_buffer(num_stages, CHUNK, CHUNK),
        "blocks": matrix_buffer(CHUNK // 2, CHUNK),
        "scored": barrier(groups, num_stages),
        "found": barrier(1, num_stages),
        **{name: number_buffer(num_stages, CHUNK) for name in names},
    }
    if has_decay:
        buffers |= {"sums": number_buffer(num_stages, CHUNK), "summed": barrier(1, num_stages)}
        buffers |= {"in_warp": number_buffer(CHUNK), "kept": number_buffer(num_stages)}
    arrays = PassArrays(**dict.fromkeys(PassArrays._fields))  # type: ignore[arg-type]
    arrays = arrays._replace(written=Keys(x.k, False), read=Keys(x.q, False), v=x.v)
    gates = {"log_decay": x.log_decay, "erase": x.erase, "write": None if x.write is x.erase else x.write}
    results = call(
        _forward_kernel,
        "delta_forward",
        p,
        {**arrays.by_name(), **gates, "split_states": split_states},
        {
            "out": jax.ShapeDtypeStruct(x.v.shape, p.dtype),
            "final_state": p.per_head(p.key_size, p.value_size, dtype=jnp.float32),
        },
        chunk_tiles(p, arrays, groups),
        buffers,
        num_compute_warpgroups=groups,
        num_stages=num_stages,
        scores=_find_factors,
        registers=REGISTERS_WITH_FACTORS,
        is_exact=has_decay,
    )
    return results["out"], results["final_state"]  # type: ignore[return-value]

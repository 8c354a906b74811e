"""The whole forward in one kernel, where rows and heads fill the card and nothing is kept for a backward.

A program has a head of a row. Two warpgroups carry the state, 64 value channels each, as in `fwd`. One more finds what
does not need the state, as `wy` does, of the chunk after theirs: scores, the inverse, and the factors on rows. None of
it leaves shared memory. The last one copies.
"""

import math
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.common.decay import LOG2_E, MIN_LOG_DECAY
from pallas_kernels.common.kernel_shape import CHUNK, KernelShape
from pallas_kernels.common.mosaic_gpu import (
    SIDE,
    arrive,
    awaited,
    barrier,
    begin_column,
    fence_smem,
    load_row,
    matrix_buffer,
    multiply,
    number_buffer,
    row_numbers,
    spread_columns,
    spread_rows,
    with_accumulators,
)
from pallas_kernels.delta_rule.inputs import Inputs
from pallas_kernels.delta_rule.mosaic_gpu.fwd import output_kernel
from pallas_kernels.delta_rule.mosaic_gpu.pipeline import (
    REGISTERS_WITH_FACTORS,
    Keys,
    PassArrays,
    call,
    chunk_tiles,
    near_pairs,
    tokens,
)
from pallas_kernels.delta_rule.mosaic_gpu.prefix_sum import prefix_sums
from pallas_kernels.delta_rule.mosaic_gpu.triangular_inverse import unit_lower_inverse

_GATES = "log_decay", "erase", "write"
_FOUND = "inverse", "erased_rows", "written_rows", "read_rows", "write_rows", "kept"


def _forward_kernel(r, tiles, buffers, pipeline, place, chunks, *, kernel_shape: KernelShape, is_exact: bool):
    """The pass over chunks, with what `_find_factors` finds in place of tiles."""
    found = {name: getattr(buffers, name) for name in _FOUND if hasattr(buffers, name)}
    output_kernel(
        r,
        SimpleNamespace(**vars(tiles), **found),
        buffers,
        pipeline,
        place,
        chunks,
        kernel_shape=kernel_shape,
        is_exact=is_exact,
    )


def _find_factors(r, tiles, buffers, pipeline, place, chunks, *, kernel_shape: KernelShape, is_exact: bool):
    """What does not need the state, a chunk ahead of it; a slot's is free when its tiles are."""
    del is_exact
    first, count = chunks
    has_decay = r.log_decay is not None
    names = [name for name in _GATES if getattr(r, name) is not None]
    # The scores' scale: a summand of a decay's exponent, or a factor.
    shift, factor = 0.0, kernel_shape.scale
    if has_decay and factor > 0:
        shift, factor = math.log2(factor), 1.0

    def begin_gates(m):
        n = first + jnp.minimum(m, count - 1)
        return tuple(begin_column(getattr(r, name).at[place.batch, tokens(n), place.head]) for name in names)

    def sum_decay(m, log_decay):
        """The log decay added up to each token, base 2. What is rounded here is far below the pairs' rounding."""
        step = jnp.maximum(log_decay, MIN_LOG_DECAY) * LOG2_E
        (decay,) = prefix_sums(m, [step], buffers.sums.at[0])
        buffers.sums.at[1][...] = decay
        fence_smem()
        return decay

    def exponent(decay):
        return spread_rows(decay) - spread_columns(load_row(buffers.sums.at[1]))

    def store_rows(slot, decay, erase, write):
        """The factors on rows, and the chunk's."""
        if hasattr(buffers, "write_rows"):
            buffers.write_rows.at[slot][...] = write
        if not has_decay:
            if erase is not None:
                buffers.erased_rows.at[slot][...] = erase
            return
        last = buffers.sums[1, CHUNK - 1]
        from_start = jnp.exp2(decay)
        buffers.read_rows.at[slot][...] = kernel_shape.scale * from_start
        buffers.erased_rows.at[slot][...] = from_start if erase is None else erase * from_start
        buffers.written_rows.at[slot][...] = jnp.exp2(last - decay)
        buffers.kept[slot] = jnp.exp2(last)

    def step(m, loaded):
        gates = {name: x.astype(jnp.float32) for name, x in zip(names, loaded)}
        following = begin_gates(m + 1)
        decay: Any = sum_decay(m, gates["log_decay"]) if has_decay else None
        slot = pipeline.wait(m)
        erase = gates.get("erase")

        def find_scores(scores):
            multiply(scores, tiles.read.at[slot], tiles.written.at[slot].T)
            store_rows(slot, decay, erase, gates.get("write", erase))
            near = near_pairs(m, None)
            if has_decay:
                weight = jnp.exp2(jnp.where(near, exponent(decay + shift), -jnp.inf))
                scores = factor * weight * awaited(scores) if factor != 1.0 else weight * awaited(scores)
            else:
                scores = jnp.where(near, factor * awaited(scores), 0.0)
            buffers.scores[slot] = scores.astype(jnp.bfloat16)
            fence_smem()
            arrive(buffers.scored.at[slot])

        def find_erased(erased):
            multiply(erased, tiles.written.at[slot], tiles.written.at[slot].T)
            # Found once more: kept from above it would be spilled. What is above the diagonal does not count.
            weight = jnp.exp2(exponent(decay)) if has_decay else 1.0
            return weight * awaited(erased)

        with_accumulators(find_scores, CHUNK)
        erased = with_accumulators(find_erased, CHUNK)
        if erase is not None:
            erased = spread_rows(erase) * erased
        inverse = buffers.inverse.at[slot]
        # What is inverted lies where the result goes.
        inverse[...] = unit_lower_inverse(erased, row_numbers(m), inverse, buffers.blocks)
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
        "scores": matrix_buffer(num_stages, CHUNK, CHUNK),
        "inverse": matrix_buffer(num_stages, CHUNK, CHUNK),
        "blocks": matrix_buffer(CHUNK // 2, CHUNK),
        "scored": barrier(1, num_stages),
        "found": barrier(1, num_stages),
        **{name: number_buffer(num_stages, CHUNK) for name in names},
    }
    if has_decay:
        buffers |= {"sums": number_buffer(2, CHUNK), "kept": number_buffer(num_stages)}
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

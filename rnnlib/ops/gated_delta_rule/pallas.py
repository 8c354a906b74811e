"""The gated delta rule on NVIDIA GPUs: the kernels of `pallas_kernels`, most stages of which have two backends."""

import functools
from typing import Any

import jax
from jax import Array

from rnnlib.ops.context_parallel import erasing_rule_on_shard
from rnnlib.ops.derivatives import with_further_derivatives
from rnnlib.ops.gated_delta_rule.reference import DeltaRuleInputs
from rnnlib.ops.gated_delta_rule.xla_chunked import gated_delta_rule_chunked
from rnnlib.ops.kernels import kernel_operators


@functools.partial(jax.jit, static_argnames=("scale", "chunk_size", "backend", "context_axis"), inline=True)
def gated_delta_rule_triton(
    inputs: DeltaRuleInputs,
    initial_state: Array | None,
    segment_ids: Array | None,
    *,
    scale: float,
    chunk_size: int,
    backend: str = "triton",
    context_axis: str | None = None,
) -> tuple[Array, Array]:
    """Evaluates the gated delta rule by kernels; results as `gated_delta_rule_scan`.

    Args:
        inputs: token-wise arguments.
        initial_state: None (zero) or `[B, HV, K, V]`.
        segment_ids: None or `[B, T]`.
        scale: factor on the output.
        chunk_size: tokens in a chunk.
        backend: `"mosaic"` for most stages in Mosaic GPU.
        context_axis: the mesh axis over which tokens are split; the final state is then that after this device's.
    """

    def keywords(inputs: DeltaRuleInputs, initial_state, segment_ids) -> dict[str, Any]:
        arrays = inputs._asdict()
        gates = arrays.pop("gates")
        arrays |= {"erase": gates.erase, "write": gates.own_write, "tied_gates": gates.tied}
        arrays |= {"initial_state": initial_state, "segment_ids": segment_ids}
        options = {"scale": scale, "chunk_size": chunk_size, "backend": backend, "context_axis": context_axis}
        return {**arrays, **options}

    reference: Any = functools.partial(gated_delta_rule_chunked, scale=scale, chunk_size=chunk_size)
    if context_axis is not None:
        reference = functools.partial(erasing_rule_on_shard, reference, axis=context_axis)
    run = with_further_derivatives(kernel_operators().delta_rule.gated_delta_rule, keywords, reference)
    return run(inputs, initial_state, segment_ids)

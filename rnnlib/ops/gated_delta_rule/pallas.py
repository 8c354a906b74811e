"""The gated delta rule on NVIDIA GPUs: the kernels of `pallas_kernels`, most stages of which have two backends."""

import functools
from typing import Any

import jax
from jax import Array

from rnnlib.ops.derivatives import with_further_derivatives
from rnnlib.ops.gated_delta_rule.reference import DeltaRuleInputs
from rnnlib.ops.gated_delta_rule.xla_chunked import gated_delta_rule_chunked
from rnnlib.ops.kernels import triton_kernels


@functools.partial(jax.jit, static_argnames=("shares_gate", "scale", "chunk_size", "backend"), inline=True)
def gated_delta_rule_triton(
    inputs: DeltaRuleInputs,
    initial_state: Array | None,
    segment_ids: Array | None,
    *,
    shares_gate: bool,
    scale: float,
    chunk_size: int,
    backend: str = "triton",
) -> tuple[Array, Array]:
    """Evaluates the gated delta rule by kernels; results as `gated_delta_rule_scan`.

    Args:
        inputs: token-wise arguments.
        initial_state: None (zero) or `[B, HV, K, V]`.
        segment_ids: None or `[B, T]`.
        shares_gate: whether `erase` is also the write gate. Kernels then load it once.
        scale: factor on the output.
        chunk_size: tokens in a chunk.
        backend: `"mosaic"` for most stages in Mosaic GPU.
    """
    if shares_gate:
        inputs = inputs._replace(write=None)

    def with_shared(inputs: DeltaRuleInputs) -> DeltaRuleInputs:
        return inputs._replace(write=inputs.erase) if shares_gate else inputs

    def keywords(inputs, initial_state, segment_ids) -> dict[str, Any]:
        arrays = {**with_shared(inputs)._asdict(), "initial_state": initial_state, "segment_ids": segment_ids}
        return {**arrays, "scale": scale, "chunk_size": chunk_size, "backend": backend}

    def reference(inputs, *rest):
        return gated_delta_rule_chunked(with_shared(inputs), *rest, scale=scale, chunk_size=chunk_size)

    run = with_further_derivatives(triton_kernels().gated_delta_rule, keywords, reference)
    return run(inputs, initial_state, segment_ids)

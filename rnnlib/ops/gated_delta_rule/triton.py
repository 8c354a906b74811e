"""The gated delta rule on NVIDIA GPUs: the kernels of `pallas_kernels.triton`."""

import functools

import jax
from jax import Array

from rnnlib.ops.derivatives import with_further_derivatives
from rnnlib.ops.gated_delta_rule.chunked import gated_delta_rule_chunked
from rnnlib.ops.gated_delta_rule.inputs import DeltaRuleInputs
from rnnlib.ops.kernels import triton_kernels


def gated_delta_rule_triton(
    inputs: DeltaRuleInputs,
    initial_state: Array | None,
    segment_ids: Array | None,
    *,
    scale: float,
    chunk_size: int,
) -> tuple[Array, Array]:
    """Evaluates the gated delta rule by kernels; arguments and results as `gated_delta_rule_scan`.

    Args:
        inputs: token-wise arguments. Kernels load a gate that is both `erase` and `write` once.
        initial_state: None (zero) or `[B, HV, K, V]`.
        segment_ids: None or `[B, T]`.
        scale: factor on the output.
        chunk_size: tokens in a chunk.
    """
    shares_gate = inputs.write is not None and inputs.write is inputs.erase
    if shares_gate:
        inputs = inputs._replace(write=None)  # jit would make two arguments of it
    return _run(inputs, initial_state, segment_ids, shares_gate=shares_gate, scale=scale, chunk_size=chunk_size)


@functools.partial(jax.jit, static_argnames=("shares_gate", "scale", "chunk_size"), inline=True)
def _run(
    inputs: DeltaRuleInputs,
    initial_state: Array | None,
    segment_ids: Array | None,
    *,
    shares_gate: bool,
    scale: float,
    chunk_size: int,
) -> tuple[Array, Array]:
    def with_shared(inputs: DeltaRuleInputs) -> DeltaRuleInputs:
        return inputs._replace(write=inputs.erase) if shares_gate else inputs

    def kernel(inputs, initial_state, segment_ids):
        return triton_kernels().gated_delta_rule(
            **with_shared(inputs)._asdict(),
            initial_state=initial_state,
            segment_ids=segment_ids,
            scale=scale,
            chunk_size=chunk_size,
        )

    def reference(inputs, *rest):
        return gated_delta_rule_chunked(with_shared(inputs), *rest, scale=scale, chunk_size=chunk_size)

    return with_further_derivatives(kernel, reference)(inputs, initial_state, segment_ids)

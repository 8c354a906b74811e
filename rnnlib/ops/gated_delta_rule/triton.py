"""The gated delta rule on NVIDIA GPUs: the kernels of `pallas_kernels.triton`."""

from jax import Array

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
        inputs: token-wise arguments.
        initial_state: None (zero) or `[B, HV, K, V]`.
        segment_ids: None or `[B, T]`.
        scale: factor on the output.
        chunk_size: tokens in a chunk.
    """
    return triton_kernels().gated_delta_rule(
        **inputs._asdict(),
        initial_state=initial_state,
        segment_ids=segment_ids,
        scale=scale,
        chunk_size=chunk_size,
    )

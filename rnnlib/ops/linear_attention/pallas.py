"""Linear attention on NVIDIA GPUs: the kernels of `pallas_kernels.linear_attention`."""

import functools
from typing import Any

import jax
from jax import Array

from rnnlib.ops.context_parallel import decaying_rule_on_shard
from rnnlib.ops.derivatives import with_further_derivatives
from rnnlib.ops.kernels import kernel_operators
from rnnlib.ops.linear_attention.reference import LinearAttentionInputs
from rnnlib.ops.linear_attention.xla_chunked import linear_attention_chunked

# The kernels' backward divides the final state's gradient by the scale.
_SMALLEST_SCALE = 1e-10


@functools.partial(
    jax.jit, static_argnames=("scale", "chunk_size", "diagonal_size", "backend", "context_axis"), inline=True
)
def linear_attention_triton(
    inputs: LinearAttentionInputs,
    initial_state: Array | None,
    segment_ids: Array | None,
    *,
    scale: float,
    chunk_size: int,
    diagonal_size: int = 1,
    backend: str = "triton",
    context_axis: str | None = None,
) -> tuple[Array, Array]:
    """Evaluates linear attention by kernels; arguments and results as `linear_attention_scan`.

    Args:
        inputs: token-wise arguments.
        initial_state: None (zero) or `[B, HV, K, V]`.
        segment_ids: None or `[B, T]`.
        scale: factor on the output.
        chunk_size: tokens in a chunk.
        diagonal_size: rows of a token, where there is a diagonal.
        backend: `"mosaic"` for kernels in Mosaic GPU.
        context_axis: the mesh axis over which tokens are split; the final state is then that after this device's.
    """

    def keywords(inputs, initial_state, segment_ids) -> dict[str, Any]:
        factor = scale
        if abs(scale) < _SMALLEST_SCALE:
            inputs, factor = inputs._replace(q=scale * inputs.q), 1.0
        arrays = {**inputs._asdict(), "initial_state": initial_state, "segment_ids": segment_ids}
        sizes = {"chunk_size": chunk_size, "diagonal_size": diagonal_size}
        return {**arrays, "scale": factor, "backend": backend, "context_axis": context_axis, **sizes}

    reference: Any = functools.partial(
        linear_attention_chunked, scale=scale, chunk_size=chunk_size, diagonal_size=diagonal_size
    )
    if context_axis is not None:
        reference = functools.partial(decaying_rule_on_shard, reference, axis=context_axis)
    run = with_further_derivatives(kernel_operators().linear_attention.linear_attention, keywords, reference)
    return run(inputs, initial_state, segment_ids)

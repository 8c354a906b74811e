"""Short convolutions of streams that lie side by side in one array, on NVIDIA GPUs."""

import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from pallas_kernels.common.platform import platform
from pallas_kernels.short_convolution.branch import ConvolutionBranch
from rnnlib.ops.context_parallel import current_axis, with_last_tokens
from rnnlib.ops.derivatives import with_further_derivatives
from rnnlib.ops.kernels import kernel_operators, unsupported_reason
from rnnlib.ops.short_convolution.inputs import ConvolutionInputs
from rnnlib.ops.short_convolution.taps import on_context_shard, short_convolution_taps


def fused_convolutions_support(x: Array | jax.ShapeDtypeStruct, streams: Sequence[ConvolutionBranch]) -> bool:
    """Whether `fused_convolutions` is faster than one convolution at a time: bfloat16 on a GPU.

    Args:
        x: the array, or its shape and dtype.
        streams: as `fused_convolutions` takes them.
    """
    return platform() == "gpu" and x.dtype == jnp.bfloat16 and fused_unsupported(x, streams) is None


def fused_unsupported(x: Array | jax.ShapeDtypeStruct, streams: Sequence[ConvolutionBranch]) -> str | None:
    """Why the kernels can't serve a call, as a noun phrase, or None if they can."""
    return unsupported_reason(lambda kernels: kernels.short_convolution.fused_unsupported_reason(x, streams))


def fused_convolutions(
    x: Float[Array, "B T N"], streams: Sequence[ConvolutionBranch], *, segment_ids: Int[Array, "B T"] | None = None
) -> tuple[list[tuple[Float[Array, "B T _"], Float[Array, "B tail _"]]], Float[Array, "B T rest"]]:
    """`short_convolution` of each stream's columns of `x`, by kernels that read them where they are.

    The gradient of `x` is one array, into which each stream's kernel writes its columns. So `x` can be one product of
    all streams' maps, and the gradient of its input is one product too.

    Args:
        x: inputs, the first stream's in the first columns, and so on; further columns may follow.
        streams: each starts at a multiple of its number of channels.
        segment_ids: documents packed into a row, as `short_convolution`.

    Returns:
        For each stream the output `[B, T, D]` and the last W - 1 inputs of the last segment, as `short_convolution`;
        and the columns behind the streams.

    Raises:
        NotImplementedError: the kernels do not support the call.
    """
    ends = list(itertools.accumulate(stream.kernel.shape[1] for stream in streams))
    places = [slice(end - stream.kernel.shape[1], end) for end, stream in zip(ends, streams)]
    lasts: list[Array | None] = [None for _ in streams]
    if current_axis() is not None:
        x, last = with_last_tokens(x, min(x.shape[1], max(len(stream.kernel) for stream in streams) - 1))
        lasts = [last[:, last.shape[1] + 1 - len(s.kernel) :, place] for s, place in zip(streams, places)]
    calls = [
        ConvolutionInputs(x[..., place], s.kernel, s.bias, s.initial_state, segment_ids)
        for place, s in zip(places, streams)
    ]
    entered = [on_context_shard("fused_convolutions", inputs, last) for inputs, last in zip(calls, lasts)]

    Filters = list[tuple[Array, Array | None, Array | None]]

    def given(filters: Filters) -> list[ConvolutionBranch]:
        return [ConvolutionBranch(*arrays, stream.epilogue) for arrays, stream in zip(filters, streams)]

    def keywords(x: Array, filters: Filters, segment_ids: Array | None) -> dict:
        return {"x": x, "streams": given(filters), "segment_ids": segment_ids}

    def reference(x: Array, filters: Filters, segment_ids: Array | None) -> tuple[tuple[Array, ...], Array]:
        parts = jnp.split(x, ends, axis=-1)
        results = [
            short_convolution_taps(ConvolutionInputs(y, s.kernel, s.bias, s.initial_state, segment_ids), s.epilogue)
            for y, s in zip(parts, given(filters))
        ]
        return tuple(results), parts[-1]

    filters = [(inputs.kernel, inputs.bias, inputs.initial_state) for inputs, _ in entered]
    run = with_further_derivatives(kernel_operators().short_convolution.fused_convolutions, keywords, reference)
    results, rest = run(x, filters, segment_ids)
    return [(y, tail) for y, (_, tail) in zip(results, entered)], rest

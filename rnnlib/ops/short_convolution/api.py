"""The short causal convolution of queries, keys and values over time, with an activation and a norm after it."""

from collections.abc import Callable

import jax
from jax import Array
from jaxtyping import Float, Int

from pallas_kernels.short_convolution.branch import Epilogue
from rnnlib.fields import PositiveInteger, matches
from rnnlib.ops.arguments import (
    check_positive,
    check_rank,
    check_segment_ids,
    check_shape,
    choose_implementation,
    floating_arrays,
)
from rnnlib.ops.context_parallel import current_axis, with_last_tokens
from rnnlib.ops.sharding import split_over_mesh
from rnnlib.ops.short_convolution.inputs import Activation, ConvolutionInputs
from rnnlib.ops.short_convolution.pallas import convolution_unsupported_reason, short_convolution_triton
from rnnlib.ops.short_convolution.taps import on_context_shard, short_convolution_taps

_NAME = "short_convolution"


@split_over_mesh
def short_convolution(
    x: Float[Array, "B T D"],
    kernel: Float[Array, "W D"],
    *,
    bias: Float[Array, "D"] | None = None,
    initial_state: Float[Array, "B tail D"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    activation: Activation = None,
    norm_size: int | None = None,
    norm_eps: float = 1e-6,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T D"], Float[Array, "B tail D"]]:
    """Depthwise causal convolution, `y_t = bias + sum_i kernel[W - 1 - i] * x_{t - i}`, then an activation and a norm.

    Sums, activation and norm are computed in float32 (float64 for float64 inputs), and rounded once.

    Args:
        x: inputs.
        kernel: one filter of width W per channel; `kernel[-1]` weighs the present token.
        bias: added to every output; None is zero.
        initial_state: the W - 1 inputs before the first; None is zero.
        segment_ids: documents packed into a row: no tap reaches across a change of id. The first token's segment
            continues `initial_state`.
        activation: `"silu"` of the sums, `y * sigmoid(y)`; None is none.
        norm_size: channels of a head. Each `norm_size` consecutive channels of the activation get unit length,
            `y * rsqrt(sum y^2 + norm_eps)`; zeros stay zeros. None is no norm.
        norm_eps: added to the squared norm; at least 1e-25, so that float32 can represent its gradient.
        implementation: `"chunked"` (XLA, any device: the reference), `"triton"` (Pallas kernels on NVIDIA GPUs; on a
            CPU they are interpreted, which serves tests), or None for the fastest that supports the case.

    Returns:
        The output in `x`'s dtype, and the last W - 1 inputs of the last segment (zeros if the segment is shorter).

    Raises:
        ValueError: a shape, `activation`, `norm_size` or `implementation` is none of those above.
        TypeError: an array is not floating, or `segment_ids` is not of integers.
        NotImplementedError: the implementation named does not support the case.
    """
    x, kernel, bias, initial_state = floating_arrays(_NAME, x=x, kernel=kernel, bias=bias, initial_state=initial_state)
    check_rank(_NAME, "x", x, 3, axes="[B, T, D]")
    check_rank(_NAME, "kernel", kernel, 2, axes="[W, D]")
    batch, length, channels = x.shape
    width = kernel.shape[0]
    check_shape(_NAME, "kernel", kernel, (width, channels), axes="[W, D]")
    if bias is not None:
        check_shape(_NAME, "bias", bias, (channels,), axes="[D]")
    if initial_state is not None:
        check_shape(_NAME, "initial_state", initial_state, (batch, width - 1, channels), axes="[B, W - 1, D]")
    check_segment_ids(_NAME, segment_ids, batch, length)
    if activation not in (None, "silu"):
        raise ValueError(f"{_NAME}: activation is {activation!r}, expected None or 'silu'")
    if norm_size is not None and not (matches(PositiveInteger, norm_size) and channels % norm_size == 0):
        raise ValueError(f"{_NAME}: norm_size is {norm_size}, expected a divisor of the {channels} channels")
    if not isinstance(norm_eps, jax.core.Tracer):
        check_positive(_NAME, "norm_eps", norm_eps)
        if norm_eps < 1e-25:
            raise ValueError(f"{_NAME}: norm_eps is {norm_eps}, expected at least 1e-25")
        norm_eps = float(norm_eps)

    inputs = ConvolutionInputs(x, kernel, bias, initial_state, segment_ids)
    epilogue = Epilogue(activation, norm_size, norm_eps)
    implementations: dict[str, Callable[[ConvolutionInputs, Epilogue], Array]] = {
        "chunked": short_convolution_taps,
        "triton": short_convolution_triton,
    }
    run = choose_implementation(
        _NAME,
        implementation,
        implementations,
        length,
        kernel_for_one_token=False,
        triton=lambda: convolution_unsupported_reason(inputs, epilogue),
    )
    last = None
    if run is short_convolution_triton and current_axis() is not None and 1 < width <= length:
        x, last = with_last_tokens(x, width - 1)
        inputs = inputs._replace(x=x)
    inputs, tail = on_context_shard(_NAME, inputs, last)
    return run(inputs, epilogue), tail

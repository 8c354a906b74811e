"""The short causal convolution over time that precedes queries, keys and values."""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from rnnlib.ops.arguments import check_floating, check_rank, check_segment_ids, check_shape, segment_index

_NAME = "short_convolution"


def short_convolution(
    x: Float[Array, "B T D"],
    kernel: Float[Array, "W D"],
    *,
    bias: Float[Array, "D"] | None = None,
    initial_state: Float[Array, "B tail D"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B T D"], Float[Array, "B tail D"]]:
    """Depthwise causal convolution, `y_t = bias + sum_i kernel[W - 1 - i] * x_{t - i}`.

    Args:
        x: inputs.
        kernel: one filter of width W per channel; `kernel[-1]` weighs the present token.
        bias: added to every output; None is zero.
        initial_state: the W - 1 inputs before the first; None is zero.
        segment_ids: documents packed into a row: no tap reaches across a change of id. The first token's segment
            continues `initial_state`.

    Returns:
        The output in `x`'s dtype, and the last W - 1 inputs of the last segment (zeros where it is shorter).

    Raises:
        ValueError: a shape is none of those above.
        TypeError: an array is not floating, or `segment_ids` is not of integers.
    """
    check_floating(_NAME, x=x, kernel=kernel, bias=bias, initial_state=initial_state)
    check_rank(_NAME, "x", x, 3, axes="[B, T, D]")
    check_rank(_NAME, "kernel", kernel, 2, axes="[W, D]")
    batch, length, channels = x.shape
    width = kernel.shape[0]
    check_shape(_NAME, "kernel", kernel, (width, channels), axes="[W, D]")
    if bias is not None:
        check_shape(_NAME, "bias", bias, (channels,), axes="[D]")
    state_shape = (batch, width - 1, channels)
    if initial_state is not None:
        check_shape(_NAME, "initial_state", initial_state, state_shape, axes="[B, W - 1, D]")
    check_segment_ids(_NAME, segment_ids, batch, length)

    past = jnp.zeros(state_shape, x.dtype) if initial_state is None else initial_state.astype(x.dtype)
    padded = jnp.concatenate([past, x], axis=1)
    if segment_ids is not None:
        segment_ids = segment_index(segment_ids)
        past_ids = jnp.broadcast_to(segment_ids[:, :1], (batch, width - 1))
        padded_ids = jnp.concatenate([past_ids, segment_ids], axis=1)

    y = jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32))
    for lag in range(width):
        tap = padded[:, width - 1 - lag : width - 1 - lag + length]
        if segment_ids is not None:
            tap_ids = padded_ids[:, width - 1 - lag : width - 1 - lag + length]
            tap = jnp.where((tap_ids == segment_ids)[..., None], tap, 0)
        y = y + kernel[width - 1 - lag].astype(y.dtype) * tap
    if bias is not None:
        y = y + bias.astype(y.dtype)

    tail = padded[:, length:]
    if segment_ids is not None:
        tail = jnp.where((padded_ids[:, length:] == segment_ids[:, -1:])[..., None], tail, 0)
    return y.astype(x.dtype), tail

"""The short convolution in XLA, tap by tap: its definition."""

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.short_convolution.branch import Epilogue
from rnnlib.ops.arguments import accumulation_dtype, is_symbolic, segment_index
from rnnlib.ops.context_parallel import current_axis, of_last, tokens_before
from rnnlib.ops.short_convolution.inputs import ConvolutionInputs


def short_convolution_taps(inputs: ConvolutionInputs, epilogue: Epilogue) -> Array:
    """The result `[B, T, D]`, computed in float32 at least and rounded once, to x's dtype."""
    x, kernel, bias, initial_state, segment_ids = inputs
    batch, length, channels = x.shape
    past = kernel.shape[0] - 1
    dtype = accumulation_dtype(x)
    if initial_state is None:
        initial_state = jnp.zeros((batch, past, channels), x.dtype)
    padded = jnp.concatenate([initial_state.astype(x.dtype), x], axis=1)
    if segment_ids is not None:
        index = segment_index(segment_ids)
        padded_index = jnp.pad(index, ((0, 0), (past, 0)))

    y = jnp.zeros(x.shape, dtype)
    for lag in range(past + 1):
        here = slice(past - lag, past - lag + length)
        tap = padded[:, here]
        if segment_ids is not None:
            tap = jnp.where((padded_index[:, here] == index)[..., None], tap, 0)
        y = y + kernel[past - lag].astype(dtype) * tap
    if bias is not None:
        y = y + bias.astype(dtype)
    if epilogue.activation == "silu":
        y = jax.nn.silu(y)
    if epilogue.norm_size is not None:
        heads = y.reshape(batch, length, -1, epilogue.norm_size)
        square = jnp.sum(jnp.square(heads), axis=-1, keepdims=True)
        y = (heads * jax.lax.rsqrt(square + epilogue.norm_eps)).reshape(y.shape)
    return y.astype(x.dtype)


def last_inputs(inputs: ConvolutionInputs) -> Array:
    """The last W - 1 inputs of the last segment, `[B, W - 1, D]`; zeros if the segment is shorter."""
    x, kernel, _, initial_state, segment_ids = inputs
    batch, length, channels = x.shape
    past = kernel.shape[0] - 1
    if past == 0:
        return jnp.zeros((batch, 0, channels), x.dtype)
    tail = x
    if is_symbolic(length) or length < past:
        if initial_state is None:
            initial_state = jnp.zeros((batch, past, channels), x.dtype)
        tail = jnp.concatenate([initial_state.astype(x.dtype), x], axis=1)
    tail = tail[:, -past:]
    if segment_ids is not None:
        index = jnp.pad(segment_index(segment_ids), ((0, 0), (past, 0)))[:, -past:]
        tail = jnp.where((index == index[:, -1:])[..., None], tail, 0)
    return tail


def on_context_shard(
    name: str, inputs: ConvolutionInputs, last: Array | None = None
) -> tuple[ConvolutionInputs, Array]:
    """The inputs with the tokens before them, and `last_inputs` of the row, where devices have a shard of it each.

    Args:
        name: the operator's, for errors.
        inputs: of this device, with the state before the row's first token.
        last: the last W - 1 of them, from `with_last_tokens`; None is a slice.
    """
    axis, past = current_axis(), inputs.kernel.shape[0] - 1
    if axis is None:
        return inputs, last_inputs(inputs)
    before = tokens_before(name, inputs.x, past, inputs.initial_state, inputs.segment_ids, axis, last)
    inputs = inputs._replace(initial_state=before)
    return inputs, of_last(last_inputs(inputs), axis)

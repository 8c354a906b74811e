"""The diagonal Gram recurrence token by token: the reference implementation, which every other is tested against."""

import functools

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.common.vma import pvary_together
from rnnlib.ops.arguments import accumulation_dtype, resets_of
from rnnlib.ops.diagonal_preconditioner.inputs import DiagonalGramInputs, with_channels


@functools.partial(jax.jit, inline=True)
def diagonal_gram_scan(
    inputs: DiagonalGramInputs, initial_state: Array | None, segment_ids: Array | None
) -> tuple[Array, Array]:
    """Evaluates `A_t = exp(log_decay_t) A_{t-1} + gain_t k_t^2` with `jax.lax.scan` over tokens.

    Args:
        inputs: token-wise arguments.
        initial_state: None (zero) or `[B, H, K]`.
        segment_ids: None or `[B, T]`.

    Returns:
        `A` after each token `[B, T, H, K]` and after the last `[B, H, K]`, in float32 (float64 for float64 inputs).
    """
    dtype = accumulation_dtype(*inputs, initial_state)
    batch, _, heads, channels = inputs.k.shape
    state = jnp.zeros((batch, heads, channels), dtype) if initial_state is None else initial_state.astype(dtype)
    decay = None if inputs.log_decay is None else jnp.exp(with_channels(inputs.log_decay).astype(dtype))
    resets = None if segment_ids is None else resets_of(segment_ids)

    def step(state: Array, token: tuple[Array, Array | None, Array | None]) -> tuple[Array, Array]:
        increment, decay, start = token
        if start is not None:
            state = jnp.where(start[:, None, None], 0.0, state)
        state = increment + (state if decay is None else decay * state)
        return state, state

    tokens = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (inputs.increments(dtype), decay, resets))
    final, states = jax.lax.scan(step, *pvary_together((state, tokens)))
    return jnp.moveaxis(states, 0, 1), final

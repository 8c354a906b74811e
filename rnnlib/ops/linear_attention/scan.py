"""Linear attention token by token: the definition that every other implementation is held to."""

import functools

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.varying import vary_alike
from rnnlib.ops.arguments import accumulation_dtype, segment_starts
from rnnlib.ops.heads import merge_heads
from rnnlib.ops.linear_attention.inputs import LinearAttentionInputs


@functools.partial(jax.jit, static_argnames=("scale",), inline=True)
def linear_attention_scan(
    inputs: LinearAttentionInputs, initial_state: Array | None, segment_ids: Array | None, *, scale: float
) -> tuple[Array, Array]:
    """Evaluates `S_t = D_t S_{t-1} + k_t (w_t * v_t)^T`, `o_t = scale * S_t^T q_t` with `jax.lax.scan` over tokens.

    Args:
        inputs: token-wise arguments.
        initial_state: None (zero) or `[B, HV, K, V]`.
        segment_ids: None or `[B, T]`.
        scale: factor on the output.

    Returns:
        Output `[B, T, HV, V]` in `v`'s dtype and final state `[B, HV, K, V]` in float32 (float64 for float64 inputs).
    """
    dtype = accumulation_dtype(*inputs, initial_state)
    batch, _, heads, key_size = inputs.q.shape
    value_heads, value_size = inputs.v.shape[2:]
    tokens = jax.tree.map(lambda x: jnp.moveaxis(x.astype(dtype), 1, 0), inputs.group_heads())
    starts = None if segment_ids is None else jnp.moveaxis(segment_starts(segment_ids), 1, 0)
    state_shape = (batch, heads, value_heads // heads, key_size, value_size)
    state = jnp.zeros(state_shape, dtype) if initial_state is None else initial_state.astype(dtype).reshape(state_shape)
    state, tokens, starts = vary_alike((state, tokens, starts))

    def step(state: Array, token: tuple[LinearAttentionInputs, Array | None]) -> tuple[Array, Array]:
        t, start = token
        if start is not None:
            state = jnp.where(start[:, None, None, None, None], 0.0, state)
        if t.log_decay is not None:
            state = jnp.exp(t.log_decay)[..., None] * state
        written = t.v if t.write is None else t.write * t.v
        state = state + t.k[..., None] * written[..., None, :]
        return state, scale * jnp.einsum("bhrkv,bhrk->bhrv", state, t.q)

    with jax.default_matmul_precision("highest"):
        state, out = jax.lax.scan(step, state, (tokens, starts))
    out = merge_heads(jnp.moveaxis(out, 0, 1)).astype(inputs.v.dtype)
    return out, state.reshape(batch, value_heads, key_size, value_size)

"""The diagonal-plus-low-rank recurrence token by token: the definition that every other form is held to."""

import functools

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.varying import vary_alike
from rnnlib.ops.arguments import accumulation_dtype, segment_starts
from rnnlib.ops.dplr.inputs import DPLRInputs
from rnnlib.ops.heads import merge_heads


@functools.partial(jax.jit, static_argnames=("scale",), inline=True)
def dplr_scan(
    inputs: DPLRInputs, initial_state: Array | None, segment_ids: Array | None, *, scale: float
) -> tuple[Array, Array]:
    """Evaluates `S_t = D_t S_{t-1} - b_t (S_{t-1}^T a_t)^T + k_t v_t^T` with `jax.lax.scan` over tokens.

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
    grouped = inputs.group_heads()
    tokens = jax.tree.map(lambda x: jnp.moveaxis(x.astype(dtype), 1, 0), grouped)
    starts = None if segment_ids is None else jnp.moveaxis(segment_starts(segment_ids), 1, 0)
    state_shape = (batch, heads, value_heads // heads, key_size, value_size)
    state = jnp.zeros(state_shape, dtype) if initial_state is None else initial_state.astype(dtype).reshape(state_shape)
    state, tokens, starts = vary_alike((state, tokens, starts))

    def step(state: Array, token: tuple[DPLRInputs, Array | None]) -> tuple[Array, Array]:
        t, start = token
        if start is not None:
            state = jnp.where(start[:, None, None, None, None], 0.0, state)
        removed = jnp.einsum("bhrkv,bhrk->bhrv", state, jnp.broadcast_to(t.a, state.shape[:-1]))
        if t.log_decay is not None:
            state = jnp.exp(t.log_decay)[..., None] * state
        state = state - t.b[..., None] * removed[..., None, :] + t.k[..., None] * t.v[..., None, :]
        return state, scale * jnp.einsum("bhrkv,bhrk->bhrv", state, jnp.broadcast_to(t.q, state.shape[:-1]))

    with jax.default_matmul_precision("highest"):
        state, out = jax.lax.scan(step, state, (tokens, starts))
    out = merge_heads(jnp.moveaxis(out, 0, 1)).astype(inputs.v.dtype)
    return out, state.reshape(batch, value_heads, key_size, value_size)

"""The gated delta rule token by token: the definition that every other implementation is held to."""

import functools

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.varying import vary_alike
from rnnlib.ops.arguments import accumulation_dtype, segment_starts
from rnnlib.ops.gated_delta_rule.inputs import DeltaRuleInputs
from rnnlib.ops.heads import merge_heads


@functools.partial(jax.jit, static_argnames=("scale",), inline=True)
def gated_delta_rule_scan(
    inputs: DeltaRuleInputs, initial_state: Array | None, segment_ids: Array | None, *, scale: float
) -> tuple[Array, Array]:
    """Evaluates the recurrence that `rnnlib.ops.gated_delta_rule` states with `jax.lax.scan` over tokens.

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

    def step(state: Array, token: tuple[DeltaRuleInputs, Array | None]) -> tuple[Array, Array]:
        t, start = token
        if start is not None:
            state = jnp.where(start[:, None, None, None, None], 0.0, state)
        if t.log_decay is not None:
            state = jnp.exp(t.log_decay)[..., None] * state
        erased = t.k if t.erase is None else t.erase * t.k
        written = t.v if t.write is None else t.write * t.v
        write_key = t.k if t.write_key is None else t.write_key
        residual = written - jnp.einsum("bhrkv,bhrk->bhrv", state, erased)
        state = state + write_key[..., None] * residual[..., None, :]
        return state, scale * jnp.einsum("bhrkv,bhrk->bhrv", state, t.q)

    with jax.default_matmul_precision("highest"):
        state, out = jax.lax.scan(step, state, (tokens, starts))
    out = merge_heads(jnp.moveaxis(out, 0, 1)).astype(inputs.v.dtype)
    return out, state.reshape(batch, value_heads, key_size, value_size)

"""Rules with a state `[K, V]` per value head, token by token: the reference that other forms are tested against."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.common.vma import pvary_together
from rnnlib.ops.arguments import accumulation_dtype, resets_of
from rnnlib.ops.heads import group_inputs, merge_heads


def read_state(state: Array, key: Array) -> Array:
    """`S^T k` for states `[B, H, R, K, V]` and keys `[B, H, R or 1, K]`."""
    return jnp.einsum("bhrkv,bhrk->bhrv", state, key)


@functools.partial(jax.jit, static_argnums=(0,), static_argnames=("scale", "rows"), inline=True)
def scan_rule(
    token_step: Callable[[Array, Any], tuple[Array, Array]],
    inputs: Any,
    initial_state: Array | None,
    segment_ids: Array | None,
    *,
    scale: float,
    rows: int | None = None,
) -> tuple[Array, Array]:
    """Evaluates a rule with `jax.lax.scan` over tokens.

    Args:
        token_step: from the state `[B, H, R, K, V]` and one token's arguments, heads grouped, to the next state and
            the query's reading of that state, `[B, H, R, V]`.
        inputs: the rule's token-wise arguments, a named tuple with at least `q [B, T, H, K]` and `v [B, T, HV, V]`.
        initial_state: None (zero) or `[B, HV, K, V]`.
        segment_ids: None or `[B, T]`.
        scale: factor on the output.
        rows: of a token, where it has several: T is a multiple, and `token_step` takes and returns `[rows, ...]`.

    Returns:
        Output `[B, T, HV, V]` in `v`'s dtype and final state `[B, HV, K, V]` in float32 (float64 for float64 inputs).
    """
    dtype = accumulation_dtype(*jax.tree.leaves(inputs), initial_state)
    batch, _, heads, key_size = inputs.q.shape
    value_heads, value_size = inputs.v.shape[2:]
    tokens = jax.tree.map(lambda x: jnp.moveaxis(x.astype(dtype), 1, 0), group_inputs(inputs))
    resets = None if segment_ids is None else jnp.moveaxis(resets_of(segment_ids), 1, 0)
    if rows is not None:
        tokens = jax.tree.map(lambda x: x.reshape(-1, rows, *x.shape[1:]), tokens)
        resets = None if resets is None else resets[::rows]
    state_shape = (batch, heads, value_heads // heads, key_size, value_size)
    state = jnp.zeros(state_shape, dtype) if initial_state is None else initial_state.astype(dtype).reshape(state_shape)
    state, tokens, resets = pvary_together((state, tokens, resets))

    def step(state: Array, token: tuple[Any, Array | None]) -> tuple[Array, Array]:
        arguments, start = token
        if start is not None:
            state = jnp.where(start[:, None, None, None, None], 0.0, state)
        state, out = token_step(state, arguments)
        return state, scale * out

    with jax.default_matmul_precision("highest"):
        state, out = jax.lax.scan(step, state, (tokens, resets))
    if rows is not None:
        out = out.reshape(-1, *out.shape[2:])
    out = merge_heads(jnp.moveaxis(out, 0, 1)).astype(inputs.v.dtype)
    return out, state.reshape(batch, value_heads, key_size, value_size)

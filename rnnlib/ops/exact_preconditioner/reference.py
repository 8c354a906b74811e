"""The full inverse Gram token by token."""

import functools

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.common.vma import pvary_together
from rnnlib.ops.arguments import accumulation_dtype, resets_of


@functools.partial(jax.jit, inline=True)
def exact_preconditioner_scan(
    q: Array,
    k: Array,
    gain: Array | None,
    ridge: Array,
    initial_inverse: Array | None,
    segment_ids: Array | None,
) -> tuple[Array, Array, Array]:
    """Updates the inverse Gram by Sherman and Morrison's formula, with `jax.lax.scan` over tokens.

    Args:
        q: queries `[B, T, H, K]`.
        k: keys `[B, T, H, K]`.
        gain: None (1) or `[B, T, H]`.
        ridge: `[H]`.
        initial_inverse: None (`I / ridge`) or `[B, H, K, K]`.
        segment_ids: None or `[B, T]`.

    Returns:
        `P_t q_t` and `gain_t P_t k_t`, `[B, T, H, K]`, and the last `P [B, H, K, K]`.
    """
    dtype = accumulation_dtype(q, k, gain, initial_inverse)
    batch, _, heads, channels = k.shape
    empty = jnp.eye(channels, dtype=dtype) / ridge.astype(dtype)[:, None, None]
    empty = jnp.broadcast_to(empty, (batch, heads, channels, channels))
    inverse = empty if initial_inverse is None else initial_inverse.astype(dtype)
    gain = jnp.ones(k.shape[:3], dtype) if gain is None else gain.astype(dtype)
    resets = None if segment_ids is None else resets_of(segment_ids)

    def step(inverse: Array, token: tuple[Array, Array, Array, Array | None]) -> tuple[Array, tuple[Array, Array]]:
        q, k, gain, start = token
        if start is not None:
            inverse = jnp.where(start[:, None, None, None], empty, inverse)
        column = jnp.einsum("bhij,bhj->bhi", inverse, k)
        denominator = 1 + gain * jnp.einsum("bhi,bhi->bh", k, column)
        write_key = (gain / denominator)[..., None] * column
        inverse = inverse - write_key[..., :, None] * column[..., None, :]
        # Rounding would otherwise let P drift from symmetry, and then from positive definiteness.
        inverse = (inverse + jnp.swapaxes(inverse, -1, -2)) / 2
        return inverse, (jnp.einsum("bhij,bhj->bhi", inverse, q), write_key)

    tokens = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (q.astype(dtype), k.astype(dtype), gain, resets))
    with jax.default_matmul_precision("highest"):
        final, (queries, keys) = jax.lax.scan(step, *pvary_together((inverse, tokens)))
    return jnp.moveaxis(queries, 0, 1), jnp.moveaxis(keys, 0, 1), final

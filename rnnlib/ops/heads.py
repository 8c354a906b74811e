"""Heads: groups of value heads that share a key head, and channel pairs that turn.

Value head `j` uses key head `j // R`, `R = HV // H`, and nothing is repeated in memory.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float


def group_heads(x: Array, heads: int) -> Array:
    """Splits the head axis into key heads and the value heads that share each of them.

    Args:
        x: `[B, T, n * H, X]`, or `[B, T, n * H]` (a scalar per head, which gets a channel axis of 1).
        heads: the number of key heads H.

    Returns:
        `[B, T, H, n, X]`; `n` is 1 for key heads and broadcasts.
    """
    channels = x.shape[3] if x.ndim == 4 else 1
    return x.reshape(*x.shape[:2], heads, x.shape[2] // heads, channels)


def merge_heads(x: Array) -> Array:
    """The inverse of `group_heads`: `[B, T, H, n, X]` to `[B, T, n * H, X]`."""
    return x.reshape(*x.shape[:2], x.shape[2] * x.shape[3], x.shape[4])


def group_inputs(inputs: Any) -> Any:
    """`group_heads` of each array of a named tuple with `q [B, T, H, K]`."""
    return jax.tree.map(lambda x: group_heads(x, inputs.q.shape[2]), inputs)


def rotate_pairs(x: Float[Array, "*axes K"], angle: Float[Array, "... P"]) -> Float[Array, "*axes K"]:
    """Turns the first P channel pairs `(i, i + K/2)` of `x` by `angle` in radians; computed in its dtype."""
    cosine, sine, pairs, half = jnp.cos(angle), jnp.sin(angle), angle.shape[-1], x.shape[-1] // 2
    first, second = (x[..., start : start + pairs].astype(angle.dtype) for start in (0, half))
    turned = (first * cosine - second * sine).astype(x.dtype), (second * cosine + first * sine).astype(x.dtype)
    return jnp.concatenate([turned[0], x[..., pairs:half], turned[1], x[..., half + pairs :]], axis=-1)

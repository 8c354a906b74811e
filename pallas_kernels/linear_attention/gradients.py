"""Parts of linear attention's backward that the backends share."""

from typing import Any

import jax.numpy as jnp
from jax import Array

from pallas_kernels.common.decay import MIN_LOG_DECAY, divisible
from pallas_kernels.delta_rule.inputs import Inputs


def with_divisible_gate(inputs: Inputs) -> Inputs:
    """Inputs whose write gate may be divided by, where there is a diagonal, on which that gate has no part."""
    if inputs.diagonal is None or inputs.write is None:
        return inputs
    return inputs._replace(write=divisible(inputs.write.astype(jnp.float32)))


def diagonal_gradient(inputs: Inputs, d_out: Array, size: int, scale: float) -> Array:
    """The gradient of a diagonal, `[B, T, HV]`: `scale * sum_s (q_r . k_s) (do_r . v_s)`, s over r's token."""
    batch, length, heads = inputs.v.shape[:3]

    def by_token(x):
        x = x.astype(jnp.float32).reshape(batch, length // size, size, x.shape[2], x.shape[3])
        return jnp.repeat(x, heads // x.shape[3], axis=3)

    q, k, v, d_out = map(by_token, (inputs.q, inputs.k, inputs.v, d_out))
    total = jnp.zeros(q.shape[:4], jnp.float32)
    for s in range(size):
        total += jnp.sum(q * k[:, :, s : s + 1], axis=-1) * jnp.sum(d_out * v[:, :, s : s + 1], axis=-1)
    assert inputs.diagonal is not None
    return (scale * total).reshape(batch, length, heads).astype(inputs.diagonal.dtype)


def dtype_of_parts(like: Array, inputs: Inputs) -> Any:
    """Dtype of a gradient by value head: float32 where those of several value heads are still to be added up."""
    return like.dtype if like.shape[2] == inputs.v.shape[2] else jnp.float32


def of_key_heads(gradient: Array, like: Array) -> Array:
    """Adds up the parts of the value heads that share a key head."""
    if gradient.shape == like.shape:
        return gradient
    batch, length, heads, size = like.shape
    return gradient.reshape(batch, length, heads, -1, size).sum(axis=3).astype(like.dtype)


def without_flat(gradient: Array, inputs: Inputs) -> Array:
    """The gradient of a log decay `[B, T, HV]`, zero where the decay is clamped or a document starts."""
    x = inputs.log_decay
    assert x is not None
    is_flat = x <= MIN_LOG_DECAY
    if inputs.resets is not None:
        is_flat = is_flat | (inputs.resets > 0)[:, :, None]
    return jnp.where(is_flat, 0.0, gradient).astype(x.dtype)

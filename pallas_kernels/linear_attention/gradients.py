"""Parts of linear attention's backward that the backends share."""

from typing import Any

import jax.numpy as jnp
from jax import Array

from pallas_kernels.common.decay import MIN_LOG_DECAY
from pallas_kernels.delta_rule.inputs import Inputs


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

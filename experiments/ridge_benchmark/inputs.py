"""Arguments that are measured, drawn on the device."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array


def draw(shape: tuple[int, int, int, int], dtype: Any, seed: int = 0) -> dict[str, Array]:
    """Unit queries and keys, values, mild decays, gates and a cotangent, for `[B, T, H, K]`."""
    keys = jax.random.split(jax.random.key(seed), 6)

    def unit(key: Array) -> Array:
        x = jax.random.normal(key, shape)
        return (x / jnp.linalg.norm(x, axis=-1, keepdims=True)).astype(dtype)

    return {
        "q": unit(keys[0]),
        "k": unit(keys[1]),
        "v": jax.random.normal(keys[2], shape).astype(dtype),
        "log_decay": jax.nn.log_sigmoid(jax.random.normal(keys[3], shape[:3]) + 3.0),
        "beta": jax.nn.sigmoid(jax.random.normal(keys[4], shape[:3])).astype(dtype),
        "d_out": jax.random.normal(keys[5], shape).astype(dtype),
    }

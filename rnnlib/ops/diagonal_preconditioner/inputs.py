"""The token-wise arguments of the diagonal Gram recurrence, kept together."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array


class DiagonalGramInputs(NamedTuple):
    """The token-wise arguments of `rnnlib.ops.diagonal_gram`.

    Attributes:
        k: `[B, T, H, K]`.
        log_decay: None (no decay), `[B, T, H]` or `[B, T, H, K]`.
        gain: None (1), `[B, T, H]` or `[B, T, H, K]`.
    """

    k: Array
    log_decay: Array | None
    gain: Array | None

    def increments(self, dtype: jnp.dtype) -> Array:
        """What each token adds, `gain * k^2`, `[B, T, H, K]`."""
        square = jnp.square(self.k.astype(dtype))
        return square if self.gain is None else with_channels(self.gain).astype(dtype) * square


def with_channels(x: Array) -> Array:
    """A gate per head gets a channel axis of 1; one per channel stays."""
    return x[..., None] if x.ndim == 3 else x

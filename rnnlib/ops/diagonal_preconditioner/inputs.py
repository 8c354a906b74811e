"""The token-wise arguments of the diagonal Gram recurrence, kept together."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from rnnlib.ops.arguments import accumulation_dtype, check_rank, check_shape, floating_arrays, per_head


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

    def per_head(self, operator: str, name: str, number: Any, *, is_positive: bool = False) -> Array:
        """`rnnlib.ops.arguments.per_head` for the heads of the keys."""
        return per_head(operator, name, number, self.k.shape[2], accumulation_dtype(self.k), is_positive=is_positive)


def gram_inputs(operator: str, k: Any, log_decay: Any, gain: Any) -> DiagonalGramInputs:
    """The arguments, checked; errors name `operator`, which takes them by these names."""
    k, log_decay, gain = floating_arrays(operator, k=k, log_decay=log_decay, gain=gain)
    check_rank(operator, "k", k, 4, axes="[B, T, H, K]")
    for name, gate in (("log_decay", log_decay), ("gain", gain)):
        if gate is not None:
            check_shape(operator, name, gate, k.shape[:3], k.shape, axes="[B, T, H] or [B, T, H, K]")
    return DiagonalGramInputs(k, log_decay, gain)


def with_channels(x: Array) -> Array:
    """A gate per head gets a channel axis of 1; one per channel stays."""
    return x[..., None] if x.ndim == 3 else x

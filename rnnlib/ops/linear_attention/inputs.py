"""The token-wise arguments of linear attention, kept together."""

from typing import NamedTuple

import jax
from jax import Array

from rnnlib.ops.heads import group_heads


class LinearAttentionInputs(NamedTuple):
    """The token-wise arguments of linear attention, as `rnnlib.ops.linear_attention` takes them.

    Attributes:
        q: `[B, T, H, K]`.
        k: `[B, T, H, K]`.
        v: `[B, T, HV, V]`.
        write: None (1), `[B, T, HV]` or `[B, T, HV, V]`.
        log_decay: None (no decay), `[B, T, HV]` or `[B, T, HV, K]`.
    """

    q: Array
    k: Array
    v: Array
    write: Array | None
    log_decay: Array | None

    def group_heads(self) -> "LinearAttentionInputs":
        """Splits heads into `[B, T, H, R, X]`, R = HV // H or 1, and gives per-head gates a channel axis of 1."""
        return jax.tree.map(lambda x: group_heads(x, self.q.shape[2]), self)

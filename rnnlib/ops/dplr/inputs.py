"""The token-wise arguments of the diagonal-plus-low-rank recurrence, kept together."""

from typing import NamedTuple

import jax
from jax import Array

from rnnlib.ops.heads import group_heads


class DPLRInputs(NamedTuple):
    """The token-wise arguments of `rnnlib.ops.dplr`.

    Attributes:
        q: `[B, T, H, K]`.
        k: `[B, T, H, K]` or `[B, T, HV, K]`, the key that values are written along.
        v: `[B, T, HV, V]`.
        a: `[B, T, H, K]` or `[B, T, HV, K]`, what the state is read with.
        b: `[B, T, H, K]` or `[B, T, HV, K]`, what that reading is subtracted along.
        log_decay: None (no decay), `[B, T, HV]` or `[B, T, HV, K]`.
    """

    q: Array
    k: Array
    v: Array
    a: Array
    b: Array
    log_decay: Array | None

    def group_heads(self) -> "DPLRInputs":
        """Splits heads into `[B, T, H, R, X]`, R = HV // H or 1, and gives a decay per head a channel axis of 1."""
        heads = self.q.shape[2]
        return jax.tree.map(lambda x: group_heads(x, heads), self)

"""The token-wise arguments of the diagonal-plus-low-rank recurrence, kept together."""

from typing import NamedTuple

from jax import Array


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

"""The token-wise arguments of linear attention, kept together."""

from typing import NamedTuple

from jax import Array


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

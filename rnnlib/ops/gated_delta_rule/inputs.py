"""The token-wise arguments of the gated delta rule, kept together."""

from typing import NamedTuple

from jax import Array


class DeltaRuleInputs(NamedTuple):
    """The token-wise arguments of the gated delta rule, as `rnnlib.ops.gated_delta_rule` takes them.

    Attributes:
        q: `[B, T, H, K]`.
        k: `[B, T, H, K]`, the read key.
        v: `[B, T, HV, V]`.
        erase: None (1), `[B, T, HV]` or `[B, T, HV, K]`.
        write: None (1), `[B, T, HV]` or `[B, T, HV, V]`.
        write_key: None (the read key), `[B, T, H, K]` or `[B, T, HV, K]`.
        log_decay: None (no decay), `[B, T, HV]` or `[B, T, HV, K]`.
    """

    q: Array
    k: Array
    v: Array
    erase: Array | None
    write: Array | None
    write_key: Array | None
    log_decay: Array | None

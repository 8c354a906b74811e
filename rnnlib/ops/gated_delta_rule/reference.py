"""The gated delta rule token by token: the reference implementation, which every other is tested against."""

import functools
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from rnnlib.ops.gates import ResolvedGates
from rnnlib.ops.token_scan import read_state, scan_rule


class DeltaRuleInputs(NamedTuple):
    """The token-wise arguments of the gated delta rule, as `rnnlib.ops.gated_delta_rule` takes them.

    Attributes:
        q: `[B, T, H, K]`.
        k: `[B, T, H, K]`, the read key.
        v: `[B, T, HV, V]`.
        gates: erase and write gate.
        write_key: None (the read key), `[B, T, H, K]` or `[B, T, HV, K]`.
        log_decay: None (no decay), `[B, T, HV]` or `[B, T, HV, K]`.
    """

    q: Array
    k: Array
    v: Array
    gates: ResolvedGates
    write_key: Array | None
    log_decay: Array | None


def delta_rule_step(state: Array, t: DeltaRuleInputs) -> tuple[Array, Array]:
    """One token of the recurrence that `rnnlib.ops.gated_delta_rule` states."""
    if t.log_decay is not None:
        state = jnp.exp(t.log_decay)[..., None] * state
    erased = t.k if t.gates.erase is None else t.gates.erase * t.k
    written = t.v if t.gates.write is None else t.gates.write * t.v
    write_key = t.k if t.write_key is None else t.write_key
    residual = written - read_state(state, erased)
    state = state + write_key[..., None] * residual[..., None, :]
    return state, read_state(state, t.q)


gated_delta_rule_scan = functools.partial(scan_rule, delta_rule_step)

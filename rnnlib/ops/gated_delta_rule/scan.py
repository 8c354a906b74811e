"""The gated delta rule token by token: the definition that every other implementation is held to."""

import functools

import jax.numpy as jnp
from jax import Array

from rnnlib.ops.gated_delta_rule.inputs import DeltaRuleInputs
from rnnlib.ops.token_scan import read_state, scan_rule


def delta_rule_step(state: Array, t: DeltaRuleInputs) -> tuple[Array, Array]:
    """One token of the recurrence that `rnnlib.ops.gated_delta_rule` states."""
    if t.log_decay is not None:
        state = jnp.exp(t.log_decay)[..., None] * state
    erased = t.k if t.erase is None else t.erase * t.k
    written = t.v if t.write is None else t.write * t.v
    write_key = t.k if t.write_key is None else t.write_key
    residual = written - read_state(state, erased)
    state = state + write_key[..., None] * residual[..., None, :]
    return state, read_state(state, t.q)


gated_delta_rule_scan = functools.partial(scan_rule, delta_rule_step)

"""The diagonal-plus-low-rank recurrence token by token: the definition that every other form is held to."""

import functools

import jax.numpy as jnp
from jax import Array

from rnnlib.ops.dplr.inputs import DPLRInputs
from rnnlib.ops.token_scan import read_state, scan_rule


def dplr_step(state: Array, t: DPLRInputs) -> tuple[Array, Array]:
    """One token of `S_t = D_t S_{t-1} - b_t (S_{t-1}^T a_t)^T + k_t v_t^T`, `o_t = S_t^T q_t`."""
    removed = read_state(state, jnp.broadcast_to(t.a, state.shape[:-1]))
    if t.log_decay is not None:
        state = jnp.exp(t.log_decay)[..., None] * state
    state = state - t.b[..., None] * removed[..., None, :] + t.k[..., None] * t.v[..., None, :]
    return state, read_state(state, jnp.broadcast_to(t.q, state.shape[:-1]))


dplr_scan = functools.partial(scan_rule, dplr_step)

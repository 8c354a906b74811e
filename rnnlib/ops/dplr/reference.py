"""The diagonal-plus-low-rank recurrence token by token: the reference that the chunk form is tested against."""

import functools
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from rnnlib.ops.token_scan import read_state, scan_rule


class DPLRInputs(NamedTuple):
    """The token-wise arguments of `rnnlib.ops.dplr`.

    Attributes:
        q: `[B, T, H, K]`.
        k: `[B, T, H, K]` or `[B, T, HV, K]`, the key that values are written along.
        v: `[B, T, HV, V]`.
        a: `[B, T, H, K]` or `[B, T, HV, K]`, the vector that reads the state.
        b: `[B, T, H, K]` or `[B, T, HV, K]`, the vector along which that reading is subtracted.
        log_decay: None (no decay), `[B, T, HV]` or `[B, T, HV, K]`.
    """

    q: Array
    k: Array
    v: Array
    a: Array
    b: Array
    log_decay: Array | None


def dplr_step(state: Array, t: DPLRInputs) -> tuple[Array, Array]:
    """One token of `S_t = D_t S_{t-1} - b_t (S_{t-1}^T a_t)^T + k_t v_t^T`, `o_t = S_t^T q_t`."""
    removed = read_state(state, jnp.broadcast_to(t.a, state.shape[:-1]))
    if t.log_decay is not None:
        state = jnp.exp(t.log_decay)[..., None] * state
    state = state - t.b[..., None] * removed[..., None, :] + t.k[..., None] * t.v[..., None, :]
    return state, read_state(state, jnp.broadcast_to(t.q, state.shape[:-1]))


dplr_scan = functools.partial(scan_rule, dplr_step)

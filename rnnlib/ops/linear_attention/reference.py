"""Linear attention token by token: the reference implementation, which every other is tested against."""

import functools
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from rnnlib.ops.token_scan import read_state, scan_rule


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


def linear_attention_step(state: Array, t: LinearAttentionInputs) -> tuple[Array, Array]:
    """One token of `S_t = D_t S_{t-1} + k_t (w_t * v_t)^T`, `o_t = S_t^T q_t`."""
    if t.log_decay is not None:
        state = jnp.exp(t.log_decay)[..., None] * state
    written = t.v if t.write is None else t.write * t.v
    state = state + t.k[..., None] * written[..., None, :]
    return state, read_state(state, t.q)


linear_attention_scan = functools.partial(scan_rule, linear_attention_step)

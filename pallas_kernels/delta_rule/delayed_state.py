"""A state whose last writes wait beside it: what a loop over single tokens carries in order to store the state seldom.

A step of one token reads the whole state to multiply it with a key and a query, and changes it by a matrix of rank one.
Storing it costs as much as reading it. So up to `PERIOD - 1` writes wait as the vectors that they are made of. Each
step applies them again to what it has loaded, in their order; the step of token number `PERIOD` stores the state.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

PERIOD = 4
"""Tokens for which the state is stored once. Applying the writes of more costs what it saves."""


class DelayedState(NamedTuple):
    """The state before some tokens, and what each of these tokens did: `S <- Diag(decay) S + key value^T`.

    Attributes:
        state: `[B, HV, K, V]` float32, before the tokens whose writes wait.
        keys: `[B, H, PERIOD, K]` or `[B, HV, PERIOD, K]`, the key that each of them wrote.
        values: `[B, HV, PERIOD, V]` float32, what it wrote: the gated value without what was erased.
        decays: `[B, HV, PERIOD]` or `[B, HV, PERIOD, K]` float32, `exp(log_decay)`; None without a decay.
        num_pending: `[]` int32, how many writes wait, 0 to `PERIOD - 1`. Rows from there on mean nothing.
    """

    state: Array
    keys: Array
    values: Array
    decays: Array | None
    num_pending: Array


def without_pending(state: Array, key: Array, log_decay: Array | None) -> DelayedState:
    """A state beside which no write waits yet.

    Args:
        state: `[B, HV, K, V]` float32.
        key: of any token, `[B, 1, H, K]` or `[B, 1, HV, K]`, in the dtype of its queries and values.
        log_decay: likewise, `[B, 1, HV]`, `[B, 1, HV, K]` or None.
    """

    def rows(heads: int, *sizes: int) -> tuple[int, ...]:
        return (state.shape[0], heads, PERIOD, *sizes)

    return DelayedState(
        state=state,
        keys=jnp.zeros(rows(key.shape[2], key.shape[3]), key.dtype),
        values=jnp.zeros(rows(state.shape[1], state.shape[3]), jnp.float32),
        decays=None if log_decay is None else jnp.zeros(rows(*log_decay.shape[2:]), jnp.float32),
        num_pending=jnp.int32(0),
    )

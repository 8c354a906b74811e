"""Linear attention token by token: the reference implementation, which every other is tested against."""

from typing import NamedTuple

import jax
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
        diagonal: None (`write`), or `[B, T, HV]`, in place of `write` on what a token reads of its own write.
    """

    q: Array
    k: Array
    v: Array
    write: Array | None
    log_decay: Array | None
    diagonal: Array | None = None


def linear_attention_step(state: Array, t: LinearAttentionInputs) -> tuple[Array, Array]:
    """One token of `S_t = D_t S_{t-1} + k_t (w_t * v_t)^T`, `o_t = S_t^T q_t`."""
    if t.log_decay is not None:
        state = jnp.exp(t.log_decay)[..., None] * state
    written = t.v if t.write is None else t.write * t.v
    state = state + t.k[..., None] * written[..., None, :]
    return state, read_state(state, t.q)


def linear_attention_block(state: Array, t: LinearAttentionInputs) -> tuple[Array, Array]:
    """The rows `[R, ...]` of one token with a `diagonal`: each reads the state before them and all their writes."""
    assert t.diagonal is not None
    entered, reads = state, []
    own = jnp.einsum("rbhnk,sbhnk->bhnrs", t.q, t.k)
    for i, weight in enumerate(t.diagonal):
        one = jax.tree.map(lambda x: x[i], t._replace(diagonal=None))
        if one.log_decay is not None:
            entered = jnp.exp(one.log_decay)[..., None] * entered
        state, _ = linear_attention_step(state, one)
        read = jnp.sum(jnp.moveaxis(own[..., i, :], -1, 0)[..., None] * t.v, axis=0)
        reads.append(read_state(entered, one.q) + weight * read)
    return state, jnp.stack(reads)


def linear_attention_scan(
    inputs: LinearAttentionInputs,
    initial_state: Array | None,
    segment_ids: Array | None,
    *,
    scale: float,
    diagonal_size: int = 1,
) -> tuple[Array, Array]:
    """Evaluates linear attention token by token; arguments and results as `scan_rule`."""
    if inputs.diagonal is None:
        return scan_rule(linear_attention_step, inputs, initial_state, segment_ids, scale=scale)
    return scan_rule(linear_attention_block, inputs, initial_state, segment_ids, scale=scale, rows=diagonal_size)

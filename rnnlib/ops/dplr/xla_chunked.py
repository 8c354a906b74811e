"""The diagonal-plus-low-rank recurrence in chunks: matrix products in XLA, on any device."""

import functools

import jax.numpy as jnp
from jax import Array

from rnnlib.ops import chunk
from rnnlib.ops.dplr.reference import DPLRInputs
from rnnlib.ops.triangular import unit_lower_inverse


def dplr_factors(inputs: DPLRInputs, resets: Array | None, *, scale: float, size: int) -> chunk.ChunkFactors:
    """The chunk form, with two rows for each token: the reading that is removed and the value that is added.

    Token r removes the reading `e_r = S_{r-1}^T a_r`, which depends on the chunk's earlier removals and additions. With
    `L_xy[r, s]` the inner product of `x_r` and `y_s` decayed over (s, r - 1], for s < r,

        (I + L_ab) E = A_bar S_0 + L_ak V        S_r = D S_0 - sum_s D b_s e_s^T + sum_s D k_s v_s^T

    Four score matrices are formed (appendix D.2 of Preconditioned DeltaNet). If `b` is a multiple of `k`, two suffice:
    `rnnlib.ops.gated_delta_rule` uses two.

    Args:
        inputs: the rule's arguments in their own dtypes.
        resets: None or `[B, T]`, true where a document begins.
        scale: factor on the queries.
        size: chunk size C.
    """
    grouped = chunk.group_tokens(inputs, resets)
    if resets is not None:
        # The first token of a segment must read zero. Its own `a` would read the state before the reset.
        grouped = grouped._replace(a=jnp.where(resets[:, :, None, None, None], 0.0, grouped.a))
    c = chunk.split_tokens(grouped, size)

    q = scale * c.q
    if c.log_decay is None:
        a_bar, q_bar, b_tail, k_tail, total = c.a, q, c.b, c.k, None
    else:
        since_start = chunk.decay_since_start(c.log_decay)
        before = jnp.concatenate([jnp.ones_like(since_start[..., :1, :]), since_start[..., :-1, :]], axis=-2)
        until_end = chunk.decay_until_end(c.log_decay)
        a_bar, q_bar, b_tail, k_tail = before * c.a, since_start * q, until_end * c.b, until_end * c.k
        total = jnp.swapaxes(since_start[..., -1:, :], -1, -2)

    # Reading r decays over (s, r - 1], s < r. So compute scores for `a` moved up by one token, and move the rows down.
    following = jnp.concatenate([c.a[..., 1:, :], jnp.zeros_like(c.a[..., :1, :])], axis=-2)
    q_b, a_b = chunk.causal_scores([q, following], c.b, c.log_decay)
    q_k, a_k = chunk.causal_scores([q, following], c.k, c.log_decay)
    inverse = unit_lower_inverse(_move_down(a_b))
    removed = -inverse @ _move_down(a_k) @ c.v
    correction = inverse @ a_bar
    return chunk.ChunkFactors(
        read=q_bar,
        scores=_join(q_b, q_k, axis=-1),
        correction=_join(correction, jnp.zeros_like(correction), axis=-2),
        update=_join(removed, c.v, axis=-2),
        write=_join(b_tail, k_tail, axis=-2),
        decay=total,
    )


def _move_down(scores: Array) -> Array:
    """Moves each row down by one: the last row is dropped, the first becomes zero."""
    return jnp.concatenate([jnp.zeros_like(scores[..., :1, :]), scores[..., :-1, :]], axis=-2)


def _join(first: Array, second: Array, *, axis: int) -> Array:
    """Concatenates two arrays, either of which may be shared by the value heads of a group."""
    group = max(first.shape[3], second.shape[3])
    first, second = (jnp.broadcast_to(x, (*x.shape[:3], group, *x.shape[4:])) for x in (first, second))
    return jnp.concatenate([first, second], axis=axis)


dplr_chunked = functools.partial(chunk.evaluate_rule, dplr_factors)

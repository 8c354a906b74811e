"""Linear attention in chunks: matrix products in XLA, on any device."""

import functools
from collections.abc import Callable

import jax.numpy as jnp
from jax import Array

from rnnlib.ops import chunk
from rnnlib.ops.linear_attention.reference import LinearAttentionInputs


def linear_attention_factors(
    inputs: LinearAttentionInputs, resets: Array | None, *, scale: float, size: int, diagonal_size: int = 1
) -> chunk.ChunkFactors:
    """The chunk form of linear attention: that of the delta rule with no correction, `R = Z`.

    Args:
        inputs: the rule's arguments in their own dtypes.
        resets: None or `[B, T]`, true where a document begins.
        scale: factor on the queries.
        size: chunk size C.
        diagonal_size: rows of a token, where there is a `diagonal`.
    """
    c = chunk.split_tokens(chunk.group_tokens(inputs, resets), size)

    z = c.v if c.write is None else c.write * c.v
    q = scale * c.q
    if c.log_decay is None:
        q_bar, k_tail, total = q, c.k, None
    else:
        since_start = chunk.decay_since_start(c.log_decay)
        q_bar = since_start * q
        k_tail = chunk.decay_until_end(c.log_decay) * c.k
        total = jnp.swapaxes(since_start[..., -1:, :], -1, -2)
    (scores,) = chunk.causal_scores((q,), c.k, c.log_decay)
    if c.diagonal is not None:
        token = jnp.arange(size) // diagonal_size
        is_earlier, is_own = token[:, None] > token, token[:, None] == token
        if c.write is not None:  # on scores and not on values, of which the token itself reads another part
            scores, z, k_tail = scores * jnp.swapaxes(c.write, -1, -2), c.v, c.write * k_tail
        own = jnp.where(is_own, c.diagonal * (q @ jnp.swapaxes(c.k, -1, -2)), 0.0)
        scores = jnp.where(is_earlier, scores, 0.0) + own
    return chunk.ChunkFactors(read=q_bar, scores=scores, correction=None, update=z, write=k_tail, decay=total)


@functools.cache
def _with_diagonal(size: int) -> Callable[..., chunk.ChunkFactors]:
    """One function for each size: `jax.jit` tells them apart by identity."""
    return functools.partial(linear_attention_factors, diagonal_size=size)


def linear_attention_chunked(
    inputs: LinearAttentionInputs,
    initial_state: Array | None,
    segment_ids: Array | None,
    *,
    scale: float,
    chunk_size: int,
    diagonal_size: int = 1,
) -> tuple[Array, Array]:
    """Evaluates linear attention in chunks; arguments and results as `chunk.evaluate_rule`."""
    factors = linear_attention_factors if inputs.diagonal is None else _with_diagonal(diagonal_size)
    return chunk.evaluate_rule(factors, inputs, initial_state, segment_ids, scale=scale, chunk_size=chunk_size)

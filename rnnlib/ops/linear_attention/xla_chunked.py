"""Linear attention in chunks: matrix products in XLA, on any device."""

import functools

import jax.numpy as jnp
from jax import Array

from rnnlib.ops import chunk
from rnnlib.ops.linear_attention.reference import LinearAttentionInputs


def linear_attention_factors(
    inputs: LinearAttentionInputs, resets: Array | None, *, scale: float, size: int
) -> chunk.ChunkFactors:
    """The chunk form of linear attention: that of the delta rule with no correction, `R = Z`.

    Args:
        inputs: the rule's arguments in their own dtypes.
        resets: None or `[B, T]`, true where a document begins.
        scale: factor on the queries.
        size: chunk size C.
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
    return chunk.ChunkFactors(read=q_bar, scores=scores, correction=None, update=z, write=k_tail, decay=total)


linear_attention_chunked = functools.partial(chunk.evaluate_rule, linear_attention_factors)

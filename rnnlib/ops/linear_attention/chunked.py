"""Linear attention in chunks: matrix products in XLA, on any device."""

import functools

import jax
import jax.numpy as jnp
from jax import Array

from rnnlib.ops import chunk
from rnnlib.ops.arguments import accumulation_dtype
from rnnlib.ops.linear_attention.inputs import LinearAttentionInputs


def linear_attention_factors(
    inputs: LinearAttentionInputs, starts: Array | None, *, scale: float, size: int
) -> chunk.ChunkFactors:
    """The chunk form of linear attention: that of the delta rule with no correction, `R = Z`.

    Args:
        inputs: the rule's arguments in their own dtypes.
        starts: None or `[B, T]`, true where a segment begins.
        scale: factor on the queries.
        size: chunk size C.
    """
    dtype = accumulation_dtype(*inputs)
    grouped = inputs.group_heads()
    decay = None if grouped.log_decay is None else grouped.log_decay.astype(dtype)
    grouped = grouped._replace(log_decay=chunk.finite_log_decay(decay, starts))
    c = jax.tree.map(lambda x: chunk.split_chunks(x.astype(dtype), size), grouped)

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


@functools.partial(jax.jit, static_argnames=("scale", "chunk_size"), inline=True)
def linear_attention_chunked(
    inputs: LinearAttentionInputs,
    initial_state: Array | None,
    segment_ids: Array | None,
    *,
    scale: float,
    chunk_size: int,
) -> tuple[Array, Array]:
    """Evaluates linear attention chunk by chunk; arguments and results as `linear_attention_scan`.

    Args:
        inputs: token-wise arguments.
        initial_state: None (zero) or `[B, HV, K, V]`.
        segment_ids: None or `[B, T]`.
        scale: factor on the output.
        chunk_size: tokens in a chunk; shorter sequences use a smaller one.
    """
    size = chunk.chunk_length(inputs.q.shape[1], chunk_size)
    factors = functools.partial(linear_attention_factors, scale=scale, size=size)
    return chunk.evaluate_rule(factors, inputs, initial_state, segment_ids)

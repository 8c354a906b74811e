"""The diagonal Gram recurrence in chunks: XLA, any device."""

import functools

import jax
import jax.numpy as jnp
from jax import Array

from rnnlib.ops.arguments import accumulation_dtype, resets_of
from rnnlib.ops.diagonal_preconditioner.inputs import DiagonalGramInputs
from rnnlib.ops.linear_attention.reference import LinearAttentionInputs
from rnnlib.ops.linear_attention.xla_chunked import linear_attention_chunked

_CHUNK_SIZE = 64


@functools.partial(jax.jit, inline=True)
def diagonal_gram_chunked(
    inputs: DiagonalGramInputs, initial_state: Array | None, segment_ids: Array | None
) -> tuple[Array, Array]:
    """Evaluates the diagonal Gram in parallel; arguments and results as `diagonal_gram_scan`.

    With a decay per head it is linear attention whose queries and keys are the number 1 and whose values are the
    increments (Preconditioned DeltaNet, appendix F.1: `A = Phi A_0 + M diag(beta) K^2`, M the decayed causal mask). A
    decay per channel has no common mask; it takes a prefix scan over tokens.

    Args:
        inputs: token-wise arguments.
        initial_state: None (zero) or `[B, H, K]`.
        segment_ids: None or `[B, T]`.
    """
    dtype = accumulation_dtype(*inputs, initial_state)
    increments = inputs.increments(dtype)
    if inputs.log_decay is not None and inputs.log_decay.ndim == 4:
        return _prefix_scan(increments, inputs.log_decay.astype(dtype), initial_state, segment_ids)
    ones = jnp.ones((*increments.shape[:3], 1), dtype)
    rule = LinearAttentionInputs(ones, ones, increments, None, inputs.log_decay)
    state = None if initial_state is None else initial_state[:, :, None, :]
    grams, final = linear_attention_chunked(rule, state, segment_ids, scale=1.0, chunk_size=_CHUNK_SIZE)
    return grams, final[:, :, 0, :]


def _prefix_scan(
    increments: Array, log_decay: Array, initial_state: Array | None, segment_ids: Array | None
) -> tuple[Array, Array]:
    decay = jnp.exp(log_decay)
    if segment_ids is not None:
        decay = jnp.where(resets_of(segment_ids)[:, :, None, None], 0.0, decay)

    def compose(first: tuple[Array, Array], second: tuple[Array, Array]) -> tuple[Array, Array]:
        return first[0] * second[0], second[0] * first[1] + second[1]

    # The backward pass keeps only the arguments, not the arrays of every level. Otherwise a `jax.shard_map` would have
    # so many outputs that XLA's partitioner crashes (jaxlib 0.11.2).
    scan = jax.checkpoint(functools.partial(jax.lax.associative_scan, compose, axis=1), prevent_cse=False)
    products, grams = scan((decay, increments))
    if initial_state is not None:
        grams = grams + products * initial_state.astype(grams.dtype)[:, None]
    return grams, grams[:, -1]

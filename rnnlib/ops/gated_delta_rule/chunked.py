"""The gated delta rule in chunks: matrix products in XLA, on any device."""

import functools

import jax.numpy as jnp
from jax import Array
from jax.lax.linalg import triangular_solve

from rnnlib.ops import chunk
from rnnlib.ops.arguments import accumulation_dtype
from rnnlib.ops.gated_delta_rule.inputs import DeltaRuleInputs


def delta_rule_factors(inputs: DeltaRuleInputs, starts: Array | None, *, scale: float, size: int) -> chunk.ChunkFactors:
    """The chunk form of the gated delta rule: the WY representation of a product of Householder-like transitions.

    Source: DeltaNet (arXiv 2406.06484) section 3.2 and Gated DeltaNet-2 section 3, with the write key told apart from the
    read key (Preconditioned DeltaNet, figure 9); DESIGN section 1.

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
    c = DeltaRuleInputs(*(None if x is None else chunk.split_chunks(x.astype(dtype), size) for x in grouped))

    # Rows are tokens of a chunk: [N, B, H, R, C, K or V].
    e = c.k if c.erase is None else c.erase * c.k
    z = c.v if c.write is None else c.write * c.v
    write_key = c.k if c.write_key is None else c.write_key
    q = scale * c.q
    if c.log_decay is None:
        e_bar, q_bar, k_tail, total = e, q, write_key, None
    else:
        since_start = chunk.decay_since_start(c.log_decay)
        e_bar, q_bar = since_start * e, since_start * q
        k_tail = chunk.decay_until_end(c.log_decay) * write_key
        total = jnp.swapaxes(since_start[..., -1:, :], -1, -2)

    # (I + T) [Y, U] = [E_bar, Z], by forward substitution: stable for repeated keys with a gate of 1.
    t = chunk.causal_scores(e, write_key, c.log_decay, strict=True)
    group = max(t.shape[3], e_bar.shape[3], z.shape[3])
    t, e_bar, z = (jnp.broadcast_to(x, (*x.shape[:3], group, *x.shape[4:])) for x in (t, e_bar, z))
    y_u = triangular_solve(t, jnp.concatenate([e_bar, z], axis=-1), left_side=True, lower=True, unit_diagonal=True)
    y, u = jnp.split(y_u, [e_bar.shape[-1]], axis=-1)
    return chunk.ChunkFactors(
        read=q_bar,
        scores=chunk.causal_scores(q, write_key, c.log_decay),
        correction=y,
        update=u,
        write=k_tail,
        decay=total,
    )


def gated_delta_rule_chunked(
    inputs: DeltaRuleInputs,
    initial_state: Array | None,
    segment_ids: Array | None,
    *,
    scale: float,
    chunk_size: int,
) -> tuple[Array, Array]:
    """Evaluates the gated delta rule chunk by chunk; arguments and results as `gated_delta_rule_scan`.

    Args:
        inputs: token-wise arguments.
        initial_state: None (zero) or `[B, HV, K, V]`.
        segment_ids: None or `[B, T]`.
        scale: factor on the output.
        chunk_size: tokens in a chunk; shorter sequences use a smaller one.
    """
    factors = functools.partial(delta_rule_factors, scale=scale, size=chunk.chunk_length(inputs.q.shape[1], chunk_size))
    return chunk.evaluate_rule(factors, inputs, initial_state, segment_ids)

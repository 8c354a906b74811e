"""The gated delta rule in chunks: matrix products in XLA, on any device."""

import functools

import jax.numpy as jnp
from jax import Array

from rnnlib.ops import chunk
from rnnlib.ops.gated_delta_rule.reference import DeltaRuleInputs
from rnnlib.ops.triangular import unit_lower_inverse


def delta_rule_factors(inputs: DeltaRuleInputs, resets: Array | None, *, scale: float, size: int) -> chunk.ChunkFactors:
    """The chunk form of the gated delta rule: the WY representation of a product of Householder-like transitions.

    With `G_r` the log decay summed over the chunk up to and with token r, `E_bar_r = exp(G_r) * e_r` and
    `K_bar_s = exp(-G_s) * k~_s` (never formed like this), the rows of a chunk obey

        T = tril(E_bar K_bar^T, -1)    Y = (I + T)^-1 E_bar    U = (I + T)^-1 Z    R = U - Y S_0

    Source: DeltaNet (arXiv 2406.06484) section 3.2, Gated DeltaNet-2 section 3, with a write key that differs from the
    read key (Preconditioned DeltaNet, equation 6 and figure 8).

    Args:
        inputs: the rule's arguments in their own dtypes.
        resets: None or `[B, T]`, true where a document begins.
        scale: factor on the queries.
        size: chunk size C.
    """
    c = chunk.split_tokens(chunk.group_tokens(inputs, resets), size)

    # Rows are tokens of a chunk: [N, B, H, R, C, K or V].
    e = c.k if c.gates.erase is None else c.gates.erase * c.k
    z = c.v if c.gates.write is None else c.gates.write * c.v
    write_key = c.k if c.write_key is None else c.write_key
    q = scale * c.q
    if c.log_decay is None:
        e_bar, q_bar, k_tail, total = e, q, write_key, None
    else:
        since_start = chunk.decay_since_start(c.log_decay)
        e_bar, q_bar = since_start * e, since_start * q
        k_tail = chunk.decay_until_end(c.log_decay) * write_key
        total = jnp.swapaxes(since_start[..., -1:, :], -1, -2)

    e_scores, q_scores = chunk.causal_scores((e, q), write_key, c.log_decay)
    inverse = unit_lower_inverse(jnp.tril(e_scores, -1))
    return chunk.ChunkFactors(
        read=q_bar,
        scores=q_scores,
        correction=inverse @ e_bar,
        update=inverse @ z,
        write=k_tail,
        decay=total,
    )


gated_delta_rule_chunked = functools.partial(chunk.evaluate_rule, delta_rule_factors)

"""Softmax attention whose weights decay: the forget gates of the Forgetting Transformer (arXiv 2503.02130).

The score of query t and key s has the sum of the log decays of the tokens after s, up to t, added to it. A score so has
the same form as in linear attention with a decay per head, and positions need no rotation.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from rnnlib.ops.arguments import is_symbolic

# Queries in a block: scores of one block at a time are in memory.
_QUERIES = 512
# In place of -inf, which would make differences of sums NaN, and of less, which would round the other sums. No weight
# survives it in float32.
_LOWEST = -100.0


def decayed_attention(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S HK K"],
    v: Float[Array, "B S HK V"],
    *,
    query_sums: Float[Array, "B T H"],
    key_sums: Float[Array, "B S H"],
    mask: Bool[Array, "B T S"],
    scale: float | None = None,
) -> Float[Array, "B T H V"]:
    """`softmax(scale q_t.k_s + query_sums_t - key_sums_s) v` over the keys of a mask, in `v`'s dtype.

    Args:
        q: queries. Head `j` uses key head `j // (H // HK)`.
        k: keys.
        v: values.
        query_sums: sum of the log decays up to each query's token, from any token on.
        key_sums: likewise of the keys' tokens, from the same token on.
        mask: what each query sees. A query that sees nothing, of padding, has the mean of all values.
        scale: factor on the scores; None is `K ** -0.5`.
    """
    batch, length, heads, size = q.shape
    shared = k.shape[2]
    wide = query_sums.dtype
    groups = q.reshape(batch, length, shared, -1, size)
    scores = jnp.einsum("bthgk,bshk->bhgts", groups, k.astype(q.dtype), preferred_element_type=wide)

    def by_group(sums: Array) -> Array:
        """`[B, N, H]` as `[B, HK, G, N]`."""
        return jnp.moveaxis(sums.reshape(*sums.shape[:2], shared, -1), 1, -1)

    decays = by_group(query_sums)[..., :, None] - by_group(key_sums)[..., None, :]
    scores = scores * (size**-0.5 if scale is None else scale) + decays
    is_seen = mask[:, None, None]
    weights = jax.nn.softmax(jnp.where(is_seen, scores, jnp.finfo(wide).min / 2), axis=-1).astype(v.dtype)
    out = jnp.einsum("bhgts,bshv->bthgv", weights, v, preferred_element_type=wide)
    return out.reshape(batch, length, heads, -1).astype(v.dtype)


def sums_from(log_decay: Float[Array, "B S H"], start: Array | int) -> Float[Array, "B S H"]:
    """Sums of the log decays from token `start` on, up to each token; of the tokens before, less than nothing.

    They are added up away from `start`, so that sums of tokens near it are not rounded as those far away are.
    """
    log_decay = jnp.maximum(log_decay, _LOWEST)
    is_before = (jnp.arange(log_decay.shape[1]) < start)[:, None]
    before, after = jnp.where(is_before, log_decay, 0), jnp.where(is_before, 0, log_decay)
    return jnp.cumsum(after, axis=1) - (lax.cumsum(before, axis=1, reverse=True) - before)


def forgetting_attention(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S HK K"],
    v: Float[Array, "B S HK V"],
    log_decay: Float[Array, "B S H"],
    *,
    window: int | None,
    query_documents: Int[Array, "B T"] | None,
    documents: Int[Array, "B S"] | None,
    first: Array | int = 0,
) -> Float[Array, "B T H V"]:
    """Attention of the tokens `first` to `first + T - 1` of rows of S tokens; memory is linear in T.

    Args:
        q: queries of these tokens.
        k: keys of whole rows.
        v: values of whole rows.
        log_decay: of whole rows, float32 at least.
        window: as in `rnnlib.ops.causal_attention`.
        query_documents: a number for the document of each of the tokens, or None.
        documents: of whole rows.
        first: number of the first token.
    """
    batch, length = q.shape[:2]

    def attend(block: tuple[Array, Array, Array | None]) -> Array:
        """A block of consecutive queries, given with the number of the first."""
        start, q, of_queries = block
        distance = start + jnp.arange(q.shape[1])[:, None] - jnp.arange(k.shape[1])
        mask = (distance >= 0 if window is None else (distance >= 0) & (distance < window))[None]
        if of_queries is not None and documents is not None:
            mask = mask & (of_queries[:, :, None] == documents[:, None, :])
        key_sums = sums_from(log_decay, start)
        query_sums = lax.dynamic_slice_in_dim(key_sums, start, q.shape[1], axis=1)
        mask = jnp.broadcast_to(mask, (batch, *mask.shape[1:]))
        return decayed_attention(q, k, v, query_sums=query_sums, key_sums=key_sums, mask=mask)

    start = jnp.asarray(first, jnp.int32)
    if is_symbolic(length) or length <= _QUERIES:
        return attend((start, q, query_documents))
    blocks = -(-length // _QUERIES)
    padding = blocks * _QUERIES - length

    def cut(x: Array) -> Array:
        x = _padded(x, padding)
        return jnp.moveaxis(x.reshape(batch, blocks, _QUERIES, *x.shape[2:]), 1, 0)

    if padding:  # queries behind the row's end see its last keys, and are dropped
        k, v, log_decay = (_padded(x, padding) for x in (k, v, log_decay))
        documents = None if documents is None else _padded(documents, padding)
    starts = start + _QUERIES * jnp.arange(blocks, dtype=jnp.int32)
    of_blocks = (starts, cut(q), None if query_documents is None else cut(query_documents))
    out = lax.map(jax.checkpoint(attend), of_blocks)
    return jnp.moveaxis(out, 0, 1).reshape(batch, blocks * _QUERIES, *out.shape[3:])[:, :length]


def _padded(x: Array, count: int) -> Array:
    """`x` `[B, N, ...]` with so many zeros behind its tokens."""
    return jnp.pad(x, [(0, 0), (0, count)] + [(0, 0)] * (x.ndim - 2))

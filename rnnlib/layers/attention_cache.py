"""Caches of attention: ring buffers of fixed size, and the attention of later tokens to them.

Token `n` (counted from the first call) is in slot `n % capacity`. The capacity is the window, or the greatest length
if there is no window.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Int

from rnnlib.ops.arguments import segment_index

# The number of queries that attend to a cache at a time; it bounds the memory of the scores.
BLOCK = 512


class AttentionCache(NamedTuple):
    """The keys and values that later tokens may attend to; the cache has a fixed size.

    Attributes:
        key: `[B, capacity, HK, K]`, after norm and rotation.
        value: `[B, capacity, HK, K]`.
        segment: `[B, capacity]` int32, the number of segment changes before the token in each slot.
        length: `[B]` int32, tokens so far, padding included. Lengths differ by row, so that one row can be replaced
            while the others continue.
        current: `[B]` int32, the number of segment changes so far.
        position: `[B]` int32, the next token's rotary position.
        tails: the last inputs `[B, size - 1, H * K]` of the convolutions of queries, keys and values, by these names;
            without convolutions an empty dictionary.
        decay: `[B, capacity, H]` float32, less the sum of the log decays since the token in each slot, of attention
            with forget gates; else None.
    """

    key: Array
    value: Array
    segment: Array
    length: Array
    current: Array
    position: Array
    tails: Mapping[str, Array]
    decay: Array | None = None


class LatentCache(NamedTuple):
    """The latents that later tokens may attend to, shared by all heads; the cache has a fixed size.

    Attributes:
        latent: `[B, capacity, L + R]`: the latent vector, after its norm, then the part of the key that all heads
            share, after rotation.
        segment: as in `AttentionCache`.
        length: as in `AttentionCache`.
        current: as in `AttentionCache`.
        position: as in `AttentionCache`.
    """

    latent: Array
    segment: Array
    length: Array
    current: Array
    position: Array


def empty_ring(batch_size: int, capacity: int) -> dict[str, Array]:
    """The fields of an empty cache, except those with keys, values or latents."""
    counts = {name: jnp.zeros((batch_size,), jnp.int32) for name in ("length", "current", "position")}
    return {"segment": jnp.zeros((batch_size, capacity), jnp.int32), **counts}


def check_call_length(mixer: str, cache: AttentionCache | LatentCache, length: int) -> None:
    """Raises ValueError, naming `mixer`, if a call is longer than the cache of attention without a window."""
    capacity = cache.segment.shape[1]
    if length > capacity:
        raise ValueError(f"{mixer}: {length} tokens in a call, expected at most the cache's max_length = {capacity}")


# From queries `[B, T, ...]`, the cache's fields for S tokens, and which of these tokens each query sees, to the output.
Attend = Callable[[Any, Mapping[str, Array], Bool[Array, "B T S"]], Array]


def extend_ring[Cache: (AttentionCache, LatentCache)](
    cache: Cache,
    query: Any,
    kept: Mapping[str, Array],
    attend: Attend,
    segment_ids: Int[Array, "B T"] | None,
) -> tuple[Array, Cache]:
    """Attends to a cache and to a call's own tokens.

    Args:
        cache: the cache of the tokens before the call.
        query: an array `[B, T, ...]`, or a tree of those.
        kept: the arrays of the call's tokens to store, `[B, T, ...]`, by field of the cache.
        attend: computes the output of a block of queries.
        segment_ids: of the call's tokens; the first continues the cache's last segment.

    Returns:
        The output, and the cache with the tokens in it; its `position` is the old one.
    """
    batch, length = next(iter(kept.values())).shape[:2]
    segment = jnp.broadcast_to(cache.current[:, None], (batch, length))
    if segment_ids is not None:
        segment = segment + segment_index(segment_ids)

    def extend(cache: Cache, tokens: tuple[Any, dict[str, Array], Array]) -> tuple[Cache, Array]:
        return _extend_block(cache, *tokens, attend)

    tokens = (query, dict(kept), segment)
    if length <= BLOCK:
        cache, out = extend(cache, tokens)
        return out, cache
    # A long call is processed in blocks of queries, so that memory is linear in T.
    blocks = length // BLOCK

    def cut(y: Array) -> Array:
        return jnp.moveaxis(y[:, : blocks * BLOCK].reshape(batch, blocks, BLOCK, *y.shape[2:]), 1, 0)

    cache, out = jax.lax.scan(extend, cache, jax.tree.map(cut, tokens))
    out = jnp.moveaxis(out, 0, 1).reshape(batch, blocks * BLOCK, *out.shape[3:])
    if blocks * BLOCK < length:
        cache, rest = extend(cache, jax.tree.map(lambda y: y[:, blocks * BLOCK :], tokens))
        out = jnp.concatenate([out, rest], axis=1)
    return out, cache


def _extend_block[Cache: (AttentionCache, LatentCache)](
    cache: Cache, query: Any, kept: dict[str, Array], segment: Array, attend: Attend
) -> tuple[Cache, Array]:
    """The cache with a block of tokens added, and the attention of these tokens to the cache and to each other."""
    (batch, length), capacity = segment.shape, cache.segment.shape[1]
    index = cache.length[:, None] + jnp.arange(length, dtype=jnp.int32)
    before = {name: getattr(cache, name) for name in kept} | {"segment": cache.segment}
    tokens = {name: y.astype(before[name].dtype) for name, y in kept.items()} | {"segment": segment}
    # If the call is longer than the ring, only its last tokens are stored.
    last = slice(max(0, length - capacity), None)
    slots = (jnp.arange(batch)[:, None], index[:, last] % capacity)
    ring = {name: y.at[slots].set(tokens[name][:, last]) for name, y in before.items()}
    updated = cache._replace(**ring, length=cache.length + length, current=segment[:, -1])
    if length == 1:
        # For one token, the updated ring has all tokens that it sees. For several, the last tokens may overwrite slots
        # that the first ones still see.
        seen, indices = ring, _slot_indices(updated.length, capacity)
    else:
        seen = {name: jnp.concatenate([y, tokens[name]], axis=1) for name, y in before.items()}
        indices = jnp.concatenate([_slot_indices(cache.length, capacity), index], axis=1)
    mask = _mask(index, indices, segment, seen["segment"], capacity)
    return updated, attend(query, seen, mask)


def _mask(
    query_index: Int[Array, "B T"],
    key_index: Int[Array, "B S"],
    query_segment: Int[Array, "B T"],
    key_segment: Int[Array, "B S"],
    capacity: int,
) -> Bool[Array, "B T S"]:
    """The keys that each query sees: the last `capacity` of its segment. A negative key index is an empty slot."""
    distance = query_index[:, :, None] - key_index[:, None, :]
    seen = (key_index >= 0)[:, None] & (distance >= 0) & (distance < capacity)
    return seen & (query_segment[:, :, None] == key_segment[:, None, :])


def _slot_indices(length: Int[Array, "B"], capacity: int) -> Int[Array, "B capacity"]:
    """The index of the token in each slot of a ring after `length` tokens of a row; negative for an empty slot."""
    slot = jnp.arange(capacity, dtype=jnp.int32)
    last = length[:, None] - 1
    # The greatest index up to `last` that is `slot` modulo the capacity.
    return last - (last - slot) % capacity

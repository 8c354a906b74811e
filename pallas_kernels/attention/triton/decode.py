"""One token's attention to a ring of keys and values, in one launch that also stores the token; or its store alone."""

import dataclasses
import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.common.config import NUM_SMS, KernelConfig
from pallas_kernels.common.decay import LOG2_E
from pallas_kernels.common.kernel_shape import cdiv, next_power_of_two
from pallas_kernels.common.triton.backend import (
    call,
    dot,
    dot_nt,
    exp2,
    interpreted,
    iota,
    load_masked,
    store_masked,
    whole,
)

_LOWEST = -1e30  # of scores: a finite number, so that a difference of two is one
_SLOTS = 1024  # whose segments are compared at a time


@dataclasses.dataclass(frozen=True)
class TokenAttentionConfig:
    """How a call is cut into programs.

    Attributes:
        block: slots of the ring that a step of a program's loop reads, a power of two of at least 16.
        num_warps: of a program.
        num_stages: depth of the pipeline that loads ahead.
        splits: parts of a ring, each a program's.
    """

    block: int = 64
    num_warps: int = 4
    num_stages: int = 3
    splits: int = 1


@dataclasses.dataclass(frozen=True)
class Cut:
    """Static facts of a call.

    Attributes:
        group: query heads of a key head.
        key_size: K.
        value_size: V.
        capacity: slots of the ring.
        block: of them that a step reads.
        splits: programs that share a ring. With more than one, results are sums that are still to be added up.
        scale: factor on the scores, for powers of two.
    """

    group: int
    key_size: int
    value_size: int
    capacity: int
    block: int
    splits: int
    scale: float

    @property
    def queries(self) -> int:
        """Rows of a product with the queries."""
        return max(16, next_power_of_two(self.group))


def token_attention_kernel(r, *, cut: Cut):
    """The query heads of one key head of one row, and a part of the row's ring."""
    head, split, row = (pl.program_id(axis) for axis in range(3))
    count, current = r.length[row], r.current[row]
    slot, filled = lax.rem(count, cut.capacity), lax.min(count, cut.capacity)

    def channels(rows: int, size: int) -> tuple[Array, Array, Array | None]:
        """Numbers of rows, of channels, and which channels there are."""
        shape = (rows, next_power_of_two(size))
        channel = iota(shape, 1)
        return iota(shape, 0), channel, None if shape[1] == size else channel < size

    def own(ref, size: int) -> Array:
        """What the new token has, `[1, size]`."""
        _, channel, mask = channels(1, size)
        return load_masked(ref, (row, head, channel), mask)

    query, channel, mask = channels(cut.queries, cut.key_size)
    q = load_masked(r.q, (row, head * cut.group + query, channel), _both(query < cut.group, mask))  # [queries, K]
    k, v = own(r.k, cut.key_size), own(r.v, cut.value_size)
    is_first = split == 0
    score = cut.scale * jnp.sum(q.astype(jnp.float32) * k.astype(jnp.float32), axis=1)  # [queries]
    zeros = jnp.zeros((cut.queries, v.shape[1]), jnp.float32)
    start = (
        jnp.where(is_first, score, jnp.float32(_LOWEST)),
        jnp.where(is_first, jnp.ones_like(score), 0.0),
        jnp.where(is_first, zeros + v.astype(jnp.float32), 0.0),
    )
    blocks = lax.div(filled + cut.block - 1, cut.block)
    share = lax.div(blocks + cut.splits - 1, cut.splits)
    first_block = split * share

    def step(j, carry):
        highest, total, sums = carry  # [queries], [queries], [queries, V]
        first = (first_block + j) * cut.block

        def tile(ref, size: int) -> Array:
            """Slots of the ring `[block, size]`, zero where there is no token to be seen."""
            position, channel, mask = channels(cut.block, size)
            is_there = (first + position < filled) & (first + position != slot)
            return load_masked(ref, (row, first + position, head, channel), _both(is_there, mask))

        position = first + iota((cut.block,), 0)
        segment = load_masked(r.before_segment, (row, position), position < filled)
        is_seen = ((position < filled) & (position != slot) & (segment == current))[None, :]
        scores = cut.scale * dot_nt(q, tile(r.before_key, cut.key_size))  # [queries, block]
        scores = jnp.where(is_seen, scores, jnp.float32(_LOWEST))
        higher = jnp.maximum(highest, jnp.max(scores, axis=1))
        kept = exp2(highest - higher)
        weights = jnp.where(is_seen, exp2(scores - higher[:, None]), 0.0)
        values = tile(r.before_value, cut.value_size)
        sums = kept[:, None] * sums + dot(weights.astype(values.dtype), values)
        return higher, kept * total + jnp.sum(weights, axis=1), sums

    steps = lax.max(lax.min(blocks - first_block, share), 0)
    highest, total, sums = lax.fori_loop(0, steps, step, start)

    query, channel, mask = channels(cut.queries, cut.value_size)
    place, mask = (row, head * cut.group + query, channel), _both(query < cut.group, mask)
    if cut.splits == 1:
        store_masked(r.out, place, sums / total[:, None], mask)
    else:
        store_masked(r.sums, (split, *place), sums, mask)
        query = iota((cut.queries,), 0)
        place = (split, row, head * cut.group + query)
        store_masked(r.highest, place, highest, query < cut.group)
        store_masked(r.total, place, total, query < cut.group)

    @pl.when(is_first)
    def _():
        for ref, x, size in ((r.key, k, cut.key_size), (r.value, v, cut.value_size)):
            _, channel, mask = channels(1, size)
            store_masked(ref, (row, slot, head, channel), x, mask)

    @pl.when(is_first & (head == 0))
    def _():
        r.segment[row, slot] = current


def _both(mask: Array, other: Array | None) -> Array:
    return mask if other is None else mask & other


def choose_token_attention_config(rows: int, key_heads: int, capacity: int, channels: int) -> TokenAttentionConfig:
    """The schedule for a call.

    Args:
        rows: B.
        key_heads: HK.
        capacity: slots of a ring.
        channels: the greater of K and V.
    """
    if interpreted():
        return TokenAttentionConfig(block=16, splits=min(2, cdiv(capacity, 16)))
    block = 64 if channels <= 128 else 32
    return TokenAttentionConfig(block, splits=max(1, min(NUM_SMS // (rows * key_heads), cdiv(capacity, block))))


Ring = tuple[Array, Array, Array]
"""Keys, values and segments."""


def token_attention(
    q: Array,
    k: Array,
    v: Array,
    ring: Ring,
    length: Array,
    current: Array,
    scale: float,
    config: TokenAttentionConfig | None,
) -> tuple[Array, Ring]:
    """The output, and the ring with the token in it; see `pallas_kernels.attention.api`."""
    key, value, segment = ring
    (batch, heads, key_size), (_, capacity, key_heads, value_size) = q.shape, value.shape
    s = config or choose_token_attention_config(batch, key_heads, capacity, max(key_size, value_size))
    cut = Cut(heads // key_heads, key_size, value_size, capacity, s.block, s.splits, scale * LOG2_E)

    def wide(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((s.splits, batch, heads, *shape), jnp.float32)

    rings = {"key": whole(key), "value": whole(value), "segment": whole(segment)}
    if s.splits == 1:
        outputs = {"out": whole(jax.ShapeDtypeStruct((batch, heads, value_size), q.dtype))}
    else:
        outputs = {"highest": whole(wide()), "total": whole(wide()), "sums": whole(wide(value_size))}
    results = call(
        token_attention_kernel,
        "token_attention",
        (key_heads, s.splits, batch),
        {"q": whole(q), "k": whole(k), "v": whole(v), "length": whole(length), "current": whole(current)},
        {**outputs, **rings},
        KernelConfig(num_warps=s.num_warps, num_stages=s.num_stages),
        updates=rings,
        cut=cut,
    )
    found: dict[str, Array] = {name: x for name, x in results.items() if x is not None}
    out = found["out"] if s.splits == 1 else _added_up(found["highest"], found["total"], found["sums"], q.dtype)
    return out, (found["key"], found["value"], found["segment"])


def _added_up(highest: Array, total: Array, sums: Array, dtype: jnp.dtype) -> Array:
    """The output from the sums of all parts, `[splits, B, H]` and `[splits, B, H, V]`, in a fixed order."""
    top = functools.reduce(jnp.maximum, highest)
    kept = [jnp.exp2(part - top) for part in highest]
    total = functools.reduce(operator.add, [x * y for x, y in zip(kept, total)])
    sums = functools.reduce(operator.add, [x[..., None] * y for x, y in zip(kept, sums)])
    return (sums / total[..., None]).astype(dtype)


def store_token_kernel(r, *, capacity: int):
    """The keys and values of one row's new token, and how many tokens it sees; queries and keys may turn."""
    row = pl.program_id(0)
    heads, size = r.k.shape[1:]
    shape = (heads, size // 2)
    head, pair = iota(shape, 0), iota(shape, 1)
    places = pair, pair + size // 2

    def halves(ref) -> list[Array]:
        return [load_masked(ref, (row, head, place), None) for place in places]

    # All is loaded before anything is stored: what comes behind a store waits for what it stores.
    count, current = r.length[row], r.current[row]
    k, v = halves(r.k), halves(r.v)
    q = None
    if r.cosine is not None:
        q = halves(r.q)
        turn = [load_masked(ref, (row, iota((1, size // 2), 1)), None) for ref in (r.cosine, r.sine)]
        q, k = _turned(q, *turn), _turned(k, *turn)
    slot, filled = lax.rem(count, capacity), lax.min(count, capacity)

    def add(j, total):
        position = j * _SLOTS + iota((_SLOTS,), 0)
        # Not only as far as the ring is filled: so these loads need not wait for that of the length.
        segment = load_masked(r.before_segment, (row, position), position < capacity)
        is_seen = (position < filled) & (position != slot) & (segment == current)
        return total + jnp.sum(is_seen.astype(jnp.int32))

    one = jnp.int32(1)  # itself
    seen = add(0, one) if capacity <= _SLOTS else lax.fori_loop(0, cdiv(capacity, _SLOTS), add, one)
    for i, place in enumerate(places):
        store_masked(r.key, (row, slot, head, place), k[i], None)
        store_masked(r.value, (row, slot, head, place), v[i], None)
        if q is not None:
            store_masked(r.turned, (row, head, place), q[i], None)
    r.seen[row] = seen
    r.segment[row, slot] = current


def _turned(x: list[Array], cosine: Array, sine: Array) -> list[Array]:
    """Channels `i` and `i + K/2` after each pair of them has turned, float32."""
    first, second = (half.astype(jnp.float32) for half in x)
    return [first * cosine - second * sine, second * cosine + first * sine]


def store_token(
    q: Array, k: Array, v: Array, ring: Ring, length: Array, current: Array, angle: Array | None
) -> tuple[Array, Array, Ring]:
    """Queries turned by the angle, how many tokens the new one sees, and the ring with it."""
    key, value, segment = ring
    (batch, _, _), capacity = q.shape, key.shape[1]
    rings = {"key": whole(key), "value": whole(value), "segment": whole(segment)}
    cosine, sine = (None, None) if angle is None else (jnp.cos(angle), jnp.sin(angle))
    turned = None if angle is None else jax.ShapeDtypeStruct(q.shape, q.dtype)
    inputs = {"q": q, "k": k, "v": v, "length": length, "current": current, "cosine": cosine, "sine": sine}
    found: dict[str, Any] = call(
        store_token_kernel,
        "store_token",
        (batch,),
        {name: whole(x) for name, x in inputs.items()},
        {"turned": whole(turned), "seen": whole(jax.ShapeDtypeStruct((batch,), jnp.int32)), **rings},
        KernelConfig(num_warps=4, num_stages=1),
        updates=rings,
        capacity=capacity,
    )
    return q if angle is None else found["turned"], found["seen"], (found["key"], found["value"], found["segment"])

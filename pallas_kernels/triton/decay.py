"""Decay and restarts inside one chunk, and products of its token pairs, as values inside a kernel.

With `G_r` the inclusive cumulative log decay, a pair of tokens `r >= s` is weighted by `exp(G_r - G_s)`. `exp(-G_s)`
is never formed: a scalar decay takes the exponential of the masked difference; a channel-wise decay multiplies each
side of the product relative to a reference row so that no exponent can overflow: the chunk's middle row where the decay
is mild, else, for the pairs that part at each level of halving the chunk, the first row of the later half.

A token that starts a segment begins a new run: pairs of different runs do not meet, tokens after the first run do not
see the state before the chunk, and tokens before the last run do not reach the state after it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.triton.backend import dot, dot_nt, dot_tn, iota

CHUNK = 64
# exp(-100) is zero in float32 (flushed); a smaller log decay, -inf included, would only cost the sums their digits.
MIN_LOG_DECAY = -100.0
# Largest exponent on either side of a channel-wise product taken relative to the chunk's middle row.
_MAX_EXPONENT = 60.0


class ChunkDecay(NamedTuple):
    """Decay of one chunk.

    Attributes:
        total: inclusive cumulative log decay, `[C]` or `[C, K]` float32; None without decay.
        fine: a part of the same sum, small so that it has more digits, to be added after differences; None if zero.
        runs: number of segment starts up to and including each token, `[C]` int32; None without restarts.
    """

    total: Array | None
    fine: Array | None
    runs: Array | None


def load_decay(log_decay, starts) -> ChunkDecay:
    """Reads one chunk's log decay `[C]` or `[C, K]` and segment starts `[C]` (references or None)."""
    total = fine = runs = None
    if log_decay is not None:
        step = jnp.maximum(log_decay[...].astype(jnp.float32), MIN_LOG_DECAY)
        if step.ndim == 1:
            # Multiples of 1/16 add up without rounding, so a strong decay early on costs later tokens no accuracy.
            coarse = jnp.floor(step * 16.0) * 0.0625
            fine = jnp.cumsum(step - coarse, axis=0)
            step = coarse
        total = jnp.cumsum(step, axis=0)
    if starts is not None:
        runs = jnp.cumsum(starts[...], axis=0)
    return ChunkDecay(total, fine, runs)


def pick_row(x: Array, n: int) -> Array:
    """Row `n` of `[C, ...]`."""
    return jnp.sum(jnp.where(iota(x.shape, 0) == n, x, 0), axis=0)


def _rows(mask: Array, x: Array) -> Array:
    return mask if x.ndim == 1 else mask[:, None]


def decay_from_start(decay: ChunkDecay) -> Array | None:
    """What is left at each token of the state before the chunk, `[C]` or `[C, K]`; None if all of it."""
    if decay.total is None:
        return None
    factor = jnp.exp(decay.total if decay.fine is None else decay.total + decay.fine)
    return factor if decay.runs is None else jnp.where(_rows(decay.runs == 0, factor), factor, 0.0)


def decay_to_end(decay: ChunkDecay) -> Array | None:
    """What is left at the chunk's end of each token's write, `[C]` or `[C, K]`; None if all of it."""
    if decay.total is None:
        return None
    difference = pick_row(decay.total, CHUNK - 1)[None] - decay.total
    if decay.fine is not None:
        difference = difference + (pick_row(decay.fine, CHUNK - 1)[None] - decay.fine)
    factor = jnp.exp(difference)
    return factor if decay.runs is None else jnp.where(_rows(decay.runs == jnp.max(decay.runs), factor), factor, 0.0)


def decay_of_chunk(decay: ChunkDecay) -> Array | None:
    """What the chunk leaves of the state before it, a scalar or `[K]`; None if all of it."""
    if decay.total is None:
        return None
    last = pick_row(decay.total, CHUNK - 1)
    factor = jnp.exp(last if decay.fine is None else last + pick_row(decay.fine, CHUNK - 1))
    return factor if decay.runs is None else jnp.where(jnp.max(decay.runs) == 0, factor, 0.0)


def causal_mask(decay: ChunkDecay, strict: bool) -> Array:
    """Pairs `[C, C]` of one run in which the column's token comes before the row's, or is it unless `strict`."""
    i, j = iota((CHUNK, CHUNK), 0), iota((CHUNK, CHUNK), 1)
    mask = i > j if strict else i >= j
    return mask if decay.runs is None else mask & (decay.runs[:, None] == decay.runs[None, :])


def _scalar_weights(decay: ChunkDecay, mask: Array) -> Array | None:
    """`exp(G_r - G_s)` where `mask`, else 0, `[C, C]`."""
    if decay.total is None:
        return None
    difference = decay.total[:, None] - decay.total[None, :]
    if decay.fine is not None:
        difference = difference + (decay.fine[:, None] - decay.fine[None, :])
    return jnp.exp(jnp.where(mask, difference, -jnp.inf))


def _is_mild(total: Array) -> Array:
    """Whether every exponent relative to the chunk's middle row is small enough for one product."""
    first, middle, last = (pick_row(total, n) for n in (0, CHUNK // 2, CHUNK - 1))
    return jnp.max(jnp.maximum(first - middle, middle - last)) <= _MAX_EXPONENT


def _around_middle(total: Array) -> tuple[Array, Array]:
    """Factors `[C, K]` on the rows' side and on the columns' side relative to the middle row."""
    offset = total - pick_row(total, CHUNK // 2)[None]
    return jnp.exp(offset), jnp.exp(-offset)


def _halves() -> list[int]:
    """Half widths of the blocks into which pairs are sorted: each pair `r > s` parts in exactly one of them."""
    halves = [CHUNK // 2]
    while halves[-1] > 1:
        halves.append(halves[-1] // 2)
    return halves


def _around_half(total: Array, half: int) -> tuple[Array, Array, Array]:
    """Factors relative to the first row of the later half of each block of `2 * half` rows.

    Every row is on one side only: later rows read, earlier rows are read. No exponent is positive.

    Returns:
        Factors `[C, K]` of later rows and of earlier rows, zero elsewhere, and the mask `[C, C]` of pairs in one block.
    """
    blocks = total.reshape(CHUNK // (2 * half), 2 * half, total.shape[1])
    reference = jnp.sum(jnp.where(iota(blocks.shape, 1) == half, blocks, 0.0), axis=1)
    reference = jnp.broadcast_to(reference[:, None, :], blocks.shape).reshape(total.shape)
    is_later = (iota(total.shape, 0) // half) % 2 == 1
    factor = jnp.exp(jnp.where(is_later, total - reference, reference - total))
    i, j = iota((CHUNK, CHUNK), 0), iota((CHUNK, CHUNK), 1)
    return jnp.where(is_later, factor, 0.0), jnp.where(is_later, 0.0, factor), i // (2 * half) == j // (2 * half)


def pair_products(readers: Sequence[Array], key: Array, decay: ChunkDecay) -> tuple[Array, ...]:
    """`sum_c x_rc exp(G_rc - G_sc) k_sc` for pairs `r >= s` of one run, zero elsewhere.

    Args:
        readers: matrices `[C, K]` whose rows read.
        key: `[C, K]`, whose rows are read.
        decay: the chunk's decay.

    Returns:
        One `[C, C]` float32 for each reader.
    """
    dtype = key.dtype
    mask = causal_mask(decay, strict=False)
    total = decay.total
    if total is None or total.ndim == 1:
        weights = _scalar_weights(decay, mask)
        products = (dot_nt(x, key) for x in readers)
        return tuple(jnp.where(mask, p, 0.0) if weights is None else p * weights for p in products)

    wide_readers = [x.astype(jnp.float32) for x in readers]
    wide_key = key.astype(jnp.float32)

    def mild():
        reads, written = _around_middle(total)
        keys = (wide_key * written).astype(dtype)
        return tuple(dot_nt((x * reads).astype(dtype), keys) for x in wide_readers)

    def extreme():
        i, j = iota((CHUNK, CHUNK), 0), iota((CHUNK, CHUNK), 1)
        products = [jnp.where(i == j, jnp.sum(x * wide_key, axis=1)[:, None], 0.0) for x in wide_readers]
        for half in _halves():
            later, earlier, in_block = _around_half(total, half)
            keys = (wide_key * earlier).astype(dtype)
            for n, x in enumerate(wide_readers):
                products[n] += jnp.where(in_block, dot_nt((x * later).astype(dtype), keys), 0.0)
        return tuple(products)

    return tuple(jnp.where(mask, p, 0.0) for p in lax.cond(_is_mild(total), mild, extreme))


def pair_gradients(
    gradients: Sequence[Array], readers: Sequence[Array], key: Array, decay: ChunkDecay
) -> tuple[tuple[Array, ...], Array, Array | None]:
    """Transposes `pair_products`.

    The decay's gradient is `sum_c x dx - k dk`, in which a pair whose tokens both come later must cancel: both terms
    are taken from the same rounded operands.

    Args:
        gradients: cotangents `[C, C]` float32, one for each reader.
        readers: matrices `[C, K]`.
        key: `[C, K]`.
        decay: the chunk's decay.

    Returns:
        Float32 gradients: `[C, K]` for each reader, `[C, K]` for the key, and of the cumulative log decay in its shape.
    """
    dtype = key.dtype
    mask = causal_mask(decay, strict=False)
    total = decay.total
    if total is None or total.ndim == 1:
        weights = _scalar_weights(decay, mask)
        scores = [(jnp.where(mask, d, 0.0) if weights is None else d * weights).astype(dtype) for d in gradients]
        d_readers = [dot(d, key) for d in scores]
        d_key = _sum([dot_tn(d, x) for d, x in zip(scores, readers)])
        if total is None:
            return tuple(d_readers), d_key, None
        d_total = _sum([x.astype(jnp.float32) * dx for x, dx in zip(readers, d_readers)])
        return tuple(d_readers), d_key, jnp.sum(d_total - key.astype(jnp.float32) * d_key, axis=1)

    wide_readers = [x.astype(jnp.float32) for x in readers]
    wide_key = key.astype(jnp.float32)
    masked = [jnp.where(mask, d, 0.0) for d in gradients]

    def mild():
        reads, written = _around_middle(total)
        return _scaled_gradients([d.astype(dtype) for d in masked], wide_readers, wide_key, reads, written, dtype)

    def extreme():
        i, j = iota((CHUNK, CHUNK), 0), iota((CHUNK, CHUNK), 1)
        diagonals = [jnp.sum(jnp.where(i == j, d, 0.0), axis=1)[:, None] for d in masked]
        result = [*(d * wide_key for d in diagonals), _sum([d * x for d, x in zip(diagonals, wide_readers)])]
        result.append(jnp.zeros_like(wide_key))
        for half in _halves():
            later, earlier, in_block = _around_half(total, half)
            scores = [jnp.where(in_block, d, 0.0).astype(dtype) for d in masked]
            parts = _scaled_gradients(scores, wide_readers, wide_key, later, earlier, dtype)
            result = [x + part for x, part in zip(result, parts)]
        return tuple(result)

    *d_readers, d_key, d_total = lax.cond(_is_mild(total), mild, extreme)
    return tuple(d_readers), d_key, d_total


def _scaled_gradients(scores, readers, key, reads, written, dtype) -> tuple[Array, ...]:
    """Gradients of readers, key and log decay for products `(x * reads) (k * written)^T` with cotangents `scores`."""
    keys = (key * written).astype(dtype)
    d_readers, d_key, d_total = [], jnp.zeros_like(key), jnp.zeros_like(key)
    for score, x in zip(scores, readers):
        rows = (x * reads).astype(dtype)
        d_rows = dot(score, keys)
        d_key += dot_tn(score, rows)
        d_total += rows.astype(jnp.float32) * d_rows
        d_readers.append(reads * d_rows)
    return *d_readers, written * d_key, d_total - keys.astype(jnp.float32) * d_key


def _sum(terms: list[Array]) -> Array:
    """Sum of a list that is not empty."""
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total

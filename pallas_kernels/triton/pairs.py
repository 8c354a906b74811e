"""Products of the token pairs of one chunk under its decay, and their transposes, as values inside a kernel.

With `G_r` the inclusive cumulative log decay, a pair of tokens `r >= s` is weighted by `exp(G_r - G_s)`. `exp(-G_s)` is
never formed. A scalar decay takes the exponential of the masked difference. A channel-wise decay multiplies each side
of the product relative to a reference row: the first row of the later half of each block, for the pairs that part at
each level of halving the chunk. That is exact for any decay at six times the work of one product, so it is left to
kernels of its own, which rewrite the chunks where one reference row does not do (see `channels`).
"""

import functools
from collections.abc import Iterable, Sequence

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.triton.backend import dot, dot_nt, dot_tn, exp, iota, spread_like
from pallas_kernels.triton.decay import CHUNK, ChunkDecay, causal_mask

_LEVELS = CHUNK.bit_length() - 1


def weigh_pairs(pairs: Array, decay: ChunkDecay, strict: bool, reverse: bool = False) -> Array:
    """Pairs `[C, C]` that are causal and of one run, times a scalar decay's `exp(G_r - G_s)`; zero elsewhere.

    A channel-wise decay has no such factor: it is inside the products. In `reverse` the rows' tokens are the earlier.
    """
    mask = causal_mask(decay, strict, reverse)
    if not decay.is_scalar:
        return jnp.where(mask, pairs, 0.0)

    def differences(x):
        rows, columns = spread_like(x[:, None], pairs), spread_like(x[None, :], pairs)
        return columns - rows if reverse else rows - columns

    difference = differences(decay.total)
    if decay.fine is not None:
        difference = difference + differences(decay.fine)
    return pairs * exp(jnp.where(mask, difference, -jnp.inf))


def _around_half(total: Array, level: Array) -> tuple[Array, Array, Array]:
    """Factors relative to the first row of the later half of each block of `2 * half` rows, `half = C / 2, C / 4 .. 1`.

    Each pair `r > s` parts at exactly one level, `r` in the later half of a block and `s` in the earlier. Every row is
    on one side only: later rows read, earlier rows are read. No exponent is positive, but for the rounding of the
    reference, which is the same on both sides.

    Returns:
        Factors `[C, K]` of later rows and of earlier rows, zero elsewhere, and the mask `[C, C]` of pairs in one block.
    """
    half = lax.shift_right_logical(jnp.int32(CHUNK // 2), level)
    i, j = iota((CHUNK, CHUNK), 0), iota((CHUNK, CHUNK), 1)
    is_reference = j == lax.div(i, 2 * half) * (2 * half) + half
    reference = dot(jnp.where(is_reference, 1.0, 0.0), total, precise=True)
    is_later = lax.rem(lax.div(iota(total.shape, 0), half), 2) == 1
    factor = exp(jnp.where(is_later, total - reference, reference - total))
    in_block = lax.div(i, 2 * half) == lax.div(j, 2 * half)
    return jnp.where(is_later, factor, 0.0), jnp.where(is_later, 0.0, factor), in_block


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
    if decay.total is None or decay.is_scalar:
        return tuple(weigh_pairs(dot_nt(x, key), decay, strict=False) for x in readers)
    total = decay.total
    wide_readers = [x.astype(jnp.float32) for x in readers]
    wide_key = key.astype(jnp.float32)
    i, j = iota((CHUNK, CHUNK), 0), iota((CHUNK, CHUNK), 1)
    diagonals = tuple(jnp.where(i == j, jnp.sum(x * wide_key, axis=1)[:, None], 0.0) for x in wide_readers)

    def add_level(level, products):
        later, earlier, in_block = _around_half(total, level)
        keys = (wide_key * earlier).astype(dtype)
        parts = (dot_nt((x * later).astype(dtype), keys) for x in wide_readers)
        return tuple(p + jnp.where(in_block, part, 0.0) for p, part in zip(products, parts))

    products = lax.fori_loop(0, _LEVELS, add_level, diagonals)
    return tuple(weigh_pairs(p, decay, strict=False) for p in products)


def pair_gradients(
    scores: Sequence[Array], readers: Sequence[Array], key: Array, decay: ChunkDecay
) -> tuple[tuple[Array, ...], Array, Array | None]:
    """Transposes `pair_products`.

    The decay's gradient is `sum_c x dx - k dk`, in which a pair whose tokens both come later must cancel: both terms
    are taken from operands with the same digits.

    Args:
        scores: cotangents `[C, C]` after `weigh_pairs`, one for each reader, in the dtype of `key`, or float32 if the
            decay is channel-wise.
        readers: matrices `[C, K]`.
        key: `[C, K]`.
        decay: the chunk's decay.

    Returns:
        Float32 gradients: `[C, K]` for each reader, `[C, K]` for the key, and, if the decay is channel-wise, of the
        cumulative log decay, `[C, K]`. A scalar one follows from the others: no operand was scaled.
    """
    if decay.total is None or decay.is_scalar:
        d_key = sum_of(dot_tn(d, x) for d, x in zip(scores, readers))
        return tuple(dot(d, key) for d in scores), d_key, None
    total, is_precise = decay.total, key.dtype == jnp.float32
    wide_readers = [x.astype(jnp.float32) for x in readers]
    wide_key = key.astype(jnp.float32)
    i, j = iota((CHUNK, CHUNK), 0), iota((CHUNK, CHUNK), 1)
    diagonals = [jnp.sum(jnp.where(i == j, d, 0.0), axis=1)[:, None] for d in scores]
    result = [*(d * wide_key for d in diagonals), sum_of(d * x for d, x in zip(diagonals, wide_readers))]
    result.append(jnp.zeros_like(wide_key))

    def add_level(level, result):
        later, earlier, in_block = _around_half(total, level)
        parted = [jnp.where(in_block, d, 0.0) for d in scores]
        parts = scaled_gradients(parted, [x * later for x in wide_readers], wide_key * earlier, is_precise)
        *d_rows, d_key, d_total = parts
        d_readers = [later * d for d in d_rows]
        return tuple(x + part for x, part in zip(result, (*d_readers, earlier * d_key, d_total)))

    *d_readers, d_key, d_total = lax.fori_loop(0, _LEVELS, add_level, tuple(result))
    return tuple(d_readers), d_key, d_total


def scaled_gradients(scores: Sequence[Array], rows: Sequence[Array], keys: Array, is_precise: bool) -> tuple:
    """Gradients of rows, keys and log decay for products `rows keys^T` with cotangents `scores`, all float32."""
    d_rows = tuple(dot(score, keys, precise=is_precise) for score in scores)
    d_keys = sum_of(dot_tn(score, x, precise=is_precise) for score, x in zip(scores, rows))
    return *d_rows, d_keys, sum_of(x * d for x, d in zip(rows, d_rows)) - keys * d_keys


def sum_of(terms: Iterable[Array], *more: Array) -> Array:
    """Sum of terms of which there is at least one."""
    return functools.reduce(jnp.add, [*terms, *more])

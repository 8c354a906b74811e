"""A channel-wise decay of one chunk, as values inside a kernel.

In each channel a pair of tokens `r >= s` has the weight `exp(G_r - G_s)`, with `G` the inclusive cumulative log decay.
To form all pairs by one matrix product, both operands are scaled relative to a reference row `m`: rows that read by
`exp(G_r - G_m)`, rows that are written by `exp(G_m - G_s)`.

A chunk is *mild* if no channel loses more than 50 nats (a factor `exp(-50)`) in either half. Its middle row is then the
reference for all pairs. Any other chunk is *extreme*. Its pairs are formed in groups, each with its own references:

- pairs with the reference between them: r in the upper and s in the lower half of a block of 64, 32 or 16 rows
  (float32: also of 8). The reference is the block's middle row, and no exponent is positive;
- pairs within one block of 8 rows (float32: 4). The reference is the block's middle row.

In these factors a token's decay is raised to at least `exp(-12.5)` (4e-6; float32: `exp(-25)`), so that exponents stay
within 50. Any decay comes out as exact as the operands are, for four products (float32: five) instead of one.
"""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.common.decay import LOG2_E, MAX_EXPONENT, MIN_LOG_DECAY
from pallas_kernels.common.kernel_shape import CHUNK
from pallas_kernels.common.triton.backend import dot, exp2, iota
from pallas_kernels.common.triton.decay import load_resets

_MIDDLE = CHUNK // 2


class ChunkEnds(NamedTuple):
    """How a block of channels decays over a chunk.

    Attributes:
        front: `exp(G_m)` with `m` the chunk's middle: what completes the factor on what reads, where it meets the state
            before the chunk, `[K]` float32.
        tail: `exp(G_C - G_m)`, what completes the factor on what is written, likewise.
        kept: what the chunk leaves of the state, likewise.
        is_extreme: whether a reference for the whole chunk does not do.
    """

    front: Array
    tail: Array
    kept: Array
    is_extreme: Array


def clamped_steps(log_decay: Array, resets: Array | None) -> Array:
    """Log decay `[C, K]` of a chunk (or of one token) as it is added up, float32: 0 where a document starts, `[C]`."""
    step = jnp.maximum(log_decay.astype(jnp.float32), MIN_LOG_DECAY)
    if resets is None:
        return step
    return jnp.where(resets[:, None] > 0 if step.ndim > 1 else resets > 0, 0.0, step)


def runs_of(r) -> Array | None:
    """Number of document starts up to and including each token, `[C]` int32; None without restarts."""
    resets = load_resets(r)
    return None if resets is None else jnp.cumsum(resets, axis=0)


def end_masks(r) -> tuple[Array | None, Array | None]:
    """Masks `[C]` of the tokens that see the state before the chunk, and whose writes reach its end; None for all."""
    runs = runs_of(r)
    return (None, None) if runs is None else (runs == 0, runs == jnp.max(runs))


def keep_rows(x: Array, mask: Array | None) -> Array:
    """Rows of `x` `[C, K]` where the mask `[C]` is true, zero elsewhere; all of them for None."""
    return x if mask is None else jnp.where(mask[:, None], x, 0.0)


def is_flat(log_decay: Array, resets: Array | None) -> Array:
    """Where the gradient of the log decay, `[C, K]` or `[C]`, is zero: where it was clamped or a document starts."""
    flat = log_decay.astype(jnp.float32) <= MIN_LOG_DECAY
    if resets is None:
        return flat
    return flat | ((resets > 0)[:, None] if flat.ndim > 1 else resets > 0)


def _bits(step: Array, dtype: Any) -> tuple[Array, ...]:
    """Steps as binary logarithms, in parts to be summed apart, for operands of `dtype`.

    In float32, multiples of 1/8 and the rest. The multiples add up without rounding, so that the sum over half of a
    mild chunk, up to 72, is rounded once and not at each of its terms.
    """
    bits = step * LOG2_E
    if dtype != jnp.float32:
        return (bits,)
    coarse = jnp.floor(bits * 8.0) * 0.125
    return coarse, bits - coarse


def chunk_ends(step: Array, first: Array, runs: Array | None, dtype: Any) -> ChunkEnds:
    """`ChunkEnds` of steps `[C, K]`, for operands of `dtype`.

    `first` is their first row `[K]` once more, `runs` counts document starts `[C]`.
    """
    row = iota(step.shape, 0)

    def sum_where(mask):
        if dtype != jnp.float32:
            return jnp.sum(jnp.where(mask, step, 0.0), axis=0) * LOG2_E
        return functools.reduce(jnp.add, [jnp.sum(jnp.where(mask, part, 0.0), axis=0) for part in _bits(step, dtype)])

    to_middle = sum_where((row > 0) & (row <= _MIDDLE))
    after = sum_where(row > _MIDDLE)
    before = first * LOG2_E + to_middle
    kept = exp2(before + after)
    if runs is not None:
        kept = jnp.where(jnp.max(runs) == 0, kept, 0.0)
    is_extreme = jnp.min(jnp.minimum(to_middle, after)) < -MAX_EXPONENT * LOG2_E
    return ChunkEnds(exp2(before), exp2(after), kept, is_extreme)


def sum_rows(signs: Array, x: Array, dtype: Any) -> Array:
    """`signs @ x` for a matrix of -1, 0 and 1; for operands of bfloat16, `x` is taken to 16 bits of its mantissa."""
    if dtype == jnp.float32:
        return dot(signs, x, precise=True)
    signs, high = signs.astype(dtype), x.astype(dtype)
    return dot(signs, high) + dot(signs, (x - high.astype(jnp.float32)).astype(dtype))


def _indices() -> tuple[Array, Array]:
    return iota((CHUNK, CHUNK), 0), iota((CHUNK, CHUNK), 1)


def _sums_from(step: Array, middle: Array, dtype: Any) -> Array:
    """Sums of the steps between each row and row `middle` `[C]`, without the earlier of the two, `[C, K]`."""
    row, column = iota((CHUNK,), 0), iota((CHUNK,), 0)
    after, until = jnp.minimum(row, middle), jnp.maximum(row, middle)
    is_between = (column[None, :] > after[:, None]) & (column[None, :] <= until[:, None])
    return sum_rows(jnp.where(is_between, 1.0, 0.0), step * LOG2_E, dtype)


def mild_exponent(step: Array, dtype: Any) -> Array:
    """Binary exponent `[C, K]` of the factor on what reads, relative to the chunk's middle; its negative for the other.

    `dtype` is that of the operands of matrix products.
    """
    i, j = _indices()
    is_early = j <= _MIDDLE
    signs = jnp.where(j <= i, jnp.where(is_early, 0.0, 1.0), jnp.where(is_early, -1.0, 0.0))
    return functools.reduce(jnp.add, [sum_rows(signs, part, dtype) for part in _bits(step, dtype)])


def before_decay(step: Array) -> Array:
    """The factor on a key `[C, K]` that reads the decayed state, by which it reads the state before its own decay."""
    return exp2(-LOG2_E * step)


def extreme_groups(dtype: Any) -> int:
    """Number of groups of an extreme chunk's pairs: one for each size of block, as the module's page lists them."""
    return 5 if dtype == jnp.float32 else 4


def extreme_factors(step: Array, group: Array, dtype: Any) -> tuple[Array, Array, Array]:
    """Factors `[C, K]` on what reads and on what is written for one group of pairs, and the pairs' mask `[C, C]`.

    In the mask rows are later tokens than columns, or the same.
    """
    row = iota((CHUNK,), 0)
    last = extreme_groups(dtype) - 1
    is_parted = group < last
    width = lax.shift_right_logical(jnp.int32(CHUNK), group)
    strongest = -MAX_EXPONENT / (CHUNK >> (last + 1))  # of a token, with half a block on either side of its middle
    block = lax.div(row, width)
    middle = block * width + lax.div(width, 2)
    is_later = row >= middle
    exponent = _sums_from(jnp.maximum(step, strongest), middle, dtype)
    # Where the middle is between the pair, a row is on one side only: later rows read, earlier rows are read.
    reads = exp2(jnp.where(is_later | is_parted, 1.0, -1.0)[:, None] * exponent)
    writes = exp2(jnp.where(is_later & ~is_parted, -1.0, 1.0)[:, None] * exponent)
    readers, written = jnp.where(is_later | ~is_parted, block, -1), jnp.where(is_later & is_parted, -2, block)
    return reads, writes, readers[:, None] == written[None, :]


def start_factor(step: Array, dtype: Any) -> Array:
    """`exp(G_r)`, `[C, K]`: what is left at each token of the state before the chunk."""
    i, j = _indices()
    return exp2(sum_rows(jnp.where(j <= i, 1.0, 0.0), step * LOG2_E, dtype))


def end_factor(step: Array, dtype: Any) -> Array:
    """`exp(G_C - G_s)`, `[C, K]`: what is left at the chunk's end of what each token writes."""
    i, j = _indices()
    return exp2(sum_rows(jnp.where(j > i, 1.0, 0.0), step * LOG2_E, dtype))


def add_up_to_end(x: Array, dtype: Any) -> Array:
    """Sums of the rows `[C, K]` from each to the last."""
    i, j = _indices()
    return sum_rows(jnp.where(i <= j, 1.0, 0.0), x, dtype)

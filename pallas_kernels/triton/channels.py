"""A channel-wise decay of one chunk, as values inside a kernel.

Each side of a product of token pairs is scaled relative to a reference row: what reads by `exp(G_r - G_m)`, what is
written by `exp(G_m - G_s)`, with `m` the chunk's middle. Where they meet the state, `exp(G_m)` and `exp(G_C - G_m)`
complete the factors to `exp(G_r)` and `exp(G_C - G_s)`.

Where exponents relative to the middle would be too large, the chunk is extreme: the factors are the complete ones from
the start, and kernels of their own make its pairs (see `pairs`).
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from pallas_kernels.triton.backend import LOG2_E, dot, exp, exp2, iota
from pallas_kernels.triton.decay import CHUNK, MIN_LOG_DECAY

# Largest exponent on either side of a product taken relative to the chunk's middle row.
_MAX_EXPONENT = 70.0
_MIDDLE = CHUNK // 2


class ChannelDecay(NamedTuple):
    """A channel-wise decay of a chunk.

    Attributes:
        step: log decay, `[C, K]` float32.
        before: its sum up to the middle row, `[K]`.
        after: its sum beyond, `[K]`.
        runs: number of segment starts up to and including each token, `[C]` int32; None without restarts.
        is_extreme: whether one product of the scaled matrices does not give the pairs.
        front: what completes the factor on what reads, where it meets the state, `[K]` float32.
        tail: what completes the factor on what is written, likewise.
        kept: what the chunk leaves of the state, likewise.
    """

    step: Array
    before: Array
    after: Array
    runs: Array | None
    is_extreme: Array
    front: Array
    tail: Array
    kept: Array


def sum_rows(signs: Array, x: Array, dtype: Any) -> Array:
    """`signs @ x` for a matrix of -1, 0 and 1; for operands of bfloat16, `x` is taken to 16 bits of its mantissa."""
    if dtype == jnp.float32:
        return dot(signs, x, precise=True)
    signs, high = signs.astype(dtype), x.astype(dtype)
    return dot(signs, high) + dot(signs, (x - high.astype(jnp.float32)).astype(dtype))


def channel_decay(log_decay: Array, first: Array, starts: Array | None, is_mild: bool = False) -> ChannelDecay:
    """What concerns a chunk as a whole.

    Args:
        log_decay: `[C, K]` float32.
        first: its first row once more, `[K]`.
        starts: 1 at each token that starts a segment, `[C]` int32, or None.
        is_mild: whether the chunk is known not to be extreme.
    """
    step = jnp.maximum(log_decay, MIN_LOG_DECAY)
    row = iota(step.shape, 0)
    to_middle = jnp.sum(jnp.where((row > 0) & (row <= _MIDDLE), step, 0.0), axis=0)
    after = jnp.sum(jnp.where(row > _MIDDLE, step, 0.0), axis=0)
    before = jnp.maximum(first, MIN_LOG_DECAY) + to_middle
    runs = None if starts is None else jnp.cumsum(starts, axis=0)
    if is_mild:
        is_extreme = jnp.zeros((), jnp.bool_)
    else:
        is_extreme = jnp.min(jnp.minimum(to_middle, after)) < -_MAX_EXPONENT
        if runs is not None:  # segments that start inside of a chunk have no reference in common
            is_extreme = is_extreme | (jnp.max(runs) > jnp.min(runs))
    front = exp(jnp.where(is_extreme, 0.0, before))
    tail = exp(jnp.where(is_extreme, 0.0, after))
    kept = exp(before + after)
    if runs is not None:
        front = jnp.where(jnp.min(runs) == 0, front, 0.0)
        kept = jnp.where(jnp.max(runs) == 0, kept, 0.0)
    return ChannelDecay(step, before, after, runs, is_extreme, front, tail, kept)


def offsets(decay: ChannelDecay, dtype: Any) -> Array:
    """`G_r - G_m`, `[C, K]` float32; `dtype` is that of the operands of matrix products."""
    i, j = iota((CHUNK, CHUNK), 0), iota((CHUNK, CHUNK), 1)
    is_early = j <= _MIDDLE
    signs = jnp.where(j <= i, jnp.where(is_early, 0.0, 1.0), jnp.where(is_early, -1.0, 0.0))
    return sum_rows(signs, decay.step, dtype)


def read_factor(decay: ChannelDecay, offset: Array) -> Array:
    """Factor `[C, K]` on queries and erase keys."""
    shift = jnp.where(decay.is_extreme, decay.before, 0.0) * LOG2_E
    factor = exp2(offset * LOG2_E + shift[None])
    if decay.runs is None:
        return factor
    return jnp.where((decay.is_extreme & (decay.runs > 0))[:, None], 0.0, factor)


def write_factor(decay: ChannelDecay, offset: Array) -> Array:
    """Factor `[C, K]` on write keys."""
    shift = jnp.where(decay.is_extreme, decay.after, 0.0) * LOG2_E
    factor = exp2(shift[None] - offset * LOG2_E)
    if decay.runs is None:
        return factor
    return jnp.where((decay.is_extreme & (decay.runs < jnp.max(decay.runs)))[:, None], 0.0, factor)

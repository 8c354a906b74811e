"""Products of the token pairs of one chunk under its decay, and their transposes, as values inside a kernel.

With `G_r` the inclusive cumulative log decay, a pair of tokens `r >= s` is weighted by `exp(G_r - G_s)`. `exp(-G_s)` is
never formed: a decay of one number a token takes the exponential of the masked difference. A channel-wise one is inside
the products (see `channel_decay`); of it only the restarts concern the pairs here.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.common.triton.backend import dot, dot_nt, dot_tn, exp, iota, spread_like
from pallas_kernels.common.triton.decay import ChunkDecay, causal_mask


def weigh_pairs(pairs: Array, decay: ChunkDecay, strict: bool, reverse: bool = False) -> Array:
    """Pairs `[C, C]` that are causal and of one run, times `exp(G_r - G_s)`; zero elsewhere.

    In `reverse` the rows' tokens are the earlier.
    """
    mask = causal_mask(decay, strict, reverse)
    if decay.total is None or decay.fine is None:
        return jnp.where(mask, pairs, 0.0)

    def differences(x):
        rows, columns = spread_like(x[:, None], pairs), spread_like(x[None, :], pairs)
        return columns - rows if reverse else rows - columns

    difference = differences(decay.total) + differences(decay.fine)
    return pairs * exp(jnp.where(mask, difference, -jnp.inf))


def diagonal(x: Array, axis: int) -> Array:
    """The diagonal of a square matrix, by a sum along an axis."""
    return jnp.sum(jnp.where(iota(x.shape, 0) == iota(x.shape, 1), x, 0.0), axis=axis)


def pair_products(readers: Sequence[Array], key: Array, decay: ChunkDecay) -> tuple[Array, ...]:
    """`x_r . k_s exp(G_r - G_s)` for pairs `r >= s` of one run, zero elsewhere.

    Args:
        readers: matrices `[C, K]` whose rows read.
        key: `[C, K]`, whose rows are read.
        decay: the chunk's decay.

    Returns:
        One `[C, C]` float32 for each reader.
    """
    return tuple(weigh_pairs(dot_nt(x, key), decay, strict=False) for x in readers)


def pair_gradients(scores: Sequence[Array], readers: Sequence[Array], key: Array) -> tuple[tuple[Array, ...], Array]:
    """Transposes `pair_products`.

    Args:
        scores: cotangents `[C, C]` after `weigh_pairs`, one for each reader, in the dtype of `key`.
        readers: matrices `[C, K]`.
        key: `[C, K]`.

    Returns:
        Float32 gradients: `[C, K]` for each reader, `[C, K]` for the key. That of the decay follows from them.
    """
    return tuple(dot(d, key) for d in scores), sum_of(dot_tn(d, x) for d, x in zip(scores, readers))


def sum_of(terms: Iterable[Array], *more: Array) -> Array:
    """Sum of terms of which there is at least one."""
    return functools.reduce(jnp.add, [*terms, *more])


def sum_of_parts(size: int, block: int, terms: Callable[[Any], Any], start: Any) -> Any:
    """Sum of `terms(part)`, trees like `start`, over slices of `block` of `size` channels.

    A loop is what makes the compiler copy ahead and leave products in flight.
    """

    def add(n, sums):
        return jax.tree.map(jnp.add, sums, terms(pl.ds(n * block, block)))

    return lax.fori_loop(0, size // block, add, start)

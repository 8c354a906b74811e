"""Rows of a cache: which texts go on, and which take the place of those that have ended."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from rnnlib.models.decoder import DecoderCache


def gather_rows(cache: DecoderCache, rows: Int[Array | np.ndarray, " N"] | Sequence[int]) -> DecoderCache:
    """A cache whose row `i` is row `rows[i]` of another: beams that go on, or one prompt read for several samples.

    `insert_rows` is the other way: rows of one cache go into another.

    Args:
        cache: from `init_cache` or `extend`.
        rows: numbers of its rows, in any order, any of them more than once.

    Returns:
        A cache of N rows.

    Raises:
        ValueError: `rows` is not `[N]` with N >= 1, or has a number that is none of the cache's rows. Where jax traces
            the function that calls this, such a row is NaN instead, and so are its logits.
        TypeError: `rows` is not of integers.
    """
    numbers = _row_numbers("gather_rows", rows, cache)
    # Filled with NaN, and integers with the lowest.
    return jax.tree.map(lambda x: x.at[numbers].get(mode="fill", wrap_negative_indices=False) if x.ndim else x, cache)


def insert_rows(
    cache: DecoderCache, rows: Int[Array | np.ndarray, " N"] | Sequence[int], others: DecoderCache
) -> DecoderCache:
    """A cache whose row `rows[i]` is row `i` of another: a new text takes the place of one that has ended.

    Rows may have read different numbers of tokens, whatever the mixers are.

    Args:
        cache: from `init_cache` or `extend`.
        rows: numbers of its rows that are replaced, each once.
        others: a cache of N rows of the same model and `max_length`.

    Returns:
        A cache of as many rows as `cache`; those that `rows` does not name are as they were.

    Raises:
        ValueError: `rows` is not `[N]` with N >= 1, or has a number twice or one that is none of the cache's rows;
            `others` has another number of rows, or is of another model or `max_length`. Where jax traces the function
            that calls this, rows outside are left out and of one named twice either may stay.
        TypeError: `rows` is not of integers.
    """
    numbers = _row_numbers("insert_rows", rows, cache)
    if isinstance(numbers, np.ndarray) and np.unique(numbers).size != numbers.size:
        raise ValueError(f"insert_rows: rows are {numbers.tolist()}, expected each once")
    if str(jax.tree.structure(cache)) != str(jax.tree.structure(others)):
        raise ValueError("insert_rows: others is not of the model that cache is of")
    for x, y in zip(jax.tree.leaves(cache), jax.tree.leaves(others)):
        if x.ndim and y.shape != (numbers.size, *x.shape[1:]):
            raise ValueError(
                f"insert_rows: others has an array of shape {y.shape}, expected {(numbers.size, *x.shape[1:])}: one "
                "row for each of rows, of the same model and max_length"
            )

    def put(x: Array, y: Array) -> Array:
        return x.at[numbers].set(y.astype(x.dtype), mode="drop", wrap_negative_indices=False) if x.ndim else x

    return jax.tree.map(put, cache, others)


def _row_numbers(function: str, rows: Any, cache: DecoderCache) -> Any:
    numbers = rows if isinstance(rows, jax.core.Tracer) else np.asarray(rows)
    if numbers.ndim != 1 or not numbers.size:
        raise ValueError(f"{function}: rows has shape {numbers.shape}, expected [N], at least one")
    if not jnp.issubdtype(numbers.dtype, jnp.integer):
        raise TypeError(f"{function}: rows has dtype {numbers.dtype}, expected an integer dtype")
    # Arrays are [B, ...], but for what parts of one's own may share between rows.
    batch = min((x.shape[0] for x in jax.tree.leaves(cache) if x.ndim), default=0)
    if isinstance(numbers, np.ndarray) and (numbers.min() < 0 or numbers.max() >= batch):
        raise ValueError(f"{function}: rows are {numbers.min()} to {numbers.max()}, expected them in [0, {batch})")
    return numbers

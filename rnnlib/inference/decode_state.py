"""Slots of an `Engine`: rows of caches, and the compiled programs by which prompts join and every slot advances."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Int

from rnnlib.inference.delayed_updates import after_tokens, delay_updates, flushed
from rnnlib.inference.generation import draw_filtered, have_nan, likeliest_token, prompt_positions
from rnnlib.models.decoder import DecoderCache

# Stop tokens that a text may have.
MAX_STOP_TOKENS = 8


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


class DecodeState(NamedTuple):
    """What every slot goes on from; arrays of one entry a slot."""

    logits: Array
    likeliest: Array  # token
    cache: DecoderCache
    key: Array
    place: Array  # with the seed, what decides a text's draws: its row in `generate`
    made: Array
    limit: Array
    divisor: Array  # 0 takes the likeliest token
    top_k: Array
    top_p: Array
    stop: Array  # [slots, MAX_STOP_TOKENS], -1 for none
    ended: Array


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def insert_prefill(
    graphdef, state, rows: DecodeState, slots: Array, tokens: Array, segment_ids: Array, empty, values: dict[str, Any]
):
    """The rows, which are donated, with prompts read into some of them."""
    model = nnx.merge(graphdef, state)
    positions = prompt_positions(segment_ids)
    hidden, cache = model.extend_hidden(tokens, empty, segment_ids=segment_ids, positions=positions)
    logits = model.logits(hidden[:, -1:])[:, 0]
    values = values | {"logits": logits, "likeliest": likeliest_token(logits)}
    changed = {name: getattr(rows, name).at[slots].set(value) for name, value in values.items()}
    return rows._replace(cache=insert_rows(rows.cache, slots, cache), **changed)


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=4)
def decode_steps(graphdef, size: int, draws: str, state, rows: DecodeState, limit: Array | int):
    """At most `limit <= size` tokens a row, until one ends or has NaN for logits; the rows are donated.

    Returns:
        How many tokens; the tokens and their log-probabilities `[slots, size]`; the rows `[slots]` that have no next
        token; the rows to go on from.
    """
    ended_before = rows.ended

    def stuck(rows):
        return have_nan(rows.logits, rows.likeliest) & ~rows.ended

    def unfinished(loop):
        number, _, _, rows = loop
        return (number < limit) & (rows.ended == ended_before).all() & ~stuck(rows).any()

    def step(loop):
        number, tokens, scores, rows = loop
        token = _next_tokens(rows, draws)
        chosen = jnp.take_along_axis(rows.logits, token[:, None], axis=-1)[:, 0]
        score = (chosen - _log_sum(rows.logits, rows.likeliest)).astype(jnp.float32)
        made = rows.made + 1
        ended = rows.ended | (made >= rows.limit) | (token[:, None] == rows.stop).any(axis=-1)
        model = nnx.merge(graphdef, state)
        logits, cache = model.extend(token[:, None], after_tokens(model, rows.cache, number))
        logits = logits[:, 0]
        rows = rows._replace(logits=logits, likeliest=likeliest_token(logits), cache=cache, made=made, ended=ended)
        return number + 1, tokens.at[:, number].set(token), scores.at[:, number].set(score), rows

    shape = (rows.ended.shape[0], size)
    model = nnx.merge(graphdef, state)
    rows = rows._replace(cache=delay_updates(model, rows.cache))
    start = (jnp.int32(0), jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32), rows)
    number, tokens, scores, rows = jax.lax.while_loop(unfinished, step, start)
    return number, tokens, scores, stuck(rows), rows._replace(cache=flushed(model, rows.cache, number))


def _log_sum(logits: Array, likeliest: Array) -> Array:
    """`jax.nn.logsumexp` of rows whose largest logit is known, so that they are read once."""
    largest = jnp.take_along_axis(logits, likeliest[:, None], axis=-1)
    largest = jnp.where(jnp.isfinite(largest), largest, 0)
    return jnp.log(jnp.sum(jnp.exp(logits - largest), axis=-1)) + largest[:, 0]


def _next_tokens(rows: DecodeState, draws: str) -> Array:
    """One token a row; what a row gets does not depend on what others ask for."""
    if draws == "greedy":
        return rows.likeliest
    # As `stream` draws for the row of this place.
    fold = jax.random.fold_in
    keys = jax.vmap(lambda key, made, place: fold(fold(key, made), place))(rows.key, rows.made, rows.place)
    greedy = rows.divisor == 0
    divisor = jnp.where(greedy, 1.0, rows.divisor)[:, None]
    logits = (rows.logits - jnp.max(rows.logits, axis=-1, keepdims=True)) / divisor
    token = jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)
    if draws == "filter":
        by_filter = draw_filtered(keys, logits, rows.top_k[:, None], rows.top_p[:, None])
        filtered = (rows.top_k < rows.logits.shape[-1]) | (rows.top_p <= 1)
        token = jnp.where(filtered, by_filter, token)
    return jnp.where(greedy, rows.likeliest, token)

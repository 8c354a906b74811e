"""Slots of an `Engine`, and the compiled programs by which prompts join and every slot advances."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from rnnlib.inference.cache_rows import insert_rows
from rnnlib.inference.delayed_updates import after_tokens, delay_updates, flushed
from rnnlib.inference.prompts import prompt_positions
from rnnlib.inference.sampling import draw_filtered, have_nan, likeliest_token
from rnnlib.models.decoder import DecoderCache

# Stop tokens that a text may have.
MAX_STOP_TOKENS = 8


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

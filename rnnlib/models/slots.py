"""The compiled programs of a `Decoder`: prompts join the slots, and every slot advances by some tokens."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from rnnlib.models.decoder import DecoderCache, put_rows
from rnnlib.models.generation import draw_filtered, likeliest_token, prompt_positions
from rnnlib.models.waiting import after_tokens, defer_writes, settled

# Stop tokens that a text may have.
MAX_STOP_TOKENS = 8


class Rows(NamedTuple):
    """What every slot goes on from; arrays of one entry a slot."""

    logits: Array
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
def join(graphdef, state, rows: Rows, slots: Array, tokens: Array, segment_ids: Array, empty, values: dict[str, Any]):
    """The rows, which are donated, with prompts read into some of them."""
    model = nnx.merge(graphdef, state)
    positions = prompt_positions(segment_ids)
    hidden, cache = model.extend_hidden(tokens, empty, segment_ids=segment_ids, positions=positions)
    values = values | {"logits": model.logits(hidden[:, -1:])[:, 0]}
    changed = {name: getattr(rows, name).at[slots].set(value) for name, value in values.items()}
    return rows._replace(cache=put_rows(rows.cache, slots, cache), **changed)


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=4)
def advance(graphdef, size: int, draws: str, state, rows: Rows, limit: Array | int):
    """At most `limit <= size` tokens a row, until one ends or has NaN for logits; the rows are donated.

    Returns:
        How many tokens; the tokens and their log-probabilities `[slots, size]`; the rows `[slots]` that have no next
        token; the rows to go on from.
    """
    ended_before = rows.ended

    def stuck(rows):
        return jnp.isnan(rows.logits).any(axis=-1) & ~rows.ended

    def unfinished(loop):
        number, _, _, rows = loop
        return (number < limit) & (rows.ended == ended_before).all() & ~stuck(rows).any()

    def step(loop):
        number, tokens, scores, rows = loop
        token = _next_tokens(rows, draws)
        chosen = jnp.take_along_axis(rows.logits, token[:, None], axis=-1)[:, 0]
        score = (chosen - jax.nn.logsumexp(rows.logits, axis=-1)).astype(jnp.float32)
        made = rows.made + 1
        ended = rows.ended | (made >= rows.limit) | (token[:, None] == rows.stop).any(axis=-1)
        model = nnx.merge(graphdef, state)
        logits, cache = model.extend(token[:, None], after_tokens(model, rows.cache, number))
        rows = rows._replace(logits=logits[:, 0], cache=cache, made=made, ended=ended)
        return number + 1, tokens.at[:, number].set(token), scores.at[:, number].set(score), rows

    shape = (rows.ended.shape[0], size)
    model = nnx.merge(graphdef, state)
    rows = rows._replace(cache=defer_writes(model, rows.cache))
    start = (jnp.int32(0), jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32), rows)
    number, tokens, scores, rows = jax.lax.while_loop(unfinished, step, start)
    return number, tokens, scores, stuck(rows), rows._replace(cache=settled(model, rows.cache, number))


def _next_tokens(rows: Rows, draws: str) -> Array:
    """One token a row; what a row gets does not depend on what others ask for."""
    likeliest = likeliest_token(rows.logits)
    if draws == "greedy":
        return likeliest
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
    return jnp.where(greedy, likeliest, token)

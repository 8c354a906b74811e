"""Continuous batching: texts join and leave a fixed number of slots while others go on."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from rnnlib.fields import PositiveInteger, Range, check_value
from rnnlib.models.decoder import DecoderCache, DecoderLM, put_rows
from rnnlib.models.generation import PROMPT_BUCKET, NaNLogitsError, Sampling, draw_filtered, pad_prompts, seed_key

# Stop tokens that a text may have.
MAX_STOP_TOKENS = 8


@dataclasses.dataclass(eq=False)
class Continuation:
    """A text that a `Decoder` continues; it grows with `Decoder.step`.

    Attributes:
        prompt: the tokens that it began with.
        tokens: the new tokens so far, a stop token at the end among them.
        log_probabilities: of each new token under the model: the log-softmax of its logits, before `temperature`,
            `top_k` and `top_p`.
        finish: why it has ended: "stop" (a stop token), "length" (`max_new_tokens`), "removed" (by
            `Decoder.remove`), "nan" (its logits were NaN); None while it goes on.
    """

    prompt: tuple[int, ...]
    tokens: list[int] = dataclasses.field(default_factory=list)
    log_probabilities: list[float] = dataclasses.field(default_factory=list)
    finish: Literal["stop", "length", "removed", "nan"] | None = None


class _Rows(NamedTuple):
    """What every slot goes on from; arrays of one entry a slot."""

    logits: Array
    cache: DecoderCache
    key: Array
    made: Array
    limit: Array
    divisor: Array  # 0 takes the likeliest token
    top_k: Array
    top_p: Array
    stop: Array  # [slots, MAX_STOP_TOKENS], -1 for none
    ended: Array


class Decoder:
    """Continues texts in a fixed number of slots: each joins when it is added and leaves when it ends.

    What a text gets depends on its prompt and options, not on the slot or the other texts (up to rounding): it is what
    `generate(model, [prompt], ...)` gives alone. Reading a prompt compiles once for each power of two of its length;
    decoding compiles once for greedy texts, once for draws and once for draws by `top_k` or `top_p`.

    Example:
        >>> decoder = Decoder(model, slots=2, max_length=256)
        >>> first = decoder.add([3, 1, 4], max_new_tokens=20, temperature=0)
        >>> second = decoder.add([1, 5], max_new_tokens=50, seed=7, stop_tokens=(0,))
        >>> while decoder.active:
        ...     finished = decoder.step()
        >>> len(first.tokens)
        20
    """

    def __init__(self, model: DecoderLM, *, slots: int, max_length: int):
        """Makes empty slots.

        Args:
            model: the language model, as it is now.
            slots: texts that are decoded together.
            max_length: most tokens of a text, prompt and new ones together. Only layers of full attention take memory
                in proportion to it.

        Raises:
            ValueError: `slots` or `max_length` is no integer of at least 1.
        """
        for name, value in (("slots", slots), ("max_length", max_length)):
            check_value("Decoder", name, value, PositiveInteger)
        self._graphdef, self._state = nnx.split(model)
        self._model = model
        self.slots = slots
        self.max_length = max_length
        self._vocabulary_size = model.config.vocabulary_size
        # Prompts are padded, but to no more than the cache holds; of a text that goes on, padding is overwritten first.
        self._capacity = -(-max_length // PROMPT_BUCKET) * PROMPT_BUCKET
        self._texts: list[Continuation | None] = [None] * slots
        self._sampling: list[Sampling] = [Sampling(temperature=0)] * slots
        logits_dtype = jnp.promote_types(jnp.float32, model.config.compute_dtype)
        self._rows = _Rows(
            logits=jnp.zeros([slots, self._vocabulary_size], logits_dtype),
            cache=model.init_cache(slots, self._capacity),
            key=jnp.stack([seed_key(0)] * slots),
            made=jnp.zeros(slots, jnp.int32),
            limit=jnp.zeros(slots, jnp.int32),
            divisor=jnp.zeros(slots, jnp.float32),
            top_k=jnp.full(slots, self._vocabulary_size, jnp.int32),
            top_p=jnp.full(slots, 2.0, jnp.float32),
            stop=jnp.full([slots, MAX_STOP_TOKENS], -1, jnp.int32),
            ended=jnp.ones(slots, bool),
        )

    @property
    def active(self) -> int:
        """Texts that go on."""
        return sum(text is not None for text in self._texts)

    @property
    def free(self) -> int:
        """Slots that a text may join."""
        return self.slots - self.active

    def add(
        self,
        prompt_tokens: Sequence[int] | np.ndarray,
        *,
        max_new_tokens: int,
        temperature: float | int = 1.0,
        top_k: int | None = None,
        top_p: float | int | None = None,
        seed: int = 0,
        stop_tokens: Sequence[int] = (),
    ) -> Continuation:
        """Reads a prompt into a free slot.

        Args:
            prompt_tokens: token numbers, at least one.
            max_new_tokens: tokens to add.
            temperature: see `Sampling`; 0 is greedy.
            top_k: see `Sampling`.
            top_p: see `Sampling`.
            seed: of the draws, in [0, 2**63).
            stop_tokens: at most eight; the text ends after any of them.

        Returns:
            The text, to which `step` adds tokens.

        Raises:
            ValueError: an option is out of range, the prompt is empty or has a token outside the vocabulary, prompt and
                new tokens are more than `max_length`, or no slot is free.
        """
        check_value("Decoder.add", "max_new_tokens", max_new_tokens, PositiveInteger)
        check_value("Decoder.add", "seed", seed, Annotated[int, Range(at_least=0, below=2**63)])
        sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
        if len(stop_tokens) > MAX_STOP_TOKENS:
            raise ValueError(f"Decoder.add: {len(stop_tokens)} stop_tokens, expected at most {MAX_STOP_TOKENS}")
        for token in stop_tokens:
            check_value(
                "Decoder.add", "stop_tokens", token, Annotated[int, Range(at_least=0, below=self._vocabulary_size)]
            )
        prompt = np.asarray(prompt_tokens).tolist()
        pad_prompts([prompt], self._vocabulary_size)  # checks it
        size = len(prompt)
        if size + max_new_tokens > self.max_length:
            raise ValueError(
                f"Decoder.add: a prompt of {size} tokens and {max_new_tokens} new ones, expected at most "
                f"max_length = {self.max_length} together"
            )
        if not self.free:
            raise ValueError(f"Decoder.add: all {self.slots} slots are taken, expected a free one: step until one is")
        slot = self._texts.index(None)
        bucket = PROMPT_BUCKET * 2 ** max(0, math.ceil(math.log2(size / PROMPT_BUCKET)))
        tokens, segment_ids = pad_prompts([prompt], self._vocabulary_size, multiple=min(bucket, self._capacity))
        stop = np.full(MAX_STOP_TOKENS, -1, np.int32)
        stop[: len(stop_tokens)] = stop_tokens
        options = {
            "key": seed_key(int(seed)),
            "made": jnp.int32(0),
            "limit": jnp.int32(max_new_tokens),
            "divisor": jnp.float32(sampling.divisor or 0.0),
            "top_k": jnp.int32(min(top_k or self._vocabulary_size, self._vocabulary_size)),
            "top_p": jnp.float32(2.0 if top_p is None else top_p),
            "stop": jnp.asarray(stop),
            "ended": jnp.asarray(False),
        }
        empty = self._model.init_cache(1, self._capacity)
        self._rows = _join(
            self._graphdef, self._state, self._rows, jnp.asarray([slot]), tokens, segment_ids, empty, options
        )
        text = Continuation(tuple(prompt))
        self._texts[slot], self._sampling[slot] = text, sampling
        return text

    def step(self, max_tokens: int = 16) -> list[Continuation]:
        """Adds at most `max_tokens` tokens to each text; returns sooner when one ends, so that another may join.

        Args:
            max_tokens: of each text.

        Returns:
            The texts that have ended, whose slots are free; empty where none has.

        Raises:
            ValueError: `max_tokens` is no integer of at least 1.
            NaNLogitsError: a text's logits are NaN. It has left ("nan"); the others go on with the next call.
        """
        check_value("Decoder.step", "max_tokens", max_tokens, PositiveInteger)
        texts = [(slot, text) for slot, text in enumerate(self._texts) if text is not None]
        if not texts:
            return []
        size = -(-max_tokens // PROMPT_BUCKET) * PROMPT_BUCKET
        used = [self._sampling[slot] for slot, _ in texts]
        filtered = any(s.top_k is not None or s.top_p is not None for s in used if not s.greedy)
        draws = "filter" if filtered else "greedy" if all(s.greedy for s in used) else "draw"
        number, tokens, scores, stuck, self._rows = _advance(
            self._graphdef, size, draws, self._state, self._rows, max_tokens
        )
        count, stuck_rows = int(number), np.asarray(stuck)
        new_tokens, new_scores = np.asarray(tokens)[:, :count], np.asarray(scores)[:, :count]
        ended = np.asarray(self._rows.ended)
        finished = []
        for slot, text in texts:
            text.tokens += new_tokens[slot].tolist()
            text.log_probabilities += new_scores[slot].tolist()
            if ended[slot]:
                is_stop = text.tokens[-1] in np.asarray(self._rows.stop[slot])
                self._release(slot, "stop" if is_stop else "length")
                finished.append(text)
        if stuck_rows.any():
            failed = [slot for slot, text in texts if stuck_rows[slot] and text.finish is None]
            for slot in failed:
                self._release(slot, "nan")
            raise NaNLogitsError(
                f"Decoder.step: the model's logits are NaN for the text(s) in slot(s) {failed}, expected numbers: are "
                "its weights finite?"
            )
        return finished

    def remove(self, text: Continuation) -> None:
        """Ends a text and frees its slot; ValueError where it is none of those that go on."""
        if not any(text is other for other in self._texts):
            raise ValueError("Decoder.remove: text has ended or is of another decoder, expected one that goes on")
        self._release(next(slot for slot, other in enumerate(self._texts) if other is text), "removed")

    def _release(self, slot: int, finish: Literal["stop", "length", "removed", "nan"]) -> None:
        text = self._texts[slot]
        if text is not None:
            text.finish = finish
        self._texts[slot] = None
        self._rows = self._rows._replace(ended=self._rows.ended.at[slot].set(True))


@functools.partial(jax.jit, static_argnums=0)
def _join(graphdef, state, rows: _Rows, slot: Array, tokens: Array, segment_ids: Array, empty, options: dict[str, Any]):
    """The rows with a prompt read into one of them."""
    model = nnx.merge(graphdef, state)
    # Positions count from the prompt's first token, not from the padding's.
    positions = jnp.maximum(jnp.cumsum(segment_ids, axis=1, dtype=jnp.int32) - 1, 0)
    hidden, cache = model.extend_hidden(tokens, empty, segment_ids=segment_ids, positions=positions)
    options = options | {"logits": model.logits(hidden[:, -1:])[0, 0]}
    changed = {name: getattr(rows, name).at[slot[0]].set(value) for name, value in options.items()}
    return rows._replace(cache=put_rows(rows.cache, slot, cache), **changed)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _advance(graphdef, size: int, draws: str, state, rows: _Rows, limit: Array | int):
    """At most `limit <= size` tokens a row, until one ends or has NaN for logits.

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
        logits, cache = nnx.merge(graphdef, state).extend(token[:, None], rows.cache)
        rows = rows._replace(logits=logits[:, 0], cache=cache, made=made, ended=ended)
        return number + 1, tokens.at[:, number].set(token), scores.at[:, number].set(score), rows

    shape = (rows.ended.shape[0], size)
    start = (jnp.int32(0), jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32), rows)
    number, tokens, scores, rows = jax.lax.while_loop(unfinished, step, start)
    return number, tokens, scores, stuck(rows), rows


def _next_tokens(rows: _Rows, draws: str) -> Array:
    """One token a row; what a row gets does not depend on what others ask for."""
    likeliest = jnp.argmax(rows.logits, axis=-1).astype(jnp.int32)
    if draws == "greedy":
        return likeliest
    # As `generate` draws for its first row.
    keys = jax.vmap(lambda key, made: jax.random.fold_in(jax.random.fold_in(key, made), 0))(rows.key, rows.made)
    greedy = rows.divisor == 0
    divisor = jnp.where(greedy, 1.0, rows.divisor)[:, None]
    logits = (rows.logits - jnp.max(rows.logits, axis=-1, keepdims=True)) / divisor
    token = jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)
    if draws == "filter":
        by_filter = draw_filtered(keys, logits, rows.top_k[:, None], rows.top_p[:, None])
        filtered = (rows.top_k < rows.logits.shape[-1]) | (rows.top_p <= 1)
        token = jnp.where(filtered, by_filter, token)
    return jnp.where(greedy, likeliest, token)

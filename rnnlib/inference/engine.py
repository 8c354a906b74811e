"""Continuous batching: texts join an `Engine` and leave it while others go on."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from rnnlib.fields import PositiveInteger, Range, check_value
from rnnlib.inference.decode_state import MAX_STOP_TOKENS, DecodeState, decode_steps, insert_prefill
from rnnlib.inference.prompts import PROMPT_BUCKET, pad_prompts, rounded_up
from rnnlib.inference.sampling import NaNLogitsError, Sampling, Seed, seed_key
from rnnlib.models.decoder import DecoderLM


@dataclasses.dataclass(eq=False)
class Continuation:
    """A text that an `Engine` continues; it grows with `Engine.step`.

    Attributes:
        prompt: the tokens that it began with.
        tokens: the new tokens so far, a stop token at the end among them.
        log_probabilities: of each new token under the model: the log-softmax of its logits, before `temperature`,
            `top_k` and `top_p`.
        finish_reason: why it has ended: "stop" (a stop token), "length" (`max_new_tokens`), "removed" (by
            `Engine.remove`), "nan" (its logits were NaN); None while it goes on.
    """

    prompt: tuple[int, ...]
    tokens: list[int] = dataclasses.field(default_factory=list)
    log_probabilities: list[float] = dataclasses.field(default_factory=list)
    finish_reason: Literal["stop", "length", "removed", "nan"] | None = None


class _Asked(NamedTuple):
    """A text that is to join: its prompt, how it is drawn, and its entries in `DecodeState`."""

    prompt: list[int]
    sampling: Sampling
    values: dict[str, Any]


class Engine:
    """Continues texts in a fixed number of slots: each joins when it is added and leaves when it ends.

    What a text gets depends on its prompt and options, not on the slot or the other texts (up to rounding): it is what
    `generate(model, [prompt], ...)` gives alone. Reading a prompt compiles once for each power of two of its length;
    decoding compiles once for greedy texts, once for draws and once for draws by `top_k` or `top_p`.

    Examples:
        >>> engine = Engine(model, slots=2, max_length=256)
        >>> first = engine.add([3, 1, 4], max_new_tokens=20, temperature=0)
        >>> second = engine.add([1, 5], max_new_tokens=50, seed=7, stop_tokens=(0,))
        >>> while engine.active:
        ...     finished = engine.step()
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
            check_value("Engine", name, value, PositiveInteger)
        self._graphdef, self._state = nnx.split(model)
        self._model = model
        self.slots = slots
        self.max_length = max_length
        self._vocabulary_size = model.config.vocabulary_size
        # Prompts are padded, but to no more than the cache holds; of a text that goes on, padding is overwritten first.
        self._capacity = rounded_up(max_length, PROMPT_BUCKET)
        self._texts: list[Continuation | None] = [None] * slots
        self._sampling: list[Sampling] = [Sampling(temperature=0)] * slots
        logits_dtype = jnp.promote_types(jnp.float32, model.config.compute_dtype)
        self._rows = DecodeState(
            logits=jnp.zeros([slots, self._vocabulary_size], logits_dtype),
            likeliest=jnp.zeros(slots, jnp.int32),
            cache=model.init_cache(slots, self._capacity),
            key=jnp.stack([seed_key(0)] * slots),
            place=jnp.zeros(slots, jnp.int32),
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
        asked = self._asked(
            prompt_tokens,
            max_new_tokens=max_new_tokens,
            sampling=Sampling(temperature=temperature, top_k=top_k, top_p=top_p),
            seed=seed,
            stop_tokens=stop_tokens,
        )
        if not self.free:
            raise ValueError(f"Engine.add: all {self.slots} slots are taken, expected a free one: step until one is")
        return self._join([self._texts.index(None)], [asked])[0]

    def add_all(self, texts: Sequence[dict[str, Any]], *, owner: str = "Engine.add_all") -> list[Continuation]:
        """Reads several prompts into free slots at once.

        Args:
            texts: for each the arguments of `add` by name, and perhaps `place`, an integer that with the seed decides
                the draws; 0 is what `add` takes.
            owner: who asks, for messages.

        Returns:
            The texts, to which `step` adds tokens.

        Raises:
            ValueError: as `add`, or there are fewer free slots than texts; then no text joins.
        """
        asked = []
        for text in texts:
            drawn = {name: text[name] for name in ("temperature", "top_k", "top_p") if name in text}
            rest: dict[str, Any] = {"seed": 0, "stop_tokens": ()}
            rest |= {name: value for name, value in text.items() if name not in drawn}
            asked.append(self._asked(sampling=Sampling(**drawn), owner=owner, **rest))
        free = [slot for slot, text in enumerate(self._texts) if text is None]
        if len(asked) > len(free):
            raise ValueError(
                f"{owner}: {len(asked)} texts and {len(free)} free slots, expected no more texts than slots"
            )
        return self._join(free[: len(asked)], asked) if asked else []

    def _asked(
        self,
        prompt_tokens: Any,
        *,
        max_new_tokens: int,
        sampling: Sampling,
        seed: int,
        stop_tokens: Sequence[int],
        place: int = 0,
        owner: str = "Engine.add",
    ) -> "_Asked":
        """What a text asks for, checked."""
        check_value(owner, "max_new_tokens", max_new_tokens, PositiveInteger)
        check_value(owner, "seed", seed, Seed)
        if len(stop_tokens) > MAX_STOP_TOKENS:
            raise ValueError(f"{owner}: {len(stop_tokens)} stop_tokens, expected at most {MAX_STOP_TOKENS}")
        for token in stop_tokens:
            check_value(owner, "stop_tokens", token, Annotated[int, Range(at_least=0, below=self._vocabulary_size)])
        prompt = np.asarray(prompt_tokens).tolist()
        pad_prompts([prompt], self._vocabulary_size)  # checks it
        if len(prompt) + max_new_tokens > self.max_length:
            raise ValueError(
                f"{owner}: a prompt of {len(prompt)} tokens and {max_new_tokens} new ones, expected at most "
                f"max_length = {self.max_length} together"
            )
        stop = np.full(MAX_STOP_TOKENS, -1, np.int32)
        stop[: len(stop_tokens)] = stop_tokens
        vocabulary = self._vocabulary_size
        values = {
            "key": seed_key(int(seed)),
            "place": jnp.int32(place),
            "made": jnp.int32(0),
            "limit": jnp.int32(max_new_tokens),
            "divisor": jnp.float32(sampling.divisor or 0.0),
            "top_k": jnp.int32(min(sampling.top_k or vocabulary, vocabulary)),
            "top_p": jnp.float32(2.0 if sampling.top_p is None else sampling.top_p),
            "stop": jnp.asarray(stop),
            "ended": jnp.asarray(False),
        }
        return _Asked(prompt, sampling, values)

    def _join(self, slots: list[int], asked: list["_Asked"]) -> list[Continuation]:
        """Reads prompts into free slots, all at once."""
        size = max(len(text.prompt) for text in asked)
        bucket = PROMPT_BUCKET * 2 ** max(0, math.ceil(math.log2(size / PROMPT_BUCKET)))
        prompts = [text.prompt for text in asked]
        tokens, segment_ids = pad_prompts(prompts, self._vocabulary_size, multiple=min(bucket, self._capacity))
        values = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(text.values for text in asked))
        empty = self._model.init_cache(len(slots), self._capacity)
        rows = jnp.asarray(slots)
        self._rows = insert_prefill(self._graphdef, self._state, self._rows, rows, tokens, segment_ids, empty, values)
        texts = [Continuation(tuple(prompt)) for prompt in prompts]
        for slot, text, of in zip(slots, texts, asked, strict=True):
            self._texts[slot], self._sampling[slot] = text, of.sampling
        return texts

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
        check_value("Engine.step", "max_tokens", max_tokens, PositiveInteger)
        texts = [(slot, text) for slot, text in enumerate(self._texts) if text is not None]
        if not texts:
            return []
        size = rounded_up(max_tokens, PROMPT_BUCKET)
        used = [self._sampling[slot] for slot, _ in texts]
        filtered = any(s.top_k is not None or s.top_p is not None for s in used if not s.greedy)
        draws = "filter" if filtered else "greedy" if all(s.greedy for s in used) else "draw"
        number, tokens, scores, stuck, self._rows = decode_steps(
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
            failed = [slot for slot, text in texts if stuck_rows[slot] and text.finish_reason is None]
            for slot in failed:
                self._release(slot, "nan")
            raise NaNLogitsError.of("Engine.step", f"the text(s) in slot(s) {failed}")
        return finished

    def remove(self, text: Continuation) -> None:
        """Ends a text and frees its slot; ValueError where it is none of those that go on."""
        if not any(text is other for other in self._texts):
            raise ValueError("Engine.remove: text has ended or is of another engine, expected one that goes on")
        self._release(next(slot for slot, other in enumerate(self._texts) if other is text), "removed")

    def _release(self, slot: int, finish_reason: Literal["stop", "length", "removed", "nan"]) -> None:
        text = self._texts[slot]
        if text is not None:
            text.finish_reason = finish_reason
        self._texts[slot] = None
        self._rows = self._rows._replace(ended=self._rows.ended.at[slot].set(True))

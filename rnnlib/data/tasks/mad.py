"""The six tasks of MAD (Poli et al. 2024, "Mechanistic design and scaling of hybrid architectures"; DeltaNet, table 2).

The defaults are MAD's base settings; it varies vocabulary size, sequence length, number of training examples, noise and
tokens to copy around them. Recall is in its multi-query form, as in that benchmark.
"""

import dataclasses
import functools
from typing import Annotated

import numpy as np

from rnnlib.data.tasks.base import Example, Task, TaskSplit
from rnnlib.fields import Fraction, NaturalNumber, PositiveInteger, Range


def _check_length(task: Task, minimum: int) -> None:
    if task.sequence_length < minimum:
        raise ValueError(f"sequence_length must be at least {minimum}; got {task.sequence_length}")


def _recall_weights(
    split: TaskSplit, everywhere: bool, targets: np.ndarray, query_ids: np.ndarray, pad: int | None
) -> np.ndarray:
    """Weights of a recall task: in training every next token may count, otherwise only the recalled ones."""
    if split != "train" or not everywhere:
        return (query_ids > 0).astype(np.float32)
    weights = np.ones(len(targets), np.float32)
    weights[-1] = 0  # nothing follows the last token
    return weights if pad is None else weights * (targets != pad)


@dataclasses.dataclass(frozen=True, kw_only=True)
class InContextRecall(Task):
    """Key-value pairs; where a key comes again its value is to be predicted.

    Keys are the lower half of the vocabulary, values the upper half. Each of the T / 2 slots holds a random key and its
    value, drawn when the key first comes (so two keys may share one); the last slot holds a key shown before.
    With noise a slot instead holds two noise tokens, from the end of the vocabulary.

    Attributes:
        sequence_length: T, even.
        vocabulary_size: V, noise tokens included.
        noise_fraction: probability that a slot is noise. One slot never is.
        noise_vocabulary_size: number of noise tokens.
        train_on_all_tokens: in training every next token has loss weight 1, as in MAD; otherwise only the answers.
    """

    sequence_length: PositiveInteger = 128
    vocabulary_size: PositiveInteger = 16
    noise_fraction: Fraction = 0.0
    noise_vocabulary_size: NaturalNumber = 0
    train_on_all_tokens: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sequence_length % 2 or self.sequence_length < 4:
            raise ValueError(f"sequence_length must be even and at least 4; got {self.sequence_length}")
        if self.noise_fraction and not self.noise_vocabulary_size:
            raise ValueError(f"noise_fraction={self.noise_fraction} needs noise_vocabulary_size of at least 1")
        if self.vocabulary_size - self.noise_vocabulary_size < 2:
            raise ValueError(
                f"vocabulary_size must leave a key and a value beside the noise; got {self.vocabulary_size}"
            )

    def generate(self, rng: np.random.Generator, split: TaskSplit) -> Example:
        """Draws the pairs."""
        symbols = self.vocabulary_size - self.noise_vocabulary_size
        slots = self.sequence_length // 2
        keys = rng.integers(symbols // 2, size=slots)
        values = rng.integers(symbols // 2, symbols, size=slots)
        is_noise = rng.random(slots) < self.noise_fraction
        is_noise[int(rng.integers(slots - 1))] = is_noise[-1] = False
        keys[-1] = rng.choice(np.unique(keys[:-1][~is_noise[:-1]]))
        shown: dict[int, int] = {}
        query_ids = np.zeros(self.sequence_length, np.int32)
        for i in np.flatnonzero(~is_noise).tolist():
            key = int(keys[i])
            if key in shown:
                values[i] = shown[key]
                query_ids[2 * i] = query_ids.max() + 1
            else:
                shown[key] = int(values[i])
        text = np.stack([keys, values], 1)
        text[is_noise] = rng.integers(symbols, self.vocabulary_size, size=(is_noise.sum(), 2)) if is_noise.any() else 0
        inputs = text.ravel()
        targets = np.append(inputs[1:], 0)
        weights = _recall_weights(split, self.train_on_all_tokens, targets, query_ids, None)
        return self._finish(inputs, targets, query_ids, weights)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoisyRecall(InContextRecall):
    """In-context recall with noise tokens between the pairs."""

    vocabulary_size: PositiveInteger = 32
    noise_fraction: Fraction = 0.2
    noise_vocabulary_size: NaturalNumber = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class FuzzyRecall(Task):
    """In-context recall where keys and values are runs of one to three different tokens.

    In training the number of tokens of each key and value is uniform; in evaluation keys are as long as they may be.
    The last pair repeats one shown before. Padding, the last id of the vocabulary, fills the example at its beginning.

    Attributes:
        sequence_length: T.
        vocabulary_size: V, padding included; the rest is half keys, half values.
        max_key_tokens: longest key.
        max_value_tokens: longest value.
        train_on_all_tokens: in training every next token has loss weight 1, as in MAD; otherwise only the answers.
    """

    sequence_length: PositiveInteger = 128
    vocabulary_size: PositiveInteger = 16
    max_key_tokens: PositiveInteger = 3
    max_value_tokens: PositiveInteger = 3
    train_on_all_tokens: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        symbols = self.vocabulary_size - 1
        if symbols // 2 < self.max_key_tokens or symbols - symbols // 2 < self.max_value_tokens:
            raise ValueError(
                f"vocabulary_size={self.vocabulary_size} has too few keys or values for max_key_tokens="
                f"{self.max_key_tokens} and max_value_tokens={self.max_value_tokens}"
            )
        _check_length(self, 2 * (self.max_key_tokens + self.max_value_tokens) + 1)

    def generate(self, rng: np.random.Generator, split: TaskSplit) -> Example:
        """Draws the pair that is asked for last, then pairs up to the length."""
        symbols = self.vocabulary_size - 1

        def key() -> tuple[int, ...]:
            count = int(rng.integers(1, self.max_key_tokens + 1)) if split == "train" else self.max_key_tokens
            return tuple(rng.choice(symbols // 2, count, replace=False).tolist())

        def value() -> tuple[int, ...]:
            count = int(rng.integers(1, self.max_value_tokens + 1))
            return tuple((symbols // 2 + rng.choice(symbols - symbols // 2, count, replace=False)).tolist())

        probe_key, probe_value = key(), value()
        probe_length = len(probe_key) + len(probe_value)
        longest = self.max_key_tokens + self.max_value_tokens
        limit = self.sequence_length - probe_length - longest
        # Early enough that the pairs before it cannot pass over it.
        probe_at = int(rng.integers(max(1, limit - longest + 1)))
        shown: dict[tuple[int, ...], tuple[int, ...]] = {}
        text: list[int] = []
        answered: list[int] = []  # for each token the query that it answers

        def write(one_key: tuple[int, ...], new_value: tuple[int, ...]) -> None:
            again = one_key in shown
            one_value = shown.setdefault(one_key, new_value)
            text.extend(one_key + one_value)
            query = max(answered, default=0) + 1 if again else 0
            answered.extend([0] * len(one_key) + [query] * len(one_value))

        while len(text) < limit:
            if len(text) >= probe_at and probe_key not in shown:
                write(probe_key, probe_value)
            else:
                drawn, drawn_value = key(), value()
                write(drawn, probe_value if drawn == probe_key else drawn_value)
        write(probe_key, probe_value)
        pad = self.sequence_length + 1 - len(text)
        tokens = np.array([symbols] * pad + text)
        query_ids = np.array([0] * pad + answered)[1:]
        weights = _recall_weights(split, self.train_on_all_tokens, tokens[1:], query_ids, symbols)
        weights[-1] = 1  # here the last token is a target, not an input
        return self._finish(tokens[:-1], tokens[1:], query_ids, weights)


@functools.lru_cache(maxsize=8)
def _fixed_map(symbols: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Keys in random order and the different values they stand for."""
    rng = np.random.default_rng(seed)
    keys = rng.permutation(symbols // 2)
    values = symbols // 2 + rng.permutation(symbols - symbols // 2)
    return keys, values[: len(keys)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memorization(Task):
    """A fixed map from keys to values that is the same in all examples of all splits.

    Keys alternate with a blank (the last id), at which the key's value is to be predicted.

    Attributes:
        sequence_length: T, even.
        vocabulary_size: V: half keys, half values, then noise tokens, then the blank.
        map_seed: of the map.
        noise_fraction: probability that a slot holds two noise tokens instead. One slot never does.
        noise_vocabulary_size: number of noise tokens.
    """

    sequence_length: PositiveInteger = 32
    vocabulary_size: PositiveInteger = 256
    map_seed: NaturalNumber = 12345
    noise_fraction: Fraction = 0.0
    noise_vocabulary_size: NaturalNumber = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sequence_length % 2 or self.sequence_length < 2:
            raise ValueError(f"sequence_length must be even and at least 2; got {self.sequence_length}")
        if self.noise_fraction and not self.noise_vocabulary_size:
            raise ValueError(f"noise_fraction={self.noise_fraction} needs noise_vocabulary_size of at least 1")
        if self.vocabulary_size - self.noise_vocabulary_size < 3:
            raise ValueError(f"vocabulary_size must leave a key, a value and the blank; got {self.vocabulary_size}")

    def generate(self, rng: np.random.Generator, split: TaskSplit) -> Example:
        """Draws the keys."""
        symbols = self.vocabulary_size - 1 - self.noise_vocabulary_size
        keys, values = _fixed_map(symbols, self.map_seed)
        slots = self.sequence_length // 2
        drawn = rng.integers(len(keys), size=slots)
        is_noise = rng.random(slots) < self.noise_fraction
        is_noise[rng.integers(slots)] = False
        inputs = np.stack([keys[drawn], np.full(slots, self.vocabulary_size - 1)], 1)
        if is_noise.any():
            inputs[is_noise] = rng.integers(symbols, self.vocabulary_size - 1, size=(is_noise.sum(), 2))
        targets = np.stack([np.zeros(slots, np.int64), values[drawn]], 1)
        asked = np.stack([np.zeros(slots, bool), ~is_noise], 1).ravel()
        return self._finish(inputs.ravel(), targets.ravel(), np.cumsum(asked) * asked)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compression(Task):
    """Random tokens and an aggregation token, from whose output alone all of them are to be recovered.

    The target at each position is its own input, and the model is MAD's auto-encoder: the output at the last position,
    together with a position's embedding, goes through an MLP to give that position's token. (A decoder that
    reads its own input at each position would have nothing to do.) The aggregation token, the last id, is no query.

    Attributes:
        sequence_length: T, the aggregation token included.
        vocabulary_size: V, noise tokens and aggregation token included.
        noise_fraction: probability that a token is noise, which need not be recovered. Below 1, or nothing would be
            asked.
        noise_vocabulary_size: number of noise tokens.
    """

    sequence_length: Annotated[int, Range(at_least=2)] = 32
    vocabulary_size: PositiveInteger = 16
    noise_fraction: Annotated[float, Range(at_least=0, below=1)] = 0.0
    noise_vocabulary_size: NaturalNumber = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.noise_fraction and not self.noise_vocabulary_size:
            raise ValueError(f"noise_fraction={self.noise_fraction} needs noise_vocabulary_size of at least 1")
        if self.vocabulary_size - self.noise_vocabulary_size < 2:
            raise ValueError(f"vocabulary_size must leave a token and the aggregation; got {self.vocabulary_size}")

    def generate(self, rng: np.random.Generator, split: TaskSplit) -> Example:
        """Draws the tokens."""
        symbols = self.vocabulary_size - 1 - self.noise_vocabulary_size
        inputs = rng.integers(symbols, size=self.sequence_length)
        is_noise = rng.random(self.sequence_length) < self.noise_fraction
        if is_noise.any():
            inputs[is_noise] = rng.integers(symbols, self.vocabulary_size - 1, size=is_noise.sum())
        inputs[-1] = self.vocabulary_size - 1
        asked = ~is_noise
        asked[-1] = False
        return self._finish(inputs, inputs, np.cumsum(asked) * asked)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelectiveCopying(Task):
    """Tokens scattered among blanks, to be repeated in order after a copy token.

    The blanks fall independently and uniformly before the tokens, so the last token stands directly before the
    copy token; then come as many blanks as tokens, at which these are to be predicted.

    Attributes:
        sequence_length: T; larger than twice `num_copied` plus one.
        vocabulary_size: V; the last two ids are the blank and the copy token.
        num_copied: tokens to copy.
    """

    sequence_length: PositiveInteger = 256
    vocabulary_size: Annotated[int, Range(at_least=3)] = 16
    num_copied: PositiveInteger = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_length(self, 2 * self.num_copied + 2)

    def generate(self, rng: np.random.Generator, split: TaskSplit) -> Example:
        """Draws tokens and blanks."""
        copied = rng.integers(self.vocabulary_size - 2, size=self.num_copied)
        blanks = self.sequence_length - 2 * self.num_copied - 1
        gaps = np.bincount(rng.integers(self.num_copied, size=blanks), minlength=self.num_copied)
        inputs = np.full(self.sequence_length, self.vocabulary_size - 2)
        inputs[np.cumsum(gaps + 1) - 1] = copied
        inputs[blanks + self.num_copied] = self.vocabulary_size - 1
        targets = np.zeros(self.sequence_length, np.int32)
        targets[-self.num_copied :] = copied
        asked = np.arange(self.sequence_length) >= self.sequence_length - self.num_copied
        return self._finish(inputs, targets, np.cumsum(asked) * asked)

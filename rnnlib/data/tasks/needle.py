"""Needles in a haystack, in RULER's form."""

import dataclasses
import uuid
from typing import Literal

import numpy as np

from rnnlib.data.config import plain_paths
from rnnlib.data.tasks.base import Example, TaskSplit
from rnnlib.data.tasks.text import TextTask, essay_cut, hide, repeated_noise
from rnnlib.data.tasks.words import ADJECTIVES, NOUNS
from rnnlib.fields import Fraction, PositiveInteger
from rnnlib.tokenizers import Tokenizer

Kind = Literal["words", "numbers", "uuids"]
# How many keys or values of a kind there are.
_COUNTS: dict[Kind, int] = {"words": len(ADJECTIVES) * len(NOUNS), "numbers": 9 * 10**6, "uuids": 2**122}
_NEEDLE = "One of the special magic {kind} for {key} is: {value}."
_INTRODUCTION = (
    "A special magic {kind} is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n"
)
_QUESTION = (
    "What is the special magic {kind} for {key} mentioned in the provided text? "
    "The special magic {kind} for {key} mentioned in the provided text is"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NeedleInHaystack(TextTask):
    """A sentence that gives a key's value, hidden in a long text, and a question for it (RULER, Hsieh et al. 2024).

    The text is RULER's: introduction, haystack with needles at random sentences, question; the answer's tokens (a space
    and the value) are to be predicted, and are one query, right when all of them are. RULER's tasks are presets:

    | task | haystack | keys | values |
    |---|---|---|---|
    | S-NIAH-1 | one noise sentence repeated | 1 word | number |
    | S-NIAH-2 | essay | 1 word | number |
    | S-NIAH-3 | essay | 1 word | uuid |
    | MK-NIAH-1 | essay | 4 words, one asked for | number |
    | MK-NIAH-2 | other needles | word | number |
    | MK-NIAH-3 | other needles | uuid | uuid |

    The haystack takes all the room that is left in T tokens. RULER's essays cannot be bundled, so the essay is the
    Python language reference that comes with the interpreter (`pydoc_data`), or the text files that `essay_paths`
    names, begun at a random word. Byte-pair tokens are made word by word, so that the cut fits to the token.

    Attributes:
        sequence_length: T.
        haystack: "repeat", "essay" or "needles".
        key_kind: "words" (adjective-noun), "numbers" (seven digits) or "uuids".
        value_kind: likewise.
        num_keys: needles, of which one is asked for; at most as many as the kind has keys (49,780 words).
        depth: where that needle stands in the haystack, 0 (beginning) to 1 (end); None draws it.
        tokenizer: "byte" or a tokenizers JSON file.
        essay_paths: text files for the essay, globs allowed.
        random_start: begin the essay at a random word (RULER always begins with the first).
        train_on_all_tokens: in training every next token has loss weight 1; otherwise only the answer.
    """

    sequence_length: PositiveInteger = 1024
    haystack: Literal["repeat", "essay", "needles"] = "repeat"
    key_kind: Kind = "words"
    value_kind: Kind = "numbers"
    num_keys: PositiveInteger = 1
    depth: Fraction | None = None
    tokenizer: str = "byte"
    essay_paths: tuple[str, ...] = ()
    random_start: bool = True
    train_on_all_tokens: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "essay_paths", plain_paths("essay_paths", self.essay_paths))
        super().__post_init__()
        if self.num_keys > _COUNTS[self.key_kind]:
            raise ValueError(
                f"num_keys={self.num_keys} is more than the {_COUNTS[self.key_kind]} keys of key_kind={self.key_kind!r}"
            )
        if self.essay_paths and self.haystack != "essay":
            raise ValueError(f"essay_paths goes with haystack='essay'; got haystack={self.haystack!r}")

    def generate(self, rng: np.random.Generator, split: TaskSplit) -> Example:
        """Draws keys, values and places."""
        tokenizer = self.read_tokenizer()
        needles: dict[str, str] = {}
        while len(needles) < self.num_keys:
            needles[_draw(rng, self.key_kind)] = _draw(rng, self.value_kind)
        asked, answer = next(iter(needles.items()))
        kind = self.value_kind.removesuffix("s")
        first = tokenizer.encode(_INTRODUCTION.format(kind=kind))
        line_break = "\n" if self.haystack == "essay" else ""  # the other haystacks are whole lines
        last = tokenizer.encode(line_break + _QUESTION.format(kind=kind, key=asked))
        reply = tokenizer.encode(f" {answer}")
        sentences = [
            _sentence(tokenizer, _NEEDLE.format(kind=self.value_kind, key=key, value=value), self.haystack == "essay")
            for key, value in needles.items()
        ]
        fixed = len(first) + len(last) + len(reply) + sum(map(len, sentences))
        room = self.sequence_length + 1 - fixed
        hay = self._hay(rng, tokenizer, room, set(needles))
        if not hay:
            raise ValueError(
                f"sequence_length={self.sequence_length} is too short: needles, question and answer alone are "
                f"{fixed} tokens, and at least one sentence of haystack must fit"
            )
        # Where among the haystack's sentences each needle stands; the one asked for is the first of them.
        places = rng.integers(len(hay) + 1, size=len(sentences))
        if self.depth is not None:
            places[0] = round(self.depth * len(hay))
        return self.answered(first + hide(hay, sentences, places) + last, [reply], split)

    def _hay(self, rng: np.random.Generator, tokenizer: Tokenizer, room: int, taken: set[str]) -> list[list[int]]:
        """Sentences of at most `room` tokens together, each with the space or line that parts it from the next."""
        if self.haystack == "essay":
            return essay_cut(self.tokenizer, self.essay_paths, rng if self.random_start else None, room)
        if self.haystack == "repeat":
            return repeated_noise(tokenizer, room)
        lines: list[list[int]] = []
        while True:
            if len(taken) == _COUNTS[self.key_kind]:
                raise ValueError(
                    f"sequence_length={self.sequence_length} is too long: its haystack of needles has room for more "
                    f"than the {len(taken)} keys of key_kind={self.key_kind!r}"
                )
            key, value = _draw(rng, self.key_kind), _draw(rng, self.value_kind)
            if key in taken:
                continue
            taken.add(key)
            line = _sentence(tokenizer, _NEEDLE.format(kind=self.value_kind, key=key, value=value), False)
            room -= len(line)
            if room < 0:
                return lines
            lines.append(line)


def _sentence(tokenizer: Tokenizer, text: str, in_essay: bool) -> list[int]:
    """Tokens of a sentence: within an essay led by a space, otherwise a line."""
    return tokenizer.encode(f" {text}" if in_essay else f"{text}\n")


def _draw(rng: np.random.Generator, kind: Kind) -> str:
    if kind == "words":
        return f"{ADJECTIVES[rng.integers(len(ADJECTIVES))]}-{NOUNS[rng.integers(len(NOUNS))]}"
    if kind == "numbers":
        return str(rng.integers(10**6, 10**7))
    return str(uuid.UUID(bytes=rng.bytes(16), version=4))

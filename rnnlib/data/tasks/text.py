"""What tasks of text share: a tokenizer, haystacks of sentences, and answers at the end."""

import functools
import re

import numpy as np

from rnnlib.data.config import DataConfig, plain_path
from rnnlib.data.sources import iterate_documents
from rnnlib.data.tasks.base import Example, Task, TaskSplit
from rnnlib.tokenizers import Tokenizer, load_tokenizer

# Longer "words" of an essay, which are lines of tables and addresses, would leave no room in a short text.
_LONGEST_WORD = 40
_NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."


class TextTask(Task):
    """A task whose example is a text, a question and its answers. Each answer is one query.

    A subclass declares these fields itself: the order of a task's fields names the runs of studies.

    Attributes:
        tokenizer: "byte" or a tokenizers JSON file.
        train_on_all_tokens: in training every next token has loss weight 1; otherwise only the answers.
    """

    tokenizer: str
    train_on_all_tokens: bool

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokenizer", plain_path(self.tokenizer))
        super().__post_init__()
        self.read_tokenizer()

    @property
    def vocabulary_size(self) -> int:
        """The tokenizer's."""
        return self.read_tokenizer().vocabulary_size

    def read_tokenizer(self) -> Tokenizer:
        """The tokenizer that the field names."""
        return _tokenizer(self.tokenizer)

    def answered(self, prompt: list[int], answers: list[list[int]], split: TaskSplit) -> Example:
        """The example of a prompt's tokens and, one after another, those of its answers."""
        text = [*prompt, *(token for answer in answers for token in answer)]
        numbers = np.repeat(np.arange(len(answers)) + 1, [len(answer) for answer in answers])
        query_ids = np.zeros(len(text) - 1, np.int32)
        query_ids[-len(numbers) :] = numbers
        everywhere = self.train_on_all_tokens and split == "train"
        weights = np.ones(len(query_ids), np.float32) if everywhere else None
        return self._finish(text[:-1], text[1:], query_ids, weights)


def hide(hay: list[list[int]], sentences: list[list[int]], places: np.ndarray) -> list[int]:
    """The tokens of `hay` with sentence i before its piece `places[i]`; sentences at one place keep their order."""
    order = np.argsort(places, kind="stable").tolist()
    text: list[int] = []
    for i in range(len(hay) + 1):
        while order and places[order[0]] == i:
            text += sentences[order.pop(0)]
        if i < len(hay):
            text += hay[i]
    return text


def repeated_noise(tokenizer: Tokenizer, room: int) -> list[list[int]]:
    """As many lines of RULER's noise as fit in `room` tokens."""
    line = tokenizer.encode(f"{_NOISE}\n")
    return [line] * (max(room, 0) // len(line))


def essay_cut(
    tokenizer_name: str, paths: tuple[str, ...], rng: np.random.Generator | None, room: int
) -> list[list[int]]:
    """As many words of an essay as fit in `room` tokens, by sentences; past its end the essay begins again.

    Args:
        tokenizer_name: a task's field `tokenizer`.
        paths: text files, globs allowed; empty for the Python language reference that the interpreter brings.
        rng: draws the word that the cut begins with; None begins with the first.
        room: tokens, at most.
    """
    tokens, ends, ends_sentence = _essay(tokenizer_name, paths)
    word = int(rng.integers(len(ends))) if rng is not None else 0
    sentences: list[list[int]] = []
    sentence: list[int] = []
    while True:
        ids = tokens[ends[word - 1] if word else 0 : ends[word]].tolist()
        room -= len(ids)
        if room < 0:
            return [*sentences, sentence] if sentence else sentences
        sentence += ids
        if ends_sentence[word]:
            sentences.append(sentence)
            sentence = []
        word = (word + 1) % len(ends)


@functools.lru_cache(maxsize=4)
def _tokenizer(name: str) -> Tokenizer:
    return load_tokenizer(name)


@functools.lru_cache(maxsize=4)
def _essay(tokenizer_name: str, paths: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """An essay's tokens, where each of its words ends, and whether a sentence ends with the word."""
    if paths:
        config = DataConfig(source="text", paths=paths, split_by="document", validation_fraction=1e-9)
        text = " ".join(iterate_documents(config, "train"))
    else:
        from pydoc_data.topics import topics

        text = " ".join(topics[name] for name in sorted(topics))
    words = [word for word in text.split() if len(word) <= _LONGEST_WORD]
    if not words:
        raise ValueError(f"essay_paths={paths} hold no word of at most {_LONGEST_WORD} characters, expected some")
    encoded = _tokenizer(tokenizer_name).encode_batch([f" {word}" for word in words])
    ends_sentence = np.array([bool(re.search(r"[.!?][\"')\]]*$", word)) for word in words])
    return np.concatenate(encoded), np.cumsum([len(ids) for ids in encoded]), ends_sentence

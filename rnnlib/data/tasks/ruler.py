"""RULER's tasks that trace and count: variable tracking, common words and frequent words (Hsieh et al. 2024).

Prompts, defaults and rules of drawing are RULER's; there is no solved example before the text. Answers are taught and
scored one after another, so their order has to follow from the text: each task says which it is.
"""

import dataclasses
import string
from typing import Annotated

import numpy as np

from rnnlib.data.tasks.base import Example, TaskSplit
from rnnlib.data.tasks.text import TextTask, hide, repeated_noise
from rnnlib.data.tasks.words import ADJECTIVES, NOUNS
from rnnlib.fields import PositiveInteger, Range

_UPPERCASE, _LOWERCASE = np.array(list(string.ascii_uppercase)), np.array(list(string.ascii_lowercase))
_WORDS = np.array(sorted({*ADJECTIVES, *NOUNS}))


@dataclasses.dataclass(frozen=True, kw_only=True)
class VariableTracking(TextTask):
    """Chains of assignments hidden in noise; all variables of one chain are asked for (RULER's VT).

    `VAR A = 12345`, then `VAR B = VAR A` and so on, a line each, in order, at random places among lines of noise. The
    answer names the chain's variables in the chain's order. Other chains, with other numbers, are there to confuse.

    Attributes:
        sequence_length: T.
        num_chains: chains, of which one is asked for.
        num_hops: assignments from variable to variable in a chain, which has one variable more.
        tokenizer: "byte" or a tokenizers JSON file.
        train_on_all_tokens: in training every next token has loss weight 1; otherwise only the answers.
    """

    sequence_length: PositiveInteger = 1024
    num_chains: Annotated[int, Range(at_least=1, at_most=1000)] = 1
    num_hops: Annotated[int, Range(at_least=1, at_most=1000)] = 4
    tokenizer: str = "byte"
    train_on_all_tokens: bool = False

    def generate(self, rng: np.random.Generator, split: TaskSplit) -> Example:
        """Draws numbers, variables and places."""
        encode = self.read_tokenizer().encode
        variables = _distinct_words(rng, self.num_chains * (self.num_hops + 1), _UPPERCASE, length=5)
        chains = np.array(variables).reshape(self.num_chains, -1).tolist()
        numbers = (10_000 + rng.choice(90_000, self.num_chains, replace=False)).tolist()
        lines = [
            encode(f"VAR {variable} = {f'VAR {chain[i - 1]}' if i else value}\n")
            for chain, value in zip(chains, numbers, strict=True)
            for i, variable in enumerate(chain)
        ]
        number = numbers[0]
        first = encode("Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n")
        last = encode(
            f"Question: Find all variables that are assigned the value {number} in the text above. Answer: According "
            f"to the chain(s) of variable assignment in the text above, {len(chains[0])} variables are assigned the "
            f"value {number}, they are:"
        )
        answers = [encode(f" {variable}") for variable in chains[0]]
        fixed = sum(map(len, [first, last, *lines, *answers]))
        hay = repeated_noise(self.read_tokenizer(), self.sequence_length + 1 - fixed)
        if not hay:
            raise ValueError(
                f"sequence_length={self.sequence_length} is too short: chains, question and answers alone are {fixed} "
                "tokens, and at least one line of noise must fit"
            )
        places = np.sort(rng.integers(len(hay) + 1, size=(self.num_chains, self.num_hops + 1)), axis=1)
        return self.answered(first + hide(hay, lines, places.reshape(-1)) + last, answers, split)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommonWords(TextTask):
    """A numbered list with a few words that stand in it often, which are asked for, and others (RULER's CWE).

    The answer names them in the order in which they first stand in the list. The list has as many other words as fit in
    T tokens.

    Attributes:
        sequence_length: T.
        num_common: words that are asked for.
        common_repeats: how often each of them stands in the list.
        uncommon_repeats: how often each of the others does; less than `common_repeats`.
        tokenizer: "byte" or a tokenizers JSON file.
        train_on_all_tokens: in training every next token has loss weight 1; otherwise only the answers.
    """

    sequence_length: PositiveInteger = 4096
    num_common: Annotated[int, Range(at_least=1, at_most=len(_WORDS) - 1)] = 10
    common_repeats: PositiveInteger = 30
    uncommon_repeats: PositiveInteger = 3
    tokenizer: str = "byte"
    train_on_all_tokens: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.uncommon_repeats >= self.common_repeats:
            raise ValueError(
                f"uncommon_repeats={self.uncommon_repeats} must be less than common_repeats={self.common_repeats}"
            )

    def generate(self, rng: np.random.Generator, split: TaskSplit) -> Example:
        """Draws the words and the list's order."""
        encode = self.read_tokenizer().encode
        words = [str(word) for word in rng.permutation(_WORDS)]
        tokens = [encode(f" {word}") for word in words]
        first = encode(
            "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones "
            "that appear most often.\n"
        )
        last = encode(
            f"\nQuestion: What are the {self.num_common} most common words in the above list? Answer: The top "
            f"{self.num_common} words that appear most often in the list are:"
        )
        labels: list[list[int]] = []
        used = len(first) + len(last) + sum(map(len, tokens[: self.num_common])) - 1  # the last token is no input
        entries: list[int] = []
        for word, ids in enumerate(tokens):
            is_common = word < self.num_common
            repeats = self.common_repeats if is_common else self.uncommon_repeats
            added = [encode(f"{' ' if i else ''}{i + 1}.") for i in range(len(entries), len(entries) + repeats)]
            used += repeats * len(ids) + sum(map(len, added))
            if used > self.sequence_length:
                break
            labels += added
            entries += [word] * repeats
        else:
            raise ValueError(
                f"sequence_length={self.sequence_length} is too long: its list has room for more than the {len(words)} "
                f"words that there are; with uncommon_repeats above {self.uncommon_repeats} it takes fewer"
            )
        if len(entries) <= self.num_common * self.common_repeats:
            raise ValueError(
                f"sequence_length={self.sequence_length} is too short: num_common={self.num_common} words, "
                f"common_repeats={self.common_repeats} times each, and at least one other word must fit"
            )
        order = rng.permutation(entries).tolist()
        text = [token for label, word in zip(labels, order, strict=True) for token in label + tokens[word]]
        common = sorted(range(self.num_common), key=order.index)
        return self.answered(first + text + last, [tokens[word] for word in common], split)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FrequentWords(TextTask):
    """A text of coded words by Zipf's law, whose most frequent ones are asked for, most frequent first (RULER's FWE).

    Of n words, the one of rank r stands `floor(n r^-alpha / sum_s s^-alpha)` times. Rank 1 is `...`, which the question
    says to ignore. n is the largest with which the text fits in T tokens.

    Attributes:
        sequence_length: T.
        num_answers: words that are asked for.
        num_words: ranks, with that of `...`.
        alpha: the law's exponent; a smaller one makes the ranks harder to tell apart.
        word_length: letters of a coded word.
        tokenizer: "byte" or a tokenizers JSON file.
        train_on_all_tokens: in training every next token has loss weight 1; otherwise only the answers.
    """

    sequence_length: PositiveInteger = 2048
    num_answers: PositiveInteger = 3
    num_words: PositiveInteger = 100
    alpha: Annotated[float, Range(above=0, at_most=20)] = 2.0
    word_length: Annotated[int, Range(at_least=2, at_most=40)] = 6
    tokenizer: str = "byte"
    train_on_all_tokens: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_words < self.num_answers + 2:
            raise ValueError(
                f"num_words={self.num_words} must be at least num_answers + 2 = {self.num_answers + 2}: the dots, the "
                "answers and one other word"
            )
        if self.num_words > 26**self.word_length:
            raise ValueError(
                f"num_words={self.num_words} is more than the {26**self.word_length} words of "
                f"word_length={self.word_length}"
            )

    def generate(self, rng: np.random.Generator, split: TaskSplit) -> Example:
        """Draws the words and the text's order."""
        encode = self.read_tokenizer().encode
        words = ["...", *_distinct_words(rng, self.num_words - 1, _LOWERCASE, self.word_length)]
        tokens = [encode(f" {word}") for word in words]
        first = encode(
            "Read the following coded text and track the frequency of each coded word. Find the most frequently "
            "appeared coded words."
        )
        last = encode(
            f"\nQuestion: Do not provide any explanation. Please ignore the dots '...'. What are the "
            f"{self.num_answers} most frequently appeared words in the above coded text? Answer: According to the "
            f"coded text above, the {self.num_answers} most frequently appeared words are:"
        )
        answers = tokens[1 : 1 + self.num_answers]
        room = self.sequence_length + 1 - sum(map(len, [first, last, *answers]))
        counts = self._counts(room, np.array([len(ids) for ids in tokens]))
        asked = counts[1 : self.num_answers + 2]
        if (np.diff(asked) >= 0).any():
            raise ValueError(
                f"sequence_length={self.sequence_length} is too short: the {self.num_answers} most frequent words and "
                f"the next stand {asked.tolist()} times in its text, and these numbers must fall"
            )
        order = rng.permutation(np.repeat(np.arange(self.num_words), counts)).tolist()
        return self.answered(first + [token for word in order for token in tokens[word]] + last, answers, split)

    def _counts(self, room: int, sizes: np.ndarray) -> np.ndarray:
        """How often each rank stands in the longest text of at most `room` tokens. `sizes`: tokens of each word."""
        law = np.arange(1.0, self.num_words + 1) ** -self.alpha
        law /= law.sum()
        # A text of `low` words fits, one of `high` does not: rank 1 alone stands more than `room` times in it.
        low, high = 0, self.num_words * (max(room, 0) + 2)
        while high - low > 1:
            middle = (low + high) // 2
            fits = np.floor(middle * law) @ sizes <= room
            low, high = (middle, high) if fits else (low, middle)
        return np.floor(low * law).astype(np.int64)


def _distinct_words(rng: np.random.Generator, count: int, letters: np.ndarray, length: int) -> list[str]:
    words: dict[str, None] = {}
    while len(words) < count:
        words["".join(rng.choice(letters, length))] = None
    return list(words)

"""Tracking the state of a small automaton: parity, modular arithmetic, permutations."""

import dataclasses
import itertools
from typing import Annotated, Literal

import numpy as np

from rnnlib.data.tasks.base import Example, Task, TaskSplit
from rnnlib.fields import PositiveInteger, Range

Supervision = Literal["all", "last"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parity(Task):
    """Whether the number of ones so far is odd (Grazzi et al. 2025, "Unlocking state-tracking in linear RNNs").

    No linear recurrence whose transition has only positive eigenvalues solves it at all lengths (their theorem 1).

    Attributes:
        sequence_length: T bits.
        supervise: "all" asks at every bit, "last" at the last one only.
    """

    sequence_length: PositiveInteger = 40
    supervise: Supervision = "last"

    @property
    def vocabulary_size(self) -> int:
        """0 and 1."""
        return 2

    def generate(self, rng: np.random.Generator, split: TaskSplit) -> Example:
        """Draws the bits."""
        bits = rng.integers(2, size=self.sequence_length)
        return self._finish(bits, np.cumsum(bits) % 2, _query_ids(self.sequence_length, self.supervise))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModularArithmetic(Task):
    """The value of an arithmetic expression modulo a small number (Delétang et al. 2023; Grazzi et al. 2025).

    Without brackets: digits joined by `+`, `-`, `*`, where `*` binds stronger; then `=`. The value stands to be
    predicted at `=`, and with `supervise="all"` at every digit too (the value of the expression so far). With brackets:
    an expression is a digit, `-` and a digit, an expression of either kind in brackets, or two expressions
    joined by an operator within brackets, of the exact length.

    Token ids: 0 ... modulus - 1 digits, then `+ - * ( ) =`.

    Attributes:
        sequence_length: T, the `=` included. Without brackets an expression has odd length, so that an odd T leaves one
            token of padding at the end.
        modulus: m.
        brackets: draw nested expressions (a context-free language) instead of flat ones (a regular one).
        supervise: "last", or without brackets "all".
    """

    sequence_length: Annotated[int, Range(at_least=2)] = 40
    modulus: Annotated[int, Range(at_least=2)] = 5
    brackets: bool = False
    supervise: Supervision = "last"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.brackets and self.supervise == "all":
            raise ValueError("supervise='all' needs brackets=False: within brackets a prefix has no value")

    @property
    def vocabulary_size(self) -> int:
        """The digits and six signs."""
        return self.modulus + 6

    def generate(self, rng: np.random.Generator, split: TaskSplit) -> Example:
        """Draws the expression."""
        return self._nested(rng) if self.brackets else self._flat(rng)

    def _flat(self, rng: np.random.Generator) -> Example:
        count = self.sequence_length // 2
        digits = rng.integers(self.modulus, size=count)
        operators = rng.integers(3, size=count - 1)
        inputs = np.zeros(2 * count, np.int32)
        inputs[0::2] = digits
        inputs[1:-1:2] = self.modulus + operators
        inputs[-1] = self.modulus + 5
        values = np.zeros(2 * count, np.int32)
        total, term = 0, int(digits[0])  # a value is total + term; the term may still be multiplied
        values[0] = term
        for i, operator in enumerate(operators):
            digit = int(digits[i + 1])
            if operator == 2:
                term = term * digit % self.modulus
            else:
                total, term = (total + term) % self.modulus, digit if operator == 0 else -digit
            values[2 * i + 2] = (total + term) % self.modulus
        values[-1] = values[-2]
        asked = np.arange(2 * count) % 2 == 0 if self.supervise == "all" else np.zeros(2 * count, bool)
        asked[-1] = True
        return self._finish(inputs, values, np.cumsum(asked) * asked)

    def _nested(self, rng: np.random.Generator) -> Example:
        plus, times, opening, closing, equals = (self.modulus + sign for sign in (0, 2, 3, 4, 5))
        tokens: list[int] = []
        values: list[int] = []
        # Work still to do, last first: a length to fill, a token to write, or an operation on the last values.
        work: list[tuple[str, int]] = [("fill", self.sequence_length - 1)]
        while work:
            kind, argument = work.pop()
            if kind == "token":
                tokens.append(argument)
            elif kind == "negate":
                values.append(-values.pop() % self.modulus)
            elif kind == "apply":
                right, left = values.pop(), values.pop()
                result = left * right if argument == times else left + (right if argument == plus else -right)
                values.append(result % self.modulus)
            elif argument == 1:
                digit = int(rng.integers(self.modulus))
                tokens.append(digit)
                values.append(digit)
            elif argument == 2:
                work += [("negate", 0), ("fill", 1), ("token", plus + 1)]
            elif argument in (3, 4):
                work += [("token", closing), ("fill", argument - 2), ("token", opening)]
            else:
                left = int(rng.integers(1, argument - 3))
                operator = plus + int(rng.integers(3))
                work += [("token", closing), ("apply", operator), ("fill", argument - 3 - left), ("token", operator)]
                work += [("fill", left), ("token", opening)]
        tokens.append(equals)
        query_ids = _query_ids(len(tokens), "last")
        return self._finish(tokens, np.full(len(tokens), values[0]), query_ids)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Permutations(Task):
    """The product so far of random permutations of a few things (the word problem of a group, Merrill et al. 2024).

    The target at position t is the number of `p_t after ... after p_1` in the lexicographic order of permutations
    (0 is the identity). Two things are parity with another name; five need more than one reflection a token.

    Attributes:
        sequence_length: T permutations.
        num_items: things permuted, 2 to 6; the vocabulary is their factorial.
        generators: "all" draws any permutation, "swaps" the identity and the exchanges of two things (one reflection
            each, which one step of a delta rule with negative eigenvalues can be).
        supervise: "all" asks at every position, "last" at the last one only.
    """

    sequence_length: PositiveInteger = 64
    num_items: Annotated[int, Range(at_least=2, at_most=6)] = 3
    generators: Literal["all", "swaps"] = "all"
    supervise: Supervision = "all"

    @property
    def vocabulary_size(self) -> int:
        """The factorial of `num_items`."""
        return len(self.permutations())

    def permutations(self) -> list[tuple[int, ...]]:
        """All permutations in lexicographic order; entry i of one is where thing i goes."""
        return list(itertools.permutations(range(self.num_items)))

    def generate(self, rng: np.random.Generator, split: TaskSplit) -> Example:
        """Draws the permutations and multiplies them."""
        permutations = np.array(self.permutations())
        if self.generators == "swaps":
            moved = (permutations != np.arange(self.num_items)).sum(1)
            inputs = rng.choice(np.flatnonzero(moved <= 2), self.sequence_length)
        else:
            inputs = rng.integers(len(permutations), size=self.sequence_length)
        number = {tuple(permutation): i for i, permutation in enumerate(permutations.tolist())}
        product = np.arange(self.num_items)
        targets = np.zeros(self.sequence_length, np.int32)
        for t, index in enumerate(inputs):
            product = permutations[index][product]
            targets[t] = number[tuple(product.tolist())]
        return self._finish(inputs, targets, _query_ids(self.sequence_length, self.supervise))


def _query_ids(length: int, supervise: Supervision) -> np.ndarray:
    """A query at every position, or one at the last."""
    if supervise == "all":
        return np.arange(1, length + 1)
    return (np.arange(length) == length - 1).astype(np.int32)

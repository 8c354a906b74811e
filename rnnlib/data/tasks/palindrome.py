"""Reversal of a random sequence."""

import dataclasses

import numpy as np

from rnnlib.data.tasks.base import Example, Task, TaskSplit
from rnnlib.fields import PositiveInteger


@dataclasses.dataclass(frozen=True, kw_only=True)
class Palindrome(Task):
    """A random sequence, a separator, and the sequence backwards (KLA paper, section 5.3; Kimi Linear, section 5.1).

    With n = T / 2 the inputs are `x_1 ... x_n SEP x_n ... x_2` and the targets of the last n - 1 positions
    `x_{n-1} ... x_1`. The papers give no vocabulary; 64 symbols are our choice.

    Attributes:
        sequence_length: T, even, at least 4.
        num_symbols: symbols 1 ... num_symbols; 0 is the separator.
        predict_first: predict x_n at the separator too; Kimi Linear's table leaves it out.
    """

    sequence_length: PositiveInteger = 256
    num_symbols: PositiveInteger = 64
    predict_first: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sequence_length % 2 or self.sequence_length < 4:
            raise ValueError(f"sequence_length must be even and at least 4; got {self.sequence_length}")

    @property
    def vocabulary_size(self) -> int:
        """The symbols and the separator."""
        return self.num_symbols + 1

    def generate(self, rng: np.random.Generator, split: TaskSplit) -> Example:
        """Draws the symbols."""
        count = self.sequence_length // 2
        symbols = rng.integers(1, self.num_symbols + 1, size=count)
        text = np.concatenate([symbols, [0], symbols[::-1]])
        answered = np.arange(2 * count) >= (count if self.predict_first else count + 1)
        # Every symbol is a query of its own.
        return self._finish(text[:-1], text[1:], np.cumsum(answered) * answered)

"""Multi-query associative recall."""

import dataclasses

import numpy as np

from rnnlib.data.tasks.base import Example, Task, TaskSplit
from rnnlib.fields import PositiveInteger


@dataclasses.dataclass(frozen=True, kw_only=True)
class MQAR(Task):
    """Multi-query associative recall (Arora et al. 2024, "Zoology", section 3 and appendix; its generator's form).

    The context is `num_pairs` key-value pairs, interleaved; keys come from the lower half of the vocabulary (0 left
    out) and values from the upper half, each without replacement. Each key stands once more after the context, as a
    query at an even distance `2 * gap`, and its value is to be predicted at that same position. Gaps are drawn without
    replacement, the first with probability `p(i) ~ i ** (power_a - 1)`, i = 1 ... (T - context) / 2: near queries are
    frequent, as repeated bigrams are in text. Everywhere else nothing is to be predicted.

    Attributes:
        sequence_length: T, even; at least `(2 * num_passes + 2) * num_pairs`.
        num_pairs: key-value pairs.
        vocabulary_size: V, even; larger than T and large enough for `num_pairs` keys and values.
        power_a: exponent of the gaps; 1 draws them uniformly.
        num_passes: how often the context is repeated (Arora et al. 2024, "Just read twice").
        random_non_queries: fill the rest with random tokens instead of 0. The paper's figure 2 does not.
    """

    sequence_length: PositiveInteger = 64
    num_pairs: PositiveInteger = 4
    vocabulary_size: PositiveInteger = 8192
    power_a: float = 0.01
    num_passes: PositiveInteger = 1
    random_non_queries: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        needed = (2 * self.num_passes + 2) * self.num_pairs
        if self.sequence_length % 2 or self.sequence_length < needed:
            raise ValueError(
                f"sequence_length must be even and at least {needed} for num_pairs={self.num_pairs} and "
                f"num_passes={self.num_passes}; got {self.sequence_length}"
            )
        if self.vocabulary_size % 2 or self.vocabulary_size <= max(self.sequence_length, 2 * self.num_pairs + 1):
            raise ValueError(
                f"vocabulary_size must be even and larger than sequence_length={self.sequence_length} and twice "
                f"num_pairs={self.num_pairs}; got {self.vocabulary_size}"
            )
        with np.errstate(all="ignore"):
            probability = self._gap_probability()
        if np.isnan(probability).any() or np.count_nonzero(probability) < self.num_pairs:
            raise ValueError(
                f"power_a={self.power_a} gives fewer than num_pairs={self.num_pairs} gaps a probability above 0; "
                "expected a number nearer to 1"
            )

    def _gap_probability(self) -> np.ndarray:
        space = self.sequence_length // 2 - self.num_passes * self.num_pairs
        weights = np.arange(1, space + 1, dtype=np.float64) ** (self.power_a - 1)
        return weights / weights.sum()

    def generate(self, rng: np.random.Generator, split: TaskSplit) -> Example:
        """Draws keys, values, then gaps."""
        half = self.vocabulary_size // 2
        keys = 1 + rng.choice(half - 1, self.num_pairs, replace=False)
        values = half + rng.choice(half, self.num_pairs, replace=False)
        context = np.tile(np.stack([keys, values], 1).ravel(), self.num_passes)
        probability = self._gap_probability()
        gaps = rng.choice(len(probability), self.num_pairs, replace=False, p=probability)
        queries = len(context) + 2 * gaps
        inputs = np.zeros(self.sequence_length, np.int32)
        inputs[: len(context)] = context
        inputs[queries] = keys
        if self.random_non_queries:
            noise = rng.integers(self.vocabulary_size, size=self.sequence_length)
            inputs = np.where(inputs == 0, noise, inputs)
        targets = np.zeros(self.sequence_length, np.int32)
        targets[queries] = values
        query_ids = np.zeros(self.sequence_length, np.int32)
        query_ids[queries] = np.arange(1, self.num_pairs + 1)
        return self._finish(inputs, targets, query_ids)

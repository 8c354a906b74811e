"""What every synthetic task has in common: example i is a pure function of (seed, split, i)."""

import abc
import dataclasses
from typing import Literal

import numpy as np

from rnnlib.fields import PositiveInteger, check_fields

TaskSplit = Literal["train", "validation", "test"]
TASK_SPLITS: tuple[TaskSplit, ...] = ("train", "validation", "test")
Example = dict[str, np.ndarray]


def check_task_split(split: str) -> None:
    """Raises ValueError unless `split` is one of a task's."""
    if split not in TASK_SPLITS:
        raise ValueError(f"split must be one of {', '.join(TASK_SPLITS)}; got {split!r}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task(abc.ABC):
    """A synthetic task; its fields are its knobs.

    Attributes:
        sequence_length: tokens an example, T.
    """

    sequence_length: PositiveInteger = 256

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    @abc.abstractmethod
    def vocabulary_size(self) -> int:
        """Number of token ids in inputs and targets."""

    @property
    def extra_arrays(self) -> tuple[str, ...]:
        """Names of the arrays that examples have beside those of every task."""
        return ()

    @abc.abstractmethod
    def generate(self, rng: np.random.Generator, split: TaskSplit) -> Example:
        """Draws one example; `example` calls it with the generator of an index."""

    def example(self, index: int, *, seed: int = 0, split: TaskSplit = "train") -> Example:
        """Example `index` of a split: the same on every machine, whatever was drawn before.

        Args:
            index: which example, from 0 without end.
            seed: of the whole set. 0 <= seed < 2**32.
            split: "train", "validation" or "test"; their examples are drawn independently.

        Returns:
            `[T]` arrays: int32 `inputs` and `targets` (the token to predict at each position), float32 `loss_weights`
            (0 where nothing is to be predicted), int32 `query_ids` (0, or which query the position answers: 1, 2, ...;
            a query is right when all of its positions are), int32 `segment_ids` (1; 0 on padding) and `positions`.
            Some tasks add bool `allowed_targets` `[T, vocabulary_size]`, where more than one token is right.

        Raises:
            ValueError: the split is unknown, or index or seed out of range.
        """
        check_task_split(split)
        if index < 0 or not 0 <= seed < 2**32:
            raise ValueError(f"index must be at least 0 and seed in [0, 2**32); got index {index}, seed {seed}")
        rng = np.random.default_rng([seed, TASK_SPLITS.index(split), index])
        return self.generate(rng, split)

    def at_length(self, sequence_length: int) -> "Task":
        """The same task at another length, for extrapolation."""
        return dataclasses.replace(self, sequence_length=sequence_length)

    def _finish(
        self,
        inputs: np.ndarray | list[int],
        targets: np.ndarray | list[int],
        query_ids: np.ndarray | list[int],
        loss_weights: np.ndarray | list[float] | None = None,
        **extra: np.ndarray,
    ) -> Example:
        """Pads an example at its end to the sequence length. Without loss weights the queries are weighted 1."""
        length = len(inputs)
        padding = self.sequence_length - length
        if padding < 0 or len(targets) != length or len(query_ids) != length:
            raise AssertionError(f"{len(inputs)} inputs, {len(targets)} targets, {len(query_ids)} query ids")
        if set(extra) != set(self.extra_arrays):
            raise AssertionError(f"arrays {sorted(extra)}, but extra_arrays is {self.extra_arrays}")
        query_ids = np.asarray(query_ids, np.int32)
        weights = np.asarray(query_ids > 0 if loss_weights is None else loss_weights, np.float32)
        example = {
            "inputs": np.asarray(inputs, np.int32),
            "targets": np.where((weights > 0) | (query_ids > 0), np.asarray(targets, np.int32), 0).astype(np.int32),
            "loss_weights": weights,
            "query_ids": query_ids,
            "segment_ids": np.ones(length, np.int32),
            **extra,
        }
        if padding:
            example = {
                name: np.pad(values, [(0, padding)] + [(0, 0)] * (values.ndim - 1)) for name, values in example.items()
            }
        example["positions"] = np.arange(self.sequence_length, dtype=np.int32)
        return example

"""Several tasks in one training set."""

import dataclasses

import numpy as np

from rnnlib.data.tasks.base import Example, Task, TaskSplit


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mixture(Task):
    """Each example comes from one of several tasks, drawn with equal probability.

    Attributes:
        sequence_length: T, of all of them, whatever theirs was.
        tasks: tasks of the same vocabulary, whose examples have the same arrays (`extra_arrays`).
    """

    tasks: tuple[Task, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "tasks", tuple(self.tasks))
        super().__post_init__()
        if not self.tasks:
            raise ValueError("tasks must not be empty")
        sizes = [task.vocabulary_size for task in self.tasks]
        if len(set(sizes)) > 1:
            raise ValueError(f"tasks must have the same vocabulary_size; got {sizes}")
        arrays = [(type(task).__name__, task.extra_arrays) for task in self.tasks]
        if len({extra for _, extra in arrays}) > 1:
            raise ValueError(f"tasks must have the same extra_arrays, to be batched together; got {arrays}")
        object.__setattr__(self, "tasks", tuple(task.at_length(self.sequence_length) for task in self.tasks))

    @property
    def vocabulary_size(self) -> int:
        """The tasks'."""
        return self.tasks[0].vocabulary_size

    @property
    def extra_arrays(self) -> tuple[str, ...]:
        """The tasks'."""
        return self.tasks[0].extra_arrays

    def generate(self, rng: np.random.Generator, split: TaskSplit) -> Example:
        """Draws the task, then its example."""
        return self.tasks[int(rng.integers(len(self.tasks)))].generate(rng, split)

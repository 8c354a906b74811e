"""Batches of a task's examples."""

import hashlib
import sys

import grain
import numpy as np

from rnnlib.data.pipeline import BatchDataset, share_by_process
from rnnlib.data.tasks.base import Example, Task, TaskSplit, check_task_split
from rnnlib.fields import NaturalNumber, PositiveInteger, check_value


class TaskExamples(grain.MapDataset[Example]):
    """Example i of a task at index i; past `num_examples` (where it is given) padding rows of weight 0."""

    def __init__(self, task: Task, *, seed: int, split: TaskSplit, num_examples: int | None, length: int):
        super().__init__()
        self._task = task
        self._seed = seed
        self._split: TaskSplit = split
        self._num_examples = num_examples
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index):
        if isinstance(index, slice):
            return self.slice(index)
        index = int(index)
        if self._num_examples is None:
            return self._task.example(index, seed=self._seed, split=self._split)
        index %= self._length  # a later epoch has the same examples
        if index < self._num_examples:
            return self._task.example(index, seed=self._seed, split=self._split)
        blank = self._task.example(0, seed=self._seed, split=self._split)
        return {name: np.zeros_like(values) for name, values in blank.items()}

    def __str__(self) -> str:
        return f"TaskExamples({self._task})"


def task_dataset(
    task: Task,
    *,
    batch_size: int,
    split: TaskSplit = "train",
    seed: int = 0,
    num_examples: int | None = None,
    num_workers: int = 0,
    prefetch: int = 2,
    process_index: int | None = None,
    process_count: int | None = None,
) -> BatchDataset:
    """Batches `[B, ...]` of a task's examples (see `Task.example`), with a position that can be saved.

    Training without `num_examples` never sees an example twice; with it, epochs of that many are shuffled and repeated.
    Validation and test need `num_examples` and are read once, in order, the last batch filled with padding of weight 0.

    Args:
        task: from `make_task`.
        batch_size: B over all processes.
        split: "train", "validation" or "test".
        seed: of the examples, and of their order. 0 <= seed < 2**32.
        num_examples: size of the set.
        num_workers: worker processes for training.
        prefetch: batches prepared ahead, per worker.
        process_index: this process among those that share a batch; by default JAX's.
        process_count: number of processes; it divides `batch_size`.

    Raises:
        ValueError: an argument does not fit (names it).
    """
    for name, value, kind in (
        ("batch_size", batch_size, PositiveInteger),
        ("num_examples", num_examples, PositiveInteger | None),
        ("num_workers", num_workers, NaturalNumber),
        ("prefetch", prefetch, PositiveInteger),
    ):
        check_value("task_dataset", name, value, kind)
    check_task_split(split)
    if split != "train" and num_examples is None:
        raise ValueError(f"split {split!r} needs num_examples")
    task.example(0, seed=seed, split=split)  # an argument that does not fit is an error here and not in a worker
    index, count = share_by_process(batch_size, process_index, process_count)
    rows: grain.MapDataset
    if num_examples is None:
        rows = TaskExamples(task, seed=seed, split=split, num_examples=None, length=sys.maxsize)
    else:
        padded = num_examples if split == "train" else -(-num_examples // batch_size) * batch_size
        rows = TaskExamples(task, seed=seed, split=split, num_examples=num_examples, length=padded)
        if split == "train":
            rows = rows.shuffle(seed).repeat()
    description = repr((task, batch_size, split, seed, num_examples))
    fingerprint = hashlib.blake2b(description.encode(), digest_size=16).hexdigest()
    batches = rows[index::count].batch(batch_size // count, drop_remainder=True)
    workers = num_workers if split == "train" else 0
    return BatchDataset(batches, fingerprint=fingerprint, num_workers=workers, prefetch=prefetch)


def task_arrays(task: Task, num_examples: int, *, split: TaskSplit = "train", seed: int = 0) -> Example:
    """The first examples of a split as arrays `[num_examples, ...]`, for sets that fit in memory and are read often."""
    check_value("task_arrays", "num_examples", num_examples, PositiveInteger)
    first = task.example(0, seed=seed, split=split)
    arrays = {name: np.empty((num_examples, *values.shape), values.dtype) for name, values in first.items()}
    for i in range(num_examples):
        for name, values in task.example(i, seed=seed, split=split).items():
            arrays[name][i] = values
    return arrays

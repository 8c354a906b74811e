"""A cell's examples as arrays, generated ahead by worker processes, answers gathered."""

import concurrent.futures
import dataclasses
import itertools
import multiprocessing
import signal
import threading
from typing import Any

import numpy as np

from experiments.sweep.study import Cell
from rnnlib.data.tasks import Task, TaskSplit

Arrays = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class CellData:
    """A cell's examples. Only positions with an answer are scored, so that no logits are computed elsewhere.

    Attributes:
        train: `inputs` `[N, T]`, and for the K most answers an example has `where` (positions), `targets`, `weights`,
            `query_ids` `[N, K]`, perhaps `allowed_targets` `[N, K, vocabulary]`; weight 0 fills up.
        validation: the same in batches, `[batches, B, ...]`, at the training length.
        test: likewise, by the names of the cell's tests.
    """

    train: Arrays
    validation: Arrays
    test: dict[str, Arrays]


def _shard(task: Task, split: TaskSplit, seed: int, start: int, stop: int) -> Arrays:
    examples = [task.example(i, seed=seed, split=split) for i in range(start, stop)]
    names = [name for name in examples[0] if name not in ("positions", "segment_ids")]
    return {name: np.stack([example[name] for example in examples]) for name in names}


def gather_answers(examples: Arrays, weights: np.ndarray) -> Arrays:
    """Keeps inputs, and of everything else the positions whose weight is not 0.

    Args:
        examples: arrays `[N, T, ...]` as `Task.example` gives them.
        weights: `[N, T]`.

    Returns:
        See `CellData.train`.
    """
    count = max(1, int((weights != 0).sum(1).max()))
    # A stable sort puts the answers first, in their order, and positions without one after them.
    where = np.argsort(weights == 0, axis=1, kind="stable")[:, :count]
    gathered = {name: np.take_along_axis(examples[name], where, 1) for name in ("targets", "query_ids")}
    if "allowed_targets" in examples:
        gathered["allowed_targets"] = np.take_along_axis(examples["allowed_targets"], where[..., None], 1)
    gathered["weights"] = np.take_along_axis(weights, where, 1).astype(np.float32)
    return {"inputs": examples["inputs"], "where": where.astype(np.int32), **gathered}


def batched(arrays: Arrays, batch_size: int) -> Arrays:
    """`[N, ...]` arrays as `[batches, batch_size, ...]`; rows of zeros (no answers) fill the last batch."""
    count = len(arrays["inputs"])
    batches = -(-count // batch_size)
    padding = batches * batch_size - count

    def shaped(values: np.ndarray) -> np.ndarray:
        values = np.pad(values, [(0, padding)] + [(0, 0)] * (values.ndim - 1))
        return values.reshape(batches, batch_size, *values.shape[1:])

    return {name: shaped(values) for name, values in arrays.items()}


def _leave_ctrl_c_to_the_parent() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class DataFactory:
    """Generates cells' data, each part once; with workers in the background."""

    def __init__(self, workers: int = 0):
        """Starts `workers` processes; with 0 the calling thread generates."""
        self._pool = None
        if workers:
            context = multiprocessing.get_context("spawn")
            self._pool = concurrent.futures.ProcessPoolExecutor(workers, context, _leave_ctrl_c_to_the_parent)
        self._workers = workers
        self._parts: dict[Any, list[concurrent.futures.Future[Arrays]] | Arrays] = {}
        self._cells: dict[Cell, CellData] = {}
        self._lock = threading.RLock()

    def request(self, cell: Cell) -> None:
        """Begins to generate what a cell needs; returns at once if there are workers."""
        with self._lock:
            for key in self._keys(cell):
                if key in self._parts:
                    continue
                task, split, seed, count = key
                if self._pool is None:
                    self._parts[key] = _shard(task, split, seed, 0, count)
                    continue
                shards = min(self._workers, -(-count // 64))
                edges = np.linspace(0, count, shards + 1).astype(int).tolist()
                self._parts[key] = [
                    self._pool.submit(_shard, task, split, seed, start, stop)
                    for start, stop in itertools.pairwise(edges)
                ]

    def get(self, cell: Cell) -> CellData:
        """The cell's data, once it is there."""
        with self._lock:
            if cell not in self._cells:
                self.request(cell)
                self._cells[cell] = self._gather(cell)
            return self._cells[cell]

    def _gather(self, cell: Cell) -> CellData:
        train, validation, *tests = (self._collect(key) for key in self._keys(cell))

        def evaluation(arrays: Arrays) -> Arrays:
            size = max(1, cell.evaluation_tokens // arrays["inputs"].shape[1])
            weights = (arrays["query_ids"] > 0).astype(np.float32)
            return batched(gather_answers(arrays, weights), min(size, len(weights)))

        weights = train["loss_weights"] * np.where(train["query_ids"] > 0, cell.answer_weight, 1)
        return CellData(
            train=gather_answers(train, weights),
            validation=evaluation(validation),
            test={name: evaluation(test) for name, test in zip(cell.test_sets, tests)},
        )

    def close(self) -> None:
        """Ends the workers."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def _keys(self, cell: Cell) -> list[tuple[Task, TaskSplit, int, int]]:
        tests = [(task, "test", cell.data_seed, cell.test_examples) for task in cell.test_sets.values()]
        train = (cell.task, "train", cell.data_seed, cell.train_examples)
        validation = (cell.task, "validation", cell.data_seed, cell.validation_examples)
        return [train, validation, *tests]  # type: ignore[list-item]

    def _collect(self, key: Any) -> Arrays:
        part = self._parts[key]
        if isinstance(part, list):
            shards = [future.result() for future in part]
            part = {name: np.concatenate([shard[name] for shard in shards]) for name in shards[0]}
            self._parts[key] = part
        return part


def epoch_orders(num_examples: int, steps: int, batch_size: int, seeds: list[int]) -> np.ndarray:
    """Which examples each step takes: int32 `[steps, seeds, batch_size]`, every epoch a new permutation."""
    orders = np.empty((steps, len(seeds), batch_size), np.int32)
    per_epoch = num_examples // batch_size
    for column, seed in enumerate(seeds):
        rng = np.random.default_rng([seed, 1])
        for start in range(0, steps, per_epoch):
            count = min(per_epoch, steps - start)
            taken = rng.permutation(num_examples)[: count * batch_size]
            orders[start : start + count, column] = taken.reshape(count, batch_size)
    return orders

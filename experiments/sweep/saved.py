"""The state of a group of runs in the middle of its training, so that what was stopped goes on."""

import dataclasses
import pathlib
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from experiments.sweep.study import Group

EVERY = 20.0
"""Seconds from one writing to the next."""


@dataclasses.dataclass
class Saved:
    """A file with parameters and optimizer of all runs of a group, after some of its chunks.

    Attributes:
        path: the file.
        last: time at which it was last written, or the group begun.
    """

    path: pathlib.Path
    last: float

    @classmethod
    def of(cls, work: pathlib.Path, group: Group) -> "Saved":
        """The file of a group, under a folder for checkpoints."""
        return cls(work / "groups" / f"{group.identity}.npz", time.monotonic())

    def read(self, like: Any) -> tuple[Any, list[np.ndarray]] | None:
        """State and loss curve as they were written; None where nothing was.

        Args:
            like: a state of the same shapes, whose place on the device the one that was read takes.
        """
        if not self.path.exists():
            return None
        with np.load(self.path) as file:
            names = (f"leaf{i}" for i in range(len(file.files) - 1))  # in the order of the tree's leaves
            state = jax.tree.map(lambda leaf: jax.device_put(file[next(names)], leaf.sharding), like)
            return state, list(file["curve"])

    def write_if_due(self, state: Any, curve: Sequence[np.ndarray]) -> None:
        """Writes after every chunk that ends `EVERY` seconds or more after the last writing, whole or not at all."""
        if time.monotonic() - self.last < EVERY:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".partial.npz")
        leaves: dict[str, Any] = {f"leaf{i}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(state))}
        np.savez(partial, curve=np.stack(curve), **leaves)
        partial.replace(self.path)
        self.last = time.monotonic()

    def remove(self) -> None:
        """The group is done."""
        self.path.unlink(missing_ok=True)

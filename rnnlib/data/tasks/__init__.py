"""Synthetic tasks as data: example i is a pure function of (seed, split, i)."""

import importlib
from typing import TYPE_CHECKING, Any

from rnnlib.extras import from_extra

if TYPE_CHECKING:
    from rnnlib.data.tasks.dataset import TaskExamples, task_arrays, task_dataset

with from_extra("train", "rnnlib.data.tasks"):
    from rnnlib.data.tasks.base import TASK_SPLITS, Example, Task, TaskSplit
    from rnnlib.data.tasks.mad import (
        Compression,
        FuzzyRecall,
        InContextRecall,
        Memorization,
        NoisyRecall,
        SelectiveCopying,
    )
    from rnnlib.data.tasks.mixture import Mixture
    from rnnlib.data.tasks.mqar import MQAR
    from rnnlib.data.tasks.needle import NeedleInHaystack
    from rnnlib.data.tasks.palindrome import Palindrome
    from rnnlib.data.tasks.regbench import Automaton, RegBench
    from rnnlib.data.tasks.registry import make_task, task_names
    from rnnlib.data.tasks.ruler import CommonWords, FrequentWords, VariableTracking
    from rnnlib.data.tasks.stack import Stack
    from rnnlib.data.tasks.state_tracking import ModularArithmetic, Parity, Permutations

# Made of grain, which is imported when it is first used, as in `rnnlib.data`.
_OF_DATASET = ("TaskExamples", "task_arrays", "task_dataset")

__all__ = [
    "MQAR",
    "TASK_SPLITS",
    "Automaton",
    "CommonWords",
    "Compression",
    "Example",
    "FrequentWords",
    "FuzzyRecall",
    "InContextRecall",
    "Memorization",
    "Mixture",
    "ModularArithmetic",
    "NeedleInHaystack",
    "NoisyRecall",
    "Palindrome",
    "Parity",
    "Permutations",
    "RegBench",
    "SelectiveCopying",
    "Stack",
    "Task",
    "TaskExamples",
    "TaskSplit",
    "VariableTracking",
    "make_task",
    "task_arrays",
    "task_dataset",
    "task_names",
]


def __getattr__(name: str) -> Any:
    if name not in _OF_DATASET:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with from_extra("train", f"{__name__}.{name}"):
        return getattr(importlib.import_module(f"{__name__}.dataset"), name)

"""Synthetic tasks as data: example i is a pure function of (seed, split, i)."""

from rnnlib.extras import from_extra

with from_extra("train", "rnnlib.data.tasks"):
    from rnnlib.data.tasks.base import TASK_SPLITS, Example, Task, TaskSplit
    from rnnlib.data.tasks.dataset import TaskExamples, task_arrays, task_dataset
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

"""Tasks by name."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from rnnlib.data.tasks import mad, state_tracking
from rnnlib.data.tasks.base import Task
from rnnlib.data.tasks.mqar import MQAR
from rnnlib.data.tasks.needle import NeedleInHaystack
from rnnlib.data.tasks.palindrome import Palindrome
from rnnlib.data.tasks.regbench import RegBench
from rnnlib.data.tasks.ruler import CommonWords, FrequentWords, VariableTracking
from rnnlib.data.tasks.stack import Stack

_TASKS: dict[str, Callable[..., Task]] = {
    "mqar": MQAR,
    "palindrome": Palindrome,
    "stack": Stack,
    "s_niah_1": functools.partial(NeedleInHaystack, haystack="repeat"),
    "s_niah_2": functools.partial(NeedleInHaystack, haystack="essay"),
    "s_niah_3": functools.partial(NeedleInHaystack, haystack="essay", value_kind="uuids"),
    "mk_niah_1": functools.partial(NeedleInHaystack, haystack="essay", num_keys=4),
    "mk_niah_2": functools.partial(NeedleInHaystack, haystack="needles"),
    "mk_niah_3": functools.partial(NeedleInHaystack, haystack="needles", key_kind="uuids", value_kind="uuids"),
    "variable_tracking": VariableTracking,
    "common_words": CommonWords,
    "frequent_words": FrequentWords,
    "regbench": RegBench,
    "mad_in_context_recall": mad.InContextRecall,
    "mad_noisy_recall": mad.NoisyRecall,
    "mad_fuzzy_recall": mad.FuzzyRecall,
    "mad_memorization": mad.Memorization,
    "mad_compression": mad.Compression,
    "mad_selective_copying": mad.SelectiveCopying,
    "parity": state_tracking.Parity,
    "modular_arithmetic": state_tracking.ModularArithmetic,
    "permutations": state_tracking.Permutations,
}


def task_names() -> tuple[str, ...]:
    """The names that `make_task` knows."""
    return tuple(_TASKS)


def make_task(name: str, **knobs: Any) -> Task:
    """The task of a name, with some of its fields changed.

    Raises:
        ValueError: the name or a field is unknown, or a field's value does not fit.
    """
    if name not in _TASKS:
        raise ValueError(f"task must be one of {', '.join(_TASKS)}; got {name!r}")
    factory = _TASKS[name]
    kind: Any = factory.func if isinstance(factory, functools.partial) else factory
    fields = [field.name for field in dataclasses.fields(kind)]
    unknown = sorted(set(knobs) - set(fields))
    if unknown:
        raise ValueError(f"task {name!r} has no {', '.join(unknown)}; it has {', '.join(fields)}")
    return factory(**knobs)

"""Which cases of a test run always. The others are marked slow: they repeat the same code on more models or sizes."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def mostly_slow(cases: Iterable[Any], always: Collection[Any]) -> list[Any]:
    """Parameters for `pytest.mark.parametrize`: those in `always`, and the others as slow ones.

    Raises:
        ValueError: one of `always` is no case.
    """
    cases = list(cases)
    if unknown := [case for case in always if case not in cases]:
        raise ValueError(f"always has {unknown}, expected some of {cases}")
    return [case if case in always else pytest.param(case, marks=pytest.mark.slow) for case in cases]

"""Annotations of the packages are checked while they are tested (tests/annotations.py)."""

import dataclasses
from collections.abc import Iterator

import jax
import jaxtyping
import numpy as np
import pytest
from jaxtyping import Float, Int, TypeCheckError

from rnnlib.ops.triangular import unit_lower_inverse

hooked = jaxtyping.jaxtyped(typechecker=None)  # what jaxtyping's import hook writes above each definition


class Sizes:
    @hooked
    def __init__(self, size: int):
        self.size = size

    @property
    @hooked
    def doubled(self) -> int:
        return self.size * 2.0

    @staticmethod
    @hooked
    def halved(size: int) -> int:
        return size // 2


@hooked
@dataclasses.dataclass
class Field:
    size: int


@hooked
def outer(x: Float[np.ndarray, "T K"], y: Float[np.ndarray, "T V"], transposed: bool) -> Float[np.ndarray, "K V"]:
    @hooked
    def inner(x: Float[np.ndarray, "K T"]) -> Int[np.ndarray, "..."]:
        return np.arange(x.shape[1])

    assert inner(x).shape == (x.shape[1],), "its own K and T"
    return y.T @ x if transposed else x.T @ y


@hooked
def count(to: int) -> Iterator[int]:
    yield from range(to)


def test_arguments_fields_and_results_are_checked():
    x, y = np.ones((5, 3)), np.ones((5, 2))
    assert outer(x, y, False).shape == (3, 2)
    for call in (
        lambda: outer(x, y[:4], False),  # T is 5 and 4
        lambda: outer(x, y, True),  # the result is V, K
        lambda: outer(x, y.astype(int), False),
        lambda: outer(x, y, transposed=1),
        lambda: Field("3"),
        lambda: Sizes("3"),
        lambda: Sizes(3).doubled,
        lambda: Sizes.halved(3.0),
        lambda: count("3"),
        lambda: unit_lower_inverse(jax.numpy.ones((2, 3, 4))),  # by the hook itself
    ):
        with pytest.raises(TypeCheckError):
            call()
    assert outer(x, y, transposed=False).shape == (3, 2), "nothing is left of calls that failed"
    assert list(count(2)) == [0, 1] and Sizes.halved(3) == 1 and Field(3).size == 3


def test_functions_within_functions_are_checked_each_time_they_are_made():
    def adding(number, kind):
        @hooked
        def add(x: kind, more: float = 0.0) -> int:
            return x + number

        return add

    one, two, other = adding(1, int), adding(2, int), adding(0, str)
    assert (one(1), two(1), two(1, more=2.0)) == (2, 3, 3), "each its own"
    for call in (lambda: one("1"), lambda: two("1"), lambda: two(1, more="1"), lambda: adding(0.5, int)(1)):
        with pytest.raises(TypeCheckError):
            call()
    with pytest.raises(TypeCheckError):
        other(1)


def test_checks_can_be_turned_off(unchecked_shapes):
    assert Sizes("3").size == "3" and Field("3").size == "3"

import dataclasses
import math
from typing import Annotated, Any, Literal

import numpy as np
import pytest

from rnnlib.configuration import to_plain
from rnnlib.data import DataConfig
from rnnlib.fields import (
    Fraction,
    NaturalNumber,
    PositiveInteger,
    PositiveNumber,
    Range,
    check_fields,
    field_types,
    in_words,
    matches,
)
from rnnlib.layers import SoftplusDecay
from rnnlib.models import ModelConfig

NAN = float("nan")


@dataclasses.dataclass(frozen=True)
class Settings:
    steps: PositiveInteger = 1
    bound: Annotated[float, Range(at_least=1, at_most=2)] | None = None
    rank: PositiveInteger | Literal["full"] = "full"
    pair: tuple[float, float] = (0.0, 1.0)
    names: tuple[str, ...] = ()
    inner: DataConfig = dataclasses.field(default_factory=DataConfig)
    is_on: bool = False
    anything: Any = None

    def __post_init__(self):
        check_fields(self)


def test_defaults_and_values_of_numpy_are_taken():
    assert Settings().steps == 1
    Settings(np.int32(3), np.float32(1.5), np.int64(4), (np.float64(0.1), 1), ("a",), is_on=np.bool_(True), anything=[])
    Settings(bound=1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "Settings: steps is 0, expected an integer of at least 1"),
        ({"steps": True}, "Settings: steps is True, expected an integer of at least 1"),
        ({"steps": 2.0}, "Settings: steps is 2.0, expected an integer of at least 1"),
        ({"bound": 2.5}, "Settings: bound is 2.5, expected a number from 1 to 2 or None"),
        ({"bound": NAN}, "Settings: bound is nan, expected a number from 1 to 2 or None"),
        ({"rank": "half"}, "Settings: rank is 'half', expected an integer of at least 1 or 'full'"),
        ({"pair": (0.0, NAN)}, "Settings: pair is (0.0, nan), expected tuple[float, float]"),
        ({"pair": (0.0,)}, "Settings: pair is (0.0,), expected tuple[float, float]"),
        ({"names": ["a"]}, "Settings: names is ['a'], expected tuple[str, ...]"),
        ({"inner": None}, "Settings: inner is None, expected DataConfig"),
        ({"is_on": 1}, "Settings: is_on is 1, expected a boolean"),
    ],
)
def test_one_error_names_class_field_value_and_what_was_expected(changes, message):
    with pytest.raises(ValueError) as caught:
        Settings(**changes)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("kind", "inside", "outside", "words"),
    [
        (PositiveInteger, (1, 10**20), (0, -1, 1.0), "an integer of at least 1"),
        (NaturalNumber, (0,), (-1, 0.5), "an integer of at least 0"),
        (PositiveNumber, (1, 1e-300), (0, -0.0, math.inf, NAN), "a number above 0 and finite"),
        (Fraction, (0, 1, 0.5), (-1e-9, 1.1, NAN), "a number from 0 to 1"),
        (Annotated[float, Range(above=0)], (1.0, math.inf), (0.0, NAN, "1"), "a number above 0"),
        (Annotated[float, Range(above=0, below=1)], (0.5,), (0, 1), "a number above 0 and below 1"),
        (Annotated[float | int, Range(at_most=3)] | None, (3, 2.5, None), (4, NAN), "a number at most 3 or None"),
        (float, (1, math.inf), (NAN, True), "a number"),
    ],
)
def test_ranges(kind, inside, outside, words):
    assert [value for value in inside if not matches(kind, value)] == []
    assert [value for value in outside if matches(kind, value)] == []
    assert in_words(kind) == words


def test_a_range_is_no_part_of_the_fields_value():
    assert list(field_types(Settings)) == [field.name for field in dataclasses.fields(Settings)]
    assert repr(ModelConfig(width=8)).startswith("ModelConfig(vocabulary_size=256, width=8, ")


def test_what_numpy_counts_is_plain_in_files(unchecked_shapes):
    plain = ModelConfig(width=np.int64(8), norm_eps=np.float64(1e-5)).to_dict()
    assert type(plain["width"]) is int and type(plain["norm_eps"]) is float
    assert type(to_plain(SoftplusDecay(step_floor=np.float32(0.5)))["SoftplusDecay"]["step_floor"]) is float

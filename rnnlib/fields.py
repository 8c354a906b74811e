"""Types and ranges of a configuration's fields, stated where the fields are, and the check that holds values to them.

A dataclass with a field `size: PositiveInteger = 4` that calls `check_fields(self)` in its `__post_init__` says
`Filter: size is 0, expected an integer of at least 1`.

Why no library does this: pydantic's dataclasses (2.14) are frozen and hashable too, but take "3" and True for an
integer without a word. For a size of 0 they say, in four lines with a web address, that "Input should be greater than
or equal to 1" of argument "0": not the field, and not in one line. To turn that into a line like the one above, and to
have tyro's help and YAML read the same `Range`, takes more code than these checks.
"""

import dataclasses
import functools
import math
import types
import typing
from typing import Annotated, Any, Literal

import numpy as np


@dataclasses.dataclass(frozen=True)
class Range:
    """The numbers that a field takes, as `Annotated[float, Range(above=0)]`; NaN is in none.

    Attributes:
        at_least: the lowest number, None for no such limit.
        above: what all numbers are above.
        at_most: the highest number.
        below: what all numbers are below; infinity for all that are finite.
    """

    at_least: float | int | None = None
    above: float | int | None = None
    at_most: float | int | None = None
    below: float | int | None = None

    def __contains__(self, number: float | int) -> bool:
        """Whether a number is in the range."""
        return (
            number == number
            and (self.at_least is None or number >= self.at_least)
            and (self.above is None or number > self.above)
            and (self.at_most is None or number <= self.at_most)
            and (self.below is None or number < self.below)
        )

    def __str__(self) -> str:
        """The range in words that follow "a number"."""
        if self.at_least is not None and self.at_most is not None:
            return f"from {self.at_least} to {self.at_most}"
        limits = {"of at least": self.at_least, "above": self.above, "at most": self.at_most, "below": self.below}
        words = [f"{word} {limit}" for word, limit in limits.items() if limit is not None]
        return " and ".join(words).replace("below inf", "finite")


PositiveInteger = Annotated[int, Range(at_least=1)]
NaturalNumber = Annotated[int, Range(at_least=0)]
PositiveNumber = Annotated[float, Range(above=0, below=math.inf)]
Fraction = Annotated[float, Range(at_least=0, at_most=1)]


def check_fields(config: Any) -> None:
    """ValueError, naming class, field, value and what was expected, unless a dataclass's fields are as they state.

    A field states its type and, for a number, perhaps a `Range`. An integer may stand for a number, and NumPy's scalars
    for Python's; a boolean is no integer, and NaN no number. What is looked into are unions, `Literal` and tuples; any
    other generic type takes every value.
    """
    for name, kind in field_types(type(config)).items():
        check_value(type(config).__name__, name, getattr(config, name), kind)


def check_value(owner: str, name: str, value: Any, kind: Any) -> None:
    """ValueError unless a field of a class, or an argument of a function, is of a type as `field_types` gives it."""
    if not matches(kind, value):
        raise ValueError(f"{owner}: {name} is {value!r}, expected {in_words(kind)}")


def field_types(cls: Any) -> dict[str, Any]:
    """The types of a dataclass's fields by name, each with its `Range`."""
    return _field_types(cls)


@functools.cache
def _field_types(cls: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(cls, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def matches(kind: Any, value: Any) -> bool:
    """Whether a value is of a type as `field_types` gives it."""
    value = value.item() if isinstance(value, np.generic) else value
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        ranges = (extra for extra in kind.__metadata__ if isinstance(extra, Range))
        return matches(arguments[0], value) and all(value in limits for limits in ranges)
    if origin in (typing.Union, types.UnionType):
        return any(matches(option, value) for option in arguments)
    if origin is Literal:
        return value in arguments
    if origin is tuple and ... in arguments:
        return isinstance(value, tuple) and all(matches(arguments[0], entry) for entry in value)
    if origin is tuple:
        return isinstance(value, tuple) and len(value) == len(arguments) and all(map(matches, arguments, value))
    if kind in (int, float):
        return isinstance(value, int | kind) and not isinstance(value, bool) and value == value
    return kind is Any or not isinstance(kind, type) or isinstance(value, kind)


def in_words(kind: Any) -> str:
    """What values a type has, as `"an integer of at least 1, 'value_size' or None"`."""
    *options, last = dict.fromkeys(_options(kind))
    return f"{', '.join(options)} or {last}" if options else last


def _options(kind: Any) -> list[str]:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        ranges = [str(extra) for extra in kind.__metadata__ if isinstance(extra, Range)]
        return [" ".join([option, *ranges]) for option in _options(arguments[0])]
    if origin in (typing.Union, types.UnionType):
        # An integer is a number: there is no need to say both.
        said = [option for option in arguments if option is not int or float not in arguments]
        return [word for option in said for word in _options(option)]
    if origin is Literal:
        return [repr(value) for value in arguments]
    if not isinstance(kind, type):
        return [str(kind)]
    names = {int: "an integer", float: "a number", bool: "a boolean", str: "a string", types.NoneType: "None"}
    return [names.get(kind, kind.__name__)]

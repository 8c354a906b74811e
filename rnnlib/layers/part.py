"""What the parts of a mixer's configuration have in common: checked types, and a form in plain values."""

import dataclasses
import functools
import numbers
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, Literal


@dataclasses.dataclass(frozen=True)
class PartConfig:
    """Configuration of a part of a mixer: a choice on an axis, or something that such a choice has.

    In plain values it is its class's name and the fields that are not at their defaults, such as
    `{"ApplyToKey": {"bound": 2.0}}`. A class of your own can be written like this as soon as it is defined.
    """

    def __post_init__(self) -> None:
        check_fields(self)


def check_fields(config: Any) -> None:
    """ValueError, naming field, value and type, unless the fields of a dataclass have the types that they state."""
    cls: Any = type(config)
    for name, hint in _hints(cls).items():
        if not _matches(hint, getattr(config, name)):
            *words, last = _words(hint)
            expected = f"{', '.join(words)} or {last}" if words else last
            raise ValueError(f"{cls.__name__}: {name} is {getattr(config, name)!r}, expected {expected}")


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def _matches(hint: Any, value: Any) -> bool:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_matches(option, value) for option in arguments)
    if origin is Literal:
        return value in arguments
    if origin is tuple and ... in arguments:
        return isinstance(value, tuple) and all(_matches(arguments[0], entry) for entry in value)
    if origin is tuple:
        return isinstance(value, tuple) and len(value) == len(arguments) and all(map(_matches, arguments, value))
    if hint in (int, float):
        kind = numbers.Integral if hint is int else numbers.Real
        return isinstance(value, kind) and not isinstance(value, bool)
    return not isinstance(hint, type) or isinstance(value, hint)


def _words(hint: Any) -> list[str]:
    """What values a type has, as a list of alternatives."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return [word for option in typing.get_args(hint) for word in _words(option)]
    if typing.get_origin(hint) is Literal:
        return [repr(value) for value in typing.get_args(hint)]
    if not isinstance(hint, type):
        return [str(hint)]
    names = {int: "an integer", float: "a number", bool: "a boolean", str: "a string", types.NoneType: "None"}
    return [names.get(hint, hint.__name__)]


def to_plain(value: Any) -> Any:
    """A part as nested mappings; a tuple as a list; any other value as it is. `from_plain` reads it."""
    if isinstance(value, PartConfig):
        changed = {
            field.name: getattr(value, field.name)
            for field in dataclasses.fields(value)
            if getattr(value, field.name) != _default(field)
        }
        return {type(value).__name__: {name: to_plain(entry) for name, entry in changed.items()}}
    return [to_plain(entry) for entry in value] if isinstance(value, tuple) else value


def from_plain(value: Any) -> Any:
    """What `to_plain` described: parts for mappings, tuples for lists.

    Raises:
        ValueError: a mapping is not of one part's name to its fields, or a field's value is invalid.
    """
    if isinstance(value, list | tuple):
        return tuple(from_plain(entry) for entry in value)
    if not isinstance(value, Mapping):
        return value
    parts = {part.__name__: part for part in _parts(PartConfig)}
    name, fields = next(iter(value.items())) if len(value) == 1 else (None, None)
    if name not in parts or not isinstance(fields, Mapping):
        raise ValueError(
            f"{value!r}: expected a part and its fields, {{name: {{field: value}}}}, one of {sorted(parts)}"
        )
    known = [field.name for field in dataclasses.fields(parts[name])]
    for field in fields:
        if field not in known:
            raise ValueError(f"{name} has no field {field!r}, expected {known}")
    return parts[name](**{field: from_plain(entry) for field, entry in fields.items()})


def _default(field: dataclasses.Field) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _parts(part: type[PartConfig]) -> Iterator[type[PartConfig]]:
    """Everything that can be made of a class and its subclasses."""
    for subclass in part.__subclasses__():
        if not getattr(subclass, "__abstractmethods__", None):
            yield subclass
        yield from _parts(subclass)

"""Base classes of the parts of a mixer's configuration: checked fields, and conversion to and from plain values."""

import abc
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from rnnlib.configuration import field_default, to_plain
from rnnlib.fields import check_fields


@dataclasses.dataclass(frozen=True)
class PartConfig:
    """Configuration of a part of a mixer: a choice on an axis, or a part of such a choice.

    In plain values, a part is its class's name with the fields that differ from their defaults, such as
    `{"ApplyToKey": {"bound": 2.0}}`. Your own class can be written like this once it is defined, if no part of another
    module has its name.

    Attributes:
        heads_apart: set this to True in your own class if its module has the heads of `MixerShape`, does not mix heads,
            and reads them out by `MixerShape.output`. Heads can then be divided over devices (`--mesh.tensor`).
    """

    heads_apart: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_fields(self)

    def to_dict(self) -> dict[str, Any]:
        """The part in plain values, which `part_from_plain` reads.

        Raises:
            ValueError: a part of another module has the same name.
        """
        _part(type(self).__name__)
        entries = {field.name: (getattr(self, field.name), field_default(field)) for field in dataclasses.fields(self)}
        return {type(self).__name__: {name: to_plain(x) for name, (x, default) in entries.items() if x != default}}


@dataclasses.dataclass(frozen=True)
class AxisConfig(PartConfig, abc.ABC):
    """Configuration of an axis.

    Attributes:
        words: the choice in a few words, for the table of mixers. Override `describe` if they depend on fields.
    """

    words: ClassVar[str]

    def describe(self) -> str:
        """The axis in a few words, for the table of mixers."""
        return self.words


def part_from_plain(value: Any) -> Any:
    """The inverse of `rnnlib.configuration.to_plain`: converts mappings to parts and lists to tuples.

    Raises:
        ValueError: a mapping does not map one part's name to its fields, or a field's value is invalid.
    """
    if isinstance(value, list | tuple):
        return tuple(part_from_plain(entry) for entry in value)
    if not isinstance(value, Mapping):
        return value
    name, fields = next(iter(value.items())) if len(value) == 1 else (None, None)
    part = _part(name)
    if part is None or not isinstance(fields, Mapping):
        names = sorted({known.__name__ for known in _parts(PartConfig)})
        raise ValueError(
            f"{value!r}: expected a part and its fields, {{name: {{field: value}}}}, one of {names}, or of a module "
            "that defines it and is imported before"
        )
    known = [field.name for field in dataclasses.fields(part)]
    for field in fields:
        if field not in known:
            raise ValueError(f"{name} has no field {field!r}, expected {known}")
    return part(**{field: part_from_plain(entry) for field, entry in fields.items()})


def _part(name: Any) -> type[PartConfig] | None:
    """The part with a name. If one module defines it several times, as a notebook's cell may, the last one."""
    found = {part.__module__: part for part in _parts(PartConfig) if part.__name__ == name}
    if len(found) > 1:
        raise ValueError(f"{name}: there are parts of this name in {' and '.join(sorted(found))}, expected one: rename")
    return next(iter(found.values()), None)


def _parts(part: type[PartConfig]) -> Iterator[type[PartConfig]]:
    """Everything that can be made of a class and its subclasses."""
    for subclass in part.__subclasses__():
        if not getattr(subclass, "__abstractmethods__", None):
            yield subclass
        yield from _parts(subclass)

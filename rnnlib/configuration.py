"""Configurations as plain values, mappings, lists, strings and numbers, and back, with every name and type checked."""

import contextlib
import dataclasses
import json
import os
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from rnnlib.fields import field_types, in_words, matches


class ConfigError(ValueError):
    """A config that cannot be read: an unknown name, or a value of the wrong type or size."""


def to_plain(value: Any) -> Any:
    """A config as dictionaries, lists, strings and numbers, in the order of its fields.

    A dataclass with a method `to_dict` says itself what it is in plain values.
    """
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if dataclasses.is_dataclass(value):
        return {entry.name: to_plain(getattr(value, entry.name)) for entry in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(entry) for entry in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    # A learning rate out of np.geomspace is a number to everyone but YAML.
    return value.item() if isinstance(value, np.generic) else value


def from_plain[Config](cls: type[Config], plain: Any, *, default: Config | None = None, name: str = "") -> Config:
    """The config that `to_plain` described.

    Args:
        cls: the dataclass.
        plain: A mapping from field names to values; fields left out keep their defaults.
        default: A config to take the left-out fields from, in place of the dataclass's defaults.
        name: where in the whole config this is, for messages.

    Raises:
        ConfigError: naming the field, its value and what was expected.
    """
    if not isinstance(plain, Mapping):
        raise ConfigError(f"{name or cls.__name__}: expected a mapping of {cls.__name__}'s fields, got {plain!r}")
    fields = {entry.name: entry for entry in dataclasses.fields(cls)}  # type: ignore[arg-type]
    unknown = [str(key) for key in plain if key not in fields]
    if unknown:
        place = f"{name}.{unknown[0]}" if name else unknown[0]
        raise ConfigError(f"{place}: no such setting; expected one of {', '.join(fields)}")
    kinds = field_types(cls)
    values = {}
    for key, value in plain.items():
        place = f"{name}.{key}" if name else key
        entry_default = field_default(fields[key]) if default is None else getattr(default, key)
        values[key] = _convert(kinds[key], value, place, entry_default)
    try:
        return cls(**values) if default is None else dataclasses.replace(default, **values)  # type: ignore[type-var]
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name}: {error}" if name and name not in str(error) else str(error)) from error


def field_default(entry: dataclasses.Field) -> Any:
    """A field's default, None where it has none."""
    if entry.default is not dataclasses.MISSING:
        return entry.default
    return None if entry.default_factory is dataclasses.MISSING else entry.default_factory()


def _convert(kind: Any, value: Any, name: str, default: Any) -> Any:
    """A value, checked, in its field's type where YAML has another: lists for tuples, strings for paths and 1e-3."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        # Left-out settings of a section keep the section's defaults in this config, not those of its class.
        return from_plain(kind, value, default=default, name=name)
    if origin in (typing.Union, types.UnionType) and not (value is None and type(None) in arguments):
        errors = []
        for option in arguments:
            try:
                return _convert(option, value, name, default)
            except ConfigError as error:
                errors.append(error)
        raise errors[0]
    if origin is Annotated:
        value = _convert(arguments[0], value, name, default)
    elif origin in (tuple, list):
        if isinstance(value, str) or not isinstance(value, list | tuple):
            raise ConfigError(f"{name} is {value!r}, expected a list")
        value = origin(_convert(arguments[0], item, f"{name}[{i}]", None) for i, item in enumerate(value))
    elif kind is float and isinstance(value, str):
        # YAML reads 1e-3 as a string: its numbers want a point and a sign.
        with contextlib.suppress(ValueError):
            value = float(value)
    elif kind is Path and isinstance(value, str | os.PathLike):
        value = Path(value)
    if not matches(kind, value):
        raise ConfigError(f"{name} is {value!r}, expected {in_words(kind)}")
    return float(value) if kind is float else value


def keyed_values(name: str, texts: Iterable[str]) -> dict[str, Any]:
    """The values that texts `KEY=VALUE` name; a value that is no JSON is a text.

    Args:
        name: of the setting that has them, for messages.
        texts: the texts.

    Raises:
        ValueError: one has no key.
    """
    found: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key.isidentifier():
            raise ValueError(f"{name} {text!r}: expected KEY=VALUE, such as enable_thinking=false")
        try:
            found[key] = json.loads(value)
        except (ValueError, RecursionError):
            # Python's names of these values are as common in documentation as JSON's.
            found[key] = {"True": True, "False": False, "None": None}.get(value, value)
    return found

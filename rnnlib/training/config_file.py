"""Frozen dataclass configs from and to YAML files."""

import os
from typing import IO, Any

import yaml

from rnnlib.configuration import ConfigError, from_plain, to_plain
from rnnlib.files import expect_shallow, read_text, write_atomically

_MAX_BYTES = 2**22
# An alias (`*name`) stands for all of what it names: a few lines of them may stand for billions of entries.
_MAX_ENTRIES = 100_000


def load_config[Config](cls: type[Config], path: str | os.PathLike, *, default: Config | None = None) -> Config:
    """Reads a config from a YAML file.

    Args:
        cls: the config's dataclass.
        path: the file.
        default: A config to take left-out fields from.

    Raises:
        ConfigError: if the file cannot be read, is not YAML, or holds a wrong name or value; names the file.
    """
    try:
        plain = read_yaml(read_text(path, at_most=_MAX_BYTES))
    except OSError as error:
        raise ConfigError(f"config file {os.fspath(path)}: {error.strerror or error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"config file {os.fspath(path)} is not YAML: {' '.join(str(error).split())}") from error
    except ValueError as error:
        raise ConfigError(f"config file {error}") from error
    try:
        return from_plain(cls, {} if plain is None else plain, default=default)
    except ConfigError as error:
        raise ConfigError(f"config file {os.fspath(path)}: {error}") from error


class _Loader(yaml.SafeLoader):
    """YAML's safe loader, to which a key that stands twice is an error: one of the two would be lost."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        mapping = super().construct_mapping(node, deep=deep)
        if len(mapping) < len(node.value):
            keys = [self.construct_object(key, deep=True) for key, _ in node.value]
            seen: set[Any] = set()
            twice = next(key for key in keys if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise yaml.constructor.ConstructorError(None, None, f"{twice!r} stands twice in it", node.start_mark)
        return mapping

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:merge":  # a merge of merges grows without bound
                raise yaml.constructor.ConstructorError(None, None, "<< stands in it, expected entries", key.start_mark)


def read_yaml(text: str | IO[str]) -> Any:
    """What a text or an open file of YAML says, in plain types.

    Raises:
        yaml.YAMLError: it is not YAML, is nested too deeply, or a mapping has a key twice.
    """
    try:
        value = yaml.load(text, _Loader)
        expect_shallow(value, "the text", max_entries=_MAX_ENTRIES)
    except (ValueError, RecursionError) as error:
        raise yaml.YAMLError("nested too deeply" if isinstance(error, RecursionError) else str(error)) from error
    return value


def save_config(config: Any, path: str | os.PathLike) -> None:
    """Writes a config as YAML, whole or not at all."""
    text = yaml.safe_dump(to_plain(config), sort_keys=False, default_flow_style=False)
    write_atomically(path, text.encode())

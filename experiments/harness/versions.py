"""Versions of what is installed, for the record; imports no framework."""

import importlib.metadata
from collections.abc import Iterable


def package_versions(names: Iterable[str]) -> dict[str, str]:
    """Versions by package, of those that are installed."""
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found

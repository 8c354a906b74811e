"""Mixtures: paths with weights, `corpus/*.txt:3`."""

import dataclasses
import os
import re

from rnnlib.data.config import DataConfig

_WEIGHTED = re.compile(r"(.+):(\d+\.?\d*|\.\d+)")


def split_weight(path: str) -> tuple[str, float | None]:
    """A path or pattern and its weight, None without one. A file that exists under the whole name has none.

    Raises:
        ValueError: the weight is 0.
    """
    found = None if os.path.exists(path) else _WEIGHTED.fullmatch(path)
    if found is None:
        return path, None
    if not float(found[2]) > 0:
        raise ValueError(f"paths: the weight of {path!r} is {found[2]}, expected a number above 0")
    return found[1], float(found[2])


def mixture(config: DataConfig) -> list[tuple[DataConfig, float]]:
    """The parts of a mixture and their weights; without weights the config alone.

    Where one path has a weight, each is a part of its own, and those without count 1.
    """
    parsed = [split_weight(path) for path in config.paths]
    if all(weight is None for _, weight in parsed):
        return [(config, 1.0)]
    return [(dataclasses.replace(config, paths=(path,)), 1.0 if weight is None else weight) for path, weight in parsed]

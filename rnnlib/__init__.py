"""Delta-rule recurrent sequence models in JAX: one recurrence, four axes, papers as presets.

The parts are `rnnlib.ops`, `layers`, `models`, `inference`, `analysis`, `hub`, `tokenizers`, `data`, `training`, `eval`
and `cli`. Each is imported when it is first used, as is `rnnlib.check_numerics`. Operators, layers, models and
inference need jax and flax only. A part that needs more names the extra that has it.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

# Functions that belong to no part alone, by the module that has them.
_FROM = {"check_numerics": "rnnlib.ops.checking"}
_PARTS = ("analysis", "cli", "data", "eval", "hub", "inference", "layers", "models", "ops", "tokenizers", "training")


def __getattr__(name: str) -> Any:
    if name in _PARTS:
        return importlib.import_module(f"rnnlib.{name}")
    if name in _FROM:
        return getattr(importlib.import_module(_FROM[name]), name)
    raise AttributeError(f"module 'rnnlib' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_PARTS, *_FROM])

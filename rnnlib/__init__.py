"""Delta-rule recurrent sequence models in JAX: one recurrence, four axes, papers as presets.

The parts are `rnnlib.ops`, `layers`, `models`, `analysis`, `hub`, `tokenizers`, `data`, `training`, `eval` and `cli`.
Each is imported when it is first used. Operators, layers and models need jax and flax only. A part that needs more
names the extra that has it.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_PARTS = ("analysis", "cli", "data", "eval", "hub", "layers", "models", "ops", "tokenizers", "training")


def __getattr__(name: str) -> Any:
    if name in _PARTS:
        return importlib.import_module(f"rnnlib.{name}")
    raise AttributeError(f"module 'rnnlib' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_PARTS])

"""The command line: `rnnlib train | eval | lm-eval | generate | export | mixers | tokenizer`.

A script of your own ends with `sys.exit(rnnlib.cli.main.main())` to have these commands know its mixers.
"""

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    # `import rnnlib` is enough for the line above; `python -m rnnlib.cli.main` would warn of an import made here.
    if name == "main":
        return importlib.import_module("rnnlib.cli.main")
    raise AttributeError(f"module 'rnnlib.cli' has no attribute {name!r}")

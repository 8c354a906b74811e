"""The command line as the user started it, for hints that can be pasted."""

import os
import shlex
import sys
from pathlib import Path


def command_line(*arguments: str | os.PathLike, program: str = "rnnlib") -> str:
    """A command of rnnlib as this process was started: by its script, by a script of the user's own, with uv or not.

    A run whose mixer a script registers is read by that script alone; with `uv run`, rnnlib itself is on no path.

    Args:
        arguments: The command and its arguments.
        program: Another program of the same environment, in place of rnnlib.
    """
    words = [program]
    script = Path(sys.argv[0])
    if program == "rnnlib" and script.suffix == ".py":
        ours = script.name == "__main__.py" or script.parts[-3:] == ("rnnlib", "cli", "main.py")
        words = ["python", "-m", "rnnlib"] if ours else ["python", str(script)]
    if "UV_RUN_RECURSION_DEPTH" in os.environ:  # `uv run` sets it
        words = ["uv", "run", *words]
    return shlex.join([*words, *(os.fspath(argument) for argument in arguments)])

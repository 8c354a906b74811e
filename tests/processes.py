"""Tests that need several devices: JAX counts them once, so that each of these tests runs a program of its own."""

import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

ROOT = pathlib.Path(__file__).parents[1]
# Where the tests' own processes keep compiled functions between runs (tests/conftest.py).
_KEPT = {
    "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".pytest_cache" / "jax"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.3",
}


def result_of(module: str, *arguments: str, environment: Mapping[str, str] | None = None, timeout: float = 1200) -> Any:
    """What `python -m module` prints as JSON in its last line, on CPU devices; a failure shows its errors.

    Args:
        module: the program, which sets how many devices it has.
        arguments: of the program.
        environment: its environment; by default that of this process, with functions that the tests have compiled.
        timeout: in seconds.
    """
    process = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env={**(_KEPT | os.environ if environment is None else environment), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    return json.loads(process.stdout.splitlines()[-1])

"""What a measurement on a CPU was made with."""

import datetime
import importlib.metadata
import os
import pathlib
import platform
import subprocess
from typing import Any


def machine() -> dict[str, Any]:
    """Processor, cores, versions and date."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    packages = ("jax", "jaxlib", "flax", "optax", "numpy")
    return {
        "processor": models[0] if models else platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in packages},
        "date": datetime.date.today().isoformat(),
    }


def revision(tree: pathlib.Path) -> dict[str, Any]:
    """The commit of a work tree, and whether files of the library differ from it."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", "-C", str(tree), *arguments], capture_output=True, text=True).stdout.strip()

    changed = git("status", "--porcelain", "--", "rnnlib", "pallas_kernels")
    return {"commit": git("rev-parse", "--short", "HEAD"), "changed": bool(changed)}

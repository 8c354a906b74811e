"""What a measurement on a CPU was made with."""

import datetime
import json
import os
import pathlib
import platform
import subprocess
from typing import Any

from experiments.harness.records import installed_versions
from experiments.harness.tables import write_text


def machine() -> dict[str, Any]:
    """Processor, cores, versions and date."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": models[0] if models else platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": installed_versions(("jax", "jaxlib", "flax", "optax", "numpy")),
        "date": datetime.date.today().isoformat(),
    }


def revision(tree: pathlib.Path) -> dict[str, Any]:
    """The commit of a work tree, and whether files of the library differ from it."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", "-C", str(tree), *arguments], capture_output=True, text=True).stdout.strip()

    changed = git("status", "--porcelain", "--", "rnnlib", "pallas_kernels")
    return {"commit": git("rev-parse", "--short", "HEAD"), "changed": bool(changed)}


def read_runs(path: pathlib.Path) -> list[dict[str, Any]]:
    """The runs of a file; none where there is none."""
    return json.loads(path.read_text()) if path.exists() else []


def add_run(path: pathlib.Path, run: dict[str, Any]) -> None:
    """Adds a run to a file: one a line, since what they hold is long."""
    lines = ",\n".join(json.dumps(one) for one in [*read_runs(path), run])
    write_text(path, f"[\n{lines}\n]\n")

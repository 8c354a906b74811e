"""Where and with what results are being measured, for the record."""

import datetime
import importlib.metadata
import pathlib
import platform
import shlex
import subprocess
import sys
from typing import Any

import jax

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy")


def environment(command: str, commit: str | None = None) -> dict[str, Any]:
    """Where and with what results are being measured."""
    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "platform": device.platform,
        "python": platform.python_version(),
        "packages": {name: importlib.metadata.version(name) for name in _PACKAGES},
        "commit": commit or _commit(),
        "command": command,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _commit() -> str:
    folder = pathlib.Path(__file__).parent
    try:
        run = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return run.stdout.strip()


def command_line(module: str) -> str:
    """The command that is running, for the record."""
    return shlex.join(["python", "-m", module, *sys.argv[1:]])

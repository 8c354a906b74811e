"""Where and with what results are being measured, for the record."""

import platform
import shlex
import sys
from typing import Any

import jax

from experiments.harness.records import checked_out_commit, installed_versions, now

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy")


def environment(command: str, commit: str | None = None) -> dict[str, Any]:
    """Where and with what results are being measured."""
    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "platform": device.platform,
        "python": platform.python_version(),
        "packages": installed_versions(_PACKAGES),
        "commit": commit or checked_out_commit() or "unknown",
        "command": command,
        "date": now(),
    }


def command_line(module: str) -> str:
    """The command that is running, for the record."""
    return shlex.join(["python", "-m", module, *sys.argv[1:]])

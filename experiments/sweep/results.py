"""Result files: one for each mixer in each cell, written whole or not at all."""

import dataclasses
import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import subprocess
import sys
from typing import Any

import jax

from experiments.sweep.study import Cell, Lane, Mixer, Study, fingerprint, slug
from rnnlib.data.tasks import Task

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


def result_path(folder: pathlib.Path, mixer: Mixer, cell: Cell) -> pathlib.Path:
    """The file of a mixer in a cell."""
    return folder / f"{slug(cell.name)}--{slug(mixer.label)}.json"


def read_runs(folder: pathlib.Path, mixer: Mixer, cell: Cell) -> dict[Lane, dict[str, Any]]:
    """Finished runs of a mixer in a cell; none where they were made with another configuration."""
    path = result_path(folder, mixer, cell)
    if not path.exists():
        return {}
    content = json.loads(path.read_text())
    if content["fingerprint"] != fingerprint(mixer, cell):
        return {}
    return {Lane(run["learning_rate"], run["seed"]): run for run in content["runs"]}


def write_runs(
    folder: pathlib.Path,
    study: Study,
    mixer: Mixer,
    cell: Cell,
    runs: list[dict[str, Any]],
    *,
    num_parameters: int,
) -> pathlib.Path:
    """Adds runs to those of a mixer in a cell."""
    merged = read_runs(folder, mixer, cell) | {Lane(run["learning_rate"], run["seed"]): run for run in runs}
    config: dict[str, Any] = {field.name: getattr(cell, field.name) for field in dataclasses.fields(cell)}
    config["task"] = _described(cell.task)
    config["tests"] = {name: _described(task) for name, task in cell.tests}
    content = {
        "study": study.name,
        "mixer": {
            "label": mixer.label,
            "preset": list(mixer.preset),
            "overrides": {name: _plain(value) for name, value in mixer.overrides},
        },
        "cell": config,
        "num_parameters": num_parameters,
        "fingerprint": fingerprint(mixer, cell),
        "runs": [merged[lane] for lane in sorted(merged)],
    }
    path = result_path(folder, mixer, cell)
    write_text(path, json.dumps(content, indent=1) + "\n")
    return path


def _described(task: Task) -> dict[str, Any]:
    return {"kind": type(task).__name__, **dataclasses.asdict(task)}


def _plain(value: Any) -> Any:
    return value if isinstance(value, bool | int | float | str | None) else repr(value)


def write_text(path: pathlib.Path, text: str) -> None:
    """Writes a file whole or not at all: a reader never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.write_text(text)
    partial.replace(path)


def command_line(module: str) -> str:
    """The command that is running, for the record."""
    return " ".join(["python", "-m", module, *sys.argv[1:]])

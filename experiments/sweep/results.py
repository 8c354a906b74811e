"""Result files: one for each mixer in each cell, written whole or not at all."""

import dataclasses
import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
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


def holds_other_runs(path: pathlib.Path, expected: str) -> bool:
    """Whether there is a result file, of another fingerprint than expected: writing it would lose its runs."""
    return path.exists() and json.loads(path.read_text())["fingerprint"] != expected


def refuse_other_runs(wanted: Mapping[pathlib.Path, str]) -> None:
    """Raises where result files that are to be written hold finished runs of another configuration.

    Args:
        wanted: the files, each with its fingerprint.

    Raises:
        ValueError: names the first such file, its fingerprint and the expected one.
    """
    other = [path for path, expected in wanted.items() if holds_other_runs(path, expected)]
    if other:
        found = json.loads(other[0].read_text())["fingerprint"]
        more = f" (and {len(other) - 1} more such files)" if len(other) > 1 else ""
        raise ValueError(
            f"{other[0]} holds finished runs of another configuration: its fingerprint is {found}, expected "
            f"{wanted[other[0]]}{more}; choose another folder with --output, or remove what is not needed"
        )


def write_runs(
    folder: pathlib.Path,
    study: Study,
    mixer: Mixer,
    cell: Cell,
    runs: list[dict[str, Any]],
    *,
    num_parameters: int,
) -> pathlib.Path:
    """Adds runs to those of a mixer in a cell.

    Raises:
        ValueError: the file has runs of another configuration.
    """
    path = result_path(folder, mixer, cell)
    refuse_other_runs({path: fingerprint(mixer, cell)})
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
    return shlex.join(["python", "-m", module, *sys.argv[1:]])

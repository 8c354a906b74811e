"""A study's result table: a row for each run of a mixer in a cell at a learning rate with a seed."""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

from experiments.harness.study import Mixer
from experiments.harness.tables import Row, add_rows, read_table
from experiments.sweep.study import Cell, Lane, Study, fingerprint
from rnnlib.data.tasks import Task

RUN = (
    "learning_rate",
    "seed",
    "train_loss",
    "validation",
    "test",
    "train_seconds_of_all_lanes",
    "lanes",
    "environment",
)
"""What a row has of its run alone, as `train_group` records it."""


def read_runs(path: pathlib.Path, mixer: Mixer, cell: Cell) -> dict[Lane, Row]:
    """Finished runs of a mixer in a cell, from a table; those of another configuration do not count."""
    wanted = fingerprint(mixer, cell)
    rows = (row for row in read_table(path) if row["fingerprint"] == wanted)
    return {Lane(row["learning_rate"], row["seed"]): row for row in rows}


def write_runs(
    path: pathlib.Path,
    study: Study,
    mixer: Mixer,
    cell: Cell,
    runs: Sequence[dict[str, Any]],
    *,
    num_parameters: int,
) -> None:
    """Adds runs to a table; what it has of other configurations stays.

    Args:
        path: the table; its name is the setting's.
        study: whose it is.
        mixer: that was trained.
        cell: on this.
        runs: records as `train_group` gives them, each with its environment.
        num_parameters: of one model.
    """
    config: dict[str, Any] = {field.name: getattr(cell, field.name) for field in dataclasses.fields(cell)}
    config["task"] = _described(cell.task)
    config["tests"] = {name: _described(task) for name, task in cell.tests}
    shared = {
        "study": study.name,
        "setting": path.stem,
        "mixer": {
            "label": mixer.label,
            "preset": list(mixer.preset),
            "overrides": {name: _plain(value) for name, value in mixer.overrides},
        },
        "cell": config,
        "num_parameters": num_parameters,
        "fingerprint": fingerprint(mixer, cell),
    }
    add_rows(path, [shared | run | {"id": _name(mixer, cell, run)} for run in runs])


def _name(mixer: Mixer, cell: Cell, run: dict[str, Any]) -> str:
    lane = f"rate {run['learning_rate']:g}, seed {run['seed']}"
    return f"{cell.name}; {mixer.label}; {lane}; {fingerprint(mixer, cell)}"


def _described(task: Task) -> dict[str, Any]:
    return {"kind": type(task).__name__, **dataclasses.asdict(task)}


def _plain(value: Any) -> Any:
    return value if isinstance(value, bool | int | float | str | None) else repr(value)

"""`python -m experiments.cpu_benchmark.report`: writes the tables of `README.md` from `parts.json` and `job.json`."""

import pathlib
import statistics
from collections.abc import Callable
from typing import Any

from experiments.cpu_benchmark.machine import read_runs
from experiments.cpu_benchmark.parts import IDLE, PARTS, UNNAMED
from experiments.harness.page import markdown_table, replaced
from experiments.harness.tables import write_text

FOLDER = pathlib.Path(__file__).parent
VERSIONS = {"before": "before", "main": "memory kept", "one axis": "rows as one axis", "now": "now"}
JOB_PARTS = (
    "import",
    "data, first parameters",
    "compile the step",
    "steps",
    "evaluations",
    "checkpoints, picture",
    "sample",
    "end",
    "total",
)


def measured(runs: list[dict[str, Any]]) -> list[str]:
    """The versions that were measured."""
    return [name for name in VERSIONS if any(run["name"] == name for run in runs)]


def medians(runs: list[dict[str, Any]], value: Callable[[dict[str, Any]], float]) -> list[float]:
    """The median over the runs of each version."""
    return [statistics.median(value(run) for run in runs if run["name"] == name) for name in measured(runs)]


def _rows(first: str, runs: list[dict[str, Any]], rows: list[list[str]]) -> str:
    head = [first, *(VERSIONS[name] for name in measured(runs))]
    return "\n".join([*markdown_table(head, rows), ""])


def parts_table(runs: list[dict[str, Any]]) -> str:
    """Milliseconds of a step by part: forward + backward where a part has both."""

    def cell(name: str, part: str) -> str:
        of = [run["parts"].get(part, {}) for run in runs if run["name"] == name]
        directions = ("both",) if any("both" in one for one in of) else ("forward", "backward")
        values = [statistics.median(one.get(direction, 0.0) for one in of) for direction in directions]
        return " + ".join(f"{value:.1f}" for value in values)

    rows = [[part, *(cell(name, part) for name in measured(runs))] for part in (*PARTS, UNNAMED, IDLE)]
    totals = medians(runs, lambda run: sum(sum(part.values()) for part in run["parts"].values()))
    rows.append(["a traced step", *(f"{value:.1f}" for value in totals)])
    rows.append(["a step that is not traced", *(f"{v:.1f}" for v in medians(runs, lambda run: run["milliseconds"]))])
    return _rows("milliseconds, forward + backward", runs, rows)


def job_table(runs: list[dict[str, Any]]) -> str:
    """Seconds of the main job by part."""
    rows = []
    for part in JOB_PARTS:
        values = medians(runs, lambda run, part=part: run["seconds"][part])  # type: ignore[misc]
        rows.append([part, *(f"{value:.1f}" for value in values)])
    steps = medians(runs, lambda run: run["step_milliseconds"])
    used = medians(runs, lambda run: run["processor_seconds"])
    rows.append(["milliseconds of a step", *(f"{value:.1f}" for value in steps)])
    rows.append(["seconds of processors", *(f"{value:.0f}" for value in used)])
    return _rows("seconds", runs, rows)


def loss_differences(runs: list[dict[str, Any]], name: str = "now") -> dict[int, float]:
    """The largest difference of a step's loss between the first version and another, in the first steps and in all."""
    losses = [next(run["losses"] for run in runs if run["name"] == one) for one in ("before", name)]
    differences = [abs(x - y) for x, y in zip(*losses, strict=True)]
    return {steps: max(differences[:steps]) for steps in (50, 100, 150, len(differences))}


def differences_table(runs: list[dict[str, Any]]) -> str:
    """The largest differences of a loss, in nats a token, of the last version and of the control."""
    names = {"now": "now", "control": "memory kept, XLA told to take wider vectors"}
    found = {shown: loss_differences(runs, name) for name, shown in names.items()}
    head = ["largest difference from before", *(f"first {steps} steps" for steps in found["now"])]
    rows = [[name, *(f"{value:.1e}" for value in values.values())] for name, values in found.items()]
    return "\n".join([*markdown_table(head, rows), ""])


def tables() -> dict[str, str]:
    """All tables of the page, by their markers."""
    runs = read_runs(FOLDER / "job.json")
    return {
        "parts": parts_table(read_runs(FOLDER / "parts.json")),
        "job": job_table(runs),
        "losses": differences_table(runs),
    }


def main() -> None:
    """Writes the tables into the page."""
    page = FOLDER / "README.md"
    text = page.read_text()
    for marker, table in tables().items():
        text = replaced(text, f"<!-- {marker} -->\n", f"<!-- /{marker} -->", table)
    write_text(page, text)


if __name__ == "__main__":
    main()

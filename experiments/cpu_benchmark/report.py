"""`python -m experiments.cpu_benchmark.report`: writes the tables of `README.md` from `parts.json` and `job.json`."""

import json
import pathlib
import statistics
from collections.abc import Callable
from typing import Any

from experiments.cpu_benchmark.parts import IDLE, PARTS, UNNAMED
from experiments.sweep.results import write_text

FOLDER = pathlib.Path(__file__).parent
VERSIONS = {"before": "before", "main": "memory kept", "now": "now"}
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


def read(name: str) -> list[dict[str, Any]]:
    """All measurements of a file."""
    found: list[dict[str, Any]] = json.loads((FOLDER / name).read_text())
    return found


def medians(runs: list[dict[str, Any]], value: Callable[[dict[str, Any]], float]) -> list[float]:
    """The median over the runs of each version."""
    return [statistics.median(value(run) for run in runs if run["name"] == name) for name in VERSIONS]


def _rows(first: str, rows: list[list[str]]) -> str:
    head = [first, *VERSIONS.values()]
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def parts_table(runs: list[dict[str, Any]]) -> str:
    """Milliseconds of a step by part: forward + backward where a part has both."""

    def cell(name: str, part: str) -> str:
        of = [run["parts"].get(part, {}) for run in runs if run["name"] == name]
        directions = ("both",) if any("both" in one for one in of) else ("forward", "backward")
        values = [statistics.median(one.get(direction, 0.0) for one in of) for direction in directions]
        return " + ".join(f"{value:.1f}" for value in values)

    rows = [[part, *(cell(name, part) for name in VERSIONS)] for part in (*PARTS, UNNAMED, IDLE)]
    totals = medians(runs, lambda run: sum(sum(part.values()) for part in run["parts"].values()))
    rows.append(["a traced step", *(f"{value:.1f}" for value in totals)])
    rows.append(["a step that is not traced", *(f"{v:.1f}" for v in medians(runs, lambda run: run["milliseconds"]))])
    return _rows("milliseconds, forward + backward", rows)


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
    return _rows("seconds", rows)


def largest_difference(runs: list[dict[str, Any]]) -> float:
    """The largest difference of a step's loss between the first version and the last."""
    losses = [next(run["losses"] for run in runs if run["name"] == name) for name in ("before", "now")]
    return max(abs(x - y) for x, y in zip(*losses, strict=True))


def main() -> None:
    """Writes the tables into the page."""
    page = FOLDER / "README.md"
    text = page.read_text()
    for marker, table in {"parts": parts_table(read("parts.json")), "job": job_table(read("job.json"))}.items():
        begin, end = f"<!-- {marker} -->\n", f"<!-- /{marker} -->"
        text = text[: text.index(begin) + len(begin)] + table + text[text.index(end) :]
    write_text(page, text)
    print(f"largest difference of a loss: {largest_difference(read('job.json')):.1e} nats a token")


if __name__ == "__main__":
    main()

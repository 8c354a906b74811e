"""`python -m experiments.cpu_benchmark.job`: runs the README's main job once and adds its times by part to `job.json`.

The job is `rnnlib train` without options, but that it prints every step: each line is given the time at which it came,
so any version's code can be measured without a change. Run it in turns with the code of several versions.
"""

import dataclasses
import json
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import tyro

from experiments.cpu_benchmark.machine import add_run, machine, read_runs, revision

FOLDER = pathlib.Path(__file__).parent
PROGRAM = "import sys; from rnnlib.cli.main import main; sys.exit(main(sys.argv[1:]))"


@dataclasses.dataclass(frozen=True)
class Options:
    """Runs the main job once with the code of a folder."""

    name: str = "this"
    """What the results call this version."""
    tree: pathlib.Path = pathlib.Path(".")
    """Folder of the code, a git work tree."""
    steps: int = 1200
    """Training steps; the main job has 1200."""
    output: pathlib.Path = FOLDER / "job.json"
    """Where the run is added."""


def run(options: Options) -> dict[str, Any]:
    """One run: its seconds by part, and its losses."""
    environment = os.environ | {"PYTHONPATH": str(options.tree.resolve()), "JAX_PLATFORMS": "cpu"}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", PROGRAM, "train", "--run", f"{folder}/run", "--steps", str(options.steps)]
        begin, lines = time.perf_counter(), []
        with subprocess.Popen(
            [*command, "--logging.plain-seconds", "0"],
            env=environment,
            cwd=folder,  # whose modules come first
            stdout=subprocess.PIPE,
            text=True,
            errors="replace",
        ) as process:
            assert process.stdout is not None
            lines = [(time.perf_counter() - begin, line) for line in process.stdout]
        total = time.perf_counter() - begin
        if process.returncode:
            raise SystemExit(f"rnnlib train ended with {process.returncode}")
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        header, *rows = (pathlib.Path(folder) / "run" / "metrics.csv").read_text().splitlines()
        column = header.split(",").index("loss")
        losses = [float(row.split(",")[column]) for row in rows]
    seconds, step = parts(lines, total)
    return {
        "seconds": {"total": total} | seconds,
        "step_milliseconds": 1e3 * step,
        "processor_seconds": used.ru_utime + used.ru_stime,
        "losses": losses,
    }


def parts(lines: list[tuple[float, str]], total: float) -> tuple[dict[str, float], float]:
    """Seconds of each part of a run, which sum to `total`, and the median seconds of a step.

    Args:
        lines: what the run printed, with the seconds at which it came.
        total: seconds of the whole run.
    """
    kinds = [_kind(text) for _, text in lines]
    marks = [(when, kind) for (when, _), kind in zip(lines, kinds) if kind]
    found = dict.fromkeys(
        ("import", "data, first parameters", "compile the step", "steps", "evaluations", "checkpoints, picture"), 0.0
    )
    found |= {"sample": 0.0, "end": 0.0}
    last, before, gaps = 0.0, "start", []
    after_evaluation = 0
    for when, kind in marks:
        gap = when - last
        if kind == "step" and before == "step":
            gaps.append(gap)
        match kind:
            case "reading":
                found["import"] += gap
            case "run":
                found["data, first parameters"] += gap
            case "step" if before == "run":
                found["compile the step"] += gap
            case "step" if before == "evaluation":  # a step, and a checkpoint where one is due
                after_evaluation += 1
                found["checkpoints, picture"] += gap
            case "step":
                found["steps"] += gap
            case "evaluation":
                found["evaluations"] += gap
            case "trained":
                found["checkpoints, picture"] += gap
            case "sampled":
                found["sample"] += gap
        last, before = when, kind
    found["end"] = total - last
    step = statistics.median(gaps)
    found["checkpoints, picture"] -= after_evaluation * step
    found["steps"] += after_evaluation * step
    return found, step


def _kind(line: str) -> str | None:
    if line.startswith("step "):
        return "evaluation" if "validation:" in line else "step"
    for begin, kind in {
        "reading": "reading",
        "run ": "run",
        "trained on": "trained",
        "more of them": "sampled",
    }.items():
        if line.startswith(begin):
            return kind
    return None


def main(options: Options) -> None:
    """Adds one run to the results."""
    command = f"python -m experiments.cpu_benchmark.job --name {options.name} --tree FOLDER --steps {options.steps}"
    record = {"name": options.name, **revision(options.tree), **machine(), "command": command} | run(options)
    first = next((one for one in read_runs(options.output) if one["name"] == options.name), None)
    record["same_losses"] = first is not None and first["losses"] == record["losses"]
    if record["same_losses"]:
        del record["losses"]
    add_run(options.output, record)
    print(json.dumps({name: value for name, value in record.items() if name != "losses"}, indent=1))


if __name__ == "__main__":
    main(tyro.cli(Options))

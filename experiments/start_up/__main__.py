"""`python -m experiments.start_up`: seconds from `rnnlib train` to the first step, by stage, cold and warm.

Each measurement is a process of its own. The first has an empty compilation cache, the second the one that the first
left behind. Results go to `results.json`, one record for each device, preset and state of the cache.
"""

import dataclasses
import itertools
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any

import tyro

from experiments.harness.command import errors_as_lines
from experiments.harness.environment import command_line, environment
from experiments.harness.page import markdown_table, write_between_marks
from experiments.harness.tables import write_text

FOLDER = pathlib.Path(__file__).parent
STAGES = (
    "imports",
    "settings",
    "model's shapes, step traced",
    "text read and tokenized",
    "step lowered",
    "step compiled by XLA",
    "first parameters",
    "first step",
)


@dataclasses.dataclass(frozen=True)
class Options:
    """Measures the start of training, cold and warm."""

    presets: tuple[str, ...] = ("default",)
    """Presets of `rnnlib train --preset`; "default" is none."""
    flags: str = ""
    """More flags of `rnnlib train`, in one text."""
    output: pathlib.Path = FOLDER
    """Folder of results.json and of the page."""
    commit: str | None = None
    """Commit to record where there is no git repository."""


def stages(argv: list[str]) -> dict[str, float]:
    """Runs the stages in this process, whose start is `RNNLIB_START` in seconds since the epoch."""
    begin = float(os.environ["RNNLIB_START"])
    marks: list[float] = [begin]
    from rnnlib.cli import train
    from rnnlib.cli.compilation_cache import keep_compiled_programs
    from rnnlib.training import Trainer
    from rnnlib.training.batches import put_batch
    from rnnlib.training.step import abstract_state

    marks.append(time.time())
    arguments = train.parse_settings(train.TrainArguments, argv, command="train")
    keep_compiled_programs(arguments.compilation_cache)
    marks.append(time.time())
    trainer = Trainer(arguments.train, read_data=False)
    marks.append(time.time())
    batches, _ = trainer.read_data()
    marks.append(time.time())
    steps = trainer._steps
    batch = put_batch(next(iter(batches)), steps.mesh, trainer.config.accumulation_steps)
    lowered = steps.train_step.lower(abstract_state(steps.template, steps.mesh), batch)
    marks.append(time.time())
    compiled = lowered.compile()
    marks.append(time.time())
    state = steps.first_state()
    marks.append(time.time())
    _, metrics = compiled(state, batch)
    float(metrics.nats)
    marks.append(time.time())
    return dict(zip(STAGES, (after - before for before, after in itertools.pairwise(marks)), strict=True))


def measured(preset: str, flags: list[str], cache: str) -> dict[str, float]:
    """The stages in a process of its own, with the cache's folder."""
    argv = [*([] if preset == "default" else ["--preset", preset]), "--compilation-cache", cache, *flags]
    process = subprocess.run(
        [sys.executable, "-m", "experiments.start_up", "stages", *argv],
        env={**os.environ, "RNNLIB_START": str(time.time())},
        capture_output=True,
        text=True,
        timeout=3600,
    )
    if process.returncode:
        raise RuntimeError(f"{preset}: the run failed:\n{process.stderr[-3000:]}")
    return json.loads(process.stdout.splitlines()[-1])


def table(records: list[dict[str, Any]]) -> str:
    """Markdown of all records."""
    header = ["seconds", *(f"{r['preset']}, {'warm' if r['warm'] else 'cold'}, {r['device']}" for r in records)]
    rows = [[stage, *(f"{r['seconds'][stage]:.1f}" for r in records)] for stage in STAGES]
    rows.append(["all", *(f"{sum(r['seconds'].values()):.1f}" for r in records)])
    return "\n".join(markdown_table(header, rows)) + "\n"


def main() -> int:
    """Runs the command; returns the exit code."""
    options = tyro.cli(Options, prog="python -m experiments.start_up")
    path = options.output / "results.json"
    records = json.loads(path.read_text()) if path.exists() else []
    with errors_as_lines():
        found = environment(command_line("experiments.start_up"), options.commit)
        for preset in options.presets:
            with tempfile.TemporaryDirectory() as cache:
                for warm in (False, True):
                    seconds = measured(preset, options.flags.split(), cache)
                    key = {"preset": preset, "warm": warm, "device": found["device"]}
                    records = [r for r in records if {name: r[name] for name in key} != key]
                    records.append({**key, "seconds": seconds, "environment": found})
                    print(preset, "warm" if warm else "cold", {k: round(v, 2) for k, v in seconds.items()}, flush=True)
    write_text(path, json.dumps(records, indent=1) + "\n")
    write_between_marks(options.output / "README.md", "start", table(records))
    print(table(records))
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["stages"]:
        print(json.dumps(stages(sys.argv[2:])))
    else:
        sys.exit(main())

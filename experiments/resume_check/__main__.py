"""`python -m experiments.resume_check`: kills a training run, resumes it and compares it with one left alone.

Four runs side by side, each in processes of its own: one from start to end; one killed (SIGKILL) after its first
checkpoint and resumed; and two from start to end without `TrainConfig.deterministic`, to see whether it is needed.
"""

import concurrent.futures
import dataclasses
import json
import pathlib
import shutil
import subprocess
import sys
import time
from typing import Any

import tyro

from experiments.harness.environment import command_line, environment
from experiments.harness.tables import write_text
from rnnlib.data import DataConfig
from rnnlib.models import ModelConfig
from rnnlib.training import CheckpointConfig, EvaluationConfig, LoggingConfig, TrainConfig, read_csv, train

FOLDER = pathlib.Path(__file__).parent
COMPARED = ("loss", "gradient_norm")


@dataclasses.dataclass(frozen=True)
class Options:
    """Kills, resumes and compares."""

    steps: int = 60
    """Steps of each run."""
    width: int = 256
    """Of the model: four layers of gated delta-net and sliding-window attention in turns, bfloat16."""
    length: int = 512
    """Tokens a row, 16 rows a step."""
    output: pathlib.Path = FOLDER / "results.json"
    """Where the result goes."""
    work: pathlib.Path = pathlib.Path("runs/resume_check")
    """Folder of the runs; what is in it is removed."""
    commit: str | None = None
    """Commit to record where there is no git repository."""
    child: str = ""
    """Used by the command itself: the run that this process trains."""
    resume: bool = False
    """Used by the command itself."""

    def __post_init__(self) -> None:
        if self.steps < 6:
            raise ValueError(f"steps must be at least 6, got {self.steps}")


def config(options: Options) -> TrainConfig:
    """What is trained; runs whose name begins with "free" without `deterministic`."""
    return TrainConfig(
        model=ModelConfig(
            vocabulary_size=257,
            width=options.width,
            num_layers=4,
            num_heads=options.width // 64,
            mixers=("gated_deltanet", "sliding_window_attention"),
            tie_embeddings=True,
            dtype="bfloat16",
        ),
        data=DataConfig(sequence_length=options.length, batch_size=16, max_train_bytes=4_000_000),
        evaluation=EvaluationConfig(every=options.steps, batches=4),
        checkpoint=CheckpointConfig(every=options.steps // 3, keep=1),
        logging=LoggingConfig(tensorboard=False, picture=False),
        steps=options.steps,
        deterministic=not options.child.startswith("free"),
    )


def start(options: Options, name: str, *, resume: bool = False) -> subprocess.Popen:
    """A process that trains a run."""
    arguments = ["--steps", options.steps, "--width", options.width, "--length", options.length, "--work", options.work]
    command = [sys.executable, "-m", "experiments.resume_check", "--child", name, *map(str, arguments)]
    return subprocess.Popen([*command, "--resume"] if resume else command)


def rows(options: Options, name: str) -> list[dict[str, Any]]:
    """The training steps that a run has recorded."""
    path = options.work / name / "metrics.csv"
    if not path.exists():
        return []
    return [{key: row[key] for key in ("step", *COMPARED)} for row in read_csv(path) if row.get("loss") is not None]


def killed_and_resumed(options: Options) -> dict[str, Any]:
    """Kills a run after its first checkpoint and two more steps, and resumes it."""
    process = start(options, "killed")
    wanted = options.steps // 3 + 2
    checkpoints = options.work / "killed" / "checkpoints"
    while process.poll() is None:
        saved = checkpoints.exists() and any(path.name.isdigit() for path in checkpoints.iterdir())
        if saved and len(rows(options, "killed")) >= wanted:
            break
        time.sleep(0.05)
    process.kill()
    process.wait()
    at = len(rows(options, "killed"))
    return {"steps_when_killed": at, "resumed": start(options, "killed", resume=True).wait()}


def first_difference(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> int | None:
    """The first step at which two runs differ in a compared column, None if none."""
    for a, b in zip(one, other):
        if a != b:
            return int(a["step"])
    return None if len(one) == len(other) else min(len(one), len(other)) + 1


def main() -> int:
    """Runs the command; returns the exit code."""
    options = tyro.cli(Options, prog="python -m experiments.resume_check")
    if options.child:
        train(config(options), options.work / options.child, resume=options.resume)
        return 0
    shutil.rmtree(options.work, ignore_errors=True)
    options.work.mkdir(parents=True)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        plain = {name: pool.submit(lambda n: start(options, n).wait(), name) for name in ("whole", "free_1", "free_2")}
        killed = pool.submit(killed_and_resumed, options)
        codes = {name: future.result() for name, future in plain.items()}
        outcome = killed.result()
    whole, again = rows(options, "whole"), rows(options, "killed")
    result = {
        "exit_codes": codes,
        **outcome,
        "steps": {name: len(rows(options, name)) for name in ("whole", "killed", "free_1", "free_2")},
        "compared": COMPARED,
        "resumed_differs_first_at": first_difference(whole, again),
        "without_deterministic_differs_first_at": first_difference(rows(options, "free_1"), rows(options, "free_2")),
        "last": whole[-1:] + again[-1:],
        "config": repr(config(options)),
        "environment": environment(command_line("experiments.resume_check"), options.commit),
    }
    write_text(options.output, json.dumps(result, indent=1) + "\n")
    print(json.dumps({key: value for key, value in result.items() if key != "config"}, indent=1))
    return 0 if result["resumed_differs_first_at"] is None and len(whole) == options.steps else 1


if __name__ == "__main__":
    sys.exit(main())

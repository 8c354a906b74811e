"""`python -m experiments.kill_check`: kills processes of a training run at random moments, and starts it again.

Again and again one of them, or all, are killed (SIGKILL): while they start, between steps, or while a checkpoint is
being written. The run is started again with `resume` until it is done, then another is begun. Its losses are compared
with those of a run left alone. `--setting device` has one process on a GPU, and says whether
`TrainConfig.deterministic` is needed: two runs without it are compared with each other.
"""

import dataclasses
import hashlib
import itertools
import json
import pathlib
import random
import shutil
import signal
import sys
import time
from typing import Any, Literal

import jax
import numpy as np
import tyro
from flax import nnx

from experiments.harness.environment import command_line, environment
from experiments.harness.tables import write_text
from experiments.kill_check.training import Setting, Start, Training, training
from rnnlib.training import load_run, read_csv

FOLDER = pathlib.Path(__file__).parent
COMPARED = ("loss", "gradient_norm")
_SECONDS = 600
"""That a run may take which nobody kills."""
Moment = Literal["starting", "stepping", "saving"]
Rows = list[dict[str, float]]


@dataclasses.dataclass(frozen=True)
class Options:
    """Kills, starts again and compares."""

    setting: Setting = "processes"
    """"processes" has two on CPUs, "device" one on this machine's device."""
    kills: int = 32
    """How many times."""
    steps: int = 60
    """Steps of a run, with a checkpoint after every fifth ("processes") or every third part of them ("device")."""
    seed: int = 0
    """Of the moments and of who is killed."""
    lost_seconds: float = 6.0
    """A process without a sign of life for so long is lost."""
    output: pathlib.Path = FOLDER
    """Folder of the result."""
    work: pathlib.Path = pathlib.Path("runs/kill_check")
    """Folder of the runs; what is in it is removed."""
    commit: str | None = None
    """Commit to record where there is no git repository."""

    def __post_init__(self) -> None:
        for name, least in {"kills": 1, "steps": 6}.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")


def saved(folder: pathlib.Path) -> list[int]:
    """Steps of the whole checkpoints of a run."""
    found = folder / "checkpoints"
    return sorted(int(path.name) for path in found.iterdir() if path.name.isdecimal()) if found.is_dir() else []


def is_saving(folder: pathlib.Path) -> bool:
    """Whether a checkpoint is being written."""
    return any((folder / "checkpoints").glob("*.orbax-checkpoint-tmp*"))


def rows(folder: pathlib.Path) -> Rows:
    """The training steps that a run has recorded."""
    return [{key: row[key] for key in ("step", *COMPARED)} for row in read_csv(folder / "metrics.csv")]


def arrays(folder: pathlib.Path) -> str:
    """A hash of all parameters of a run's last checkpoint."""
    leaves = jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(nnx.state(load_run(folder).model, nnx.Param)))
    pairs = sorted((jax.tree_util.keystr(path), np.asarray(leaf).tobytes()) for path, leaf in leaves)
    return hashlib.sha256(repr(pairs).encode()).hexdigest()


def first_difference(one: Rows, other: Rows) -> int | None:
    """The first step at which two runs differ in a compared column, None if none."""
    for a, b in zip(one, other):
        if a != b:
            return int(a["step"])
    return None if len(one) == len(other) else min(len(one), len(other)) + 1


def await_moment(start: Start, moment: Moment, every: int, chance: random.Random) -> None:
    """Waits for the moment to kill, at most four times `every` steps later, or until the run ends."""
    folder, deadline = start.folder, time.monotonic() + 120
    begun = len(rows(folder))
    if moment == "starting":
        deadline = time.monotonic() + chance.uniform(0, 4)
    else:
        more = chance.randint(1, 4 * every)

        def reached() -> bool:
            recorded = len(rows(folder))
            # A start drops the rows after its checkpoint, and then adds to them.
            return recorded >= min(begun, (saved(folder) or [0])[-1]) + more and recorded != begun

        while not reached() and not start.has_ended and time.monotonic() < deadline:
            time.sleep(0.003)
        pause = chance.uniform(0, 0.15)
        if moment == "saving":
            while not is_saving(folder) and not start.has_ended and time.monotonic() < deadline:
                pass
            pause = chance.uniform(0, 0.05)
        deadline = time.monotonic() + pause
    while not start.has_ended and time.monotonic() < deadline:
        time.sleep(0.001)


def one_kill(
    start: Start, moment: Moment, victims: tuple[int, ...], plan: Training, chance: random.Random
) -> dict[str, Any] | None:
    """Kills processes of a start; what was there before and after, or None where the run has ended before."""
    await_moment(start, moment, plan.config.checkpoint.every, chance)
    if start.has_ended:
        return None
    saving = is_saving(start.folder)
    before = saved(start.folder)
    start.kill(victims)
    seconds = start.wait(plan.lost_seconds + 60)
    if start.has_finished:
        return None
    # What was being written may have become whole in the moment of the kill.
    whole, recorded = saved(start.folder), [int(row["step"]) for row in rows(start.folder)]
    last = max(recorded, default=0)
    kept = max(whole, default=0)
    return {
        "asked": moment,
        "saving": saving,
        "killed": victims,
        "exit_codes": list(start.codes.values()),
        "seconds_to_end": round(seconds, 2),
        "steps_recorded": last,
        "last_whole_checkpoint": kept,
        "last_whole_checkpoint_before": max(before, default=0),
        "steps_lost": max(last - kept, 0),
    }


def faults(kill: dict[str, Any], after: dict[str, Any] | None, every: int) -> list[str]:
    """What is not as it is to be in one kill.

    Args:
        kill: what was found.
        after: the next kill, if it was of the same run.
        every: steps from one checkpoint to the next.
    """
    found = []
    if kill["last_whole_checkpoint"] < kill["last_whole_checkpoint_before"]:
        found.append("a whole checkpoint was lost")
    # A checkpoint is written while the next steps are done, but the second is not begun before the first is whole.
    if kill["steps_lost"] >= 2 * every + 1:
        found.append(f"{kill['steps_lost']} steps were lost")
    for process, code in enumerate(kill["exit_codes"]):
        if process not in kill["killed"] and code in (0, -signal.SIGKILL):
            found.append(f"process {process} ended with code {code}")
    if after is not None and after["last_whole_checkpoint"] < kill["last_whole_checkpoint"]:
        found.append("the next start went back before the last whole checkpoint")
    return found


def leave_alone(plan: Training, folder: pathlib.Path) -> dict[int, int]:
    """Trains a run that nobody kills; exit codes of its processes."""
    start = Start(plan, folder)
    start.wait(_SECONDS)
    return start.codes


def campaign(options: Options, plan: Training) -> dict[str, Any]:
    """Runs, killed and continued until there were enough kills and the last run is done."""
    chance = random.Random(options.seed)
    groups = [tuple(range(plan.processes)), *((i,) for i in range(plan.processes) if plan.processes > 1)]
    kills: list[dict[str, Any]] = []
    by_themselves: list[dict[str, Any]] = []
    runs: list[str] = []
    starts, name = 0, ""
    while len(kills) < options.kills or name:
        if not name:
            name = f"killed-{len(runs) + 1}"
            runs.append(name)
        start = Start(plan, options.work / name)
        starts += 1
        if len(kills) < options.kills:
            moment: Moment = chance.choice(("starting", "stepping", "saving", "saving"))
            kill = one_kill(start, moment, chance.choice(groups), plan, chance)
            if kill is not None:
                kills.append({"run": name, "start": starts, **kill})
                print(json.dumps(kills[-1]), flush=True)
        else:
            start.wait(_SECONDS)
        if start.has_finished:
            name = ""
        elif not kills or kills[-1]["start"] != starts:
            by_themselves.append({"run": name, "start": starts, "exit_codes": list(start.codes.values())})
            if len(by_themselves) > options.kills:
                raise RuntimeError(f"starts that nobody killed end again and again, the last with {start.codes}")
    return {"kills": kills, "runs": runs, "starts": starts, "by_themselves": by_themselves}


def judge(options: Options, found: dict[str, Any], every: int) -> dict[str, Any]:
    """Compares what was found with the run left alone; a checkpoint was written each `every` steps."""
    kills, wanted = found["kills"], rows(options.work / "whole")
    following = [b if a["run"] == b["run"] else None for a, b in itertools.pairwise(kills)]
    wrong = {
        kill["start"]: bad for kill, after in zip(kills, [*following, None]) if (bad := faults(kill, after, every))
    }
    differences = [first_difference(wanted, rows(options.work / name)) for name in found["runs"]]
    bits = arrays(options.work / "whole")
    victims = sorted({kill["killed"] for kill in kills})
    return {
        "kills": len(kills),
        "while_saving": sum(kill["saving"] for kill in kills),
        "before_the_first_checkpoint": sum(not kill["last_whole_checkpoint"] for kill in kills),
        "of_processes": {str(which): sum(kill["killed"] == which for kill in kills) for which in victims},
        "most_steps_lost": max((kill["steps_lost"] for kill in kills), default=0),
        "longest_seconds_to_end": max((kill["seconds_to_end"] for kill in kills), default=0),
        "starts_that_ended_by_themselves": found["by_themselves"],
        "faults": wrong,
        "runs_differ_first_at": differences,
        "runs_whose_parameters_repeat_bit_for_bit": (
            f"{sum(arrays(options.work / name) == bits for name in found['runs'])} of {len(differences)}"
        ),
        "steps_of_the_run_left_alone": len(wanted),
        "as_expected": not (wrong or found["by_themselves"])
        and differences == [None] * len(differences)
        and len(wanted) == options.steps,
    }


def main() -> int:
    """Runs the command; returns the exit code."""
    options = tyro.cli(Options, prog="python -m experiments.kill_check")
    shutil.rmtree(options.work, ignore_errors=True)
    options.work.mkdir(parents=True)
    begin = time.monotonic()
    plan = training(options.setting, options.steps, options.work, options.lost_seconds)
    codes = {"whole": leave_alone(plan, options.work / "whole")}
    free: tuple[str, ...] = ()
    if options.setting == "device":
        free = ("free-1", "free-2")
        loose = dataclasses.replace(plan, config=dataclasses.replace(plan.config, deterministic=False))
        codes |= {name: leave_alone(loose, options.work / name) for name in free}
    found = campaign(options, plan)
    result = judge(options, found, plan.config.checkpoint.every)
    if free:
        result["without_deterministic_differs_first_at"] = first_difference(*(rows(options.work / n) for n in free))
    result |= {
        "exit_codes_of_runs_left_alone": codes,
        "seconds": round(time.monotonic() - begin),
        "starts": found["starts"],
        "config": repr(plan.config),
        "environment": environment(command_line("experiments.kill_check"), options.commit),
        "each": found["kills"],
    }
    write_text(options.output / f"{options.setting}.json", json.dumps(result, indent=1) + "\n")
    print(json.dumps({key: value for key, value in result.items() if key not in ("config", "each")}, indent=1))
    return 0 if result["as_expected"] else 1


if __name__ == "__main__":
    sys.exit(main())

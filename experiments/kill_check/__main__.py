"""`python -m experiments.kill_check`: kills processes of a training run at random moments, and starts it again.

Two processes of two devices train one model, whose parameters lie in four shards. Again and again one of them, or both,
is killed (SIGKILL): while they start, between steps, or while a checkpoint is being written. The run is started again
with `resume` until it is done, then another is begun. Its losses are compared with those of a run left alone.
"""

import dataclasses
import hashlib
import itertools
import json
import os
import pathlib
import random
import shutil
import signal
import socket
import sys
import time
from typing import Any, Literal

import jax
import numpy as np
import tyro
from flax import nnx

from experiments.harness.environment import command_line, environment
from experiments.harness.tables import write_text
from rnnlib.data import DataConfig
from rnnlib.models import ModelConfig
from rnnlib.training import (
    CheckpointConfig,
    DistributedConfig,
    EvaluationConfig,
    LoggingConfig,
    MeshConfig,
    OptimizerConfig,
    TrainConfig,
    ending_together,
    join_processes,
    load_run,
    read_csv,
    train,
)

FOLDER = pathlib.Path(__file__).parent
PROCESSES, DEVICES, EVERY, KEEP = 2, 2, 5, 3
COMPARED = ("loss", "gradient_norm")
Moment = Literal["starting", "stepping", "saving"]


@dataclasses.dataclass(frozen=True)
class Options:
    """Kills, starts again and compares."""

    kills: int = 32
    """How many times."""
    steps: int = 60
    """Steps of a run, with a checkpoint after every fifth."""
    seed: int = 0
    """Of the moments and of who is killed."""
    lost_seconds: float = 6.0
    """A process without a sign of life for so long is lost."""
    output: pathlib.Path = FOLDER / "results.json"
    """Where the result goes."""
    work: pathlib.Path = pathlib.Path("runs/kill_check")
    """Folder of the runs; what is in it is removed."""
    commit: str | None = None
    """Commit to record where there is no git repository."""

    def __post_init__(self) -> None:
        for name in ("kills", "steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


def config(options: Options) -> TrainConfig:
    """What is trained."""
    return TrainConfig(
        model=ModelConfig(width=16, num_layers=1, num_heads=2, mlp_width=16, mixers=("linear_attention",)),
        data=DataConfig(
            source="text", paths=(f"{options.work}/text/*.txt",), split_by="tail", sequence_length=16, batch_size=8
        ),
        optimizer=OptimizerConfig(warmup_steps=5),
        checkpoint=CheckpointConfig(every=EVERY, keep=KEEP),
        evaluation=EvaluationConfig(every=options.steps, batches=1),
        logging=LoggingConfig(tensorboard=False, picture=False),
        mesh=MeshConfig(data=1, fsdp=PROCESSES * DEVICES),
        steps=options.steps,
    )


def write_corpus(folder: pathlib.Path) -> None:
    """A few files of sums."""
    folder.mkdir(parents=True)
    for number in range(12):
        words = " ".join(f"{number} plus {i} is {number + i};" for i in range(100))
        (folder / f"{number:02}.txt").write_text(words)


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Pair:
    """The processes of one start. They are forks of this one, which has imported all and computed nothing."""

    def __init__(self, options: Options, name: str, number: int):
        """Starts or continues a run.

        Args:
            options: those of the command.
            name: the run's.
            number: of this start, for the names of what the processes print.
        """
        self.folder, port = options.work / name, free_port()
        self.codes: dict[int, int] = {}
        self._pids = [self._fork(options, process, port, number) for process in range(PROCESSES)]

    def _fork(self, options: Options, process: int, port: int, number: int) -> int:
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            out = os.open(options.work / f"{number}-{process}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            os.dup2(out, 1)
            os.dup2(out, 2)
            self._train(options, process, port)
            code = 0
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", flush=True)
        finally:
            os._exit(code)

    def _train(self, options: Options, process: int, port: int) -> None:
        jax.config.update("jax_num_cpu_devices", DEVICES)
        join_processes(DistributedConfig(f"127.0.0.1:{port}", PROCESSES, process, lost_seconds=options.lost_seconds))

        def report(error: BaseException) -> int:
            print(f"{type(error).__name__}: {error}", flush=True)
            return 1

        with ending_together(report):
            train(config(options), self.folder, resume=self.folder.exists())
        jax.distributed.shutdown()  # as at the end of a program, which a fork does not come to: together

    def poll(self) -> bool:
        """Whether all of them have ended."""
        for process, pid in enumerate(self._pids):
            if process not in self.codes:
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    self.codes[process] = os.waitstatus_to_exitcode(status)
        return len(self.codes) == PROCESSES

    def kill(self, victims: tuple[int, ...]) -> None:
        """Ends processes as a lost machine would."""
        for process in victims:
            if process not in self.codes:
                os.kill(self._pids[process], signal.SIGKILL)

    def wait(self, seconds: float) -> float:
        """Waits until all have ended; how long that took.

        Raises:
            RuntimeError: they have not.
        """
        start = time.monotonic()
        while not self.poll():
            if time.monotonic() - start > seconds:
                self.kill(tuple(range(PROCESSES)))
                raise RuntimeError(f"processes of {self.folder} were still there after {seconds:.0f} s")
            time.sleep(0.01)
        return time.monotonic() - start


def saved(folder: pathlib.Path) -> list[int]:
    """Steps of the whole checkpoints of a run."""
    found = folder / "checkpoints"
    return sorted(int(path.name) for path in found.iterdir() if path.name.isdecimal()) if found.is_dir() else []


def is_saving(folder: pathlib.Path) -> bool:
    """Whether a checkpoint is being written."""
    return any((folder / "checkpoints").glob("*.orbax-checkpoint-tmp*"))


def rows(folder: pathlib.Path) -> list[dict[str, float]]:
    """The training steps that a run has recorded."""
    return [{key: row[key] for key in ("step", *COMPARED)} for row in read_csv(folder / "metrics.csv")]


def arrays(folder: pathlib.Path) -> str:
    """A hash of all parameters of a run's last checkpoint."""
    leaves = jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(nnx.state(load_run(folder).model, nnx.Param)))
    pairs = sorted((jax.tree_util.keystr(path), np.asarray(leaf).tobytes()) for path, leaf in leaves)
    return hashlib.sha256(repr(pairs).encode()).hexdigest()


def await_moment(pair: Pair, moment: Moment, chance: random.Random) -> None:
    """Waits until the moment to kill: at once where the run has ended before."""
    folder, deadline = pair.folder, time.monotonic() + 120
    begun = len(rows(folder))
    if moment == "starting":
        deadline = time.monotonic() + chance.uniform(0, 4)
    else:
        more = chance.randint(1, 4 * EVERY)

        def reached() -> bool:
            recorded = len(rows(folder))
            # A start drops the rows after its checkpoint, and then adds to them.
            return recorded >= min(begun, (saved(folder) or [0])[-1]) + more and recorded != begun

        while not reached() and not pair.poll() and time.monotonic() < deadline:
            time.sleep(0.003)
        pause = chance.uniform(0, 0.15)
        if moment == "saving":
            while not is_saving(folder) and not pair.poll() and time.monotonic() < deadline:
                pass
            pause = chance.uniform(0, 0.05)
        deadline = time.monotonic() + pause
    while not pair.poll() and time.monotonic() < deadline:
        time.sleep(0.001)


def one_kill(pair: Pair, moment: Moment, victims: tuple[int, ...], options: Options, chance: random.Random) -> Any:
    """Kills processes of a start; what was there before and after, or None where the run has ended before."""
    await_moment(pair, moment, chance)
    if pair.poll():
        return None
    saving = is_saving(pair.folder)
    before = saved(pair.folder)
    pair.kill(victims)
    seconds = pair.wait(options.lost_seconds + 60)
    if all(code == 0 for code in pair.codes.values()):
        return None
    # What was being written may have become whole in the moment of the kill.
    whole, recorded = saved(pair.folder), [int(row["step"]) for row in rows(pair.folder)]
    last = max(recorded, default=0)
    kept = max(whole, default=0)
    return {
        "asked": moment,
        "saving": saving,
        "killed": victims,
        "exit_codes": [pair.codes[process] for process in range(PROCESSES)],
        "seconds_to_end": round(seconds, 2),
        "steps_recorded": last,
        "last_whole_checkpoint": kept,
        "last_whole_checkpoint_before": max(before, default=0),
        "steps_lost": max(last - kept, 0),
    }


def faults(kill: dict[str, Any], after: dict[str, Any] | None) -> list[str]:
    """What is not as it is to be in one kill, `after` which the next was, if it was of the same run."""
    found = []
    if kill["last_whole_checkpoint"] < kill["last_whole_checkpoint_before"]:
        found.append("a whole checkpoint was lost")
    # A checkpoint is written while the next steps are done, but the second is not begun before the first is whole.
    if kill["steps_lost"] >= 2 * EVERY + 1:
        found.append(f"{kill['steps_lost']} steps were lost")
    for process, code in enumerate(kill["exit_codes"]):
        if process not in kill["killed"] and code in (0, -signal.SIGKILL):
            found.append(f"process {process} ended with code {code}")
    if after is not None and after["last_whole_checkpoint"] < kill["last_whole_checkpoint"]:
        found.append("the next start went back before the last whole checkpoint")
    return found


def campaign(options: Options) -> dict[str, Any]:
    """Runs, killed and continued until there were enough kills and the last run is done."""
    chance = random.Random(options.seed)
    write_corpus(options.work / "text")
    jax.config.update("jax_compilation_cache_dir", str((options.work / "compiled").absolute()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    # It takes seconds to import: once, and not in every process that is forked from this one.
    from orbax.checkpoint import v1  # noqa: F401

    alone = Pair(options, "whole", 0)
    alone.wait(600)
    kills: list[dict[str, Any]] = []
    by_themselves: list[dict[str, Any]] = []
    runs: list[str] = []
    starts, name = 1, ""
    while len(kills) < options.kills or name:
        if not name:
            name = f"killed-{len(runs) + 1}"
            runs.append(name)
        pair = Pair(options, name, starts)
        starts += 1
        if len(kills) < options.kills:
            moment: Moment = chance.choice(("starting", "stepping", "saving", "saving"))
            victims = chance.choice(((0,), (1,), (0, 1)))
            kill = one_kill(pair, moment, victims, options, chance)
            if kill is not None:
                kills.append({"run": name, "start": starts - 1, **kill})
                print(json.dumps(kills[-1]), flush=True)
        else:
            pair.wait(600)
        if all(code == 0 for code in pair.codes.values()):
            name = ""
        elif not kills or kills[-1]["start"] != starts - 1:
            by_themselves.append({"run": name, "start": starts - 1, "exit_codes": list(pair.codes.values())})
            if len(by_themselves) > options.kills:
                raise RuntimeError(f"starts that nobody killed end again and again, the last with {pair.codes}")
    return {"whole": alone.codes, "kills": kills, "runs": runs, "starts": starts, "by_themselves": by_themselves}


def judge(options: Options, found: dict[str, Any]) -> dict[str, Any]:
    """Compares what was found with the run left alone."""
    kills, wanted = found["kills"], rows(options.work / "whole")
    following = [b if a["run"] == b["run"] else None for a, b in itertools.pairwise(kills)]
    wrong = {kill["start"]: bad for kill, after in zip(kills, [*following, None]) if (bad := faults(kill, after))}
    same = {name: rows(options.work / name) == wanted for name in found["runs"]}
    bits = arrays(options.work / "whole")
    return {
        "kills": len(kills),
        "while_saving": sum(kill["saving"] for kill in kills),
        "before_the_first_checkpoint": sum(not kill["last_whole_checkpoint"] for kill in kills),
        "of_process_0": sum(kill["killed"] == (0,) for kill in kills),
        "of_process_1": sum(kill["killed"] == (1,) for kill in kills),
        "of_both": sum(len(kill["killed"]) == 2 for kill in kills),
        "most_steps_lost": max((kill["steps_lost"] for kill in kills), default=0),
        "longest_seconds_to_end": max((kill["seconds_to_end"] for kill in kills), default=0),
        "starts_that_ended_by_themselves": found["by_themselves"],
        "faults": wrong,
        "runs_whose_losses_repeat_bit_for_bit": f"{sum(same.values())} of {len(same)}",
        "runs_whose_parameters_repeat_bit_for_bit": (
            f"{sum(arrays(options.work / name) == bits for name in found['runs'])} of {len(same)}"
        ),
        "steps_of_the_run_left_alone": len(wanted),
        "as_expected": not (wrong or found["by_themselves"]) and all(same.values()) and len(wanted) == options.steps,
    }


def main() -> int:
    """Runs the command; returns the exit code."""
    options = tyro.cli(Options, prog="python -m experiments.kill_check")
    shutil.rmtree(options.work, ignore_errors=True)
    options.work.mkdir(parents=True)
    start = time.monotonic()
    found = campaign(options)
    result = {
        **judge(options, found),
        "seconds": round(time.monotonic() - start),
        "starts": found["starts"],
        "config": repr(config(options)),
        "environment": environment(command_line("experiments.kill_check"), options.commit),
        "each": found["kills"],
    }
    write_text(options.output, json.dumps(result, indent=1) + "\n")
    print(json.dumps({key: value for key, value in result.items() if key not in ("config", "each")}, indent=1))
    return 0 if result["as_expected"] else 1


if __name__ == "__main__":
    sys.exit(main())

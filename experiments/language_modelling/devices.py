"""Training on several GPUs of one machine: two commands a GPU, of which one compiles while the other trains."""

import dataclasses
import os
import pathlib
import subprocess
import threading
import time
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from experiments.harness.study import Mixer, slug
from experiments.language_modelling.runs import read_run
from experiments.language_modelling.study import LanguageStudy

COMMANDS_PER_DEVICE = 2
COMPILING = 75.0
"""Seconds from a command's start to its first step, on an H200's machine."""
TESTING = 15.0
"""Seconds of a device for the tests behind a training."""


@dataclasses.dataclass(frozen=True)
class Job:
    """A run to train.

    Attributes:
        mixer: of the model.
        rate: learning rate.
        seed: of the initial weights.
        seconds: that the run is expected to have its device for; 0 where nothing tells.
    """

    mixer: Mixer
    rate: float
    seed: int
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.mixer.label}, learning rate {self.rate:g}, seed {self.seed}"


def expected_seconds(plan: LanguageStudy, results: pathlib.Path, mixer: Mixer) -> float:
    """Seconds that a run of a mixer has its device for: what another rate or seed took; 0 where there is none."""
    runs = (read_run(plan, results, mixer, rate, seed) for rate in plan.learning_rates for seed in plan.seeds)
    seconds = [run["seconds"] for run in runs if run is not None]
    return min(seconds) + TESTING if seconds else 0.0


class Timetable:
    """Gives out jobs in their order, but none that would end too late; several threads may ask."""

    def __init__(self, jobs: Sequence[Job], until: float | None):
        """`until` is in seconds since the epoch, as `now` is below; None is no limit."""
        self._waiting = list(jobs)
        self._until = until
        self._free: dict[int, float] = {}  # when each device is expected to be
        self._running: dict[int, list[Job]] = {}
        self._lock = threading.Lock()

    def take(self, device: int, now: float) -> Job | None:
        """The next job for a device; None where none is left that would be done in time."""
        with self._lock:
            begin = max(self._free.get(device, 0.0), now + COMPILING)
            for job in self._waiting:
                if self._until is None or begin + job.seconds <= self._until:
                    self._waiting.remove(job)
                    self._running.setdefault(device, []).append(job)
                    self._free[device] = begin + job.seconds
                    return job
            return None

    def close(self) -> None:
        """Gives out no more."""
        with self._lock:
            self._waiting.clear()

    def end(self, device: int, job: Job, now: float) -> None:
        """A job has ended: what its device still has to do begins now."""
        with self._lock:
            self._running[device].remove(job)
            self._free[device] = now + sum(other.seconds for other in self._running[device])


def train_on_devices(
    jobs: Sequence[Job],
    devices: Sequence[int],
    command: Callable[[Job, int], list[str]],
    *,
    logs: pathlib.Path,
    console: Console,
    until: float | None = None,
) -> None:
    """Runs a command for each job, `COMMANDS_PER_DEVICE` at a time on each device; one that fails stops no other.

    Args:
        jobs: what is to be trained, the most wanted first.
        devices: as `CUDA_VISIBLE_DEVICES` numbers them.
        command: arguments of the process that trains a job on a device, by turns with others there.
        logs: folder for what the commands print.
        console: where progress is shown.
        until: begins no job that would end after this time (since the epoch).
    """
    logs.mkdir(parents=True, exist_ok=True)
    timetable = Timetable(jobs, until)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("language models", total=len(jobs))

        def work(device: int) -> None:
            # Two commands share a device's memory, so none may take most of it when it starts.
            own = {"CUDA_VISIBLE_DEVICES": str(device), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
            while (job := timetable.take(device, time.time())) is not None:
                console.print(f"GPU {device}: {job}", highlight=False, markup=False)
                begin = time.monotonic()
                log = logs / f"{slug(job.mixer.label)}--{job.rate:g}--{job.seed}.log"
                with log.open("w") as out:
                    code = subprocess.run(
                        command(job, device), env=os.environ | own, stdout=out, stderr=subprocess.STDOUT, check=False
                    ).returncode
                timetable.end(device, job, time.time())
                outcome = "done" if code == 0 else f"ended with {code}, see {log},"
                took = f"{outcome} after {time.monotonic() - begin:.0f} s"
                console.print(f"GPU {device}: {job}: {took}", highlight=False, markup=False)
                progress.advance(bar)

        threads = [threading.Thread(target=work, args=(d,)) for _ in range(COMMANDS_PER_DEVICE) for d in devices]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except KeyboardInterrupt:  # the commands have got it too, and write their checkpoints
            timetable.close()
            for thread in threads:
                thread.join()
            raise

"""Running jobs on the GPUs of one machine: some commands a GPU, of which one trains while the others compile."""

import dataclasses
import os
import pathlib
import signal
import subprocess
import time
from collections.abc import Callable, Sequence

from experiments.harness.jobs import Job
from experiments.harness.study import slug

COMPILING = 75.0
"""Seconds from a command's start until it wants its devices."""
STOPPING = 30.0
"""Seconds before the end at which commands are told to stop, so that they can save where they are."""
POLL = 0.5


class Timetable:
    """Which job begins next, and on which devices; it runs nothing."""

    def __init__(self, jobs: Sequence[Job], devices: Sequence[int], until: float | None, commands: int = 2):
        """Makes a plan.

        Args:
            jobs: the most wanted first.
            devices: by their numbers.
            until: time, as `now` is below, by which all must be done; None is no limit.
            commands: of a device at a time.
        """
        self._waiting = [job for job in jobs if job.devices <= len(devices)]
        self.too_large = [job for job in jobs if job.devices > len(devices)]
        self._until = until
        self._commands = commands
        self._running: dict[int, list[Job]] = {device: [] for device in devices}
        self._free = dict.fromkeys(devices, 0.0)  # when each device is expected to be

    def take(self, now: float) -> tuple[Job, tuple[int, ...]] | None:
        """A job that may begin now, with its devices; None while there is none.

        It is the first that is expected to be done in time. Where none is, it is the first of all: what it does is
        saved, and the next call goes on from there.
        """
        order = [job for job in self._waiting if self._fits(job, now)] or self._waiting
        if self._until is not None and now + COMPILING + STOPPING > self._until:
            return None
        for job in order:
            devices = self._devices(job)
            if len(devices) < job.devices:
                return None  # a job that needs many devices is not overtaken for ever
            self._waiting.remove(job)
            begin = self._begin(job, devices, now)
            for device in devices:
                self._running[device].append(job)
                if job.alone:
                    self._free[device] = begin + job.seconds
            return job, devices
        return None

    def end(self, job: Job, devices: Sequence[int], now: float) -> None:
        """A job has ended: what its devices still have to do begins now."""
        for device in devices:
            self._running[device].remove(job)
            self._free[device] = now + sum(other.seconds for other in self._running[device] if other.alone)

    @property
    def left(self) -> list[Job]:
        """Jobs that were not begun."""
        return [*self._waiting, *self.too_large]

    def _devices(self, job: Job) -> tuple[int, ...]:
        """The devices that would be free first, of those that take another command."""
        able = [device for device, running in self._running.items() if len(running) < self._commands]
        return tuple(sorted(sorted(able, key=self._load)[: job.devices]))

    def _load(self, device: int) -> tuple[float, int]:
        return self._free[device], len(self._running[device])

    def _begin(self, job: Job, devices: Sequence[int], now: float) -> float:
        free = (self._free[device] for device in devices if job.alone)
        return max((now + COMPILING, *free))

    def _fits(self, job: Job, now: float) -> bool:
        begin = self._begin(job, self._devices(job), now)
        return self._until is None or begin + job.seconds + STOPPING <= self._until


@dataclasses.dataclass
class _Command:
    job: Job
    devices: tuple[int, ...]
    process: subprocess.Popen
    log: pathlib.Path
    begin: float


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a job's command ended.

    Attributes:
        job: the job.
        code: its exit status.
        seconds: that it took.
        log: what it printed.
    """

    job: Job
    code: int
    seconds: float
    log: pathlib.Path


def run_jobs(
    jobs: Sequence[Job],
    devices: Sequence[int],
    command: Callable[[Job, tuple[int, ...]], list[str]],
    *,
    logs: pathlib.Path,
    tell: Callable[[str], None],
    ended: Callable[[Ended], None],
    until: float | None = None,
    commands: int = 2,
) -> list[Job]:
    """Runs a command for each job; one that fails stops no other.

    Shortly before the end, and at Ctrl-C, commands are interrupted, as by Ctrl-C: they save where they are.

    Args:
        jobs: what to run, the most wanted first.
        devices: as `CUDA_VISIBLE_DEVICES` numbers them.
        command: arguments of the process for a job on its devices, which it has by turns with others.
        logs: folder for what the commands print.
        tell: shows a line of progress.
        ended: called when a command has ended.
        until: time (since the epoch) at which no command runs any more.
        commands: of a device at a time.

    Returns:
        Jobs that were not begun.
    """
    logs.mkdir(parents=True, exist_ok=True)
    table = Timetable(jobs, devices, until, commands)
    running: list[_Command] = []
    stopped = False
    try:
        while True:
            while not stopped and (taken := table.take(time.time())) is not None:
                running.append(_start(*taken, command, logs))
                tell(f"GPU {', '.join(map(str, taken[1]))}: {taken[0]}")
            if not running:
                break
            time.sleep(POLL)
            if not stopped and until is not None and time.time() > until - STOPPING:
                stopped = True
                tell(f"time is up: {len(running)} commands save and stop")
                _interrupt(running)
            if until is not None and time.time() > until:
                for one in running:
                    one.process.kill()
            for one in [one for one in running if one.process.poll() is not None]:
                running.remove(one)
                table.end(one.job, one.devices, time.time())
                result = Ended(one.job, one.process.returncode, time.monotonic() - one.begin, one.log)
                outcome = "done" if result.code == 0 else f"ended with {result.code}, see {one.log},"
                tell(f"GPU {', '.join(map(str, one.devices))}: {one.job}: {outcome} after {result.seconds:.0f} s")
                ended(result)
    except BaseException:
        _interrupt(running)
        for one in running:
            one.process.wait()
        raise
    return table.left


def _start(
    job: Job, devices: tuple[int, ...], command: Callable[[Job, tuple[int, ...]], list[str]], logs: pathlib.Path
) -> _Command:
    # Two commands share a device's memory, so none may take most of it when it starts.
    own = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, devices)), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    # What was stopped and goes on need not compile again.
    own["JAX_COMPILATION_CACHE_DIR"] = os.environ.get("JAX_COMPILATION_CACHE_DIR", str(logs.parent / "compiled"))
    log = logs / f"{slug(str(job))[:120]}.log"
    with log.open("a") as out:
        # A session of its own: Ctrl-C reaches it through `_interrupt`, once.
        process = subprocess.Popen(
            command(job, devices),
            env=os.environ | own,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_take_interrupts,
        )
    return _Command(job, devices, process, log, time.monotonic())


def _take_interrupts() -> None:
    """A queue that a shell began with `&` ignores interrupts, and so would its commands: they could not save."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _interrupt(running: Sequence[_Command]) -> None:
    for one in running:
        if one.process.poll() is None:
            one.process.send_signal(signal.SIGINT)

"""Runs the workers of a benchmark and gathers their records."""

import concurrent.futures
import contextlib
import dataclasses
import importlib.util
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from experiments.harness.command import sigterm_as_interrupt
from experiments.harness.device import turn
from experiments.harness.records import Record, installed_versions, read_records
from experiments.kernel_benchmarks.config import OURS, PEERS, BenchmarkConfig, part_of, plan, share_out
from experiments.kernel_benchmarks.inputs import Shape
from experiments.kernel_benchmarks.peers import PEERS as PEER_LIBRARIES
from experiments.kernel_benchmarks.work import Work, write_work

Process = subprocess.Popen[str]
GRACE = 25.0
"""Seconds after the deadline in which what has begun may end."""
STOPPING = 5.0
"""Seconds that a process has to end in, once it is told to."""
INTERRUPTED: Record = {"kind": "failure", "of": "run", "reason": "interrupted: what follows was not measured"}


def _environment(peer: str, gpu: str | None) -> dict[str, str]:
    environment = dict(os.environ)
    if gpu is not None:
        environment["CUDA_VISIBLE_DEVICES"] = gpu
    # Frameworks share the card: none may take most of its memory at its start.
    environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    if peer in PEER_LIBRARIES:
        environment |= {"JAX_PLATFORMS": "cpu", **dict(PEER_LIBRARIES[peer].environment)}
    return environment


class Processes(contextlib.AbstractContextManager):
    """Processes of a run, each of a session of its own: all end with this context, and none starts after it."""

    def __init__(self) -> None:
        self._started: list[Process] = []
        self._over = False

    def start(self, command: Sequence[str], **options: Any) -> Process:
        """`subprocess.Popen`.

        Raises:
            RuntimeError: the run is over.
        """
        if self._over:
            raise RuntimeError("the run is over")
        process = subprocess.Popen(command, text=True, start_new_session=True, **options)
        self._started.append(process)
        return process

    def __exit__(self, *_: object) -> None:
        """Ends them."""
        self._over = True
        end(self._started)


def end(processes: Iterable[Process]) -> None:
    """Ends processes and all that they have started, and waits for it: nothing of them is on a GPU any more.

    Args:
        processes: each the first of a process group, which may have ended already and have left others.
    """
    processes = list(processes)
    for number, wait in ((signal.SIGTERM, STOPPING), (signal.SIGKILL, STOPPING)):
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
        until = time.monotonic() + wait
        while any(map(_is_running, processes)) and time.monotonic() < until:
            time.sleep(0.05)


def _is_running(process: Process) -> bool:
    """Whether a process or any of its group is there."""
    process.poll()  # what has ended leaves the group once it is waited for
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return False
    return True


def installed_peers(config: BenchmarkConfig) -> list[str]:
    """Peers that were asked for and can be imported, with torch where they need it."""

    def is_installed(name: str) -> bool:
        peer = PEER_LIBRARIES[name]
        needed = (peer.module, "torch") if peer.framework == "torch" else (peer.module,)
        return all(map(importlib.util.find_spec, needed))

    return [name for name in PEERS if name in config.implementations and is_installed(name)]


class Runner:
    """Starts a run's processes, shows their progress and reads their records."""

    def __init__(self, work: Work, progress: Progress, processes: Processes, gpu: str | None) -> None:
        self.work, self._progress, self._processes, self._gpu = work, progress, processes, gpu
        self._folder = work.folder
        self._logs: dict[Process, pathlib.Path] = {}

    def start(self, module: str, *arguments: str, stdin: int = subprocess.DEVNULL) -> Process:
        """Starts a worker."""
        log = self._folder / f"{'_'.join((module, *arguments))}.log"
        peer = arguments[0] if arguments else ""
        with log.open("w") as output:
            process = self._processes.start(
                [sys.executable, "-m", f"experiments.kernel_benchmarks.{module}", str(self._folder), *arguments],
                env=_environment(peer, self._gpu),
                stdin=stdin,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self._logs[process] = log
        return process

    def wait(
        self, title: str, processes: dict[Process, str], total: int | None = None, until: float | None = None
    ) -> list[Record]:
        """Waits for processes, each with the file that its records go to (or ""), and reads these.

        Progress is that of records where a total is given, else of processes. What still runs at `until` is ended; left
        out, that is a while after the deadline, when nothing new should have started.
        """
        until = self.work.deadline + GRACE if until is None else until
        files = [self._folder / file for file in dict.fromkeys(processes.values()) if file]
        where = "" if self._gpu is None else f"GPU {self._gpu}: "
        task = self._progress.add_task(where + title, total=len(processes) if total is None else total)
        late: set[Process] = set()
        while any(process.poll() is None for process in processes):
            if time.time() > until:
                late |= {process for process in processes if process.poll() is None}
                end(late)
            if total is None:
                done = sum(process.poll() is not None for process in processes)
            else:
                records = [record for file in files for record in read_records(file)]
                points = (r for r in records if "operator" in r)
                done = len({(r["operator"], str(r["shape"]), r.get("case"), r.get("seed")) for r in points})
            self._progress.update(task, completed=done)
            time.sleep(0.2)
        self._progress.update(task, total=1, completed=1)
        end(processes)  # compilers and tuners that they started, too
        records = [record for file in files for record in read_records(file)]
        for process in processes:
            if process.returncode != 0:
                log = self._logs[process]
                ended = "stopped, out of time" if process in late else f"exit {process.returncode}"
                reason = f"{log.stem}: {ended}: {log.read_text()[-1500:]}"
                records.append({"kind": "failure", "of": "worker", "reason": reason})
        return records

    def later(self, seconds: float) -> None:
        """Puts the deadline off, for workers that read their work from now on, too."""
        self.work = dataclasses.replace(self.work, deadline=self.work.deadline + seconds)
        write_work(self.work)

    def wait_for_prepared(self, process: Process, file: str) -> None:
        """Waits until a worker's file says that it has compiled all that it will, or the worker has ended."""
        while process.poll() is None and time.time() < self.work.deadline:
            if any(record["kind"] == "prepared" for record in read_records(self._folder / file)):
                break
            time.sleep(0.2)


def visible_gpus() -> tuple[str, ...]:
    """The GPUs of this machine, or those of them that CUDA_VISIBLE_DEVICES leaves; empty where there is none."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return tuple(name for name in chosen.split(",") if name)
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return ()
    return tuple(str(n) for n, line in enumerate(listed.splitlines()) if line.startswith("GPU"))


def measure(config: BenchmarkConfig, folder: pathlib.Path, console: Console) -> list[Record]:
    """Runs all measurements; whatever is timed has its GPU for itself.

    Args:
        config: what to measure.
        folder: an empty folder for the workers' files.
        console: where progress is shown.

    Returns:
        The records of all workers; with `INTERRUPTED`, those that there are at Ctrl-C or SIGTERM.
    """
    peers = installed_peers(config)
    ours = tuple(name for name in OURS if name in config.implementations)
    measurements = tuple(m for m in plan(config) if m.implementation in (*ours, *peers))
    in_jax = (*ours, *(name for name in peers if PEER_LIBRARIES[name].framework == "jax"))
    in_torch = [name for name in peers if name not in in_jax]
    gpus: tuple[str | None, ...] = config.gpus or visible_gpus() or (None,)
    shares = share_out(measurements, len(gpus))
    cores = sorted(os.sched_getaffinity(0))
    deadline = time.time() + config.time_limit
    columns = (TextColumn("{task.description:<30}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())

    def measure_share(n: int, progress: Progress, processes: Processes) -> list[Record]:
        # Threads have cores of their own, and hand them on to the processes that they start.
        os.sched_setaffinity(0, cores[n * len(cores) // len(shares) : (n + 1) * len(cores) // len(shares)] or cores)
        place = folder / f"gpu_{n}"
        place.mkdir()
        work = Work(shares[n], in_jax, config.dtype, config.repeats, deadline, place)
        write_work(work)
        return _measure_on_one(
            Runner(work, progress, processes, gpus[n]), in_torch, config.exclusive, config.jax_processes
        )

    # Not as a context, which waits for its threads: those that wait for a lock file can't be interrupted.
    pool = concurrent.futures.ThreadPoolExecutor(len(shares))
    with sigterm_as_interrupt(), Progress(*columns, console=console) as progress, Processes() as processes:
        jobs = [pool.submit(measure_share, n, progress, processes) for n in range(len(shares))]
        try:
            found = [(n, record) for n, job in enumerate(jobs) for record in job.result()]
        except KeyboardInterrupt:
            files = sorted((int(file.parent.name.removeprefix("gpu_")), file) for file in folder.glob("gpu_*/*.jsonl"))
            found = [(n, record) for n, file in files for record in read_records(file)]
            found.append((len(shares) - 1, INTERRUPTED))
    return [{**record, "gpu": gpus[n]} for n, record in found]


def _measure_on_one(
    runner: Runner, peers: list[str], exclusive: Sequence[pathlib.Path], jax_processes: int
) -> list[Record]:
    """One GPU's share; what is measured alone waits for the lock files of `exclusive`."""
    work = runner.work
    peers = [name for name in peers if any(m.implementation == name for m in work.measurements)]
    parts = max(1, min(jax_processes, len({(m.operator, m.shape) for m in work.measurements})))
    jax_workers = [runner.start("jax_worker", str(n), str(parts), stdin=subprocess.PIPE) for n in range(parts)]
    checking = {} if any(m.kind != "error" for m in work.measurements) else _start_checks(runner)
    compiling = {runner.start("torch_worker", *job): "" for job in _compile_jobs(work, peers)}
    # A peer that compiles for longer than half of the time takes it from its own measurements, not from ours.
    records = runner.wait("compiling peers", compiling, until=(time.time() + work.deadline) / 2)
    for n, worker in enumerate(jax_workers):
        runner.wait_for_prepared(worker, f"jax_{n}.jsonl")
    asked = time.time()
    with turn(exclusive):
        runner.later(time.time() - asked)  # waiting for others takes no time from what is measured
        work = runner.work
        for n, worker in enumerate(jax_workers):
            assert worker.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it may have ended, and its log says why
                worker.stdin.write("measure\n")
                worker.stdin.flush()
            total = sum(m.implementation in work.in_jax for m in part_of(work.measurements, n, parts))
            records += runner.wait("measuring ours and peers in JAX", {worker: f"jax_{n}.jsonl"}, total)
        for peer in peers if not checking else ():
            total = sum(m.implementation == peer and m.kind != "error" for m in work.measurements)
            process = runner.start("torch_worker", peer, "time")
            records += runner.wait(f"timing {PEER_LIBRARIES[peer].title}", {process: f"{peer}.jsonl"}, total)
    return records + runner.wait("checking peers", checking or _start_checks(runner))


def _start_checks(runner: Runner) -> dict[Process, str]:
    """Starts a worker for each peer and operator whose errors are measured; gives the files of their records."""
    work = runner.work
    checked = {(m.implementation, m.operator) for m in work.measurements if m.kind == "error"}
    jobs = sorted((peer, operator) for peer, operator in checked if peer not in work.in_jax)
    return {
        runner.start("torch_worker", peer, "errors", operator): f"{peer}_errors_{operator}.jsonl"
        for peer, operator in jobs
    }


def _compile_jobs(work: Work, peers: list[str]) -> list[tuple[str, ...]]:
    """For each operator and number of heads a shape, or one row, short and long, and a batch."""
    shapes: dict[tuple[str, str, int], list[Shape]] = {}
    for m in work.measurements:
        if m.implementation in peers and m.kind == "time":
            shapes.setdefault((m.implementation, m.operator, m.shape[2]), []).append(m.shape)
    jobs = []
    for (peer, operator, _), found in sorted(shapes.items()):
        single = sorted(shape for shape in found if shape[0] == 1)
        several = sorted((shape for shape in found if shape[0] > 1), key=lambda shape: shape[0] * shape[1])
        chosen = [*single[:1], *single[-1:], *several[:1]]
        for shape in dict.fromkeys(chosen if PEER_LIBRARIES[peer].by_shape else chosen[:1]):
            jobs.append((peer, "warm", operator, *map(str, shape)))
    return jobs


def versions() -> dict[str, Any]:
    """Versions of what the results depend on, as far as it is installed."""
    of_peers = (package for peer in PEER_LIBRARIES.values() for package in peer.packages)
    return installed_versions(("jax", "jaxlib", "jax-cuda13-plugin", "torch", *of_peers))

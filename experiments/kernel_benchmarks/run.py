"""Runs the workers of a benchmark and gathers their records."""

import importlib.metadata
import importlib.util
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from experiments.kernel_benchmarks.config import OURS, PEERS, BenchmarkConfig, plan
from experiments.kernel_benchmarks.peers import PEERS as PEER_LIBRARIES
from experiments.kernel_benchmarks.records import Record, read_records
from experiments.kernel_benchmarks.work import Work, write_work

Process = subprocess.Popen[str]


def _environment(worker: str) -> dict[str, str]:
    environment = dict(os.environ)
    # Frameworks share the card: none may take most of its memory at its start.
    environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    if worker == "torch":
        environment["JAX_PLATFORMS"] = "cpu"
    return environment


def _start(module: str, *arguments: str, log: pathlib.Path, stdin: int = subprocess.DEVNULL) -> Process:
    with log.open("w") as output:
        return subprocess.Popen(
            [sys.executable, "-m", f"experiments.kernel_benchmarks.{module}", *arguments],
            env=_environment("torch" if module == "torch_worker" else "jax"),
            stdin=stdin,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
        )


def _failure(worker: str, process: Process, log: pathlib.Path) -> list[Record]:
    if process.returncode == 0:
        return []
    reason = f"exit {process.returncode}: {log.read_text()[-1500:]}"
    return [{"kind": "failure", "of": "worker", "implementation": worker, "reason": reason}]


@contextmanager
def _processes() -> Iterator[list[Process]]:
    """Processes that end with this block."""
    running: list[Process] = []
    try:
        yield running
    finally:
        for process in running:
            if process.poll() is None:
                process.terminate()


def installed_peers(config: BenchmarkConfig) -> list[str]:
    """Peers that were asked for and can be imported, where there is an NVIDIA GPU's torch."""
    return [
        name
        for name in PEERS
        if name in config.implementations
        and importlib.util.find_spec("torch")
        and importlib.util.find_spec(PEER_LIBRARIES[name].module)
    ]


def measure(config: BenchmarkConfig, folder: pathlib.Path, console: Console) -> list[Record]:
    """Runs all measurements, one worker process after the other, while nothing else uses the GPU.

    Args:
        config: what to measure.
        folder: an empty folder for the workers' files.
        console: where progress is shown.

    Returns:
        The records of all workers.
    """
    peers = installed_peers(config)
    ours = tuple(name for name in OURS if name in config.implementations)
    measurements = tuple(m for m in plan(config) if m.implementation in (*ours, *peers))
    work = Work(
        measurements=measurements,
        workers={"jax": ours, **{peer: (peer,) for peer in peers}},
        dtype=config.dtype,
        repeats=config.repeats,
        deadline=time.time() + config.time_limit,
        folder=folder,
    )
    write_work(work)
    records: list[Record] = []
    columns = (TextColumn("{task.description:<42}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress, _processes() as running:
        jax_log = folder / "jax.log"
        jax_worker = _start("jax_worker", str(folder), log=jax_log, stdin=subprocess.PIPE)
        running.append(jax_worker)
        compiling = [
            _start("torch_worker", str(folder), *job, log=folder / f"warm_{'_'.join(job)}.log")
            for job in _compile_jobs(work, peers)
        ]
        running += compiling
        task = progress.add_task("compiling peers", total=len(compiling))
        while any(process.poll() is None for process in compiling) and jax_worker.poll() is None:
            progress.update(task, completed=sum(process.poll() is not None for process in compiling))
            time.sleep(0.2)
        progress.update(task, completed=len(compiling))
        if jax_worker.poll() is None:
            assert jax_worker.stdin is not None
            jax_worker.stdin.write("measure\n")
            jax_worker.stdin.flush()
        for worker in work.workers:
            process = jax_worker
            log = jax_log
            if worker != "jax":
                log = folder / f"{worker}.log"
                process = _start("torch_worker", str(folder), worker, log=log)
                running.append(process)
            mine = [m for m in measurements if m.implementation in work.workers[worker]]
            task = progress.add_task(f"measuring {worker}", total=len(mine))
            while process.poll() is None:
                done = read_records(folder / f"{worker}.jsonl")
                keys = {(r.get("operator"), r.get("implementation"), str(r.get("shape")), r.get("case")) for r in done}
                progress.update(task, completed=min(len(keys), len(mine)))
                time.sleep(0.2)
            progress.update(task, completed=len(mine))
            records += read_records(folder / f"{worker}.jsonl") + _failure(worker, process, log)
    return records


def _compile_jobs(work: Work, peers: list[str]) -> list[tuple[str, ...]]:
    jobs = {
        (m.implementation, "warm", m.operator, str(m.shape[2]))
        for m in work.measurements
        if m.implementation in peers and m.kind != "decode"
    }
    return sorted(jobs)


def versions() -> dict[str, Any]:
    """Versions of what the results depend on, as far as it is installed."""
    found = {}
    for name in ("jax", "jaxlib", "jax-cuda13-plugin", "torch", "triton", "fla-core", "flash-qla", "tilelang"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found

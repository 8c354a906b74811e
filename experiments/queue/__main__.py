"""`python -m experiments.queue`: see experiments/README.md."""

import dataclasses
import pathlib
import subprocess
import sys
import time
from collections.abc import Sequence

import tyro

from experiments.harness.command import errors_as_lines
from experiments.harness.jobs import Job
from experiments.harness.study import unmatched
from experiments.harness.tables import EXPERIMENTS, add_rows, read_table, table_path
from experiments.queue.bundle import fold, tail, unpack, write_bundle
from experiments.queue.left import hours, told
from experiments.queue.order import ORDER, Entry
from experiments.queue.scheduler import Ended, run_jobs


@dataclasses.dataclass(frozen=True)
class Options:
    """Takes the next unfinished runs of all studies, on every GPU of this machine, for as long as there is time."""

    minutes: float | None = None
    """Stop by then; what is unfinished is saved in `work`, and the next call goes on from there."""
    out: pathlib.Path = pathlib.Path("build/queue")
    """Folder for what is to be brought back: results of this machine, and a log; eight files of 16 MB at most."""
    work: pathlib.Path = pathlib.Path("runs/queue")
    """Folder for checkpoints, tokens, logs and tables."""
    studies: tuple[str, ...] = ()
    """Only these, as study/setting or study, in this order; left out, all of `experiments/queue/order.py`."""
    jobs: tuple[str, ...] = ()
    """Only jobs of these names, or whose name contains one of these, as `--list` shows them."""
    commands: int = 2
    """Commands a GPU at a time: one trains while the others compile."""
    devices: tuple[int, ...] = ()
    """GPUs, by the numbers of CUDA_VISIBLE_DEVICES; left out, all that there are. 0 is the CPU where there is none."""
    commit: str | None = None
    """Commit to record where there is no git repository."""
    list: bool = False
    """Only show what is left, in order."""
    fold: tuple[pathlib.Path, ...] = ()
    """Only add what was brought back in these folders to the studies' tables, and write their pages and figures."""

    def __post_init__(self) -> None:
        if self.commands < 1:
            raise ValueError(f"commands must be at least 1, got {self.commands}")


def entries(names: Sequence[str]) -> list[Entry]:
    """The studies of these names, in their order; all without any.

    A name may have another setting than the queue's, as "long_context/small".

    Raises:
        ValueError: a name is of no study in the queue.
    """
    found = []
    for name in names:
        study, _, setting = name.partition("/")
        own = [entry for entry in ORDER if entry.study == study]
        if not own:
            raise ValueError(f"studies: {name!r} is not in the queue; expected some of {', '.join(known())}")
        named = [entry for entry in own if entry.setting == setting] if setting else own
        found += named or [dataclasses.replace(own[0], setting=setting)]
    return found or list(ORDER)


def left(asked: Sequence[Entry], tables: Sequence[pathlib.Path], names: Sequence[str]) -> dict[Entry, list[Job]]:
    """What the tables lack of each study, of jobs that the names pick; all without any.

    Raises:
        ValueError: a name is of no job that is left.
    """
    found = {entry: entry.jobs(entry.study, entry.setting, tables) for entry in asked}
    every = [job.name for jobs in found.values() for job in jobs]
    if unknown := unmatched(names, every):
        raise ValueError(f"jobs: {', '.join(map(repr, unknown))} match nothing that is left; see --list")
    return {
        entry: [j for j in jobs if not names or any(n == j.name if n in every else n in j.name for n in names)]
        for entry, jobs in found.items()
    }


def known() -> list[str]:
    """What is in the queue."""
    return [entry.name for entry in ORDER]


def gpus() -> tuple[int, ...]:
    """Numbers of the GPUs of this machine; 0 where there is none."""
    try:
        shown = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return (0,)
    return tuple(range(shown.count("GPU ")))


def command_of(options: Options, job: Job, devices: tuple[int, ...]) -> list[str]:
    """The command that makes a job's runs."""
    locks = [str(options.work / "locks" / f"device{device}") for device in devices]
    places = ["--output", str(options.work / "tables"), "--work", str(options.work), "--exclusive", *locks]
    commit = [] if options.commit is None else ["--commit", options.commit]
    return [sys.executable, "-m", f"experiments.{job.study}", *job.arguments, "--train-only", *places, *commit]


def work_through(options: Options) -> int:
    """Runs what is left; returns how many jobs failed."""
    until = None if options.minutes is None else time.time() + 60 * options.minutes
    tables = options.work / "tables"
    unpack(options.out, tables)
    asked = entries(options.studies)
    for entry in asked:  # the commands look there for what is done
        add_rows(table_path(entry.study, entry.setting, tables), read_table(table_path(entry.study, entry.setting)))
    jobs = [job for own in left(asked, [tables], options.jobs).values() for job in own]
    options.out.mkdir(parents=True, exist_ok=True)
    log = options.out / "log.txt"
    begin = time.time()
    failed = []

    def tell(line: str) -> None:
        shown = f"{time.time() - begin:6.0f} s  {line}"
        print(shown, flush=True)
        with log.open("a") as file:
            file.write(shown + "\n")

    def ended(result: Ended) -> None:
        write_bundle(tables, options.out, EXPERIMENTS)
        with log.open("a") as file:
            file.write(tail(result.log))
        if result.code not in (0, 130):
            failed.append(result)

    devices = options.devices or gpus()
    tell(f"{len(jobs)} jobs on {len(devices)} devices")
    waiting = run_jobs(
        jobs,
        devices,
        lambda job, where: command_of(options, job, where),
        logs=options.work / "logs",
        tell=tell,
        ended=ended,
        until=until,
        commands=options.commands,
    )
    tell(f"{len(waiting)} jobs were not begun, {len(failed)} failed; results are in {options.out}")
    return len(failed)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the queue; returns the exit code."""
    options = tyro.cli(Options, args=argv, prog="python -m experiments.queue")
    with errors_as_lines():
        if options.fold:
            for (study, setting), count in fold(options.fold, EXPERIMENTS).items():
                print(f"{study} ({setting}): {count} new rows")
                subprocess.run(
                    [sys.executable, "-m", f"experiments.{study}", "--setting", setting, "--report-only"], check=True
                )
            subprocess.run([sys.executable, "-m", "experiments.claims"], check=True)
            return 0
        if options.list:
            found = left(entries(options.studies), [EXPERIMENTS, options.work / "tables"], options.jobs)
            for entry, jobs in found.items():
                print(f"{entry.name}: {len(jobs)} jobs, {told(*hours(jobs))} GPU-hours; {entry.why}")
                for job in jobs:
                    print(f"  {job.seconds:6.0f} s  {job.name}")
            every = [job for jobs in found.values() for job in jobs]
            print(f"in all: {len(every)} jobs, {told(*hours(every))} GPU-hours")
            return 0
        return 1 if work_through(options) else 0


if __name__ == "__main__":
    sys.exit(main())

"""`python -m experiments.throughput`: see README.md."""

import concurrent.futures
import dataclasses
import functools
import json
import os
import pathlib
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import tyro

from experiments.sweep.command import errors_as_lines, interrupts_as_lines
from experiments.sweep.device import turn
from experiments.sweep.results import command_line, environment, write_text
from experiments.sweep.study import pick_named, slug
from experiments.throughput.measure import CompiledCase, Measurement, compile_case
from experiments.throughput.peer import time_peer
from experiments.throughput.report import read_results, write_report
from experiments.throughput.study import Case, Keeps, ThroughputStudy, cases, study

FOLDER = pathlib.Path(__file__).parent


@dataclasses.dataclass(frozen=True)
class Options:
    """Times the cases that have no result yet, then writes table and figure."""

    setting: Literal["small", "real"] = "small"
    """"small" runs on a CPU in a minute and measures nothing of interest, "real" on one GPU."""
    mixers: tuple[str, ...] = ()
    """Only mixers of these labels, or whose label contains one of these."""
    lengths: tuple[int, ...] = ()
    """Only these lengths."""
    report_only: bool = False
    """Time nothing."""
    again: bool = False
    """Time what has a result too, and replace it."""
    output: pathlib.Path = FOLDER
    """Folder for results and figures."""
    keeps: tuple[Keeps, ...] = ("input",)
    """What the blocks keep for the backward pass. Under a scan over layers, keeping everything takes most of a card."""
    layers: tuple[Literal["scan", "unrolled"], ...] = ("scan", "unrolled")
    """The layers as one scan, or one after another."""
    peer: tuple[str, ...] = ()
    """Models of flash-linear-attention to time besides: names of `peer.MODELS`. Its packages must be installed."""
    compile_workers: int = 0
    """Threads that compile while others are timed, which disturbs the timing; 0 compiles and times by turns.

    To compile side by side, run several of these commands with different mixers and the same `exclusive`."""
    quiet: bool = False
    """Compile all cases, with `compile_workers` threads, before the first is timed, and time them by turns."""
    seconds: float | None = None
    """Time no case after this time."""
    exclusive: pathlib.Path | None = None
    """Lock file, for several commands on one device: nothing else is trained while a case is timed."""
    commit: str | None = None
    """Commit to record where there is no git repository."""

    def __post_init__(self) -> None:
        if self.compile_workers < 0:
            raise ValueError(f"compile_workers must not be negative, got {self.compile_workers}")


def file_name(case: Case) -> str:
    """The file of a case's result."""
    marks = "--deterministic" * case.deterministic + "--packed" * case.packed
    marks += f"--{case.keeps}" * (case.keeps != "input") + "--unrolled" * case.unrolled
    return f"{slug(case.mixer.label)}--{case.length}{marks}.json"


# Turns in which the steps of several cases are timed: a device that slows down in a run slows down all of them.
_TURNS = 5


def time_cases(
    plan: ThroughputStudy, compiled: dict[Case, concurrent.futures.Future[CompiledCase]]
) -> Iterator[tuple[Case, dict[str, Any]]]:
    """The record of each case, timed by turns, or one that says why there is none.

    A failure must not cost the others their results. The states of all cases are on the device at once.
    """
    running: dict[Case, Measurement] = {}
    failed: dict[Case, Exception] = {}

    def attempt(case: Case, function: Callable[[], Any]) -> Any:
        if case not in failed:
            try:
                return function()
            except Exception as error:
                print(f"FAILED {file_name(case)}: {''.join(traceback.format_exception(error))[-3000:]}", flush=True)
                failed[case] = error
                running.pop(case, None)
        return None

    def start(case: Case) -> None:
        running[case] = Measurement(plan, compiled[case].result())

    for case in compiled:
        attempt(case, functools.partial(start, case))
    turns = _TURNS if len(compiled) > 1 else 1
    for number in range(turns):
        steps = plan.steps * (number + 1) // turns - plan.steps * number // turns
        for case in list(running):
            attempt(case, functools.partial(running[case].time, steps))
    for case in compiled:
        record = attempt(case, lambda: running.pop(case).finish())
        yield case, record or _explanation(case, failed[case])


def _explanation(case: Case, error: Exception) -> dict[str, Any]:
    return {
        "mixer": case.mixer.label,
        "length": case.length,
        "deterministic": case.deterministic,
        "packed": case.packed,
        "keeps": case.keeps,
        "unrolled": case.unrolled,
        "error": str(error).partition("\n")[0][:200],
    }


@interrupts_as_lines()
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the study; returns the exit code."""
    options = tyro.cli(Options, args=argv, prog="python -m experiments.throughput")
    plan = study(options.setting)
    results = options.output / "results" / options.setting
    with errors_as_lines():
        picked = pick_named(plan.mixers, options.mixers)
    wanted = [c for c in cases(plan) if c.mixer in picked and (not options.lengths or c.length in options.lengths)]
    wanted = [
        c for c in wanted if c.keeps in options.keeps and ("unrolled" if c.unrolled else "scan") in options.layers
    ]
    if not wanted:
        sys.exit(f"error: mixers are {', '.join(mixer.label for mixer in plan.mixers)} and lengths {plan.lengths}")
    begin = time.monotonic()
    failed = 0
    if options.peer and not options.report_only:
        # Before anything of ours: JAX keeps the memory that it has taken, and must not take the card at its start.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        where = environment(command_line("experiments.throughput"), options.commit)
        failed += time_peer(plan, options.peer, results, where)
    missing = [case for case in wanted if options.again or not (results / file_name(case)).exists()]
    if missing and not options.report_only:
        where = environment(command_line("experiments.throughput"), options.commit)
        pool = concurrent.futures.ThreadPoolExecutor(max(1, options.compile_workers))
        queue = list(missing)
        futures: dict[concurrent.futures.Future[CompiledCase], Case] = {}
        # In the order in which they are done. What others are still compiling tries out kernels now and then: the
        # median of the steps passes over that.
        while queue or futures:
            while queue and (options.quiet or len(futures) < max(1, options.compile_workers)):
                case = queue.pop(0)
                futures[pool.submit(compile_case, plan, case)] = case
            wait_for = concurrent.futures.ALL_COMPLETED if options.quiet else concurrent.futures.FIRST_COMPLETED
            concurrent.futures.wait(futures, return_when=wait_for)
            if options.seconds is not None and time.monotonic() - begin > options.seconds:
                print(f"out of time: {len(futures) + len(queue)} cases are left", flush=True)
                pool.shutdown(wait=False, cancel_futures=True)
                failed += len(futures) + len(queue)
                break
            with turn(options.exclusive):
                while ready := [future for future in futures if future.done()]:
                    together = ready if options.quiet else ready[:1]
                    for case, record in time_cases(plan, {futures.pop(future): future for future in together}):
                        failed += "error" in record
                        record["environment"] = where
                        write_text(results / file_name(case), json.dumps(record, indent=1) + "\n")
                        print(
                            f"{time.monotonic() - begin:6.1f} s  {file_name(case)}  {record.get('tokens_per_second')} "
                            f"tokens/s, compiled in {record.get('compile_seconds')} s",
                            flush=True,
                        )
                    del ready, together
    print(write_report(plan, read_results(results), options.output, options.setting))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

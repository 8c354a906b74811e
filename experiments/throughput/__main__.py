"""`python -m experiments.throughput`: see README.md."""

import concurrent.futures
import dataclasses
import functools
import json
import os
import pathlib
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, Literal

import tyro

from experiments.harness.command import errors_as_lines, interrupts_as_lines
from experiments.harness.device import turn
from experiments.harness.environment import command_line, environment
from experiments.harness.records import installed_versions
from experiments.harness.study import pick_named, slug
from experiments.harness.tables import add_row, read_table, write_text
from experiments.throughput import peer_fla, peer_jla
from experiments.throughput.measure import (
    CompiledCase,
    Measurement,
    bytes_of_case,
    claim_memory,
    compile_case,
    in_groups,
)
from experiments.throughput.profiling import write_program
from experiments.throughput.report import read_results, write_report
from experiments.throughput.study import Case, Keeps, Scale, ThroughputStudy, cases, study
from rnnlib.training.memory import device_bytes

FOLDER = pathlib.Path(__file__).parent


@dataclasses.dataclass(frozen=True)
class Options:
    """Times the cases that have no result yet, then writes table and figure."""

    setting: Scale = "small"
    """"small" runs on a CPU in a minute and measures nothing of interest, "real" (340M), "large" and "published" (1.3B)
    on one GPU."""
    mixers: tuple[str, ...] = ()
    """Only mixers of these labels, or whose label contains one of these."""
    lengths: tuple[int, ...] = ()
    """Only these lengths."""
    cases: tuple[str, ...] = ()
    """Only cases whose results have these names, e.g. kda--4096--everything--unrolled--float8."""
    report_only: bool = False
    """Time nothing."""
    again: bool = False
    """Time what has a result too, and replace it."""
    output: pathlib.Path = FOLDER
    """Folder for results and figures."""
    card: str = ""
    """Set behind the setting in names of results and figures: for another card than the H200 of those committed."""
    keeps: tuple[Keeps, ...] = ("input",)
    """What the blocks keep for the backward pass. Under a scan over layers, keeping everything takes most of a card."""
    layers: tuple[Literal["scan", "unrolled"], ...] = ("scan", "unrolled")
    """The layers as one scan, or one after another."""
    float8: bool = False
    """Time the cases with matmuls in float8, too."""
    accumulation: int | None = None
    """Parts of a step, whose gradients are added up; left out, the setting's."""
    steps: int | None = None
    """Steps to time of each case; left out, the setting's."""
    jla: tuple[peer_jla.Model, ...] = ()
    """Models of jax-linear-attention to time besides, by its own trainer. With `compile_workers` they are compiled
    beside our cases, and the run that is timed takes what was compiled."""
    jla_float8: bool = False
    """Time each of these models with matmuls in float8, too."""
    jla_seconds: float | None = None
    """End a process of such a model after this time."""
    jla_programs: pathlib.Path | None = None
    """Keep the programs that these models compile in this folder, from which later commands take them."""
    peers_only: bool = False
    """Time no case of ours: others of these commands do, with the same `exclusive`."""
    peer: tuple[peer_fla.Model, ...] = ()
    """Models of flash-linear-attention to time besides, before ours. Needs its packages."""
    peer_processes: int = 0
    """Processes that compile each of these models' kernels beforehand, while our cases compile; 0 for none."""
    peer_torch_compile: bool = False
    """Time each of these models under `torch.compile`, too."""
    peer_seconds: float | None = None
    """End a process of such a model after this time."""
    profile: tuple[Keeps, ...] = ()
    """Also profile one step of each case that keeps this: device time by operation, in `profiles/` beside results."""
    compile_workers: int = 0
    """Threads that compile all cases before the first is timed; they are then timed by turns, as many at once as the
    device's memory takes. 0 compiles and times one case after another.

    To compile side by side, run several of these commands with different mixers and the same `exclusive`."""
    seconds: float | None = None
    """Time no case after this time."""
    exclusive: tuple[pathlib.Path, ...] = ()
    """Lock file, for several commands on one device: nothing else is trained while a case is timed."""
    commit: str | None = None
    """Commit to record where there is no git repository."""

    def __post_init__(self) -> None:
        if self.compile_workers < 0:
            raise ValueError(f"compile_workers must not be negative, got {self.compile_workers}")

    @property
    def name(self) -> str:
        """Of results and figures."""
        return f"{self.setting}_{self.card}" if self.card else self.setting

    @property
    def results(self) -> pathlib.Path:
        """The table of our steps."""
        return self.output / "results" / f"{self.name}.jsonl"


def case_name(case: Case) -> str:
    """The name of a case's result."""
    marks = "--deterministic" * case.deterministic + "--packed" * case.packed
    marks += f"--{case.keeps}" * (case.keeps != "input") + "--unrolled" * case.unrolled + "--float8" * case.float8
    return f"{slug(case.mixer.label)}--{case.length}{marks}"


# Turns in which the steps of several cases are timed: a device that slows down in a run slows down all of them.
_TURNS = 5
# Of the device's memory: the rest is for what its allocator cannot use.
_USABLE = 0.9


def time_cases(
    plan: ThroughputStudy,
    compiled: dict[Case, Future[CompiledCase]],
    profiles: tuple[pathlib.Path, Sequence[Keeps]] | None = None,
) -> Iterator[tuple[Case, dict[str, Any]]]:
    """The record of each case, timed by turns, or one that says why there is none.

    A failure must not cost the others their results. With `profiles`, a folder and what cases keep, one more step of
    those cases is profiled. The states of as many cases as the device's memory takes are on it at once. The others
    follow when these are done.
    """
    sizes = {
        case: (0, 0) if future.exception() else bytes_of_case(future.result()) for case, future in compiled.items()
    }
    memory = device_bytes()
    for group in in_groups(sizes, None if memory is None else int(_USABLE * memory)):
        yield from _time_group(plan, {case: compiled[case] for case in group}, profiles)


def _time_group(
    plan: ThroughputStudy,
    compiled: dict[Case, Future[CompiledCase]],
    profiles: tuple[pathlib.Path, Sequence[Keeps]] | None,
) -> Iterator[tuple[Case, dict[str, Any]]]:
    running: dict[Case, Measurement] = {}
    failed: dict[Case, Exception] = {}

    def attempt(case: Case, function: Callable[[], Any]) -> Any:
        if case not in failed:
            try:
                return function()
            except Exception as error:
                print(f"FAILED {case_name(case)}: {''.join(traceback.format_exception(error))[-3000:]}", flush=True)
                failed[case] = error.with_traceback(None)  # whose frames hold the state on the device
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
    for case in list(running):
        attempt(case, functools.partial(running[case].time_ahead, plan.steps))
    for case in compiled:
        if profiles is not None and case.keeps in profiles[1]:
            attempt(case, functools.partial(_profile, case, running.get(case), profiles[0]))
        record = attempt(case, lambda: running.pop(case).finish())
        yield case, record or case.fields() | {"error": str(failed[case]).partition("\n")[0][:200]}


def _profile(case: Case, measurement: Measurement | None, folder: pathlib.Path) -> None:
    if measurement is not None:
        operations, text = measurement.profile()
        rows = ",\n".join(json.dumps(dataclasses.asdict(operation)) for operation in operations)
        write_text(folder / f"{case_name(case)}.json", f"[\n{rows}\n]\n")
        write_program(text, folder / f"{case_name(case)}.program.gz")


def time_peers(
    options: Options, plan: ThroughputStudy, where: dict[str, Any], ours: Sequence[Future[CompiledCase]]
) -> int:
    """Times the peers' models and writes their records into tables beside ours; gives how many failed.

    Nothing compiles while a peer is timed: what is being compiled of ours is waited for, and of the peers' what can be
    compiled apart is compiled beside it.
    """
    begin, failed = time.monotonic(), 0
    compiling = peer_fla.start_compiling(plan, options.peer, options.peer_processes, options.peer_seconds)
    with tempfile.TemporaryDirectory() as temporary:
        given: dict[str, Any] = {"fp8": options.jla_float8, "seconds": options.jla_seconds}
        given["programs"] = options.jla_programs
        if options.compile_workers:
            given["programs"] = options.jla_programs or pathlib.Path(temporary)
            given["compiled"] = peer_jla.start_compiling(plan, options.jla, **given)()
            for model, seconds in given["compiled"].items():
                print(f"{time.monotonic() - begin:6.1f} s  jla {model}: compiled beforehand: {seconds}", flush=True)
        concurrent.futures.wait(ours)
        for model, reason in compiling().items():
            print(f"FLA {model}: not all compiled beforehand: {reason}", flush=True)
        of_fla = _by_turns(
            peer_fla.time_models(
                plan, options.peer, torch_compile=options.peer_torch_compile, seconds=options.peer_seconds
            ),
            options.exclusive,
        )
        of_jla = peer_jla.time_models(plan, options.jla, **given, exclusive=options.exclusive)
        for table, packages, records in (("peer", peer_fla.PACKAGES, of_fla), ("jla", peer_jla.PACKAGES, of_jla)):
            for name, record in records:
                failed += "error" in record
                content = record | {"versions": installed_versions(packages), "environment": where}
                add_row(options.results.with_name(f"{options.name}_{table}.jsonl"), "throughput", name, content)
                said = record.get("step_seconds", record.get("error"))
                print(f"{time.monotonic() - begin:6.1f} s  {table} {name}: {said}", flush=True)
    return failed


def _by_turns[Record](records: Iterator[Record], exclusive: tuple[pathlib.Path, ...]) -> Iterator[Record]:
    """All of them, each computed while no other command times anything."""
    while True:
        with turn(exclusive):
            record = next(records, None)
        if record is None:
            return
        yield record


def _begin_compiling(
    pool: concurrent.futures.Executor, plan: ThroughputStudy, case: Case, begin: float
) -> Future[CompiledCase]:
    """Submits a case, and prints a line when it is compiled: that of a large model takes minutes."""

    def say(future: Future[CompiledCase]) -> None:
        state = "did not compile" if future.cancelled() or future.exception() else "compiled"
        print(f"{time.monotonic() - begin:6.1f} s  {case_name(case)}  {state}", flush=True)

    future = pool.submit(compile_case, plan, case)
    future.add_done_callback(say)
    return future


def time_all(options: Options, plan: ThroughputStudy, missing: Sequence[Case]) -> int:
    """Times the peers, then the cases that have no result; gives how many failed or are left."""
    begin = time.monotonic()
    if has_peers := bool(options.peer or options.jla):
        # JAX keeps the memory that it has taken, and must leave the peer the card.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    where = environment(command_line("experiments.throughput"), options.commit)
    failed, left = 0, len(missing)
    with concurrent.futures.ThreadPoolExecutor(max(1, options.compile_workers)) as pool:
        parts = [missing] if options.compile_workers else [[case] for case in missing]
        groups: Iterable[dict[Case, Future[CompiledCase]]]
        groups = ({case: _begin_compiling(pool, plan, case, begin) for case in part} for part in parts)
        if options.compile_workers:
            groups = list(groups)  # all compile from now on
        if has_peers:
            ours = [future for group in groups for future in group.values()] if options.compile_workers else []
            failed += time_peers(options, plan, where, ours)
            if missing:
                claim_memory()
        for group in groups:
            concurrent.futures.wait(group.values())
            if options.seconds is not None and time.monotonic() - begin > options.seconds:
                print(f"out of time: {left} cases are left", flush=True)
                return failed + left
            with turn(options.exclusive):
                for case, record in time_cases(
                    plan, group, (options.output / "profiles" / options.name, options.profile)
                ):
                    failed, left = failed + ("error" in record), left - 1
                    add_row(options.results, "throughput", case_name(case), record | {"environment": where})
                    print(
                        f"{time.monotonic() - begin:6.1f} s  {case_name(case)}  {record.get('tokens_per_second')} "
                        f"tokens/s, compiled in {record.get('compile_seconds')} s",
                        flush=True,
                    )
    return failed


@interrupts_as_lines()
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the study; returns the exit code."""
    options = tyro.cli(Options, args=argv, prog="python -m experiments.throughput")
    plan = study(options.setting)
    if options.accumulation is not None:
        plan = dataclasses.replace(plan, accumulation=options.accumulation)
    if options.steps is not None:
        plan = dataclasses.replace(plan, steps=options.steps)
    with errors_as_lines():
        picked = pick_named(plan.mixers, options.mixers)
        if options.jla and options.setting != "published":
            raise ValueError(f"jla: its models are those of --setting published, not of {options.setting!r}")
    wanted = [
        case
        for case in cases(plan)
        if case.mixer in picked
        and (not options.lengths or case.length in options.lengths)
        and case.keeps in options.keeps
        and ("unrolled" if case.unrolled else "scan") in options.layers
        and (options.float8 or not case.float8)
        and (not options.cases or case_name(case) in options.cases)
    ]
    if not wanted:
        sys.exit(f"error: mixers are {', '.join(mixer.label for mixer in plan.mixers)} and lengths {plan.lengths}")
    done = set() if options.again else {row["id"] for row in read_table(options.results)}
    missing = [] if options.peers_only else [case for case in wanted if case_name(case) not in done]
    failed = 0
    if not options.report_only and (missing or options.peer or options.jla):
        failed = time_all(options, plan, missing)
    print(write_report(plan, read_results(options.results), options.output, options.name))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

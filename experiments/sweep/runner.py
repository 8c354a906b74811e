"""Runs what is missing of a study: compiling the next groups while one trains."""

import concurrent.futures
import pathlib
import time
import traceback
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from experiments.harness.device import Turn
from experiments.harness.tables import Row, read_table
from experiments.sweep.data import CellData, DataFactory
from experiments.sweep.outcomes import wanted
from experiments.sweep.results import RUN, read_runs, write_runs
from experiments.sweep.saved import Saved
from experiments.sweep.study import Group, Lane, Study, fingerprint
from experiments.sweep.training import CompiledGroup, DeviceData, compile_group, train_group


def missing_groups(study: Study, path: pathlib.Path) -> list[Group]:
    """Runs of a study that its table lacks, in groups to train side by side; cell by cell, mixer by mixer."""
    groups = []
    for cell in study.cells:
        for mixer in study.mixers:
            done = read_runs(path, mixer, cell)
            lanes = [lane for lane in wanted(study, cell, done) if lane not in done]
            parts = -(-len(lanes) // cell.max_lanes)
            groups += [Group(mixer, cell, tuple(lanes[part::parts])) for part in range(parts)]
    return groups


def adopt_results(studies: Sequence[tuple[Study, pathlib.Path]]) -> None:
    """Copies results that another study has for the same model, task and budget: they are measured once."""
    known: dict[str, dict[Lane, Row]] = {}
    # <studies>/<study>/results/<setting>.jsonl
    tables = {table for _, path in studies for table in path.parents[2].glob(f"*/results/{path.name}")}
    for table in sorted(tables):
        for row in read_table(table):
            if "fingerprint" in row and "lanes" in row:
                known.setdefault(row["fingerprint"], {})[Lane(row["learning_rate"], row["seed"])] = row
    for study, path in studies:
        for cell in study.cells:
            for mixer in study.mixers:
                found = known.get(fingerprint(mixer, cell), {})
                done = read_runs(path, mixer, cell)
                lanes = set(found) & set(wanted(study, cell, done)) - set(done)
                if lanes:
                    runs = [{name: found[lane][name] for name in RUN if name in found[lane]} for lane in sorted(lanes)]
                    size = next(iter(found.values()))["num_parameters"]
                    write_runs(path, study, mixer, cell, runs, num_parameters=size)


def run_studies(
    studies: Sequence[tuple[Study, pathlib.Path]],
    *,
    environment: dict[str, Any],
    console: Console,
    data_workers: int = 0,
    compile_workers: int = 1,
    seconds: float | None = None,
    turn: Turn | None = None,
    work: pathlib.Path | None = None,
) -> bool:
    """Trains everything that is missing, writing each group's results as soon as it is done.

    Args:
        studies: studies, each with its table.
        environment: recorded with each run.
        console: what progress is shown on: a bar on a terminal, a line for each group elsewhere.
        data_workers: processes that generate data.
        compile_workers: threads that compile the next groups while one trains.
        seconds: begins no group after this time; the rest is left for another call.
        turn: at the devices: the first group waits for it to train, and it is kept; None waits for nothing.
        work: folder for checkpoints of groups that take long; None makes none.

    Returns:
        Whether all runs are there. A group that fails is shown with its error, and the others go on.
    """
    begin = time.monotonic()
    turn = Turn(()) if turn is None else turn
    adopt_results(studies)
    waiting = []
    planned: set[tuple[str, tuple[Lane, ...]]] = set()
    for study, path in studies:
        for group in missing_groups(study, path):
            key = (fingerprint(group.mixer, group.cell), group.lanes)
            if key not in planned:
                planned.add(key)
                waiting.append((study, path, group))
    # The first cell of every study, then the second of every one: whenever it ends, each study has something.
    waiting.sort(key=lambda entry: entry[0].cells.index(entry[2].cell))
    if not waiting:
        return not any(missing_groups(study, path) for study, path in studies)
    factory = DataFactory(data_workers)
    compilers = concurrent.futures.ThreadPoolExecutor(compile_workers)
    # A thread that waits for the device hears no Ctrl-C, so that it is not this one.
    trainer = concurrent.futures.ThreadPoolExecutor(1)
    on_device = DeviceData()
    ahead: dict[int, concurrent.futures.Future[tuple[CompiledGroup, CellData]]] = {}

    def prepare(group: Group) -> tuple[CompiledGroup, CellData]:
        data = factory.get(group.cell)
        return compile_group(group, data), data

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    finished = True
    try:
        with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
            bar = progress.add_task("steps", total=sum(group.cell.steps for _, _, group in waiting))
            for number, (study, path, group) in enumerate(waiting):
                if seconds is not None and time.monotonic() - begin > seconds:
                    console.print(f"out of time: {len(waiting) - number} of {len(waiting)} groups are left")
                    finished = False
                    break
                for later in range(number, min(number + 1 + compile_workers, len(waiting))):
                    if later not in ahead:
                        factory.request(waiting[later][2].cell)
                        ahead[later] = compilers.submit(prepare, waiting[later][2])
                progress.update(bar, description=f"{study.name} {group.cell.name} {group.mixer.label}")
                waited = time.monotonic()
                try:
                    compiled, data = _result(ahead.pop(number))
                    waited = time.monotonic() - waited
                    turn.take()
                    start = time.monotonic()
                    if seconds is not None and start - begin > seconds:
                        raise TimeoutError(f"its turn came after {start - begin:.0f} s")
                    training = trainer.submit(
                        train_group,
                        compiled,
                        on_device.put(group.cell, data),
                        lambda steps: progress.advance(bar, steps),
                        None if work is None else Saved.of(work, compiled.group),
                    )
                    runs = _result(training)
                except TimeoutError as error:
                    console.print(f"out of time: {len(waiting) - number} of {len(waiting)} groups are left ({error})")
                    finished = False
                    break
                except Exception as error:  # one mixer's failure must not cost the others their results
                    console.print(f"FAILED {study.name} {group.cell.name} {group.mixer.label}", markup=False)
                    console.print("".join(traceback.format_exception(error)), markup=False, highlight=False)
                    finished = False
                    continue
                for run in runs:
                    run["environment"] = environment
                write_runs(path, study, group.mixer, group.cell, runs, num_parameters=compiled.num_parameters)
                best = max(run["validation"][study.metric] for run in runs)
                console.print(
                    f"{time.monotonic() - begin:6.1f} s  {number + 1}/{len(waiting)}  {study.name}  {group.cell.name}  "
                    f"{group.mixer.label}: best validation {100 * best:.1f} %, {len(runs)} runs in "
                    f"{time.monotonic() - start:.1f} s (compiled in {compiled.seconds:.1f} s, waited {waited:.1f} s)",
                    highlight=False,
                    soft_wrap=True,
                )
    finally:
        # What is being compiled or trained cannot be stopped, and nobody waits for it.
        for threads in (compilers, trainer):
            threads.shutdown(wait=False, cancel_futures=True)
        factory.close()
    adopt_results(studies)
    return finished


def _result[Value](future: concurrent.futures.Future[Value]) -> Value:
    """A future's result, waited for in pieces: a signal that comes just before a wait begins does not end it."""
    while not future.done():
        concurrent.futures.wait([future], timeout=1.0)
    return future.result()

"""`python -m experiments.several_gpus`: see README.md."""

import concurrent.futures
import dataclasses
import functools
import json
import math
import pathlib
import statistics
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any, Literal

import jax
import tyro

from experiments.harness.command import errors_as_lines, interrupts_as_lines
from experiments.harness.device import turn
from experiments.harness.environment import command_line, environment
from experiments.harness.page import markdown_table, write_between_marks
from experiments.harness.pictures import pyplot, save
from experiments.harness.study import pick_named
from experiments.harness.tables import write_text
from experiments.throughput.measure import CompiledCase, Measurement, compile_case
from experiments.throughput.study import Case, Keeps, ThroughputStudy, model_config, study
from rnnlib.data import DataConfig
from rnnlib.training import MeshConfig, TrainConfig, make_mesh, plan_step

FOLDER = pathlib.Path(__file__).parent
Axis = Literal["data", "fsdp", "context", "tensor"]
AXES: tuple[Axis, ...] = ("data", "fsdp", "context", "tensor")
OF_COPIES = (None, "data", "context")
"""Meshes whose devices have whole copies of the model: `rnnlib.training` turns the latency-hiding scheduler off."""


@dataclasses.dataclass(frozen=True)
class Group:
    """Steps of one model: on one GPU, and with all GPUs along each of some axes of a mesh.

    Attributes:
        model: its size, for tables.
        study: gives the model and the tokens that each GPU has.
        mixer: label of one of the study's mixers.
        keeps: what blocks keep for the backward pass.
        axes: of meshes.
        both: axes of those that are timed with and without XLA's latency-hiding scheduler, which begins collectives
            before it waits for them; others as `rnnlib.training` has them, without it for "data" and "context".
    """

    model: str
    study: ThroughputStudy
    mixer: str
    keeps: Keeps
    axes: tuple[Axis, ...]
    both: tuple[Axis, ...] = ()

    @property
    def case(self) -> Case:
        """One training step, with the layers one after another."""
        mixer = pick_named(self.study.mixers, (self.mixer,))[0]
        return Case(mixer, self.study.main_length, keeps=self.keeps, unrolled=True)


def groups(setting: Literal["small", "real", "long"]) -> tuple[Group, ...]:
    """What is timed at a setting; "long" has what sharing rows and layers is for: rows and models that are large."""
    if setting == "small":
        small = study("small")
        return (Group("tiny", small, "Gated DeltaNet", "everything", AXES, ("data",)),)
    middle, large = study("real"), study("large")
    if setting == "long":
        row: dict[str, Any] = {"tokens": 131_072, "main_length": 131_072, "lengths": (131_072,)}
        middle, large = (dataclasses.replace(each, warmup=2, steps=4) for each in (middle, large))
        return (
            Group("340M", dataclasses.replace(middle, **row), "Gated DeltaNet", "input", ("context",), ("context",)),
            Group("340M", dataclasses.replace(middle, **row), "KDA", "input", ("context",)),
            Group("340M", dataclasses.replace(middle, **row), "Mamba-2", "input", ("context",)),
            Group("1.3B", large, "Gated DeltaNet", "input", ("tensor",), ("tensor",)),
        )
    return (
        Group("340M", middle, "Gated DeltaNet", "everything", AXES, ("data", "fsdp")),
        Group("340M", middle, "KDA", "everything", ("context",)),
        Group("1.3B", large, "Gated DeltaNet", "input", ("data", "fsdp", "tensor"), ("data", "fsdp")),
    )


@dataclasses.dataclass(frozen=True)
class Options:
    """Times training steps on one GPU and on all of them, each with the same number of tokens."""

    setting: Literal["small", "real", "long"] = "small"
    """"small" needs two devices of any kind and measures nothing of interest, "real" GPUs; "long" has rows of 131,072
    tokens that devices share, and layers of the 1.3B model."""
    models: tuple[str, ...] = ()
    """Only these sizes of model."""
    axes: tuple[Axis, ...] = ()
    """Only these meshes, without one GPU alone."""
    cases: tuple[str, ...] = ()
    """Only steps of these names, as the lines that are printed have them, e.g. "1.3B Gated DeltaNet tensor"."""
    exclusive: tuple[pathlib.Path, ...] = ()
    """Lock file, for several of these commands that compile side by side: nothing else is timed while a step is."""
    compile_workers: int = 4
    """Threads that compile, before the first step is timed."""
    compile_seconds: float | None = None
    """After this time steps that have compiled are timed while others still compile; left out, all are waited for."""
    report_only: bool = False
    """Time nothing; write table and picture from the results that are there. Needs one device of any kind."""
    no_report: bool = False
    """Time only."""
    add: bool = False
    """Keep the runs that the results have, and add this one."""
    output: pathlib.Path = FOLDER
    """Folder of results, figures and page."""
    commit: str | None = None
    """Commit to record where there is no git repository."""

    def __post_init__(self) -> None:
        if self.compile_workers < 1:
            raise ValueError(f"compile_workers must be at least 1, got {self.compile_workers}")


def _latency_hiding(on: bool) -> dict[str, Any]:
    """Options of XLA's compiler; it has this one on GPUs alone."""
    return {"xla_gpu_enable_latency_hiding_scheduler": on} if jax.default_backend() == "gpu" else {}


def mesh_config(axis: Axis | None, devices: int) -> MeshConfig:
    """The mesh that has all devices along one axis; None for one device."""
    return MeshConfig(**({"data": 1, "fsdp": 1} | ({} if axis is None else {axis: devices})))


def planned(group: Group, axis: Axis | None, size: int) -> dict[str, Any]:
    """What `plan_step` says of a step: bytes that a device holds, and what it sends.

    Args:
        group: gives the model.
        axis: that all devices lie along.
        size: how many they are.
    """
    case = group.case
    data = DataConfig(sequence_length=case.length, batch_size=group.study.tokens * size // case.length)
    config = TrainConfig(model=model_config(group.study, case), data=data, mesh=mesh_config(axis, size))
    plan = plan_step(config, size)
    return {
        "state_bytes": plan.parameters + plan.gradients + plan.optimizer,
        "sent_bytes": plan.sent,
        "sent": {f"{e.kind} over {' x '.join(e.over)}: {e.what}": [e.count, e.sent] for e in plan.exchanges},
    }


def measured(compiled: Any, group: Group, axis: Axis | None, devices: int) -> dict[str, Any]:
    """The record of a compiled step, timed."""
    timed = Measurement(group.study, compiled)
    timed.time(group.study.steps)
    timed.time_ahead(group.study.steps)
    record = timed.finish()
    return {"model": group.model, "axis": axis, "devices": 1 if axis is None else devices, **record}


def time_all(options: Options, wanted: Sequence[Group]) -> Iterator[dict[str, Any]]:
    """Records of all steps; a failure is recorded and does not cost the others."""
    devices = jax.device_count()
    cases: list[tuple[Group, Axis | None, bool]] = [
        (group, axis, hidden)
        for group in wanted
        for axis in (None, *group.axes)
        for hidden in ((False, True) if axis in group.both else (axis not in OF_COPIES,))
    ]
    cases = [case for case in cases if not options.axes or case[1] in options.axes]
    cases = [case for case in cases if not options.cases or step_name(*case) in options.cases]
    # Those that are not as `rnnlib.training` has them come last.
    cases.sort(key=lambda case: case[1] in case[0].both and case[2] == (case[1] in OF_COPIES))
    meshes = {axis: make_mesh(devices, mesh_config(axis, devices)) for axis in AXES}
    begin = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(options.compile_workers) as pool:
        futures = {
            pool.submit(compile_case, g.study, g.case, None)
            if axis is None
            else pool.submit(compile_case, g.study, g.case, meshes[axis], _latency_hiding(hidden)): (g, axis, hidden)
            for g, axis, hidden in cases
        }
        for future, (group, axis, hidden) in futures.items():
            future.add_done_callback(functools.partial(_say, f"{step_name(group, axis, hidden)}: compiled", begin))
        concurrent.futures.wait(futures, timeout=options.compile_seconds)
        for future in compiled_first(list(futures)):
            group, axis, hidden = futures[future]
            with turn(options.exclusive):
                record = _record(future, group, axis, devices)
            record |= {"latency_hiding": hidden, "others_compiling": sum(not other.done() for other in futures)}
            _say(f"{step_name(group, axis, hidden)}: {_milliseconds(record)} ms a step", begin)
            yield record


def step_name(group: Group, axis: Axis | None, hidden: bool) -> str:
    """The step as printed lines name it."""
    return f"{group.model} {group.mixer} {axis or 'alone'}{', latency hiding' * hidden}"


def compiled_first(futures: Sequence[Future[CompiledCase]]) -> Iterator[Future[CompiledCase]]:
    """All of them, in their order, but those that are done before those that are not."""
    left = list(futures)
    while left:
        done = next((future for future in left if future.done()), None)
        if done is None:
            concurrent.futures.wait(left, return_when=concurrent.futures.FIRST_COMPLETED)
        else:
            left.remove(done)
            yield done


def _say(text: str, begin: float, _: Any = None) -> None:
    print(f"{time.monotonic() - begin:6.1f} s  {text}", flush=True)


def _record(future: Future[CompiledCase], group: Group, axis: Axis | None, devices: int) -> dict[str, Any]:
    try:
        return measured(future.result(), group, axis, devices)
    except Exception as error:
        print(f"FAILED {group.model} {axis}: {''.join(traceback.format_exception(error))[-4000:]}", flush=True)
        reason = str(error).partition("\n")[0][:200]
        return {"model": group.model, "mixer": group.mixer, "axis": axis, "devices": devices, "error": reason}


def _milliseconds(record: dict[str, Any]) -> float | None:
    """Median time of a step that is asked for ahead."""
    seconds = record.get("step_seconds_ahead")
    return None if not seconds else round(1e3 * statistics.median(seconds), 2)


def _pairs(runs: list[dict[str, Any]]) -> list[tuple[int, dict[str, Any], dict[str, Any] | None]]:
    """The run's number and the record of each step, with that of the same model on one device.

    Of several such records it is that of the same run, or of the latest one before.
    """
    records = [(number, record) for number, run in enumerate(runs, 1) for record in run["records"]]
    alone = [(number, r) for number, r in records if r["axis"] is None and "error" not in r]

    def beside(number: int, record: dict[str, Any]) -> dict[str, Any] | None:
        same = [x for x in alone if all(x[1][key] == record[key] for key in ("model", "mixer"))]
        return max(same, key=lambda x: (x[0] <= number, x[0]), default=(0, None))[1]

    order = {model: i for i, model in enumerate(dict.fromkeys((r["model"], r["mixer"]) for _, r in records))}
    places = {None: -1} | {axis: i for i, axis in enumerate(AXES)}
    records.sort(key=lambda x: (order[x[1]["model"], x[1]["mixer"]], places[x[1]["axis"]], x[1]["latency_hiding"]))
    return [(number, record, beside(number, record)) for number, record in records]


def efficiency(record: dict[str, Any], alone: dict[str, Any]) -> float:
    """Tokens a second and device, as a part of one device's."""
    return record["tokens_per_second_ahead"] / record["devices"] / alone["tokens_per_second_ahead"]


def table(runs: list[dict[str, Any]]) -> str:
    """Markdown of all records."""
    header = ["model", "mixer", "mesh", "latency hiding", "run", "tokens a step", "ms a step", "thousand tokens/s"]
    header += [
        "each GPU, of one alone",
        "sent a GPU, GB",
        "ms more than alone",
        "memory a GPU, GB",
        "of it state, GB",
    ]
    rows = []
    for number, record, alone in _pairs(runs):
        mesh = "one GPU" if record["axis"] is None else f"{record['axis']} {record['devices']}"
        cells = [record["model"], record["mixer"], mesh, "yes" if record["latency_hiding"] else "", str(number)]
        if "error" in record:
            rows.append([*cells, "", "failed", *[""] * (len(header) - 7)])
            continue
        plan, milliseconds = record["plan"], _milliseconds(record) or math.nan
        cells += [f"{record['rows'] * record['length']:,}", f"{milliseconds:.1f}"]
        cells.append(f"{record['tokens_per_second_ahead'] / 1e3:.1f}")
        if record["axis"] is None or alone is None:
            cells += ["", "", ""]
        else:
            cells += [f"{efficiency(record, alone):.1%}", f"{plan['sent_bytes'] / 1e9:.2f}"]
            cells.append(f"{milliseconds - (_milliseconds(alone) or math.nan):.1f}")
        memory = record["memory"]
        cells.append("" if memory is None else f"{memory['peak_bytes'] / 1e9:.1f}")
        cells.append(f"{plan['state_bytes'] / 1e9:.1f}")
        rows.append(cells)
    notes = []
    for number, run in enumerate(runs, 1):
        where = run["environment"]
        version, commit, date = where["packages"]["jax"], where["commit"][:7], where["date"][:10]
        notes.append(f"Run {number}: {run['devices']} x {where['device']}, jax {version}, commit {commit}, {date}.")
    note = f"{' '.join(notes)} Median of {runs[0]['steps']} steps, each asked for while the one before it runs."
    return "\n".join([*markdown_table(header, rows), "", note]) + "\n"


def figure(runs: list[dict[str, Any]], path: pathlib.Path) -> None:
    """Bars: what each GPU of a mesh trains, as a part of one GPU's tokens a second."""
    rows = [(n, r, a) for n, r, a in _pairs(runs) if r["axis"] is not None and a is not None and "error" not in r]
    if not rows:
        return
    drawing, axes = pyplot().subplots(figsize=(8, 1.2 + 0.36 * len(rows)), layout="constrained")
    colors = dict(zip(AXES, ("tab:blue", "tab:orange", "tab:green", "tab:purple")))
    for i, (_, record, alone) in enumerate(rows):
        value = 100 * efficiency(record, alone)
        hatch = "//" if record["latency_hiding"] else None
        axes.barh(i, value, color=colors[record["axis"]], alpha=0.8, hatch=hatch, edgecolor="white")
        axes.text(value, i, f" {value:.0f} %", va="center", fontsize=8)
    axes.axvline(100, color="gray", linewidth=0.8, linestyle="--")
    labels = [f"{r['model']} {r['mixer']}, {r['axis']} {r['devices']} (run {n})" for n, r, _ in rows]
    axes.set_yticks(range(len(rows)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 118)
    axes.set_xlabel(
        "tokens a second of each GPU, percent of one GPU alone with as many tokens a step\n"
        "(hatched: with XLA's latency-hiding scheduler)",
        fontsize=8,
    )
    axes.set_title(f"Training step on {runs[0]['devices']} x {runs[0]['environment']['device']}", fontsize=10)
    save(drawing, path)


def write_report(options: Options) -> str:
    """Plans the steps that were timed, and writes table and picture; gives the table."""
    path = options.output / f"{options.setting}.json"
    runs, known = json.loads(path.read_text()), {(g.model, g.mixer): g for g in groups(options.setting)}
    for run in runs:
        for record in run["records"]:
            if "plan" not in record and "error" not in record:
                group = known[record["model"], record["mixer"]]
                record["plan"] = planned(group, record["axis"], record["devices"])
    write_text(path, json.dumps(runs, indent=1) + "\n")
    text = table(runs)
    figure(runs, options.output / f"{options.setting}.png")
    write_between_marks(options.output / "README.md", options.setting, text)
    return text


@interrupts_as_lines()
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the study; returns the exit code."""
    options = tyro.cli(Options, args=argv, prog="python -m experiments.several_gpus")
    wanted = [group for group in groups(options.setting) if not options.models or group.model in options.models]
    failed = False
    with errors_as_lines():
        if not wanted:
            raise ValueError(f"models are {', '.join(dict.fromkeys(g.model for g in groups(options.setting)))}")
        if not options.report_only:
            if jax.device_count() < 2:
                raise ValueError(f"there is {jax.device_count()} {jax.default_backend()} device, expected at least 2")
            records: list[dict[str, Any]] = []
            run = {
                "devices": jax.device_count(),
                "steps": wanted[0].study.steps,
                "environment": environment(command_line("experiments.several_gpus"), options.commit),
                "records": records,
            }
            path = options.output / f"{options.setting}.json"
            runs = json.loads(path.read_text()) if options.add and path.exists() else []
            for record in time_all(options, wanted):
                records.append(record)
                failed |= "error" in record
                write_text(path, json.dumps([*runs, run], indent=1) + "\n")
        if not options.no_report:
            print(write_report(options))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

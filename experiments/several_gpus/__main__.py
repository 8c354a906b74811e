"""`python -m experiments.several_gpus`: see README.md."""

import concurrent.futures
import dataclasses
import json
import math
import pathlib
import statistics
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import jax
import tyro

from experiments.scale_prediction.__main__ import NVLINK
from experiments.sweep.command import errors_as_lines, interrupts_as_lines
from experiments.sweep.pictures import pyplot, save
from experiments.sweep.report import write_between_marks
from experiments.sweep.results import command_line, environment, write_text
from experiments.sweep.study import pick_named
from experiments.throughput.measure import Measurement, compile_case
from experiments.throughput.study import Case, Keeps, ThroughputStudy, model_config, study
from rnnlib.data import DataConfig
from rnnlib.training import MeshConfig, TrainConfig, make_mesh, plan_step

FOLDER = pathlib.Path(__file__).parent
Axis = Literal["data", "fsdp", "sequence", "tensor"]
_OVERLAPPED = {"xla_gpu_enable_latency_hiding_scheduler": True}
AXES: tuple[Axis, ...] = ("data", "fsdp", "sequence", "tensor")


@dataclasses.dataclass(frozen=True)
class Group:
    """Steps of one model: on one GPU, and with all GPUs along each of some axes of a mesh.

    Attributes:
        model: its size, for tables.
        study: gives the model and the tokens that each GPU has.
        mixer: label of one of the study's mixers.
        keeps: what blocks keep for the backward pass.
        axes: of meshes.
        hidden: axes of those that are also timed with XLA's latency-hiding scheduler, which begins collectives before
            it waits for them, at the price of memory.
    """

    model: str
    study: ThroughputStudy
    mixer: str
    keeps: Keeps
    axes: tuple[Axis, ...]
    hidden: tuple[Axis, ...] = ()

    @property
    def case(self) -> Case:
        """One training step, with the layers one after another."""
        return Case(
            pick_named(self.study.mixers, (self.mixer,))[0], self.study.main_length, False, False, self.keeps, True
        )


def groups(setting: Literal["small", "real"]) -> tuple[Group, ...]:
    """What is timed at a setting."""
    if setting == "small":
        small = study("small")
        return (Group("tiny", small, "Gated DeltaNet", "everything", AXES, ("data",)),)
    middle, large = study("real"), study("large")
    return (
        Group("340M", middle, "Gated DeltaNet", "everything", AXES, ("data", "fsdp")),
        Group("340M", middle, "KDA", "everything", ("sequence",)),
        Group("1.3B", large, "Gated DeltaNet", "input", ("data", "fsdp", "tensor"), ("data", "fsdp")),
    )


@dataclasses.dataclass(frozen=True)
class Options:
    """Times training steps on one GPU and on all of them, each with the same number of tokens."""

    setting: Literal["small", "real"] = "small"
    """"small" needs two devices of any kind and measures nothing of interest, "real" GPUs."""
    models: tuple[str, ...] = ()
    """Only these sizes of model."""
    axes: tuple[Axis, ...] = ()
    """Only these meshes, without one GPU alone."""
    compile_workers: int = 4
    """Threads that compile, before the first step is timed."""
    report_only: bool = False
    """Time nothing; write table and picture from the results that are there. Needs one device of any kind."""
    no_report: bool = False
    """Time only."""
    output: pathlib.Path = FOLDER
    """Folder of results, figures and page."""
    commit: str | None = None
    """Commit to record where there is no git repository."""

    def __post_init__(self) -> None:
        if self.compile_workers < 1:
            raise ValueError(f"compile_workers must be at least 1, got {self.compile_workers}")


def mesh_config(axis: Axis | None, devices: int) -> MeshConfig:
    """The mesh that has all devices along one axis; None for one device."""
    return MeshConfig(**({"data": 1, "fsdp": 1} | ({} if axis is None else {axis: devices})))


def planned(group: Group, axis: Axis | None, size: int, card: str | None) -> dict[str, Any]:
    """What `plan_step` says of a step: bytes that a device holds, and what it sends.

    Args:
        group: gives the model.
        axis: that all devices lie along.
        size: how many they are.
        card: what JAX calls them; None for a CPU.
    """
    case = group.case
    data = DataConfig(sequence_length=case.length, batch_size=group.study.tokens * size // case.length)
    config = TrainConfig(model=model_config(group.study, case), data=data, mesh=mesh_config(axis, size))
    plan = plan_step(config, size, card=card)
    return {
        "state_bytes": plan.parameters + plan.gradients + plan.optimizer,
        "total_bytes": plan.total,
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
    cases: list[tuple[Group, Axis | None, bool]] = [(g, axis, False) for g in wanted for axis in (None, *g.axes)]
    cases += [(g, axis, True) for g in wanted for axis in g.hidden]
    cases = [case for case in cases if not options.axes or case[1] in options.axes]
    meshes = {axis: make_mesh(devices, mesh_config(axis, devices)) for axis in AXES}
    with concurrent.futures.ThreadPoolExecutor(options.compile_workers) as pool:
        futures = [
            pool.submit(
                compile_case, g.study, g.case, None if axis is None else meshes[axis], _OVERLAPPED if hidden else {}
            )
            for g, axis, hidden in cases
        ]
        concurrent.futures.wait(futures)
    print("compiled", flush=True)
    for (group, axis, hidden), future in zip(cases, futures):
        try:
            record = measured(future.result(), group, axis, devices)
        except Exception as error:
            print(f"FAILED {group.model} {axis}: {''.join(traceback.format_exception(error))[-4000:]}", flush=True)
            record = {
                "model": group.model,
                "mixer": group.mixer,
                "axis": axis,
                "devices": devices,
                "error": str(error).partition("\n")[0][:200],
            }
        record["latency_hiding"] = hidden
        print(f"{group.model} {group.mixer} {axis or 'one device'}: {_milliseconds(record)} ms a step", flush=True)
        yield record


def _milliseconds(record: dict[str, Any]) -> float | None:
    """Median time of a step that is asked for ahead."""
    seconds = record.get("step_seconds_ahead")
    return None if not seconds else round(1e3 * statistics.median(seconds), 2)


def _pairs(records: list[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any] | None]]:
    """Each record with that of the same model on one device."""
    alone = {(r["model"], r["mixer"]): r for r in records if r["axis"] is None and "error" not in r}
    return [(record, alone.get((record["model"], record["mixer"]))) for record in records]


def efficiency(record: dict[str, Any], alone: dict[str, Any]) -> float:
    """Tokens a second and device, as a part of one device's."""
    return record["tokens_per_second_ahead"] / record["devices"] / alone["tokens_per_second_ahead"]


def table(result: dict[str, Any]) -> str:
    """Markdown of all records."""
    header = ["model", "mixer", "mesh", "tokens a step", "ms a step", "thousand tokens/s", "of one GPU's, each"]
    header += ["sent a GPU, GB", "ms at 450 GB/s", "ms more than alone", "memory a GPU, GB", "planned at most, GB"]
    lines = [f"| {' | '.join(header)} |", "|" + " --- |" * len(header)]
    for record, alone in _pairs(result["records"]):
        mesh = "one GPU" if record["axis"] is None else f"{record['axis']} {record['devices']}"
        cells = [record["model"], record["mixer"], mesh]
        if "error" in record:
            lines.append(f"| {' | '.join([*cells, 'failed', *[''] * (len(header) - 4)])} |")
            continue
        plan, milliseconds = record["plan"], _milliseconds(record) or math.nan
        cells += [f"{record['rows'] * record['length']:,}", f"{milliseconds:.1f}"]
        cells.append(f"{record['tokens_per_second_ahead'] / 1e3:.1f}")
        if record["axis"] is None or alone is None:
            cells += ["", "", "", ""]
        else:
            cells.append(f"{efficiency(record, alone):.1%}")
            cells += [f"{plan['sent_bytes'] / 1e9:.2f}", f"{1e3 * plan['sent_bytes'] / NVLINK:.1f}"]
            cells.append(f"{milliseconds - (_milliseconds(alone) or math.nan):.1f}")
        memory = record["memory"]
        cells.append("" if memory is None else f"{memory['peak_bytes'] / 1e9:.1f}")
        cells.append(f"{plan['total_bytes'] / 1e9:.1f}")
        lines.append(f"| {' | '.join(cells)} |")
    where = result["environment"]
    lines += [
        "",
        f"{result['devices']} x {where['device']}, jax {where['packages']['jax']}; commit {where['commit'][:7]}; "
        f"{where['date'][:10]}. Median of {result['steps']} steps, each asked for while the one before it runs.",
    ]
    return "\n".join(lines) + "\n"


def figure(result: dict[str, Any], path: pathlib.Path) -> None:
    """Bars: what each GPU of a mesh trains, as a part of one GPU's tokens a second."""
    rows = [
        (r, a) for r, a in _pairs(result["records"]) if r["axis"] is not None and a is not None and "error" not in r
    ]
    if not rows:
        return
    drawing, axes = pyplot().subplots(figsize=(8, 1.2 + 0.36 * len(rows)), layout="constrained")
    colors = dict(zip(AXES, ("tab:blue", "tab:orange", "tab:green", "tab:purple")))
    for i, (record, alone) in enumerate(rows):
        value = 100 * efficiency(record, alone)
        axes.barh(i, value, color=colors[record["axis"]], alpha=0.8)
        axes.text(value, i, f" {value:.0f} %", va="center", fontsize=8)
    axes.axvline(100, color="gray", linewidth=0.8, linestyle="--")
    labels = [f"{r['model']} {r['mixer']}, {r['axis']} {r['devices']}" for r, _ in rows]
    axes.set_yticks(range(len(rows)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 118)
    axes.set_xlabel("tokens a second of each GPU, percent of one GPU alone with as many tokens a step", fontsize=8)
    axes.set_title(f"Training step on {result['devices']} x {result['environment']['device']}", fontsize=10)
    save(drawing, path)


def write_report(options: Options) -> str:
    """Plans the steps that were timed, and writes table and picture; gives the table."""
    path = options.output / f"{options.setting}.json"
    result = json.loads(path.read_text())
    where, known = result["environment"], {(g.model, g.mixer): g for g in groups(options.setting)}
    for record in result["records"]:
        if "plan" not in record and "error" not in record:
            group, card = (
                known[record["model"], record["mixer"]],
                where["device"] if where["platform"] == "gpu" else None,
            )
            record["plan"] = planned(group, record["axis"], record["devices"], card)
    write_text(path, json.dumps(result, indent=1) + "\n")
    text = table(result)
    figure(result, options.output / f"{options.setting}.png")
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
            result = {
                "devices": jax.device_count(),
                "steps": wanted[0].study.steps,
                "environment": environment(command_line("experiments.several_gpus"), options.commit),
                "records": records,
            }
            for record in time_all(options, wanted):
                records.append(record)
                failed |= "error" in record
                write_text(options.output / f"{options.setting}.json", json.dumps(result, indent=1) + "\n")
        if not options.no_report:
            print(write_report(options))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

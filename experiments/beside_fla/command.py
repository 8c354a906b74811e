"""The command line, and what is left to run."""

import dataclasses
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import tyro

from experiments.beside_fla import ours, report
from experiments.beside_fla.material import Material, prepare
from experiments.beside_fla.study import ARMS, THEIRS, CurveSetting, CurveStudy, study
from experiments.harness.child import Child, answer, last_line
from experiments.harness.command import RunOptions, errors_as_lines
from experiments.harness.device import turn
from experiments.harness.environment import command_line, environment
from experiments.harness.jobs import Job
from experiments.harness.study import Mixer, pick_named
from experiments.harness.tables import add_row, read_table, table_path

NAME = "beside_fla"
PEER = "experiments.beside_fla.theirs"
COMPILERS = 8
"""Processes among which the peer's candidates are shared out for compilation."""


@dataclasses.dataclass(frozen=True)
class Options(RunOptions):
    """Trains the models that are missing in both libraries, then writes table and figure."""

    setting: CurveSetting = "small"
    """"small" is for a CPU and leaves flash-linear-attention out, which needs a GPU."""
    arms: tuple[str, ...] = ARMS
    """Only these runs of each model."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if unknown := set(self.arms) - set(ARMS):
            raise ValueError(f"arms has {sorted(unknown)}, expected some of {'; '.join(ARMS)}")
        for name in ("rates", "seeds", "steps"):
            if getattr(self, name):
                raise ValueError(f"{name} is set, but the study has one rate, one seed and one number of steps")


def row_name(mixer: Mixer, arm: str) -> str:
    """The id of a run."""
    return f"{mixer.label}; {arm}"


def missing(plan: CurveStudy, tables: Sequence[pathlib.Path], arms: Sequence[str]) -> list[tuple[Mixer, str]]:
    """Runs that none of the tables has, all of a model before the next."""
    done = {row["id"] for path in tables for row in read_table(path)}
    return [
        (mixer, arm) for mixer in plan.mixers for arm in arms if arm in plan.arms and row_name(mixer, arm) not in done
    ]


def jobs(name: str, setting: str, outputs: Sequence[pathlib.Path]) -> list[Job]:
    """What is left of the study that no folder of `outputs` has, a job a run."""
    plan = study(setting)  # type: ignore[arg-type]
    found = []
    for mixer, arm in missing(plan, [table_path(name, setting, output) for output in outputs], ARMS):
        arguments = ("--setting", setting, "--mixers", mixer.label, "--arms", arm)
        seconds = dict(plan.seconds).get(arm, 0.0)
        found.append(Job(name, setting, f"{mixer.label}, {arm}", arguments, seconds, alone=setting == "real"))
    return found


def _train_theirs(material: Material) -> dict[str, Any]:
    """A run of flash-linear-attention, in a process of its own after those that compile."""
    files = dataclasses.astuple(material)
    children = [Child(PEER, *files, "compile", n, COMPILERS) for n in range(COMPILERS)]
    for child in children:
        if failure := child.finish()[1]:
            print(f"compiling: {last_line(failure)}", flush=True)  # the run compiles what they did not
    return answer(Child(PEER, *files))


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m experiments.beside_fla`; returns the exit code."""
    module = f"experiments.{NAME}"
    options = tyro.cli(Options, args=argv, prog=f"python -m {module}")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the other library needs memory, too
    with errors_as_lines():
        whole = study(options.setting)
        plan = dataclasses.replace(whole, mixers=pick_named(whole.mixers, options.mixers))
        results = table_path(NAME, options.setting, options.output)
        arms = [arm for arm in options.arms if arm != THEIRS or options.setting != "small"]
        failed = 0
        for mixer, arm in [] if options.report_only else missing(plan, [results], arms):
            print(f"{mixer.label}: {arm}", flush=True)
            material = prepare(plan, mixer, options.work / NAME / options.setting)
            with turn(options.exclusive if options.setting == "real" else ()):  # small models fit side by side
                try:
                    run = _train_theirs(material) if arm == THEIRS else ours.train(material, arm)
                except RuntimeError as error:  # a library that fails must not cost the others their runs
                    print(f"{arm} failed: {error}", flush=True)
                    failed += 1
                    continue
            content = {"mixer": mixer.label, "arm": arm, **run, "material": material.digest()}
            content["environment"] = environment(command_line(module), options.commit)
            add_row(results, NAME, row_name(mixer, arm), content)
        if not options.train_only:
            print(report.write(whole, results, options.output / NAME, page=options.is_whole and arms == [*ARMS]))
    return 1 if failed else 0

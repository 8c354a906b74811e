"""`python -m experiments.start_up`: seconds from `rnnlib train` to the first step, by stage, cold and warm.

Each measurement is a process of its own, which does what the command does, in its order. The first has neither Python's
bytecode nor compiled programs; then there are both ("warm"), all but the stored step ("traced"), and the bytecode alone
("cold"). Results go to `results.json`, one record for each device, preset and state of the caches.
"""

import dataclasses
import itertools
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

import tyro

from experiments.harness.command import errors_as_lines
from experiments.harness.environment import command_line, environment
from experiments.harness.page import markdown_table, write_between_marks
from experiments.harness.tables import write_text

FOLDER = pathlib.Path(__file__).parent
STAGES = (
    "imports, GPU opened beside them",
    "settings",
    "GPU awaited",
    "step traced, on a GPU lowered",
    "text read, step lowered, first parameters",
    "XLA awaited, first step",
)
"""One after the other, from the start of the process."""
SPANS = {
    "GPU opened": None,
    "step traced": "jaxpr_trace_duration",
    "step lowered": "jaxpr_to_mlir_module_duration",
    "step compiled by XLA": "backend_compile_duration",
}
"""Parts of the stages, and the event of `jax.monitoring` that has their seconds."""
PROGRAMS = ("step", "gradients_of", "gradients_in_place", "update")
"""Names of the step's programs: one of all, or two."""
_LOSSES = 3
STATES = ("first", "warm", "traced", "cold")


@dataclasses.dataclass(frozen=True)
class Options:
    """Measures the start of training: the very first one, cold and warm."""

    presets: tuple[str, ...] = ("default",)
    """Presets of `rnnlib train --preset`; "default" is none."""
    flags: str = ""
    """More flags of `rnnlib train`, in one text."""
    output: pathlib.Path = FOLDER
    """Folder of results.json and of the page."""
    commit: str | None = None
    """Commit to record where there is no git repository."""


def stages(begin: float, recorded: dict[str, Any], argv: list[str]) -> None:
    """Runs `rnnlib train` in this process up to its first step, prints a record, and ends the process.

    Args:
        begin: when the process was started, in seconds since the epoch.
        recorded: arguments of `environment`.
        argv: of `rnnlib train`.
    """
    marks: list[float] = [begin]
    from rnnlib.cli.start import kept_objects, open_early, rare_collections

    with rare_collections():
        opening = open_early(argv)
        from rnnlib.cli import train
        from rnnlib.cli.compilation_cache import keep_compiled_programs
        from rnnlib.training import Trainer, keep_freed_memory
        from rnnlib.training.compiled_steps import COMPILING
        from rnnlib.training.hooks import Hook

    marks.append(time.time())
    import jax

    spans = dict.fromkeys(SPANS, 0.0)
    of_programs: dict[str, dict[str, float]] = {span: {} for span in SPANS}

    def listen(event: str, duration_secs: float, **about: str | int) -> None:
        program = re.sub(r"^jit[(_]|\)$", "", str(about.get("fun_name")).rpartition(".")[2])
        if program in PROGRAMS:
            for span, name in SPANS.items():
                if name is not None and event.endswith(name):
                    of_programs[span][program] = max(of_programs[span].get(program, 0.0), duration_secs)
                    # XLA compiles them side by side.
                    total = max if name.startswith("backend_compile") else sum
                    spans[span] = total(of_programs[span].values())

    jax.monitoring.register_event_duration_secs_listener(listen)
    arguments = train.parse_settings(train.TrainArguments, argv, command="train")
    keep_freed_memory()
    programs = keep_compiled_programs(arguments.compilation_cache)
    marks.append(time.time())
    jax.devices()
    marks.append(time.time())
    if opening is not None:
        spans["GPU opened"] = opening.seconds

    losses: list[float] = []

    class End(Hook):
        """Ends the process after a few steps, whose losses say whether a stored step computes the same."""

        def on_report(self, trainer: Trainer, report: Any) -> None:
            if not losses:
                marks.append(time.time())
            losses.append(report.loss)
            if len(losses) < _LOSSES:
                return
            pairs = itertools.pairwise(marks)
            seconds = dict(zip(STAGES, (after - before for before, after in pairs), strict=True))
            record = {"seconds": seconds, "spans": spans, "losses": losses, "environment": environment(**recorded)}
            print("\n" + json.dumps(record), flush=True)
            for thread in threading.enumerate():  # that stores the step
                if thread.name.startswith(COMPILING):
                    thread.join()
            os._exit(0)

    with tempfile.TemporaryDirectory() as folder:
        with rare_collections():
            trainer = Trainer(arguments.train, read_data=False, programs=programs)
            if jax.default_backend() == "gpu":
                trainer.begin_compiling()
            marks.append(time.time())
            trainer.read_data()
            trainer.add_hook(End())
            trainer.open(pathlib.Path(folder) / "run")
        print(f"{trainer.size_description}, on {trainer.device_description}")
        marks.append(time.time())
        with kept_objects():
            trainer.run()


def measured(
    argv: list[str], recorded: dict[str, Any], programs: pathlib.Path, bytecode: pathlib.Path
) -> dict[str, Any]:
    """What `stages` records in a process of its own, with folders of compiled programs and of Python's bytecode."""
    given = [str(time.time()), json.dumps(recorded), *argv, "--compilation-cache", str(programs)]
    variables = {"PYTHONPYCACHEPREFIX": str(bytecode), "PYTHONDONTWRITEBYTECODE": ""}
    process = subprocess.run(
        [sys.executable, "-m", "experiments.start_up", "stages", *given],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=3600,
    )
    if process.returncode:
        raise RuntimeError(f"{' '.join(argv)}: the run failed:\n{process.stderr[-3000:]}")
    return json.loads(process.stdout.splitlines()[-1])


def table(records: list[dict[str, Any]]) -> str:
    """Markdown of all records."""
    header = ["seconds", *(f"{r['preset']}, {r['state']}, {r['device']}" for r in records)]
    stages = dict.fromkeys(stage for r in records for stage in r["seconds"])  # older records have others
    rows = [
        [stage, *(f"{r['seconds'][stage]:.1f}" if stage in r["seconds"] else "" for r in records)] for stage in stages
    ]
    rows.append(["**all**", *(f"**{sum(r['seconds'].values()):.1f}**" for r in records)])
    first = {(r["preset"], r["device"]): r["losses"] for r in records if r["state"] == STATES[0]}
    equal = [r["losses"] == first.get((r["preset"], r["device"])) for r in records]
    rows.append(["losses of three steps as in the first", *("yes" if is_equal else "**no**" for is_equal in equal)])
    rows += [[f"*within: {span}*", *(f"*{r['spans'][span]:.1f}*" for r in records)] for span in SPANS]
    return "\n".join(markdown_table(header, rows)) + "\n"


def main() -> int:
    """Runs the command; returns the exit code."""
    options = tyro.cli(Options, prog="python -m experiments.start_up")
    path = options.output / "results.json"
    records = json.loads(path.read_text()) if path.exists() else []
    recorded = {"command": command_line("experiments.start_up"), "commit": options.commit}
    with errors_as_lines():
        for preset in options.presets:
            argv = [*([] if preset == "default" else ["--preset", preset]), *options.flags.split()]
            with tempfile.TemporaryDirectory() as caches:
                for state in STATES:
                    programs = pathlib.Path(caches) / ("cold" if state == "cold" else "programs")
                    if state == "traced":
                        for folder in programs.glob("steps-*"):
                            shutil.rmtree(folder)
                    result = measured(argv, recorded, programs, pathlib.Path(caches) / "bytecode")
                    key = {"preset": preset, "state": state, "device": result["environment"]["device"]}
                    records = [r for r in records if {name: r[name] for name in key} != key]
                    records.append({**key, **result})
                    print(preset, state, {k: round(v, 2) for k, v in result["seconds"].items()}, flush=True)
                    write_text(path, json.dumps(records, indent=1) + "\n")
    write_between_marks(options.output / "README.md", "start", table(records))
    print(table(records))
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["stages"]:
        stages(float(sys.argv[2]), json.loads(sys.argv[3]), sys.argv[4:])
    else:
        sys.exit(main())

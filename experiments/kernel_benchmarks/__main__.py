"""Times the kernels and their peers on this machine's GPU, and writes results, tables and pictures.

`uv run python -m experiments.kernel_benchmarks --help` lists what can be chosen; `--from-json` makes the tables
and pictures again from committed results.
"""

import dataclasses
import json
import os
import pathlib
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import tyro
from rich.console import Console

from experiments.harness.records import results_of, write_results
from experiments.kernel_benchmarks.config import KERNELS, PEERS, BenchmarkConfig
from experiments.kernel_benchmarks.figures import write_figures
from experiments.kernel_benchmarks.report import markdown, show
from experiments.kernel_benchmarks.run import INTERRUPTED, measure, versions


def add(results: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """New results, and from before whatever was not measured again; what is new says of which commit it is.

    A failure from before goes where the same is measured now; a measurement stays where it fails now. Draws that a time
    limit cut are left out where there are others: how many there are, the records tell.
    """

    def point(record: dict[str, Any]) -> tuple[Any, ...]:
        # A time's record has no case, but that of a failure to take it has.
        case = record.get("case") or "random"
        where = (record.get("operator"), str(record.get("shape")), case, record.get("beside"))
        return record.get("of", record["kind"]), record.get("implementation"), *where

    def measurement(record: dict[str, Any]) -> tuple[Any, ...]:
        return *point(record), record.get("seed")

    measured = {measurement(record) for record in results["records"] if record["kind"] != "failure"}
    tried = {point(record) for record in results["records"]}

    def stays(record: dict[str, Any]) -> bool:
        if record["kind"] == "failure":
            return point(record) not in tried and record.get("of") != INTERRUPTED["of"]
        return measurement(record) not in measured

    new = [{"commit": results["commit"], **record} for record in results["records"]]
    records = [*filter(stays, before["records"]), *new]
    drawn = {point(record) for record in records if record["kind"] == "error"}
    return {
        **results,
        "commit": ", ".join(dict.fromkeys((*before["commit"].split(", "), results["commit"]))),
        "command": f"{before['command']} && {results['command']}",
        "date": f"{before['date'].partition(' to ')[0]} to {results['date'].rpartition(' to ')[2]}",
        "versions": {**before["versions"], **results["versions"]},
        "config": before["config"],
        "records": [r for r in records if r.get("reason") != "time limit" or point(r) not in drawn],
    }


def join(runs: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """The table's times of several runs as one run's, each from the last that measured it.

    Args:
        runs: results by the run's name, the oldest first. The table's operators and shapes are the first one's.
    """
    config = next(iter(runs.values()))["config"] | {"only": ["time"], "sweep_operators": []}
    sizes, names = [list(shape) for shape in config["shapes"]], (*KERNELS, *PEERS)
    joined: dict[str, Any] = {}
    for run in runs.values():
        records = [
            {"commit": run["commit"].partition(", ")[0], **record}
            for record in run["records"]
            if record["kind"] == "ceiling"
            or (record["kind"] == "time" and record["shape"][:3] in sizes and record["implementation"] in names)
        ]
        run = {**run, "config": config, "records": records}
        joined = add(run, joined) if joined else run
    commits = ", ".join(dict.fromkeys(record["commit"] for record in joined["records"]))
    note = f"Times of {', '.join(runs)}: each from the last of these that measured it."
    return {**joined, "commit": commits, "notes": [note]}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; 1 where nothing could be measured, 130 where it was interrupted and wrote what it had."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    console = Console(width=None if sys.stdout.isatty() else 160)
    interrupted = False
    try:
        config = tyro.cli(
            BenchmarkConfig, args=arguments, prog="python -m experiments.kernel_benchmarks", description=__doc__
        )
    except ValueError as error:
        console.print(f"error: {error}")
        return 2
    path = config.output / f"{config.name}.json"
    sources = [config.output / f"{name}.json" for name in config.join] or [path] * config.from_json
    for source in sources:
        if not source.exists():
            console.print(f"error: --{'join' if config.join else 'from-json'}: there is no {source}")
            return 2
    if config.join:
        results = join({source.stem: json.loads(source.read_text()) for source in sources})
        write_results(path, results)
    elif config.from_json:
        results = json.loads(path.read_text())
    elif config.keep and config.keep.exists() and (not config.keep.is_dir() or any(config.keep.iterdir())):
        console.print(f"error: --keep: {config.keep} is there already, expected a new or an empty folder")
        return 2
    else:
        with tempfile.TemporaryDirectory() as temporary:
            folder = config.keep or pathlib.Path(temporary)
            folder.mkdir(parents=True, exist_ok=True)
            records = measure(config, folder, console)
        interrupted = any(record.get("of") == INTERRUPTED["of"] for record in records)
        settings = {
            name: value
            for name, value in dataclasses.asdict(config).items()
            if name not in ("output", "from_json", "add", "commit", "keep", "exclusive")
        }
        results = results_of(
            records,
            versions=versions(),
            module="experiments.kernel_benchmarks",
            arguments=arguments,
            commit=config.commit,
            config=settings,
        )
        if config.add and path.exists():
            results = add(results, json.loads(path.read_text()))
        write_results(path, results)
        results = json.loads(path.read_text())
    path.with_suffix(".md").write_text(markdown(results))
    pictures = write_figures(results, config.output, config.name)
    show(results, console)
    console.print("wrote", *(str(p) for p in (path, path.with_suffix(".md"), *pictures)), soft_wrap=True)
    if interrupted:
        console.print("interrupted: what was measured is written")
        sys.stdout.flush()
        os._exit(130)  # Python would wait for threads that wait for a lock file
    return 0 if any(record["kind"] in ("time", "error") for record in results["records"]) else 1


if __name__ == "__main__":
    sys.exit(main())

"""`python -m experiments.decoding`: times `generate`, then writes table and picture."""

import dataclasses
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import tyro

from experiments.decoding.measure import time_model
from experiments.decoding.peer import PEERS, time_peer
from experiments.decoding.report import read_results, write_report
from experiments.decoding.study import DecodingSetting, DecodingStudy, study
from experiments.harness.command import errors_as_lines
from experiments.harness.environment import command_line, environment
from experiments.harness.study import slug
from experiments.harness.tables import add_row, read_table


@dataclasses.dataclass(frozen=True)
class Options:
    """Times `generate` for what has no result yet, then writes table and picture."""

    setting: DecodingSetting = "small"
    """"small" runs on a CPU in minutes, "real" on one GPU; "long_32k" and "long_131k" have such prompts."""
    card: str = ""
    """Set behind the setting in names of results and figures: for another card than the H200 of those committed."""
    models: tuple[str, ...] = ()
    """Only models whose label contains one of these."""
    batches: tuple[int, ...] = ()
    """Only these batches."""
    again: bool = False
    """Time again what has a result."""
    peer: bool = False
    """Time flash-linear-attention's and transformers' `generate` beside ours."""
    peer_python: str = sys.executable
    """Python interpreter that has torch, transformers and flash-linear-attention."""
    peer_seconds: float | None = None
    """Give a peer up after this time."""
    report_only: bool = False
    """Time nothing."""
    output: pathlib.Path = pathlib.Path(__file__).parent
    """Folder for results and figures."""
    commit: str | None = None
    """Commit to record where there is no git repository."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the study; returns the exit code."""
    options = tyro.cli(Options, args=argv, prog="python -m experiments.decoding")
    plan = study(options.setting)
    failed = 0
    with errors_as_lines():
        _check(options, plan)
        if not options.report_only:
            failed = _time_all(options, plan)
        print(write_report(plan, read_results(_results(options)), options.output, _name(options)))
    return 1 if failed else 0


def _name(options: Options) -> str:
    return f"{options.setting}_{options.card}" if options.card else options.setting


def _results(options: Options) -> pathlib.Path:
    return options.output / "results" / f"{_name(options)}.jsonl"


def _check(options: Options, plan: DecodingStudy) -> None:
    """ValueError where a model or batch that is asked for is not in the study."""
    labels = [label for label, _ in plan.models]
    for part in options.models:
        if not any(part in label for label in labels):
            raise ValueError(f"models: {part!r} is part of none, expected parts of {'; '.join(labels)}")
    for batch in options.batches:
        if batch not in plan.batches:
            raise ValueError(f"batches: {batch} is not timed, expected some of {plan.batches}")


def _time_all(options: Options, plan: DecodingStudy) -> int:
    """Times what is asked for; returns how many peers failed."""
    # JAX keeps the memory that it has taken, and must leave the peer the card.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    where = environment(command_line("experiments.decoding"), options.commit)
    for record in read_results(_results(options)):
        if record["environment"]["device"] != where["device"]:
            raise ValueError(
                f"card: the results {_name(options)!r} are of {record['environment']['device']}, and this machine's "
                f"device is {where['device']}; give its results a card's name"
            )
    failed = 0
    for label, config in plan.models:
        if options.models and not any(part in label for part in options.models):
            continue
        for batch in plan.batches:
            if options.batches and batch not in options.batches:
                continue
            name = f"{slug(label)}--{batch}"
            if _is_due(options, name):
                found = _record(options, name, label, time_model(config, batch, plan), where)
                print(f"{label}, batch {batch}: {found['tokens_per_second']:,.0f} tokens/s", flush=True)
            if options.peer and label in PEERS:
                failed += _time_peer(options, plan, label, batch, where)
    return failed


def _time_peer(options: Options, plan: DecodingStudy, label: str, batch: int, where: dict[str, Any]) -> bool:
    """Times a model's peer where that is due; says whether it failed."""
    name = f"{slug(label)}--{batch}--peer"
    if not _is_due(options, name):
        return False
    try:
        found = time_peer(plan, label, batch, options.peer_python, options.peer_seconds)
    except RuntimeError as error:
        print(f"FAILED {error}", flush=True)
        return True
    _record(options, name, label, found, where)
    print(f"  {found['peer']}: {found['tokens_per_second']:,.0f} tokens/s", flush=True)
    return False


def _is_due(options: Options, name: str) -> bool:
    return options.again or all(row["id"] != name for row in read_table(_results(options)))


def _record(options: Options, name: str, label: str, found: dict[str, Any], where: dict[str, Any]) -> dict[str, Any]:
    """Writes a result and gives it back."""
    record = {"model": label, **found, "environment": where}
    add_row(_results(options), "decoding", name, record)
    return record


if __name__ == "__main__":
    sys.exit(main())

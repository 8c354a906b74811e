"""`python -m experiments.decoding`: times `generate`, then writes table and picture."""

import dataclasses
import json
import os
import pathlib
import sys
from collections.abc import Sequence

import tyro

from experiments.decoding.measure import time_model
from experiments.decoding.peer import PEERS, time_peer
from experiments.decoding.report import read_results, write_report
from experiments.decoding.study import study
from experiments.sweep.command import errors_as_lines
from experiments.sweep.results import command_line, environment, write_text
from experiments.sweep.study import Setting, slug


@dataclasses.dataclass(frozen=True)
class Options:
    """Times `generate` for what has no result yet, then writes table and picture."""

    setting: Setting = "small"
    """"small" runs on a CPU in minutes, "real" on one GPU."""
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
    results = options.output / "results" / options.setting
    failed = 0
    with errors_as_lines():
        labels = [label for label, _ in plan.models]
        for part in options.models:
            if not any(part in label for label in labels):
                raise ValueError(f"models: {part!r} is part of none, expected parts of {'; '.join(labels)}")
        for batch in options.batches:
            if batch not in plan.batches:
                raise ValueError(f"batches: {batch} is not timed, expected some of {plan.batches}")
        if not options.report_only:
            # JAX keeps the memory that it has taken, and must leave the peer the card.
            os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
            where = environment(command_line("experiments.decoding"), options.commit)
            for label, config in plan.models:
                if options.models and not any(part in label for part in options.models):
                    continue
                for batch in plan.batches:
                    if options.batches and batch not in options.batches:
                        continue
                    path = results / f"{slug(label)}--{batch}.json"
                    if options.again or not path.exists():
                        record = {"model": label, **time_model(config, batch, plan), "environment": where}
                        write_text(path, json.dumps(record, indent=1) + "\n")
                        print(f"{label}, batch {batch}: {record['tokens_per_second']:,.0f} tokens/s", flush=True)
                    path = results / f"{slug(label)}--{batch}--peer.json"
                    if options.peer and label in PEERS and (options.again or not path.exists()):
                        try:
                            found = time_peer(plan, label, batch, options.peer_python, options.peer_seconds)
                        except RuntimeError as error:
                            failed += 1
                            print(f"FAILED {error}", flush=True)
                            continue
                        write_text(path, json.dumps({"model": label, **found, "environment": where}, indent=1) + "\n")
                        print(f"  {found['peer']}: {found['tokens_per_second']:,.0f} tokens/s", flush=True)
        print(write_report(plan, read_results(results), options.output, options.setting))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

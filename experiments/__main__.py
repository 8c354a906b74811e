"""Runs several studies in one go, or rebuilds all tables and figures: `python -m experiments --report-only`."""

import dataclasses
import sys
from typing import Literal

import tyro
from rich.console import Console

from experiments.sweep.command import SweepOptions, run

STUDIES = ("state_tracking", "mqar", "kla_suite", "ablations", "axis_combinations", "regbench_mad")


@dataclasses.dataclass(frozen=True)
class Options(SweepOptions):
    """Trains what is missing of the studies, then writes their tables and figures."""

    setting: Literal["small", "real"] = "real"
    """"small" runs on a CPU in minutes, "real" on one GPU."""
    studies: tuple[str, ...] = STUDIES
    """Which, in this order."""


def main() -> None:
    """`python -m experiments`."""
    options = tyro.cli(Options, prog="python -m experiments")
    unknown = sorted(set(options.studies) - set(STUDIES))
    if unknown:
        sys.exit(f"error: unknown studies {', '.join(unknown)}; expected some of {', '.join(STUDIES)}")
    finished = run(options.studies, options, Console(), module="experiments")
    sys.exit(0 if finished or options.report_only else 1)


if __name__ == "__main__":
    main()

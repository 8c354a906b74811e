"""Runs several studies in one go, or rebuilds all tables and figures: `python -m experiments --report-only`."""

import dataclasses
import sys

import tyro
from rich.console import Console

from experiments.claims.pages import write_pages
from experiments.decoding.__main__ import main as decoding
from experiments.harness.command import errors_as_lines
from experiments.harness.study import SETTINGS, Setting
from experiments.kernel_benchmarks.__main__ import main as kernel_benchmarks
from experiments.language_modelling.command import main as language_modelling
from experiments.language_modelling.study import SETTINGS as LANGUAGE_SETTINGS
from experiments.ridge_benchmark.__main__ import main as ridge_benchmark
from experiments.several_gpus.__main__ import main as several_gpus
from experiments.solver_convergence.__main__ import main as solver_convergence
from experiments.solver_convergence.config import SolverConvergenceConfig
from experiments.sweep.command import SweepOptions, check_names, run
from experiments.throughput.__main__ import main as throughput

STUDIES = (
    "state_tracking",
    "mqar",
    "mqar_sizes",
    "kla_suite",
    "s_niah",
    "ablations",
    "axis_combinations",
    "regbench_mad",
    "recall",
)


@dataclasses.dataclass(frozen=True)
class Options(SweepOptions):
    """Trains what is missing of the studies, then writes their tables and figures."""

    setting: Setting = "real"
    """"small" runs on a CPU in minutes, "real" on one GPU."""
    studies: tuple[str, ...] = STUDIES
    """Which, in this order."""


def main() -> None:
    """`python -m experiments`."""
    options = tyro.cli(Options, prog="python -m experiments")
    unknown = sorted(set(options.studies) - set(STUDIES))
    if unknown:
        sys.exit(f"error: unknown studies {', '.join(unknown)}; expected some of {', '.join(STUDIES)}")
    with errors_as_lines():
        check_names(options.studies, options, SETTINGS if options.report_only else [options.setting])
    if options.report_only:  # everything that has results, at either setting
        for setting in SETTINGS:
            run(options.studies, dataclasses.replace(options, setting=setting), Console(), module="experiments")
            throughput(["--report-only", "--setting", setting])
            decoding(["--report-only", "--setting", setting])
        for language_setting in LANGUAGE_SETTINGS:
            language_modelling("language_modelling", ["--report-only", "--setting", language_setting])
        language_modelling("long_context", ["--report-only", "--setting", "real"])
        several_gpus(["--setting", "real", "--report-only"])
        kernel_benchmarks(["--from-json"])
        ridge_benchmark(["--from-json"])
        solver_convergence(SolverConvergenceConfig(from_json=True))
        write_pages()
        return
    with errors_as_lines():
        finished = run(options.studies, options, Console(), module="experiments")
    sys.exit(0 if finished else 1)


if __name__ == "__main__":
    main()

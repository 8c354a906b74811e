"""`python -m experiments.throughput`: see README.md."""

import concurrent.futures
import dataclasses
import json
import pathlib
import sys
import time
import traceback
from collections.abc import Sequence
from typing import Literal

import tyro

from experiments.sweep.results import command_line, environment, write_text
from experiments.sweep.study import pick, slug
from experiments.throughput.measure import compile_case, measure
from experiments.throughput.report import read_results, write_report
from experiments.throughput.study import Case, cases, study

FOLDER = pathlib.Path(__file__).parent


@dataclasses.dataclass(frozen=True)
class Options:
    """Times the cases that have no result yet, then writes table and figure."""

    setting: Literal["small", "real"] = "small"
    """"small" runs on a CPU in a minute and measures nothing of interest, "real" on one GPU."""
    mixers: tuple[str, ...] = ()
    """Only mixers of these labels, or whose label contains one of these."""
    lengths: tuple[int, ...] = ()
    """Only these lengths."""
    report_only: bool = False
    """Time nothing."""
    again: bool = False
    """Time what has a result too, and replace it."""
    output: pathlib.Path = FOLDER
    """Folder for results and figures."""
    wave: int = 8
    """Cases that are compiled side by side; they are timed once all are compiled, so that nothing disturbs it."""
    seconds: float | None = None
    """Begin no new wave after this time."""
    commit: str | None = None
    """Commit to record where there is no git repository."""

    def __post_init__(self) -> None:
        if self.wave < 1:
            raise ValueError(f"wave must be at least 1, got {self.wave}")


def file_name(case: Case) -> str:
    """The file of a case's result."""
    marks = "--deterministic" * case.deterministic + "--packed" * case.packed
    return f"{slug(case.mixer.label)}--{case.length}{marks}.json"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the study; returns the exit code."""
    options = tyro.cli(Options, args=argv, prog="python -m experiments.throughput")
    plan = study(options.setting)
    results = options.output / "results" / options.setting
    picked = pick(plan.mixers, options.mixers)
    wanted = [c for c in cases(plan) if c.mixer in picked and (not options.lengths or c.length in options.lengths)]
    if not wanted:
        sys.exit(f"error: mixers are {', '.join(m.label for m in plan.mixers)} and lengths {plan.lengths}")
    begin = time.monotonic()
    failed = 0
    missing = [case for case in wanted if options.again or not (results / file_name(case)).exists()]
    if missing and not options.report_only:
        where = environment(command_line("experiments.throughput"), options.commit)
        with concurrent.futures.ThreadPoolExecutor(options.wave) as pool:
            while missing and (options.seconds is None or time.monotonic() - begin < options.seconds):
                wave, missing = missing[: options.wave], missing[options.wave :]
                futures = [pool.submit(compile_case, plan, case) for case in wave]
                concurrent.futures.wait(futures)
                for case, future in zip(wave, futures):
                    try:
                        record = measure(plan, future.result())
                    except Exception as error:  # a case that does not fit must not cost the others their results
                        failed += 1
                        print(
                            f"FAILED {file_name(case)}: {''.join(traceback.format_exception(error))[-3000:]}",
                            flush=True,
                        )
                        record = {"mixer": case.mixer.label, "length": case.length, "deterministic": case.deterministic}
                        record |= {"packed": case.packed, "error": str(error).partition("\n")[0][:200]}
                    record["environment"] = where
                    write_text(results / file_name(case), json.dumps(record, indent=1) + "\n")
                    speed = record.get("tokens_per_second")
                    print(f"{time.monotonic() - begin:6.1f} s  {file_name(case)}  {speed} tokens/s", flush=True)
                del futures
    print(write_report(plan, read_results(results), options.output, options.setting))
    return 0 if options.report_only or not (missing or failed) else 1


if __name__ == "__main__":
    sys.exit(main())

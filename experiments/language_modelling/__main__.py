"""`python -m experiments.language_modelling`: see README.md."""

import dataclasses
import functools
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any

import tyro
from rich.console import Console

from experiments.harness.command import errors_as_lines, interrupts_as_lines
from experiments.harness.environment import command_line, environment
from experiments.harness.page import write_between_marks
from experiments.harness.study import pick_named
from experiments.language_modelling.devices import Job, expected_seconds, train_on_devices
from experiments.language_modelling.report import chosen, figure, lacking_rates, tables, widths_figure
from experiments.language_modelling.runs import (
    get_tokenizer,
    hold_out,
    read_run,
    train_and_test,
)
from experiments.language_modelling.study import WIDTHS, LanguageSetting, study

FOLDER = pathlib.Path(__file__).parent


@dataclasses.dataclass(frozen=True)
class Options:
    """Trains the language models that are missing, then writes table and figure."""

    setting: LanguageSetting = "small"
    """"small" runs on a CPU in minutes; on one GPU "real", "short" (a tenth of the tokens), "large" (150M) and
    "large_short" (a quarter of the tokens)."""
    mixers: tuple[str, ...] = ()
    """Only mixers of these labels, or whose label contains one of these, in this order."""
    rates: tuple[float, ...] = ()
    """Train only at these learning rates; left out, at those of the study."""
    seeds: tuple[int, ...] = ()
    """Train only these seeds; left out, those of the study."""
    steps: int | None = None
    """Training steps, in place of the study's."""
    report_only: bool = False
    """Train nothing."""
    train_only: bool = False
    """Write no table and no figure."""
    devices: tuple[int, ...] = ()
    """Train on these GPUs of the machine, by the numbers of CUDA_VISIBLE_DEVICES: two models a GPU, of which one
    compiles while the other trains."""
    output: pathlib.Path = FOLDER
    """Folder for results and figures."""
    work: pathlib.Path = pathlib.Path("runs/language_modelling")
    """Folder for checkpoints."""
    seconds: float | None = None
    """Begin no new run after this time."""
    exclusive: pathlib.Path | None = None
    """Lock file: of several such commands on one device one trains at a time, while the others compile."""
    until: float | None = None
    """Give up a run that would end after this time (since the epoch), as soon as its speed tells."""
    commit: str | None = None
    """Commit to record where there is no git repository."""


def command_of(options: Options, job: Job, device: int) -> list[str]:
    """The command that trains one of the runs that `options` ask for, by turns with others on a device."""
    arguments: dict[str, Any] = {
        "setting": options.setting,
        "mixers": job.mixer.label,
        "rates": job.rate,
        "seeds": job.seed,
        "steps": options.steps,
        "output": options.output,
        "work": options.work,
        "until": options.until,
        "commit": options.commit,
        "exclusive": options.work / f"device{device}.lock",
    }
    given = [part for name, value in arguments.items() if value is not None for part in (f"--{name}", str(value))]
    return [sys.executable, "-m", "experiments.language_modelling", "--train-only", *given]


@interrupts_as_lines()
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the study; returns the exit code."""
    options = tyro.cli(Options, args=argv, prog="python -m experiments.language_modelling")
    plan = study(options.setting)
    with errors_as_lines():
        mixers = pick_named(plan.mixers, options.mixers)
    if options.devices and options.seconds is not None:
        sys.exit("error: with devices, give until (a time) in place of seconds")
    train = plan.train if options.steps is None else dataclasses.replace(plan.train, steps=options.steps)
    plan = dataclasses.replace(plan, mixers=mixers, train=train)
    results = options.output / "results" / f"{options.setting}.jsonl"
    work = options.work
    begin = time.monotonic()
    missing = [
        (mixer, rate, seed)
        for rate in options.rates or plan.learning_rates  # all mixers at one rate before the next
        for mixer in plan.mixers
        for seed in options.seeds or plan.seeds
        if read_run(plan, results, mixer, rate, seed) is None
    ]
    if missing and options.devices and not options.report_only:
        jobs = [Job(*run, expected_seconds(plan, results, run[0])) for run in missing]
        command = functools.partial(command_of, options)
        logs = work / "logs"
        train_on_devices(jobs, options.devices, command, logs=logs, console=Console(), until=options.until)
        missing = [run for run in missing if read_run(plan, results, *run) is None]
    elif missing and not options.report_only:
        tokenizer = get_tokenizer(plan, work)
        text = dataclasses.replace(plan.train.data, tokenizer=tokenizer[1])
        held_out = functools.cache(lambda: hold_out(text, tokenizer[0]))
        where = environment(command_line("experiments.language_modelling"), options.commit)
        while missing and (options.seconds is None or time.monotonic() - begin < options.seconds):
            mixer, rate, seed = missing.pop(0)
            print(f"{mixer.label}, learning rate {rate:g}, seed {seed}; {len(missing)} more runs after it", flush=True)
            done = train_and_test(
                plan,
                mixer,
                rate,
                seed,
                environment=where,
                exclusive=options.exclusive,
                until=options.until,
                work=work,
                results=results,
                tokenizer=tokenizer,
                held_out=held_out,
            )
            if done is None:
                missing.insert(0, (mixer, rate, seed))
                break
    if options.train_only:
        return 1 if missing else 0
    if found := chosen(plan, results):
        path = options.output / "figures" / f"{options.setting}.png"
        figure(found, path, plan.train.data.sequence_length, lacking_rates(plan, results))
    if options.setting in WIDTHS:
        widths_figure(options.output)
    written = tables(plan, results)
    if not options.mixers and options.steps is None:
        write_between_marks(options.output / "README.md", options.setting, written)
    print(written)
    return 0 if options.report_only or not missing else 1


if __name__ == "__main__":
    sys.exit(main())

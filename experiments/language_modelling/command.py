"""The command line of the studies of language models."""

import collections
import dataclasses
import importlib
import pathlib
import time
from collections.abc import Sequence

import tyro

from experiments.harness.command import RunOptions, errors_as_lines
from experiments.harness.environment import command_line, environment
from experiments.harness.jobs import Job
from experiments.harness.study import Mixer, pick_named
from experiments.harness.tables import read_table, table_path
from experiments.language_modelling.runs import best_rate, get_tokenizer, read_run, train_and_test
from experiments.language_modelling.study import LanguageStudy

TESTING = 15.0
"""Seconds that a run keeps its devices beside its training; it compiles and reads while others train."""


@dataclasses.dataclass(frozen=True)
class Options(RunOptions):
    """Trains the language models that are missing, then writes table and figure."""

    setting: str = "small"
    """One of the study's; "small" runs on a CPU in minutes, the others want a GPU."""


def load_study(name: str, setting: str) -> LanguageStudy:
    """A study of a folder under `experiments`, at a setting.

    Raises:
        ValueError: it has no such setting.
    """
    module = importlib.import_module(f"experiments.{name}.study")
    if setting not in module.SETTINGS:
        raise ValueError(f"setting is {setting!r}; expected one of {', '.join(module.SETTINGS)}")
    return module.study(setting)


def missing_runs(plan: LanguageStudy, *results: pathlib.Path) -> list[tuple[Mixer, float, int]]:
    """Runs that none of the tables has: those that choose a rate and, for mixers that have them, those that report."""
    runs = list(plan.runs)
    if plan.report_seeds:
        rates = {mixer: best_rate(plan, results, mixer) for mixer in plan.mixers}
        runs += [(mixer, rate, seed) for mixer, rate in rates.items() if rate for seed in plan.report_seeds]
    return [run for run in runs if all(read_run(plan, path, *run) is None for path in results)]


def jobs(name: str, setting: str, outputs: Sequence[pathlib.Path]) -> list[Job]:
    """What is left of a study that no folder of `outputs` has, a job a model."""
    plan = load_study(name, setting)
    tables = [table_path(name, setting, output) for output in outputs]
    found = []
    missing = missing_runs(plan, *tables)
    # A mixer that has chosen no rate yet has its reporting seeds still before it.
    choosing = collections.Counter(mixer for mixer, rate, seed in missing if seed in plan.seeds)
    for mixer, rate, seed in missing:
        arguments = ("--setting", setting, "--mixers", mixer.label, "--rates", f"{rate:g}", "--seeds", str(seed))
        timed = (row["seconds"] for path in tables for row in read_table(path) if row["mixer"]["label"] == mixer.label)
        seconds = min(timed, default=plan.seconds) + TESTING
        later = len(plan.report_seeds) / choosing[mixer] if choosing[mixer] else 0.0
        found.append(Job(name, setting, f"{mixer.label}, rate {rate:g}, seed {seed}", arguments, seconds, later=later))
    return found


def main(name: str, argv: Sequence[str] | None = None) -> int:
    """`python -m experiments.<name>`; returns the exit code."""
    module = f"experiments.{name}"
    options = tyro.cli(Options, args=argv, prog=f"python -m {module}")
    begin = time.monotonic()
    with errors_as_lines():
        whole = load_study(name, options.setting)
        mixers = pick_named(whole.mixers, options.mixers)
        rates, seeds = options.rates or whole.learning_rates, options.seeds or whole.seeds
        train = whole.train if options.steps is None else dataclasses.replace(whole.train, steps=options.steps)
        plan = dataclasses.replace(whole, mixers=mixers, learning_rates=rates, seeds=seeds, train=train)
        results = table_path(name, options.setting, options.output)
        missing = [] if options.report_only else missing_runs(plan, results)
        if missing:
            work = options.work / name
            text = plan.text(work)
            tokenizer = get_tokenizer(plan, text, work)
            where = environment(command_line(module), options.commit)
        while missing and (options.seconds is None or time.monotonic() - begin < options.seconds):
            mixer, rate, seed = missing.pop(0)
            print(f"{mixer.label}, learning rate {rate:g}, seed {seed}; {len(missing)} more runs after it", flush=True)
            train_and_test(
                plan,
                mixer,
                rate,
                seed,
                environment=where,
                exclusive=options.exclusive,
                text=text,
                work=work,
                results=results,
                tokenizer=tokenizer,
            )
    if not options.train_only:
        report = importlib.import_module(f"{module}.report")
        reported = dataclasses.replace(whole, mixers=mixers, train=train)
        print(report.write(reported, results, options.output / name, page=options.is_whole))
    return 1 if missing else 0

"""The command line of the studies over many small runs."""

import dataclasses
import importlib
import pathlib
import statistics
import sys
from collections.abc import Sequence

from rich.console import Console

from experiments.harness.command import RunOptions, errors_as_lines
from experiments.harness.device import Turn
from experiments.harness.environment import command_line, environment
from experiments.harness.jobs import Job
from experiments.harness.study import Mixer, Setting, pick, unmatched
from experiments.harness.tables import read_table, table_path
from experiments.sweep.outcomes import wanted
from experiments.sweep.results import read_runs
from experiments.sweep.study import Cell, Study


@dataclasses.dataclass(frozen=True)
class SweepOptions(RunOptions):
    """Trains what is missing of a study, then writes its table and figure."""

    setting: Setting = "small"
    """"small" runs on a CPU in minutes, "real" on one GPU."""
    skip: tuple[str, ...] = ()
    """No mixers whose label contains one of these."""
    cells: tuple[str, ...] = ()
    """Only cells of these names, or whose name contains one of these."""
    data_workers: int = 0
    """Processes that generate data; 0 generates in this one."""
    compile_workers: int = 1
    """Threads that compile ahead."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in (("data_workers", 0), ("compile_workers", 1)):
            if (value := getattr(self, name)) < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")

    @property
    def is_whole(self) -> bool:
        """Whether nothing of the study is left out or changed."""
        return super().is_whole and not (self.skip or self.cells)


def whole_study(name: str, setting: Setting) -> Study:
    """The study of a folder under `experiments`, at a setting."""
    return importlib.import_module(f"experiments.{name}.study").study(setting)


def load_study(name: str, options: SweepOptions) -> Study | None:
    """A study at the options' setting, reduced as they say; None where nothing is left of it."""
    study = whole_study(name, options.setting)
    mixers = pick(study.mixers, options.mixers)
    mixers = tuple(mixer for mixer in mixers if not any(part in mixer.label for part in options.skip))
    names = {cell.name for cell in study.cells}
    cells = [
        cell
        for cell in study.cells
        if not options.cells or any(part == cell.name if part in names else part in cell.name for part in options.cells)
    ]
    if not mixers or not cells:
        return None
    if options.steps is not None:
        cells = [dataclasses.replace(c, steps=options.steps, chunks=1) for c in cells]
    if options.rates:
        cells = [dataclasses.replace(cell, learning_rates=options.rates) for cell in cells]
    return dataclasses.replace(study, mixers=mixers, cells=tuple(cells), seeds=options.seeds or study.seeds)


def check_names(names: Sequence[str], options: SweepOptions, settings: Sequence[Setting]) -> None:
    """Raises where the options name something that is in none of the studies.

    Args:
        names: folders of the studies. Not every one needs to have what the options name.
        options: the options; their setting does not count.
        settings: of the studies.

    Raises:
        ValueError: a mixer or a cell is in no study, or the options leave nothing of any.
    """
    studies = [whole_study(name, setting) for setting in settings for name in names]
    labels = dict.fromkeys(mixer.label for study in studies for mixer in study.mixers)
    cells = dict.fromkeys(cell.name for study in studies for cell in study.cells)
    given = (("mixers", options.mixers, labels), ("skip", options.skip, labels), ("cells", options.cells, cells))
    unknown = [f"{option} {part!r}" for option, parts, known in given for part in unmatched(parts, known)]
    parts = [dataclasses.replace(options, setting=setting) for setting in settings]
    if unknown or not any(load_study(name, part) for part in parts for name in names):
        what = f"{', '.join(unknown)} match" if unknown else "mixers, skip and cells leave"
        raise ValueError(
            f"{what} nothing in {', '.join(names)}; expected parts of the mixers ({'; '.join(labels)}) or cells "
            f"({'; '.join(cells)})"
        )


def places(name: str, options: SweepOptions) -> tuple[pathlib.Path, pathlib.Path]:
    """A study's folder, and its table."""
    return options.output / name, table_path(name, options.setting, options.output)


def jobs(name: str, setting: str, outputs: Sequence[pathlib.Path]) -> list[Job]:
    """What is left of a study that no folder of `outputs` has: a job for each cell and mixer, cell by cell."""
    study = whole_study(name, setting)  # type: ignore[arg-type]
    tables = [table_path(name, setting, output) for output in outputs]
    found = []
    for cell in study.cells:
        for mixer in study.mixers:
            done = {lane: row for path in tables for lane, row in read_runs(path, mixer, cell).items()}
            missing = [lane for lane in wanted(study, cell, done) if lane not in done]
            if not missing:
                continue
            arguments = ["--setting", setting, "--cells", cell.name, "--mixers", mixer.label, "--data-workers", "4"]
            seconds = _seconds_of_a_run(study, cell, mixer, tables)
            later = len(study.report_seeds) if missing[0].seed in study.seeds else 0
            what = f"{cell.name}, {mixer.label}"
            runs = len(missing)
            found.append(Job(name, setting, what, tuple(arguments), seconds * runs, runs=runs, later=later))
    return found


def _seconds_of_a_run(study: Study, cell: Cell, mixer: Mixer, tables: Sequence[pathlib.Path]) -> float:
    """What a mixer's runs took in any cell, by the tokens that they read; the study's figure where it has none."""
    rows = (row for path in tables for row in read_table(path) if row["mixer"]["label"] == mixer.label)
    size = cell.steps * cell.task.sequence_length
    measured = [
        row["train_seconds_of_all_lanes"]
        / row["lanes"]
        / (row["cell"]["steps"] * row["cell"]["task"]["sequence_length"])
        for row in rows
        if "lanes" in row
    ]
    if measured:
        return statistics.median(measured) * size
    return study.seconds_of_a_run * size / max(cell.steps * cell.task.sequence_length for cell in study.cells)


def run(names: Sequence[str], options: SweepOptions, console: Console, *, module: str) -> bool:
    """Runs studies, but those of which the options leave nothing, and writes their reports.

    Returns:
        Whether all runs are there.
    """
    from experiments.sweep.report import write_report
    from experiments.sweep.runner import adopt_results, run_studies

    loaded = {name: load_study(name, options) for name in names}
    studies = [(study, *places(name, options)) for name, study in loaded.items() if study is not None]
    finished = True
    adopt_results([(study, path) for study, _, path in studies])
    if not options.report_only:
        where = environment(command_line(module), options.commit)
        with Turn(options.exclusive) as turn:
            for _ in range(2):  # the seeds that report come when those that choose are done
                finished = run_studies(
                    [(study, path) for study, _, path in studies],
                    environment=where,
                    console=console,
                    data_workers=options.data_workers,
                    compile_workers=options.compile_workers,
                    seconds=options.seconds,
                    turn=turn,
                    work=options.work,
                )
    if not options.train_only:
        for study, folder, path in studies:
            text = write_report(study, folder, path, readme=options.is_whole)
            console.print(f"\n{study.title}\n", highlight=False, markup=False)
            console.print(text, highlight=False, markup=False, soft_wrap=True)
    return finished


def main(name: str, argv: Sequence[str] | None = None) -> None:
    """`python -m experiments.<name>`."""
    import tyro

    module = f"experiments.{name}"
    options = tyro.cli(SweepOptions, args=argv, prog=f"python -m {module}")
    with errors_as_lines():
        check_names([name], options, [options.setting])
        finished = run([name], options, Console(), module=module)
    sys.exit(0 if finished else 1)

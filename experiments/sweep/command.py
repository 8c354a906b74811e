"""The command line of every study."""

import dataclasses
import importlib
import pathlib
import sys
from collections.abc import Sequence

from rich.console import Console

from experiments.harness.command import errors_as_lines
from experiments.harness.environment import command_line, environment
from experiments.harness.study import Setting, pick, unmatched
from experiments.harness.tables import EXPERIMENTS, table_path
from experiments.sweep.study import Study


@dataclasses.dataclass(frozen=True)
class SweepOptions:
    """Trains what is missing of a study, then writes its table and figure."""

    setting: Setting = "small"
    """"small" runs on a CPU in minutes, "real" on one GPU."""
    mixers: tuple[str, ...] = ()
    """Only mixers of these labels, or whose label contains one of these, in this order."""
    skip: tuple[str, ...] = ()
    """No mixers whose label contains one of these."""
    cells: tuple[str, ...] = ()
    """Only cells whose name contains one of these."""
    seeds: int | None = None
    """Number of seeds, in place of the study's."""
    steps: int | None = None
    """Training steps, in place of the study's."""
    report_only: bool = False
    """Train nothing; write table and figure from the results that are there."""
    output: pathlib.Path | None = None
    """Folder for results and figures, in place of the study's own."""
    data_workers: int = 0
    """Processes that generate data; 0 generates in this one."""
    compile_workers: int = 1
    """Threads that compile ahead."""
    seconds: float | None = None
    """Begin no new group of runs after this time."""
    exclusive: pathlib.Path | None = None
    """Lock file, for several commands on one device: groups of runs train by turns, and compile meanwhile."""
    commit: str | None = None
    """Commit to record where there is no git repository."""

    def __post_init__(self) -> None:
        for name, least in (("seeds", 1), ("steps", 1), ("data_workers", 0), ("compile_workers", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")


def whole_study(name: str, setting: Setting) -> Study:
    """The study of a folder under `experiments`, at a setting."""
    return importlib.import_module(f"experiments.{name}.study").study(setting)


def load_study(name: str, options: SweepOptions) -> Study | None:
    """A study at the options' setting, reduced as they say; None where nothing is left of it."""
    study = whole_study(name, options.setting)
    mixers = pick(study.mixers, options.mixers)
    mixers = tuple(mixer for mixer in mixers if not any(part in mixer.label for part in options.skip))
    cells = [c for c in study.cells if not options.cells or any(part in c.name for part in options.cells)]
    if not mixers or not cells:
        return None
    if options.steps is not None:
        cells = [dataclasses.replace(c, steps=options.steps, chunks=1) for c in cells]
    seeds = study.seeds if options.seeds is None else tuple(range(options.seeds))
    return dataclasses.replace(study, mixers=mixers, cells=tuple(cells), seeds=seeds)


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
    output = EXPERIMENTS if options.output is None else options.output
    return output / name, table_path(name, options.setting, output)


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
        finished = run_studies(
            [(study, path) for study, _, path in studies],
            environment=environment(command_line(module), options.commit),
            console=console,
            data_workers=options.data_workers,
            compile_workers=options.compile_workers,
            seconds=options.seconds,
            exclusive=options.exclusive,
        )
    whole = not (options.mixers or options.skip or options.cells or options.seeds or options.steps)
    for study, folder, path in studies:
        text = write_report(study, folder, path, readme=whole and options.output is None)
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

"""What a study found: for each mixer and cell the learning rate that was best in validation, and its runs."""

import dataclasses
import math
import pathlib
import statistics
from typing import Any

from experiments.harness.study import Mixer
from experiments.sweep.results import read_runs
from experiments.sweep.study import Cell, Study, test_name

SOLVED = 0.9


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A mixer's result in a cell, at its learning rate.

    Attributes:
        learning_rate: the best by the mean of validation over seeds, of those at which no run diverged.
        at_edge: whether it is the smallest or the largest that was tried.
        runs: the seeds' runs at it.
        solved: how many of all runs, at every rate, are right in 90 % of validation.
    """

    learning_rate: float
    at_edge: bool
    runs: tuple[dict[str, Any], ...]
    solved: str

    def values(self, metric: str, test: str) -> list[float]:
        """Test accuracy of each seed, percent."""
        return [100 * run["test"][test][metric] for run in self.runs]

    def mean(self, metric: str, test: str) -> float:
        """Mean over seeds, percent."""
        return statistics.fmean(self.values(metric, test))

    def spread(self, metric: str, test: str) -> float:
        """Standard deviation over seeds (n - 1), percent; 0 with one seed."""
        values = self.values(metric, test)
        return statistics.stdev(values) if len(values) > 1 else 0.0


def choose(study: Study, path: pathlib.Path, mixer: Mixer, cell: Cell) -> Outcome | None:
    """A mixer's outcome in a cell; None until all its runs are there. Test results are not looked at.

    A learning rate at which a run's validation loss is not finite is chosen only where that is so at every rate.
    """
    done = read_runs(path, mixer, cell)
    if any(lane not in done for lane in study.lanes(cell)):
        return None

    def quality(rate: float) -> tuple[bool, float, float]:
        runs = [done[lane]["validation"] for lane in study.lanes(cell) if lane.learning_rate == rate]
        loss = statistics.fmean(math.inf if run["loss"] is None else run["loss"] for run in runs)
        return math.isfinite(loss), statistics.fmean(run[study.metric] for run in runs), -loss

    rates = study.rates(cell)
    best = max(rates, key=quality)
    runs = tuple(done[lane] for lane in study.lanes(cell) if lane.learning_rate == best)
    edge = len(rates) > 1 and best in (min(rates), max(rates))
    every = [done[lane]["validation"][study.metric] for lane in study.lanes(cell)]
    return Outcome(best, edge, runs, f"{sum(accuracy >= SOLVED for accuracy in every)}/{len(every)}")


def outcomes(study: Study, path: pathlib.Path) -> dict[tuple[str, str], Outcome]:
    """All outcomes that are there, by (mixer's label, cell's name)."""
    found = {(m.label, c.name): choose(study, path, m, c) for c in study.cells for m in study.mixers}
    return {key: outcome for key, outcome in found.items() if outcome is not None}


@dataclasses.dataclass(frozen=True)
class Panel:
    """What is tested of a cell with one task: a group of columns, or a panel of the figure.

    Attributes:
        title: the cell's name, and that of the test if it is not the cell's own.
        cell: the cell.
        paper: the name under which a paper's numbers stand.
        tests: names of results by length.
        last: whether it is the cell's last.
    """

    title: str
    cell: Cell
    paper: str
    tests: dict[int, str]
    last: bool


def panels(cells: list[Cell]) -> list[Panel]:
    """One for each cell, or for each test of a cell that has tests of its own."""
    found = []
    for cell in cells:
        names = [name for name, _ in cell.tests] or [""]
        for name in names:
            tests = {length: test_name(name, length) for length in cell.test_lengths}
            title = f"{cell.name}, {name}" if name else cell.name
            found.append(Panel(title, cell, name or cell.name, tests, last=name == names[-1]))
    return found

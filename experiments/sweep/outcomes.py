"""What a study found: for each mixer and cell, runs at a learning rate that other seeds than theirs have chosen."""

import dataclasses
import math
import pathlib
import statistics
from collections.abc import Collection, Mapping, Sequence

from experiments.harness.study import Mixer
from experiments.harness.tables import Row
from experiments.sweep.results import read_runs
from experiments.sweep.study import Cell, Lane, Study, test_name

SOLVED = 0.9
"""Accuracy from which on a run counts as one that solved its task."""
BIMODAL = 10.0
"""Percent between the best and the worst seed beyond which each seed is told in place of mean and deviation."""
MOST_TOLD = 4
"""Seeds that are told one by one; of more, median and ends."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A mixer's result in a cell.

    Attributes:
        learning_rate: the best by the mean of validation over all choosing seeds, of those at which no run diverged.
        at_edge: whether it is the smallest or the largest that was tried.
        runs: a run of each reported seed, at the rate that other seeds have chosen (its own where there is no other).
        solved: how many of the reported seeds are right in 90 % of the test at the trained length, of how many.
        tried: how many of all runs at every rate are right in 90 % of validation, of how many.
    """

    learning_rate: float
    at_edge: bool
    runs: tuple[Row, ...]
    solved: tuple[int, int]
    tried: tuple[int, int]

    def values(self, metric: str, test: str) -> list[float]:
        """Test accuracy of each seed, percent."""
        return [100 * run["test"][test][metric] for run in self.runs]

    def told(self, metric: str, test: str) -> str:
        """Mean and standard deviation (n - 1) of the seeds' accuracies, or each of them where they lie far apart."""
        values = sorted(self.values(metric, test))
        if len(values) == 1:
            return f"{values[0]:.1f}"
        if values[-1] - values[0] <= BIMODAL:
            return f"{statistics.fmean(values):.1f} ± {statistics.stdev(values):.1f}"
        if len(values) <= MOST_TOLD:
            return " · ".join(f"{value:.0f}" for value in values)
        return f"{statistics.median(values):.0f} ({values[0]:.0f} to {values[-1]:.0f})"


def best_rate(study: Study, cell: Cell, done: Mapping[Lane, Row], seeds: Collection[int]) -> float:
    """The learning rate at which these seeds' validation is best; test results are not looked at.

    A rate at which a run's validation loss is not finite is chosen only where that is so at every rate.
    """

    def quality(rate: float) -> tuple[bool, float, float]:
        runs = [done[Lane(rate, seed)]["validation"] for seed in seeds]
        loss = statistics.fmean(math.inf if run["loss"] is None else run["loss"] for run in runs)
        return math.isfinite(loss), statistics.fmean(run[study.metric] for run in runs), -loss

    return max(study.rates(cell), key=quality)


def wanted(study: Study, cell: Cell, done: Mapping[Lane, Row]) -> tuple[Lane, ...]:
    """Runs of a mixer in a cell: those that choose the rate and, once they are done, those that report at it."""
    lanes = study.lanes(cell)
    if not study.report_seeds or any(lane not in done for lane in lanes):
        return lanes
    rate = best_rate(study, cell, done, study.seeds)
    return *lanes, *(Lane(rate, seed) for seed in study.report_seeds)


def choose(study: Study, path: pathlib.Path, mixer: Mixer, cell: Cell) -> Outcome | None:
    """A mixer's outcome in a cell; None until all its runs are there."""
    done = read_runs(path, mixer, cell)
    lanes = wanted(study, cell, done)
    if any(lane not in done for lane in lanes):
        return None
    rate = best_rate(study, cell, done, study.seeds)
    if study.report_seeds:
        runs = [done[Lane(rate, seed)] for seed in study.report_seeds]
    else:
        others = {seed: [other for other in study.seeds if other != seed] or [seed] for seed in study.seeds}
        runs = [done[Lane(best_rate(study, cell, done, others[seed]), seed)] for seed in study.seeds]
    rates = study.rates(cell)
    own = (cell.tests[0][0] if cell.tests else "", cell.test_lengths[0])
    tested = [run["test"][test_name(*own)][study.metric] for run in runs]
    validated = [done[lane]["validation"][study.metric] for lane in study.lanes(cell)]
    return Outcome(
        rate,
        len(rates) > 1 and rate in (min(rates), max(rates)),
        tuple(runs),
        count_solved(tested),
        count_solved(validated),
    )


def count_solved(accuracies: Sequence[float]) -> tuple[int, int]:
    """How many of these accuracies count as solved, of how many."""
    return sum(accuracy >= SOLVED for accuracy in accuracies), len(accuracies)


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

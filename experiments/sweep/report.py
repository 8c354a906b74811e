"""Tables and figures from result files: for each mixer the learning rate that was best in validation."""

import dataclasses
import math
import pathlib
import statistics
from typing import Any

from experiments.sweep.results import read_runs, write_text
from experiments.sweep.study import Cell, Mixer, Study, test_name

SOLVED = 0.9
MOST_COLUMNS = 15  # of results, in one table
_NEGATIVE = " [-1, 1]"


def marks(setting: str) -> tuple[str, str]:
    """What stands before and after the table of a setting in a README."""
    return f"<!-- {setting} setting: written by the report, do not edit -->", f"<!-- end of the {setting} setting -->"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A mixer's result in a cell, at its learning rate.

    Attributes:
        learning_rate: the best by the mean of validation over seeds.
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


def choose(study: Study, folder: pathlib.Path, mixer: Mixer, cell: Cell) -> Outcome | None:
    """A mixer's outcome in a cell; None until all its runs are there. Test results are not looked at."""
    done = read_runs(folder, mixer, cell)
    if any(lane not in done for lane in study.lanes(cell)):
        return None

    def quality(rate: float) -> tuple[float, float]:
        runs = [done[lane]["validation"] for lane in study.lanes(cell) if lane.learning_rate == rate]
        loss = statistics.fmean(math.inf if run["loss"] is None else run["loss"] for run in runs)
        return statistics.fmean(run[study.metric] for run in runs), -loss

    rates = study.rates(cell)
    best = max(rates, key=quality)
    runs = tuple(done[lane] for lane in study.lanes(cell) if lane.learning_rate == best)
    edge = len(rates) > 1 and best in (min(rates), max(rates))
    every = [done[lane]["validation"][study.metric] for lane in study.lanes(cell)]
    return Outcome(best, edge, runs, f"{sum(accuracy >= SOLVED for accuracy in every)}/{len(every)}")


def outcomes(study: Study, folder: pathlib.Path) -> dict[tuple[str, str], Outcome]:
    """All outcomes that are there, by (mixer's label, cell's name)."""
    found = {(m.label, c.name): choose(study, folder, m, c) for c in study.cells for m in study.mixers}
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


def table(study: Study, folder: pathlib.Path) -> str:
    """Markdown: mean and standard deviation over seeds of test accuracy, percent; then what it rests on.

    One table, or one for each cell and test where that would be too wide.
    """
    found = outcomes(study, folder)
    cells = [cell for cell in study.cells if any(name == cell.name for _, name in found)]
    if not cells:
        return "No results yet.\n"
    groups = panels(cells)
    wide = sum(len(group.tests) + group.last for group in groups) > MOST_COLUMNS
    parts = [[group] for group in groups] if wide else [groups]
    return "".join(f"{_part(study, found, part)}\n\n" for part in parts) + _foundation(study, cells, found)


def _part(study: Study, found: dict[tuple[str, str], Outcome], groups: list[Panel]) -> str:
    """A table with some of the columns."""
    head = ["mixer"]
    for group in groups:
        several = len(group.tests) > 1
        head += [f"{group.title}, T={length}" if several else group.title for length in group.tests]
        head += ["solved"] * group.last
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for mixer in study.mixers:
        row = [mixer.label]
        for group in groups:
            outcome = found.get((mixer.label, group.cell.name))
            row += ["" if outcome is None else _number(outcome, study, test) for test in group.tests.values()]
            if group.last:
                row.append("" if outcome is None else outcome.solved)
        if any(row[1:]):
            lines.append("| " + " | ".join(row) + " |")
    for name in dict.fromkeys(row[0] for row in study.paper):
        given = {(cell, length): value for row, cell, length, value in study.paper if row == name}
        values = []
        for group in groups:
            values += [given.get((group.paper, length)) for length in group.tests]
            values += [None] * group.last
        if any(value is not None for value in values):
            lines.append(f"| *{name}* | " + " | ".join("" if v is None else f"*{v:g}*" for v in values) + " |")
    return "\n".join(lines)


def _number(outcome: Outcome, study: Study, test: str) -> str:
    return f"{outcome.mean(study.metric, test):.1f} ± {outcome.spread(study.metric, test):.1f}"


def _foundation(study: Study, cells: list[Cell], found: dict[tuple[str, str], Outcome]) -> str:
    kind = "answer tokens" if study.metric == "token_accuracy" else "whole answers"
    environments = [run["environment"] for outcome in found.values() for run in outcome.runs]
    devices = ", ".join(sorted({e["device"] for e in environments}))
    versions = ", ".join(sorted({f"jax {e['packages']['jax']}, flax {e['packages']['flax']}" for e in environments}))
    dates = sorted({e["date"][:10] for e in environments})
    commits = ", ".join(sorted({e["commit"][:7] for e in environments}))
    lines = [
        f"Test accuracy of {kind}, percent: mean ± standard deviation over {len(study.seeds)} seeds, at the learning "
        f"rate with the best mean validation accuracy. Solved: runs of all rates and seeds with at least {SOLVED:.0%} "
        f"in validation. Rows in italics are the papers' numbers. Device: {devices}; {versions}; commit {commits}; "
        f"{' to '.join(dict.fromkeys((dates[0], dates[-1])))}.",
        "",
        "| cell | width, layers, heads | steps x batch | training set | rates tried | chosen (* at the grid's edge) |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for cell in cells:
        rates: dict[str, list[str]] = {}
        for mixer in study.mixers:
            outcome = found.get((mixer.label, cell.name))
            if outcome is not None:
                rates.setdefault(f"{outcome.learning_rate:g}{'*' * outcome.at_edge}", []).append(mixer.label)
        chosen = "; ".join(f"{rate}: {', '.join(labels)}" for rate, labels in rates.items())
        lines.append(
            f"| {cell.name} | {cell.width}, {cell.num_layers}, {cell.num_heads} | {cell.steps} x {cell.batch_size} | "
            f"{cell.train_examples} | {', '.join(f'{rate:g}' for rate in study.rates(cell))} | {chosen} |"
        )
    return "\n".join(lines) + "\n"


def figure(study: Study, folder: pathlib.Path, path: pathlib.Path) -> bool:
    """Draws the study's figure; False where there is nothing to draw."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    found = outcomes(study, folder)
    cells = [cell for cell in study.cells if any(name == cell.name for _, name in found)]
    if not cells:
        return False
    groups = panels(cells)
    # A mixer and the same with negative eigenvalues share a colour; the line of the one without is dashed.
    families = list(dict.fromkeys(m.label.removesuffix(_NEGATIVE) for m in study.mixers))
    palette = plt.get_cmap("tab10" if len(families) <= 10 else "tab20")
    colors = {m.label: palette(families.index(m.label.removesuffix(_NEGATIVE)) % palette.N) for m in study.mixers}
    markers = {m.label: "osD^vP*X<>h"[families.index(m.label.removesuffix(_NEGATIVE)) % 11] for m in study.mixers}
    chance = dict(study.chance)
    if study.figure == "axes":
        first_tests = {group.cell.name: next(iter(group.tests.values())) for group in reversed(groups)}
        drawn = [(a.name, {n: c for n, c in a.cells if c in first_tests}) for a in study.axes]
        drawn = [(name, line) for name, line in drawn if len(line) > 1] or drawn[:1]
        size = (4 * len(drawn) + 2.5, 4.6)
        drawing, axes = plt.subplots(1, len(drawn), figsize=size, squeeze=False, layout="constrained")
        shown = [m.label for m in study.mixers if any(label == m.label for label, _ in found)]
        for panel, (name, line) in zip(axes.flat, drawn):
            for i, label in enumerate(shown):
                aside = 2 ** (0.015 * (i - len(shown) / 2))  # or the error bars of one size hide each other
                here = [(n * aside, found[label, c], first_tests[c]) for n, c in line.items() if (label, c) in found]
                if here:
                    _line(panel, study, label, here, colors, markers)
            panel.set_xscale("log", base=2)
            panel.set_xticks(list(line), [str(size) for size in line])
            panel.set_xticks([], minor=True)
            panel.set_xlabel(name)
    else:
        across = min(len(groups), 3)
        down = -(-len(groups) // across)
        shown = [m.label for m in study.mixers if any((m.label, cell.name) in found for cell in cells)]
        height = 3.6 if study.figure == "lengths" else 1 + 0.26 * len(shown)
        size = (max(4.2 * across, 7.5), height * down)
        drawing, axes = plt.subplots(down, across, figsize=size, squeeze=False, layout="constrained")
        for panel, group in zip(axes.flat, groups):
            cell = group.cell
            rows = [(m.label, found[m.label, cell.name]) for m in study.mixers if (m.label, cell.name) in found]
            if study.figure == "lengths":
                for label, outcome in rows:
                    _line(panel, study, label, [(n, outcome, test) for n, test in group.tests.items()], colors, markers)
                panel.set_xscale("log", base=2)
                panel.set_xticks(list(group.tests), [str(n) for n in group.tests])
                panel.set_xticks([], minor=True)
                panel.set_xlabel(f"test length (trained at {cell.task.sequence_length})")
            else:
                _bars(panel, study, group, shown, dict(rows), colors)
            if cell.name in chance:
                line = panel.axhline if study.figure == "lengths" else panel.axvline
                line(chance[cell.name], color="grey", linestyle=":", linewidth=1)
            panel.set_title(group.title, fontsize=10)
        for panel in list(axes.flat)[len(groups) :]:
            panel.axis("off")
    if study.figure != "bars":
        for row in axes:
            row[0].set_ylabel("test accuracy, %")
        handles: dict[str, Any] = {}
        for panel in axes.flat:
            for handle, label in zip(*panel.get_legend_handles_labels()):
                handles.setdefault(label, handle)
        drawing.legend(handles.values(), handles.keys(), loc="outside right center", fontsize=8, frameon=False)
    drawing.suptitle(study.title, fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    # No date or version inside, so that a rebuilt figure is the same file.
    drawing.savefig(path, dpi=130, metadata={"Software": None})
    plt.close(drawing)
    return True


def _line(panel: Any, study: Study, label: str, points: list[Any], colors: Any, markers: Any) -> None:
    xs, means, spreads = [], [], []
    for x, outcome, test in points:
        xs.append(x)
        means.append(outcome.mean(study.metric, test))
        spreads.append(outcome.spread(study.metric, test))
    low = [min(spread, mean) for mean, spread in zip(means, spreads)]
    high = [min(spread, 100 - mean) for mean, spread in zip(means, spreads)]
    paired = any(other.label == label + _NEGATIVE for other in study.mixers)
    panel.errorbar(
        xs,
        means,
        (low, high),
        label=label,
        color=colors[label],
        marker=markers[label],
        linestyle="--" if paired else "-",
        markersize=4,
        linewidth=1.2,
        capsize=2,
    )
    panel.set_ylim(-3, 103)
    panel.grid(alpha=0.3)


def _bars(panel: Any, study: Study, group: Panel, labels: list[str], rows: dict[str, Outcome], colors: Any) -> None:
    length, test = list(group.tests.items())[-1]
    for i, label in enumerate(labels):
        if label not in rows:
            panel.text(1, i, "not run", va="center", fontsize=7, color="grey")
            continue
        values = rows[label].values(study.metric, test)
        panel.barh(i, rows[label].mean(study.metric, test), color=colors[label], alpha=0.7)
        panel.plot(values, [i] * len(values), "o", color="black", markersize=3, clip_on=False)
    panel.set_yticks(range(len(labels)), labels, fontsize=8)
    panel.set_ylim(len(labels) - 0.4, -0.6)
    panel.set_xlim(0, 103)
    panel.set_xlabel(f"test accuracy at T={length}, %: mean, and a dot for each seed", fontsize=8)
    panel.grid(alpha=0.3, axis="x")


def write_report(study: Study, folder: pathlib.Path, results: pathlib.Path, *, readme: bool) -> str:
    """Writes a study's figure and, between the marks in its README, its table.

    Args:
        study: the study.
        folder: of the study: the figure goes under it.
        results: folder of the result files.
        readme: whether to update README.md.

    Returns:
        The table.
    """
    text = table(study, results)
    figure(study, results, folder / "figures" / f"{results.name}.png")
    page = folder / "README.md"
    if readme and page.exists():
        content = page.read_text()
        begin, end = marks(results.name)
        if begin in content and end in content:
            before, rest = content.split(begin, 1)
            write_text(page, f"{before}{begin}\n{text}{end}{rest.split(end, 1)[1]}")
    return text

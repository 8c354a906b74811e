"""A study's page: tables of its results, Markdown, and the figure beside them."""

import pathlib

from experiments.harness.page import write_between_marks
from experiments.sweep.outcomes import SOLVED, Outcome, Panel, outcomes, panels
from experiments.sweep.pictures import figure
from experiments.sweep.study import Cell, Study

MOST_COLUMNS = 15  # of results, in one table


def table(study: Study, path: pathlib.Path) -> str:
    """Markdown: mean and standard deviation over seeds of test accuracy, percent; then what it rests on.

    One table, or one for each cell and test where that would be too wide. One seed has no deviation, and none is shown.
    """
    found = outcomes(study, path)
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
    mean = f"{outcome.mean(study.metric, test):.1f}"
    return mean if len(outcome.runs) == 1 else f"{mean} ± {outcome.spread(study.metric, test):.1f}"


def _foundation(study: Study, cells: list[Cell], found: dict[tuple[str, str], Outcome]) -> str:
    kind = "answer tokens" if study.metric == "token_accuracy" else "whole answers"
    count = len(study.seeds)
    numbers = "one seed" if count == 1 else f"mean ± standard deviation over {count} seeds"
    environments = [run["environment"] for outcome in found.values() for run in outcome.runs]
    devices = ", ".join(sorted({e["device"] for e in environments}))
    versions = ", ".join(sorted({f"jax {e['packages']['jax']}, flax {e['packages']['flax']}" for e in environments}))
    dates = sorted({e["date"][:10] for e in environments})
    commits = ", ".join(sorted({e["commit"][:7] for e in environments}))
    lines = [
        f"Test accuracy of {kind}, percent: {numbers}, at the learning rate "
        f"with the best mean validation accuracy. Solved: runs of all rates and seeds with at least {SOLVED:.0%} "
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


def write_report(study: Study, folder: pathlib.Path, results: pathlib.Path, *, readme: bool) -> str:
    """Writes a study's figure and, between the marks in its README, its table.

    Args:
        study: the study.
        folder: of the study: the figure goes under it.
        results: the table of results.
        readme: whether to update README.md.

    Returns:
        The table.
    """
    text = table(study, results)
    figure(study, results, folder / "figures" / f"{results.stem}.png")
    if readme:
        write_between_marks(folder / "README.md", results.stem, text)
    return text

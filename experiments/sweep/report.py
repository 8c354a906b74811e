"""A study's page: tables of its results, Markdown, and the figure beside them."""

import pathlib

from experiments.harness.page import made_with, markdown_table, write_between_marks
from experiments.sweep.outcomes import BIMODAL, MOST_TOLD, SOLVED, Outcome, Panel, outcomes, panels
from experiments.sweep.pictures import figure
from experiments.sweep.study import Cell, Study

MOST_COLUMNS = 15  # of results, in one table


def table(study: Study, path: pathlib.Path) -> str:
    """Markdown: test accuracy over seeds, percent; then what it rests on.

    One table, or one for each cell and test where that would be too wide.
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
        head += ["solved; at all rates"] * group.last
    rows = []
    for mixer in study.mixers:
        row = [mixer.label]
        for group in groups:
            outcome = found.get((mixer.label, group.cell.name))
            row += ["" if outcome is None else outcome.told(study.metric, test) for test in group.tests.values()]
            if group.last:
                row.append("" if outcome is None else "{}/{}; {}/{}".format(*outcome.solved, *outcome.tried))
        if any(row[1:]):
            rows.append(row)
    for name in dict.fromkeys(told[0] for told in study.paper):
        given = {(cell, length): value for row, cell, length, value in study.paper if row == name}
        values = []
        for group in groups:
            values += [given.get((group.paper, length)) for length in group.tests]
            values += [None] * group.last
        if any(value is not None for value in values):
            rows.append([f"*{name}*", *("" if v is None else f"*{v:g}*" for v in values)])
    return "\n".join(markdown_table(head, rows))


def _foundation(study: Study, cells: list[Cell], found: dict[tuple[str, str], Outcome]) -> str:
    kind = "answer tokens" if study.metric == "token_accuracy" else "whole answers"
    count = len(study.report_seeds or study.seeds)
    apart = "each of them" if count <= MOST_TOLD else "median and ends"
    numbers = "one seed" if count == 1 else f"mean ± standard deviation of {count} seeds, or {apart} where they lie "
    numbers += "" if count == 1 else f"more than {BIMODAL:.0f} apart"
    others = "seeds that are not reported" if study.report_seeds else "the other seeds"
    chooser = f"{others} have" if study.report_seeds or count > 1 else "it has"
    runs = [run for outcome in found.values() for run in outcome.runs]
    lines = [
        f"Test accuracy of {kind}, percent: {numbers}; a seed's learning rate is the one that {chooser} the best "
        f"mean validation accuracy at. Solved: reported seeds with at least {SOLVED:.0%} in the test at the trained "
        f"length; then runs of all rates and seeds with as much in validation. Italics are the papers' numbers. "
        f"{made_with(runs)}.",
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

"""A study's figure: every seed over test lengths as lines, over sizes as tiles, or as bars."""

import dataclasses
import itertools
import pathlib
import statistics
from typing import Any

import numpy as np

from experiments.harness.pictures import pyplot, save
from experiments.sweep.outcomes import Outcome, Panel, outcomes, panels
from experiments.sweep.study import Study

_NEGATIVE = " [-1, 1]"
_MARKERS = "osD^vP*X<>h"
_BAR = "#9ecae1"


@dataclasses.dataclass(frozen=True)
class _Picture:
    """What is drawn, and how.

    Attributes:
        study: the study.
        found: outcomes by mixer's label and cell's name.
        groups: tests of the cells that have results.
        labels: mixers that have results.
        colors: a mixer's; the same with negative eigenvalues shares it.
        markers: likewise.
    """

    study: Study
    found: dict[tuple[str, str], Outcome]
    groups: list[Panel]
    labels: list[str]
    colors: dict[str, Any]
    markers: dict[str, str]

    @classmethod
    def of(cls, study: Study, results: pathlib.Path) -> "_Picture":
        """Of the results in a table."""
        found = outcomes(study, results)
        groups = panels([cell for cell in study.cells if any(name == cell.name for _, name in found)])
        labels = [mixer.label for mixer in study.mixers if any(label == mixer.label for label, _ in found)]
        families = list(dict.fromkeys(mixer.label.removesuffix(_NEGATIVE) for mixer in study.mixers))
        palette = pyplot().get_cmap("tab10" if len(families) <= 10 else "tab20")
        place = {mixer.label: families.index(mixer.label.removesuffix(_NEGATIVE)) for mixer in study.mixers}
        colors = {label: palette(i % palette.N) for label, i in place.items()}
        markers = {label: _MARKERS[i % len(_MARKERS)] for label, i in place.items()}
        return cls(study, found, groups, labels, colors, markers)

    def over_sizes(self) -> Any:
        """Accuracy as tiles, a row for each mixer: a panel for each axis of which two sizes have results.

        Where most mixers are near 100 or near 0 %, lines would hide each other.
        """
        tests = {group.cell.name: next(iter(group.tests.values())) for group in reversed(self.groups)}
        axes = [(axis.name, {size: cell for size, cell in axis.cells if cell in tests}) for axis in self.study.axes]
        axes = [(name, cells) for name, cells in axes if len(cells) > 1] or axes[:1]
        widths = [len(cells) for _, cells in axes]
        size = (1.6 + 0.8 * sum(widths), 1.6 + 0.26 * len(self.labels))
        drawing, panel_row = pyplot().subplots(
            1, len(axes), figsize=size, squeeze=False, layout="constrained", sharey=True, width_ratios=widths
        )
        for panel, (name, cells) in zip(panel_row.flat, axes):
            medians = np.full((len(self.labels), len(cells)), np.nan)
            for (row, label), (column, cell) in itertools.product(enumerate(self.labels), enumerate(cells.values())):
                outcome = self.found.get((label, cell))
                if outcome is None:
                    panel.text(column, row, "not run", ha="center", va="center", fontsize=6, color="grey")
                    continue
                middle = statistics.median(outcome.values(self.study.metric, tests[cell]))
                medians[row, column] = middle
                solved, of = outcome.solved
                text = f"{middle:.0f}" + (f"  ({solved}/{of})" if 0 < solved < of else "")
                color = "white" if middle < 60 else "black"
                panel.text(column, row, text, ha="center", va="center", fontsize=7, color=color)
            image = panel.imshow(medians, cmap="viridis", vmin=0, vmax=100, aspect="auto")
            panel.set_xticks(range(len(cells)), [str(size) for size in cells], fontsize=8)
            panel.set_yticks(range(len(self.labels)), self.labels, fontsize=8)
            panel.tick_params(length=0)
            panel.set_xlabel(name, fontsize=9)
        drawing.colorbar(image, ax=panel_row, label="test accuracy, %: median of seeds (solved, where not all or none)")
        return drawing

    def over_lengths(self) -> Any:
        """Accuracy over test lengths, a panel for each cell and test."""
        drawing, panel_rows = self._panels(3.6)
        for panel, group in zip(panel_rows.flat, self.groups):
            for label, outcome in self._outcomes(group).items():
                self._line(panel, label, outcome, group.tests)
            self._ticks(panel, list(group.tests), f"test length (trained at {group.cell.task.sequence_length})")
            self._chance(group, panel.axhline)
        self._legend(drawing, panel_rows)
        return drawing

    def bars(self) -> Any:
        """Accuracy at the longest test, a panel for each cell and test: each seed as a dot, the median as a bar."""
        drawing, panel_rows = self._panels(0.9 + 0.24 * len(self.labels), sharey=True)
        for panel, group in zip(panel_rows.flat, self.groups):
            length, test = list(group.tests.items())[-1]
            rows = self._outcomes(group)
            for i, label in enumerate(self.labels):
                if label not in rows:
                    panel.text(1, i, "not run", va="center", fontsize=7, color="grey")
                    continue
                values = rows[label].values(self.study.metric, test)
                panel.barh(i, statistics.median(values), color=_BAR)
                panel.plot(values, [i] * len(values), "o", color="black", markersize=3, clip_on=False)
            panel.set_yticks(range(len(self.labels)), self.labels, fontsize=8)
            panel.set_ylim(len(self.labels) - 0.4, -0.6)
            panel.set_xlim(0, 103)
            panel.set_xlabel(f"test at T={length}", fontsize=8)
            panel.grid(alpha=0.3, axis="x")
            self._chance(group, panel.axvline)
        drawing.supxlabel("test accuracy, %: a dot for each seed, a bar to the median", fontsize=9)
        return drawing

    def _panels(self, height: float, **options: Any) -> tuple[Any, Any]:
        """A panel for each cell and test, three in a row."""
        across = min(len(self.groups), 3)
        down = -(-len(self.groups) // across)
        size = (max(4.2 * across, 7.5), height * down)
        drawing, panel_rows = pyplot().subplots(
            down, across, figsize=size, squeeze=False, layout="constrained", **options
        )
        for panel, group in zip(panel_rows.flat, self.groups):
            panel.set_title(group.title, fontsize=10)
        for panel in list(panel_rows.flat)[len(self.groups) :]:
            panel.axis("off")
        return drawing, panel_rows

    def _outcomes(self, group: Panel) -> dict[str, Outcome]:
        """The mixers that were run in a panel's cell."""
        keys = {label: (label, group.cell.name) for label in self.labels}
        return {label: self.found[key] for label, key in keys.items() if key in self.found}

    def _line(self, panel: Any, label: str, outcome: Outcome, tests: dict[int, str]) -> None:
        """A mixer's seeds over the lengths of tests, thin, and their median."""
        seeds = np.array([outcome.values(self.study.metric, test) for test in tests.values()])
        paired = any(other.label == label + _NEGATIVE for other in self.study.mixers)
        style: dict[str, Any] = {"color": self.colors[label], "linestyle": "--" if paired else "-"}
        panel.plot(list(tests), seeds, linewidth=0.6, alpha=0.6, **style)
        middle = np.median(seeds, axis=1)
        panel.plot(list(tests), middle, label=label, marker=self.markers[label], markersize=4, linewidth=1.4, **style)
        panel.set_ylim(-3, 103)
        panel.grid(alpha=0.3)

    def _ticks(self, panel: Any, sizes: list[int], name: str) -> None:
        """A logarithmic axis with these sizes alone."""
        panel.set_xscale("log", base=2)
        panel.set_xticks(sizes, [str(size) for size in sizes])
        panel.set_xticks([], minor=True)
        panel.set_xlabel(name)

    def _chance(self, group: Panel, line: Any) -> None:
        """What guessing gives, where the study says."""
        chance = dict(self.study.chance)
        if group.cell.name in chance:
            line(chance[group.cell.name], color="grey", linestyle=":", linewidth=1)

    def _legend(self, drawing: Any, panel_rows: Any) -> None:
        """One for all panels, of lines."""
        for row in panel_rows:
            row[0].set_ylabel("test accuracy, %")
        handles: dict[str, Any] = {}
        for panel in panel_rows.flat:
            for handle, label in zip(*panel.get_legend_handles_labels()):
                handles.setdefault(label, handle)
        drawing.legend(handles.values(), handles.keys(), loc="outside right center", fontsize=8, frameon=False)


def figure(study: Study, results: pathlib.Path, path: pathlib.Path) -> bool:
    """Draws the study's figure of the results in a table; False where there is nothing to draw."""
    picture = _Picture.of(study, results)
    if not picture.groups:
        return False
    kinds = {"axes": picture.over_sizes, "lengths": picture.over_lengths, "bars": picture.bars}
    drawing = kinds[study.figure]()
    drawing.suptitle(study.title, fontsize=11)
    save(drawing, path)
    return True

"""Losses in float8 less those in bfloat16, seed by seed, beside the spread of bfloat16's seeds."""

import dataclasses
import math
import pathlib
import statistics

import numpy as np

from experiments.float8.study import FLOAT8
from experiments.harness.page import made_with, markdown_table, write_between_marks
from experiments.harness.pictures import pyplot, save
from experiments.harness.tables import Row
from experiments.harness.verdicts import Verdict
from experiments.language_modelling.runs import read_run
from experiments.language_modelling.study import LanguageStudy

COLORS = ("#d55e00", "#cc79a7", "#e69f00")
WINDOWS = 20
"""Parts of a run whose training losses are averaged in the picture."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """A model's answer to the plan's question.

    Attributes:
        label: of the model in bfloat16.
        differences: float8's held-out loss less bfloat16's, bits per byte, by each seed that has both.
        spread: the largest less the smallest held-out loss of bfloat16's seeds.
        skipped: steps of float8's runs whose loss or gradient was not finite.
    """

    label: str
    differences: tuple[float, ...]
    spread: float
    skipped: int = 0

    @property
    def verdict(self) -> Verdict:
        """Refuted by a mean difference above the spread, or by a loss that is not finite."""
        inside = not self.skipped and statistics.fmean(self.differences) <= self.spread
        return Verdict.AGREES if inside else Verdict.DISAGREES

    @property
    def told(self) -> str:
        """The mean difference and the spread, in words."""
        mean = statistics.fmean(self.differences)
        return f"{mean:+.4f} bits per byte over {len(self.differences)} seeds, bfloat16's are {self.spread:.4f} apart"


def runs_of(plan: LanguageStudy, results: pathlib.Path) -> dict[str, dict[int, Row]]:
    """The finished runs by label and seed."""
    found: dict[str, dict[int, Row]] = {mixer.label: {} for mixer in plan.mixers}
    for mixer, rate, seed in plan.runs:
        if (row := read_run(plan, results, mixer, rate, seed)) is not None:
            found[mixer.label][seed] = row
    return found


def held_out(row: Row) -> float:
    """Bits per byte of the held-out text at the trained length."""
    return next(iter(row["test"].values()))["bits_per_byte"]


def answers(runs: dict[str, dict[int, Row]]) -> list[Answer]:
    """For each model with two seeds in bfloat16 and one in float8, or more."""
    found = []
    for label, plain in runs.items():
        lower = runs.get(label + FLOAT8, {})
        seeds = sorted(set(plain) & set(lower))
        if len(plain) > 1 and seeds:
            losses = [held_out(row) for row in plain.values()]
            differences = tuple(held_out(lower[seed]) - held_out(plain[seed]) for seed in seeds)
            skipped = sum(row["skipped"] for row in lower.values())
            found.append(Answer(label, differences, max(losses) - min(losses), skipped))
    return found


def table(runs: dict[str, dict[int, Row]]) -> str:
    """Markdown: every run, then the answers."""
    rows = [
        [
            label,
            str(seed),
            f"{held_out(row):.4f}",
            f"{statistics.fmean(loss for _, loss in row['train_loss'][-len(row['train_loss']) // 10 :]):.4f}",
            str(row["skipped"]),
            f"{row['median_tokens_per_second'] or math.nan:,.0f}",
        ]
        for label, own in runs.items()
        for seed, row in own.items()
    ]
    if not rows:
        return "No results yet.\n"
    header = ["model", "seed", "held out, bits per byte", "training loss, nats", "not finite", "tokens/s"]
    lines = markdown_table(header, rows)
    if found := answers(runs):
        header = ["model", "float8 less bfloat16, by seed", "mean", "spread of bfloat16's seeds", "within it"]
        lines += ["", *markdown_table(header, map(_answer, found))]
    every = [row for own in runs.values() for row in own.values()]
    lines += [
        "",
        f"{every[0]['steps']} steps of {every[0]['train_tokens'] // every[0]['steps']:,} tokens, "
        f"{every[0]['num_parameters'] / 1e6:.1f}M parameters; training loss: mean of the last tenth. "
        f"{made_with(every)}.",
    ]
    return "\n".join(lines) + "\n"


def _answer(answer: Answer) -> list[str]:
    *shown, mean = (f"{value:+.4f}" for value in (*answer.differences, statistics.fmean(answer.differences)))
    return [answer.label, ", ".join(shown), mean, f"{answer.spread:.4f}", answer.verdict.value]


def _windows(row: Row) -> tuple[np.ndarray, np.ndarray]:
    steps, losses = np.asarray(row["train_loss"]).T
    parts = [np.array_split(values, min(WINDOWS, len(values))) for values in (steps, losses)]
    return tuple(np.array([part.mean() for part in own]) for own in parts)  # type: ignore[return-value]


def figure(runs: dict[str, dict[int, Row]], path: pathlib.Path) -> None:
    """A panel a model: windows of training losses less bfloat16's of the same seed, beside bfloat16's other seeds."""
    labels = [answer.label for answer in answers(runs)]
    drawing, panels = pyplot().subplots(
        1, len(labels), figsize=(6.4 * len(labels), 4.0), sharey=True, squeeze=False, layout="constrained"
    )
    for panel, label in zip(panels[0], labels):
        plain, lower = runs[label], runs[label + FLOAT8]
        first = min(plain)
        for seed, row in plain.items():
            if seed != first:
                places, losses = _windows(row)
                name = f"bfloat16, seed {seed} less seed {first}"
                panel.plot(places, losses - _windows(plain[first])[1], "o-", color="0.6", markersize=3, label=name)
        for color, seed in zip(COLORS, sorted(set(plain) & set(lower))):
            places, losses = _windows(lower[seed])
            name = f"float8 less bfloat16, seed {seed}"
            panel.plot(places, losses - _windows(plain[seed])[1], "o-", color=color, markersize=3, label=name)
        panel.axhline(0, color="0.3", linewidth=0.8)
        panel.set(title=label, xlabel="step")
        panel.legend(frameon=False, fontsize=8)
    panels[0, 0].set_ylabel("difference of training losses, nats a token")
    save(drawing, path)


def write(plan: LanguageStudy, results: pathlib.Path, folder: pathlib.Path, *, page: bool) -> str:
    """Writes the figure and, on the page, the tables; returns them."""
    runs = runs_of(plan, results)
    if answers(runs):
        figure(runs, folder / "figures" / f"{results.stem}.png")
    text = table(runs)
    if page:
        write_between_marks(folder / "README.md", results.stem, text)
    return text

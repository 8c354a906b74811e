"""The language models' tables, and at which step a loss or a gradient was not finite."""

import pathlib

from experiments.harness.page import markdown_table, write_between_marks
from experiments.harness.tables import Row
from experiments.harness.verdicts import Verdict
from experiments.language_modelling.report import write as write_models
from experiments.language_modelling.runs import read_run
from experiments.language_modelling.study import LanguageStudy
from experiments.mesanet_stability.study import ONE, TWO


def broken(runs: dict[tuple[str, float], Row]) -> dict[str, list[int | None]]:
    """By label, the first step of each rate's run whose loss or gradient was not finite; None where all were."""
    found: dict[str, list[int | None]] = {}
    for (label, _), run in runs.items():
        found.setdefault(label, []).append(run["first_skipped"])
    return found


def verdicts(runs: dict[tuple[str, float], Row]) -> list[tuple[str, Verdict]]:
    """The answers to PLAN.md's two halves, of labels that were run."""
    steps, answers = broken(runs), []
    if ONE in steps:
        breaks = any(step is not None for step in steps[ONE])
        answers.append(("with one part it breaks off", Verdict.AGREES if breaks else Verdict.DISAGREES))
    if TWO in steps:
        breaks = any(step is not None for step in steps[TWO])
        answers.append(("with two parts it does not", Verdict.DISAGREES if breaks else Verdict.AGREES))
    return answers


def write(plan: LanguageStudy, results: pathlib.Path, folder: pathlib.Path, *, page: bool) -> str:
    """Writes the figure and, on the page, the tables; returns those of the models."""
    text = write_models(plan, results, folder, page=page)
    read = {(mixer.label, rate): read_run(plan, results, mixer, rate, seed) for mixer, rate, seed in plan.runs}
    runs = {key: row for key, row in read.items() if row is not None}
    if page and runs:
        rows = [
            [label, f"{rate:g}", str(run["steps"]), str(run["skipped"]), str(run["first_skipped"] or "none")]
            for (label, rate), run in runs.items()
        ]
        lines = markdown_table(["mixer", "rate", "steps", "not finite", "the first of them"], rows)
        lines += ["", *(f"- {says}: {verdict.value}" for says, verdict in verdicts(runs))]
        write_between_marks(folder / "README.md", f"{results.stem}_steps", "\n".join(lines) + "\n")
    return text

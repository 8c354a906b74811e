"""Tables and the picture are those of the language models; needles that they find stand beside."""

import pathlib

from experiments.harness.page import write_between_marks
from experiments.language_modelling.needles import needles_table
from experiments.language_modelling.report import chosen
from experiments.language_modelling.report import write as write_models
from experiments.language_modelling.study import LanguageStudy

ERASING, ADDITIVE = ("KLA", "KLA, long keys", "Gated DeltaNet"), ("Mamba-2",)


def write(plan: LanguageStudy, results: pathlib.Path, folder: pathlib.Path, *, page: bool) -> str:
    """Writes the figure and, on the page, the tables; returns those of the models."""
    text = write_models(plan, results, folder, page=page)
    if page and results.stem == "real":
        found = needles_table(chosen(plan, results), ERASING, ADDITIVE, plan.train.data.sequence_length)
        write_between_marks(folder / "README.md", "needles", found)
    return text

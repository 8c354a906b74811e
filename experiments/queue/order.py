"""Which study's runs come first."""

import dataclasses
import pathlib
from collections.abc import Callable, Sequence

from experiments.beside_fla.command import jobs as curve_jobs
from experiments.harness.jobs import Job
from experiments.language_modelling.command import jobs as language_jobs
from experiments.sweep.command import jobs as sweep_jobs

Jobs = Callable[[str, str, Sequence[pathlib.Path]], list[Job]]


@dataclasses.dataclass(frozen=True)
class Entry:
    """A study at a setting.

    Attributes:
        study: folder under `experiments`.
        setting: of the study.
        jobs: what is left of it, from the folders of studies that hold results.
        why: what it decides.
        run: its number among the ten runs of the audit that the studies were planned by.
    """

    study: str
    setting: str
    jobs: Jobs
    why: str
    run: int | None = None

    @property
    def name(self) -> str:
        """As it is asked for."""
        return f"{self.study}/{self.setting}"


ORDER = (
    Entry(
        "long_context", "real", language_jobs, "do models use what is further back than they were trained to?", run=1
    ),
    Entry(
        "recall", "real", sweep_jobs, "which rule learns recall, how often, at a rate that other seeds chose?", run=2
    ),
    Entry("float8", "short", language_jobs, "do float8 matmuls cost loss, beside what seeds differ by?"),
    Entry(
        "axes", "real", language_jobs, "what do decay and solve each do, when nothing else in the layer differs?", run=3
    ),
    Entry(
        "beside_fla", "short", curve_jobs, "does a model follow flash-linear-attention's from the same weights?", run=5
    ),
    Entry(
        "rates", "real", language_jobs, "where is each mixer's learning rate, and how far apart are two seeds?", run=4
    ),
    Entry("ablations", "real", sweep_jobs, "what do maps and norms of keys, ranges and norms of preconditioners do?"),
    Entry("float8", "real", language_jobs, "the same with four times the tokens, and for attention"),
    Entry(
        "kla_pretraining", "rates", language_jobs, "which rates do 0.4B models take? Then kla_pretraining/real", run=7
    ),
    Entry("scaling", "25m", language_jobs, "do mixers of equal parameters, and of equal state, differ?", run=6),
    Entry("scaling", "60m", language_jobs, "the same at twice the size", run=6),
    Entry("scaling", "135m", language_jobs, "the same at five times the size", run=6),
    Entry("mesanet_stability", "real", language_jobs, "does MesaNet's training break off?", run=9),
)
"""From first to last."""

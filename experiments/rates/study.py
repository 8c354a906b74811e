"""Eight mixers at five learning rates. PLAN.md says why, and what would refute what."""

from typing import Literal

from experiments.harness.study import Mixer, pick
from experiments.language_modelling.study import LanguageStudy
from experiments.language_modelling.study import study as language_study
from rnnlib.layers import ConvolutionConfig

RatesSetting = Literal["small", "real"]
SETTINGS: tuple[RatesSetting, ...] = ("small", "real")
LABELS = ("Transformer++", "DeltaNet", "Gated DeltaNet", "KLA", "KDA", "PGDN", "Gated DeltaNet-2")
# What recurrences with a convolution are to be compared with.
ATTENTION = Mixer.of("Transformer++, convolution", "attention", convolution=ConvolutionConfig())
RATES = (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2)


def study(setting: RatesSetting) -> LanguageStudy:
    """The study at a setting: "real" has models of width 384 and 105M tokens a run."""
    base = language_study("small" if setting == "small" else "real")
    if setting == "small":
        return LanguageStudy.of(base, name="rates")
    mixers = (*pick(base.mixers, LABELS), ATTENTION)
    return LanguageStudy.of(base, name="rates", mixers=mixers, learning_rates=RATES, seeds=(0, 1), seconds=120.0)

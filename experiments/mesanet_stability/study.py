"""MesaNet with its products in one part or two. PLAN.md says why, and what would refute what."""

import dataclasses
from typing import Literal

from experiments.harness.study import Mixer
from experiments.language_modelling.study import LanguageStudy
from experiments.language_modelling.study import study as language_study

StabilitySetting = Literal["small", "real"]
SETTINGS: tuple[StabilitySetting, ...] = ("small", "real")
ONE, TWO = "MesaNet, one part", "MesaNet, two parts"
MIXERS = (Mixer.of(ONE, "mesanet", **{"solve.product_dtype": "bfloat16"}), Mixer.of(TWO, "mesanet"))
STEPS = 8000


def study(setting: StabilitySetting) -> LanguageStudy:
    """The study at a setting: "real" has models of width 768 and 8000 steps; steps that are not finite are counted."""
    base = language_study("small" if setting == "small" else "large")
    steps = base.train.steps if setting == "small" else STEPS
    train = dataclasses.replace(base.train, steps=steps, max_skipped_steps=steps)
    study = LanguageStudy.of(base, name="mesanet_stability", mixers=MIXERS, train=train)
    return study if setting == "small" else LanguageStudy.of(study, learning_rates=(1e-3, 2e-3), seconds=1650.0)

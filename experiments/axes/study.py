"""Which combinations of decay and solve are trained. PLAN.md says why, and what would refute what."""

from typing import Literal

from experiments.harness.study import Mixer
from experiments.language_modelling.study import LanguageStudy
from experiments.language_modelling.study import study as language_study
from rnnlib.layers import LinearAttention, NoDecay, RidgeRegression, SoftplusDecay

AxesSetting = Literal["small", "real"]
SETTINGS: tuple[AxesSetting, ...] = ("small", "real")
RATES = (1e-3, 2e-3, 4e-3, 8e-3)


def combinations() -> tuple[Mixer, ...]:
    """DeltaNet's layer (convolution, unit keys, no output gate) with every decay under every solve."""
    decays = {
        "no decay": NoDecay(),
        "decay by head": SoftplusDecay(),
        "decay by channel": SoftplusDecay(channelwise=True),
    }
    found = []
    for name, decay in decays.items():
        found.append(Mixer.of(f"additive, {name}", "deltanet", decay=decay, solve=LinearAttention()))
        found.append(Mixer.of(f"delta rule, {name}", "deltanet", decay=decay))
        found.append(Mixer.of(f"delta rule + ATK, {name}", "pdn", decay=decay))
        if name != "decay by channel":  # the ridge solve has one decay a head
            found.append(Mixer.of(f"ridge, {name}", "deltanet", decay=decay, solve=RidgeRegression()))
    return tuple(found)


def study(setting: AxesSetting) -> LanguageStudy:
    """The study at a setting: "real" has models of width 384 and 105M tokens a run."""
    base = language_study("small" if setting == "small" else "real")
    study = LanguageStudy.of(base, name="axes", mixers=combinations())
    if setting == "small":
        return LanguageStudy.of(study, mixers=study.mixers[:2])
    return LanguageStudy.of(study, learning_rates=RATES, seeds=(0,), report_seeds=(1, 2, 3, 4), seconds=120.0)

"""KLA, Gated DeltaNet and Mamba-2 at the size of KLA's table 1. PLAN.md says why, and what would refute what."""

import dataclasses
from typing import Literal

from experiments.harness.study import Mixer
from experiments.harness.tables import table_path
from experiments.language_modelling.needles import NeedleTests, SeveralTests
from experiments.language_modelling.runs import best_rate
from experiments.language_modelling.study import LanguageStudy, Tests
from experiments.language_modelling.study import study as language_study
from rnnlib.data import DataConfig, Tokenizer
from rnnlib.layers import ConvolutionConfig, Initializer
from rnnlib.models import model_preset

PretrainingSetting = Literal["small", "rates", "real"]
SETTINGS: tuple[PretrainingSetting, ...] = ("small", "rates", "real")
# PyTorch's start of a filter, from which keys are as long as the paper's.
LONG_KEYS = ConvolutionConfig(initializer=Initializer("fan_in_uniform", 1.0))
MIXERS = (
    Mixer.of("Gated DeltaNet", "gated_deltanet"),
    Mixer.of("KLA", "kla"),
    Mixer.of("KLA, long keys", "kla", convolution=LONG_KEYS),
    Mixer.of("Mamba-2", "mamba2"),
)


@dataclasses.dataclass(frozen=True)
class PretrainingStudy(LanguageStudy):
    """Language models each at the rate that shorter runs chose.

    Attributes:
        chosen: learning rate of each mixer, by its label; a mixer without one waits.
    """

    name: str = "kla_pretraining"
    chosen: tuple[tuple[str, float], ...] = ()

    @property
    def runs(self) -> list[tuple[Mixer, float, int]]:
        """Each mixer at its own rate."""
        return [run for run in super().runs if run[1] == dict(self.chosen).get(run[0].label)]

    def tests(self, text: DataConfig, tokenizer: Tokenizer) -> Tests:
        """Bits per byte, and needles that the model was not taught to find (`experiments/s_niah/PLAN.md`)."""
        return SeveralTests((super().tests(text, tokenizer), NeedleTests(text.tokenizer)))


def study(setting: PretrainingSetting) -> LanguageStudy:
    """The study at a setting: "real" has 24 layers of width 1024 and 1B tokens; "rates", a tenth, chooses its rates."""
    base = language_study("small" if setting == "small" else "large")
    if setting == "small":
        return LanguageStudy.of(base, name="kla_pretraining", mixers=MIXERS[:2])
    size = {"width": 1024, "num_layers": 24, "num_heads": 8, "initializer_std": 0.03, "remat": True}
    train = base.train
    model = model_preset("340m").replace(vocabulary_size=train.model.vocabulary_size, mixer_overrides={}, **size)
    tokens = train.data.sequence_length * train.data.batch_size
    steps = round((0.1e9 if setting == "rates" else 1e9) / tokens)
    train = dataclasses.replace(train, model=model, steps=steps)
    base = LanguageStudy.of(base, name="kla_pretraining", mixers=MIXERS, train=train, learning_rates=(1e-3, 2e-3))
    if setting == "rates":
        return LanguageStudy.of(base, seconds=1100.0)
    choosing = study("rates")
    rates = {mixer.label: best_rate(choosing, [table_path("kla_pretraining", "rates")], mixer) for mixer in MIXERS}
    chosen = tuple((label, rate) for label, rate in rates.items() if rate is not None)
    return PretrainingStudy.of(base, seeds=(1,), seconds=11_000.0, chosen=chosen)

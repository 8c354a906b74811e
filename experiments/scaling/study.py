"""Which models are trained at which size. PLAN.md says why, and what would refute what."""

import dataclasses
import functools
import pathlib
from typing import Any, Literal

from experiments.harness.study import Mixer
from experiments.language_modelling.needles import NeedleTests, SeveralTests
from experiments.language_modelling.state import state_numbers
from experiments.language_modelling.study import RATES, LanguageStudy, Tests, model_config
from experiments.language_modelling.study import study as language_study
from experiments.long_context.text import LongText, write_long_text
from experiments.scaling.matching import match_parameters, match_state, parameters
from rnnlib.data import DataConfig, Tokenizer
from rnnlib.layers import ConvolutionConfig
from rnnlib.models import ModelConfig

ScalingSetting = Literal["small", "25m", "60m", "135m"]
SETTINGS: tuple[ScalingSetting, ...] = ("small", "25m", "60m", "135m")
SIZES: tuple[ScalingSetting, ...] = ("25m", "60m", "135m")
BASELINE = Mixer.of("Transformer++, convolution", "attention", convolution=ConvolutionConfig())
GATED_DELTANET = Mixer.of("Gated DeltaNet", "gated_deltanet")
SMALLER_STATE = "Gated KalmaNet, state of Gated DeltaNet"
MIXERS = (
    BASELINE,
    GATED_DELTANET,
    Mixer.of("KDA", "kda"),
    Mixer.of("Gated KalmaNet", "gated_kalmanet"),
    Mixer.of(SMALLER_STATE, "gated_kalmanet"),
)
REGISTER = pathlib.Path("runs/second_register")
"""Where `python -m experiments.second_register` puts its text."""
PYTHON = LongText(min_bytes=100_000)


@dataclasses.dataclass(frozen=True)
class ScalingStudy(LanguageStudy):
    """Language models with as many parameters as the one with attention, by the width of their feed-forwards.

    Attributes:
        register: folder of the second register of text; None is Python alone.
    """

    name: str = "scaling"
    register: pathlib.Path | None = REGISTER

    def model(self, mixer: Mixer) -> ModelConfig:
        """The model of a mixer, matched to the baseline; the smaller state to Gated DeltaNet's before that."""
        return _matched(self.train.model, mixer)

    @property
    def identity(self) -> tuple[Any, ...]:
        """What a run depends on beside its training configuration."""
        return (*super().identity, self.register is not None)

    def text(self, work: pathlib.Path) -> DataConfig:
        """Python without long documents and what is like them, and the second register; held-out text of both.

        Raises:
            ValueError: the second register is not prepared.
        """
        if self.register is None:
            return self.train.data
        parts = [self.register / f"{part}.jsonl" for part in ("train", "held_out")]
        if missing := [path for path in parts if not path.exists()]:
            raise ValueError(f"there is no {missing[0]}; expected what `python -m experiments.second_register` writes")
        python = write_long_text(PYTHON, self.train.data, work).train
        train, held_out = ((str(python.with_name(path.name)), str(path)) for path in parts)
        return dataclasses.replace(self.train.data, source="jsonl", paths=train, validation_paths=held_out)

    def tests(self, text: DataConfig, tokenizer: Tokenizer) -> Tests:
        """Bits per byte and, of texts in both registers, needles (`experiments/s_niah/PLAN.md`)."""
        own = super().tests(text, tokenizer)
        return own if self.register is None else SeveralTests((own, NeedleTests(text.tokenizer)))


@functools.cache
def _matched(base: ModelConfig, mixer: Mixer) -> ModelConfig:
    config = model_config(base, mixer)
    if mixer.label == SMALLER_STATE:
        config = match_state(config, mixer.preset[0], state_numbers(model_config(base, GATED_DELTANET), 1))
    return match_parameters(config, parameters(model_config(base, BASELINE)))


def study(setting: ScalingSetting) -> ScalingStudy:
    """The study at a setting: a size of the baseline, and tokens in proportion; "small" is for a CPU."""
    base = language_study({"small": "small", "135m": "large"}.get(setting, "real"))  # type: ignore[arg-type]
    plan = ScalingStudy.of(base, name="scaling", mixers=MIXERS)
    if setting == "small":
        return dataclasses.replace(plan, register=None)
    tokens, seconds = {"25m": (0.5e9, 600.0), "60m": (0.8e9, 2100.0), "135m": (1e9, 3300.0)}[setting]
    train = base.train
    model = train.model
    if setting == "60m":
        model = model.replace(width=640, num_layers=10, num_heads=5, attention_heads=10, initializer_std=0.04)
    steps = round(tokens / (train.data.sequence_length * train.data.batch_size))
    return dataclasses.replace(
        plan,
        train=dataclasses.replace(train, model=model, steps=steps),
        # The rates of width 384, scaled by 1 / width, until `rates` says better ones.
        learning_rates=tuple(round(rate * 384 / model.width, 6) for rate in RATES),
        seeds=(0,),
        report_seeds=(1,) if setting == "135m" else (1, 2, 3),
        seconds=seconds,
    )

"""Models in bfloat16 and with float8 matmuls, from the same seeds. PLAN.md says why, and what would refute what."""

import dataclasses
from typing import Literal

from experiments.harness.study import Mixer
from experiments.language_modelling.study import LanguageStudy
from experiments.language_modelling.study import study as language_study
from rnnlib.models import ModelConfig

Float8Setting = Literal["small", "short", "real"]
SETTINGS: tuple[Float8Setting, ...] = ("small", "short", "real")
FLOAT8 = ", float8"
MIXERS = tuple(
    Mixer.of(label + kind, preset)
    for label, preset in (("Gated DeltaNet", "gated_deltanet"), ("Transformer++", "attention"))
    for kind in ("", FLOAT8)
)


@dataclasses.dataclass(frozen=True)
class Float8Study(LanguageStudy):
    """Language models, of which those whose label ends in `FLOAT8` multiply by weights in float8."""

    def model(self, mixer: Mixer) -> ModelConfig:
        """The model of a mixer."""
        config = super().model(mixer)
        return config.replace(matmul_dtype="float8") if mixer.label.endswith(FLOAT8) else config


def study(setting: Float8Setting) -> Float8Study:
    """The study at a setting: 135M parameters and 2000 steps of 65,536 tokens ("real") or 16,384 ("short")."""
    base = language_study("small" if setting == "small" else "large")
    plan = Float8Study.of(base, name="float8", mixers=MIXERS[:2], lengths=base.lengths[:1], seeds=(0, 1))
    if setting == "small":  # narrower maps are not multiplied in float8
        model = base.train.model.replace(width=256, mlp_width=512)
        return dataclasses.replace(plan, train=dataclasses.replace(base.train, model=model))
    train = dataclasses.replace(base.train, steps=2000, max_skipped_steps=2000)
    plan = dataclasses.replace(plan, lengths=(train.data.sequence_length,), learning_rates=(2e-3,))
    if setting == "short":
        data = dataclasses.replace(
            train.data, batch_size=4, max_train_bytes=140_000_000, max_validation_bytes=4_000_000
        )
        return dataclasses.replace(plan, train=dataclasses.replace(train, data=data), seconds=90.0)
    return dataclasses.replace(plan, train=train, mixers=MIXERS, seeds=(0, 1, 2), seconds=340.0)

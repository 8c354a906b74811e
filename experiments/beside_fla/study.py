"""Which models are trained in both libraries, and how. PLAN.md says why, and what would refute what."""

import dataclasses
from math import cos, pi
from typing import Literal

from experiments.harness.study import Mixer
from rnnlib.models import ModelConfig

CurveSetting = Literal["small", "short", "real"]
SETTINGS: tuple[CurveSetting, ...] = ("small", "short", "real")

OURS, FLOAT32, REORDERED, THEIRS = "ours", "ours, float32", "ours, rows reordered", "flash-linear-attention"
ORDERS = tuple(f"ours, order {number}" for number in range(1, 8))
"""More runs of ours, whose rows are in an order of their own each: one reordered run is too few to tell noise by."""
ARMS = (OURS, THEIRS, REORDERED, FLOAT32, *ORDERS)
"""Runs of a model, the most wanted first."""
# What both libraries have; the third meets a kernel that flash-linear-attention refuses below Triton 3.7.1 on Hopper.
MIXERS = (Mixer.of("DeltaNet", "deltanet"), Mixer.of("KDA", "kda"), Mixer.of("Gated DeltaNet", "gated_deltanet"))


@dataclasses.dataclass(frozen=True)
class CurveStudy:
    """Models that both libraries train from the same weights on the same rows.

    Attributes:
        mixers: of the models; presets that flash-linear-attention has.
        width: of the model.
        num_layers: of the model.
        num_heads: of `width / num_heads` channels.
        sequence_length: tokens of a row.
        batch_size: rows of a step.
        steps: of training.
        warmup_steps: of the learning rate, which then falls to 0 along a cosine.
        learning_rate: its peak.
        window: steps over which differences are averaged.
        held_out_batches: that the trained model is tested on.
        train_bytes: of text.
        seconds: that a run is expected to take on an H100, by the arm.
        around_mean: whether a run is compared with the mean of our others, or with the run of rows as they are.
    """

    mixers: tuple[Mixer, ...] = MIXERS
    width: int = 1024
    num_layers: int = 24
    num_heads: int = 8
    sequence_length: int = 2048
    batch_size: int = 16
    steps: int = 1000
    warmup_steps: int = 50
    learning_rate: float = 1e-3
    window: int = 50
    held_out_batches: int = 4
    train_bytes: int = 40_000_000
    seconds: tuple[tuple[str, float], ...] = ()
    around_mean: bool = True

    @property
    def arms(self) -> tuple[str, ...]:
        """Runs of each model; on a CPU one other order is enough to show that it works."""
        return ARMS if self.steps >= 100 else tuple(arm for arm in ARMS if arm not in ORDERS)

    def model_config(self, mixer: Mixer) -> ModelConfig:
        """The model, in float32 throughout."""
        return ModelConfig(
            vocabulary_size=257,
            width=self.width,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            mixers=mixer.preset,
            mixer_overrides={"*": dict(mixer.overrides)} if mixer.overrides else {},
        )

    def rate(self, step: int) -> float:
        """The learning rate of a step, from 0."""
        warm = min((step + 1) / self.warmup_steps, 1.0)
        return self.learning_rate * warm * 0.5 * (1 + cos(pi * step / self.steps))


def study(setting: CurveSetting) -> CurveStudy:
    """The study at a setting: "real" has 340M models and 1000 steps, "short" 57M and 300, "small" is for a CPU."""
    seconds = {OURS: 200.0, REORDERED: 200.0, FLOAT32: 500.0, THEIRS: 500.0} | dict.fromkeys(ORDERS, 200.0)
    real = CurveStudy(seconds=tuple(seconds.items()))
    if setting == "real":
        return real
    if setting == "short":
        # On an H200 with its compiled step kept, among five other commands; theirs after eight that compile.
        seconds = {OURS: 80.0, REORDERED: 45.0, FLOAT32: 160.0, THEIRS: 200.0} | dict.fromkeys(ORDERS, 45.0)
        short = dataclasses.replace(real, width=768, num_layers=8, num_heads=6, steps=300)
        return dataclasses.replace(short, seconds=tuple(seconds.items()), around_mean=False)
    return dataclasses.replace(
        real,
        width=64,
        num_layers=2,
        num_heads=2,
        sequence_length=64,
        batch_size=4,
        steps=12,
        warmup_steps=3,
        window=4,
        held_out_batches=2,
        train_bytes=200_000,
    )

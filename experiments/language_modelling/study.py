"""Which language models are compared, on what."""

import dataclasses
import pathlib
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, Literal, Protocol, Self

from experiments.harness.study import Mixer
from experiments.language_modelling.lengths import LengthTests
from rnnlib.data import DataConfig, Tokenizer
from rnnlib.layers import ConvolutionConfig, Initializer
from rnnlib.models import DecoderLM, ModelConfig, every_other_sliding_window, model_preset, two_global_attention_layers
from rnnlib.training import CheckpointConfig, EvaluationConfig, LoggingConfig, OptimizerConfig, TrainConfig


def mixers_of(num_layers: int) -> tuple[Mixer, ...]:
    """All that are compared, in models of so many layers."""
    return (
        Mixer.of("Transformer++", "attention"),
        Mixer.of("Gated DeltaNet", "gated_deltanet"),
        Mixer.of("KLA", "kla"),
        Mixer.of("PGDN", "pgdn"),
        Mixer.of("Gated DeltaNet-2", "gated_deltanet2"),
        Mixer.of("DeltaNet", "deltanet"),
        Mixer.of("KDA", "kda"),
        Mixer.of("Gated KalmaNet", "gated_kalmanet"),
        Mixer.of("Gated DeltaNet-2 + sliding window", *every_other_sliding_window("gated_deltanet2")),
        # PGDN has no output gate, nor have PDN and DeltaNet; this is what PGDN is to be compared with.
        Mixer.of("Gated DeltaNet, no output gate", "gated_deltanet", output_gate=False),
        # Its authors' kernels start smaller than the other mixers'; this is what to compare those with.
        Mixer.of("Gated DeltaNet-2, start of the others", "gated_deltanet2", initializer=Initializer()),
        # What else sets it apart from KDA beside its gates: filters that keep a stream's size, a decay of full rank.
        Mixer.of("Gated DeltaNet-2, filters of the others", "gated_deltanet2", convolution=ConvolutionConfig()),
        Mixer.of("Gated DeltaNet-2, decay of rank V", "gated_deltanet2", **{"decay.rank": "value_size"}),
        Mixer.of("Mamba-2", "mamba2"),
        Mixer.of("Mamba-3", "mamba3"),
        Mixer.of("PDN", "pdn"),
        Mixer.of("PKDA", "pkda"),
        Mixer.of("GLA", "gla"),
        # Transformer++ has no convolution; this is what to compare it with.
        Mixer.of("Gated DeltaNet, no convolution", "gated_deltanet", convolution=None),
        Mixer.of("Gated DeltaNet + sliding window", *every_other_sliding_window("gated_deltanet")),
        Mixer.of("Comba", "comba"),
        Mixer.of("MesaNet", "mesanet"),
        Mixer.of("Longhorn", "longhorn"),
        Mixer.of("Mamba-3, multiple inputs", "mamba3_mimo"),
        Mixer.of("RetNet", "retnet"),
        Mixer.of("Linear attention", "linear_attention"),
        Mixer.of("EFLA", "efla"),
        Mixer.of("NLMS", "nlms"),
        Mixer.of("DeltaNet + 2 attention layers", *two_global_attention_layers("deltanet", num_layers)),
    )


MIXERS = mixers_of(9)  # of the 25M models


class Tests(Protocol):
    """Tests of a trained language model."""

    def prepare(self, shapes: DecoderLM, pool: Executor) -> Callable[[DecoderLM], dict[str, Any]]:
        """Begins to compile, in threads of `pool`; the function that comes back gives what a result's row has more."""


@dataclasses.dataclass(frozen=True)
class LanguageStudy:
    """Language models that differ in their mixer alone: same text, same order, same tokens, same rates.

    Attributes:
        mixers: rows.
        train: everything but mixer, learning rate and seed.
        vocabulary_size: of a byte-pair tokenizer learned on the training text; 0 reads bytes.
        learning_rates: tried for every mixer alike; chosen on half of the held-out documents, reported on the other.
        seeds: of the initial weights.
        report_seeds: trained at the rate that `seeds` choose, and reported in their place; () reports `seeds`.
        lengths: that the model is tested at.
        test_tokens: tokens in a batch of testing.
        name: of its folder under `experiments`.
        seconds: that a run is expected to train for on an H100, where none of its mixer was timed.
    """

    mixers: tuple[Mixer, ...]
    train: TrainConfig
    vocabulary_size: int
    learning_rates: tuple[float, ...]
    seeds: tuple[int, ...]
    lengths: tuple[int, ...]
    test_tokens: int
    name: str = "language_modelling"
    seconds: float = 0.0
    report_seeds: tuple[int, ...] = ()

    @classmethod
    def of(cls, base: "LanguageStudy", **changes: Any) -> Self:
        """Another study's settings but for some, perhaps of a class that has more of them."""
        return cls(**{field.name: getattr(base, field.name) for field in dataclasses.fields(LanguageStudy)} | changes)

    @property
    def runs(self) -> list[tuple[Mixer, float, int]]:
        """Mixer, learning rate and seed of every run, the most wanted first: all mixers at one rate, then the next."""
        return [(m, rate, seed) for rate in self.learning_rates for seed in self.seeds for m in self.mixers]

    def model(self, mixer: Mixer) -> ModelConfig:
        """The model of a mixer."""
        return model_config(self.train.model, mixer)

    @property
    def identity(self) -> tuple[Any, ...]:
        """What a run depends on beside its training configuration."""
        return self.vocabulary_size, self.lengths

    def text(self, work: pathlib.Path) -> DataConfig:
        """What is read; a text that is made for the study is written under `work`, once."""
        del work
        return self.train.data

    def tests(self, text: DataConfig, tokenizer: Tokenizer) -> Tests:
        """What a trained model is tested by."""
        return LengthTests(text, self.lengths, self.test_tokens, tokenizer)


def model_config(base: ModelConfig, mixer: Mixer) -> ModelConfig:
    """The model of a mixer at a size. Overrides are of its recurrent mixers or, where it has none, of its attention."""
    where = "attention" if set(mixer.preset) == {"attention"} else "*"
    overrides = {where: dict(mixer.overrides)} if mixer.overrides else {}
    return base.replace(mixers=mixer.preset, mixer_overrides=overrides)


# Peak learning rates at width 384, the same for every mixer; at twice the width they are half as high.
RATES = (2e-3, 4e-3)

LanguageSetting = Literal["small", "short", "real", "large_short", "large"]
SETTINGS: tuple[LanguageSetting, ...] = ("small", "short", "real", "large_short", "large")
WIDTHS: tuple[LanguageSetting, ...] = ("real", "large")  # two widths, as many tokens


def study(setting: LanguageSetting) -> LanguageStudy:
    """The study at a setting.

    "real" is about 25M parameters and 105M tokens of Python text a run, "short" 10.5M tokens; "large" is about 135M
    parameters and 105M tokens, "large_short" 26.2M.
    """
    text: dict[str, Any] = {"source": "python", "split_by": "document"}
    quiet: dict[str, Any] = {"logging": LoggingConfig(tensorboard=False)}
    if setting == "small":
        return LanguageStudy(
            mixers=(MIXERS[0], MIXERS[1], MIXERS[3]),
            train=TrainConfig(
                model=ModelConfig(vocabulary_size=257, width=64, num_layers=2, num_heads=2, tie_embeddings=True),
                data=DataConfig(
                    **text, sequence_length=128, batch_size=8, max_train_bytes=2_000_000, max_validation_bytes=65_536
                ),
                evaluation=EvaluationConfig(every=100, batches=4),
                checkpoint=CheckpointConfig(every=1000, keep=1),
                steps=200,
                **quiet,
            ),
            vocabulary_size=0,
            learning_rates=(4e-3,),
            seeds=(0,),
            lengths=(128, 256),
            test_tokens=2048,
        )
    if setting == "short":
        plan = study("real")
        data = dataclasses.replace(
            plan.train.data, batch_size=8, max_train_bytes=120_000_000, max_validation_bytes=4_000_000
        )
        return dataclasses.replace(
            plan,
            # Layers as one scan compile several times faster, and a step takes half as long again: it stacks up what
            # the backward pass needs.
            train=dataclasses.replace(
                plan.train, data=data, steps=320, model=plan.train.model.replace(scan_layers=True)
            ),
            lengths=(2048, 4096, 8192, 32_768),
        )
    if setting == "large_short":
        plan = study("large")
        data = dataclasses.replace(plan.train.data, batch_size=8)
        return dataclasses.replace(plan, train=dataclasses.replace(plan.train, data=data, steps=800))
    if setting == "large":
        plan = study("real")
        model = model_preset("150m").replace(
            vocabulary_size=16_384, attention_heads=12, initializer_std=0.036, remat=False, scan_layers=False
        )
        return dataclasses.replace(
            plan,
            mixers=mixers_of(model.num_layers),
            # Twice the width at half the rates; the start is 1 / sqrt(width) again.
            learning_rates=tuple(rate / 2 for rate in RATES),
            train=dataclasses.replace(plan.train, model=model),
        )
    return LanguageStudy(
        mixers=MIXERS,
        train=TrainConfig(
            # Attention has 64 channels a head, as the papers' Transformer++. Embedding and feed-forward begin at
            # 1 / sqrt(width): with the 0.02 of wider models attention, which has no norm behind it, learns slowly.
            model=model_preset("30m").replace(
                vocabulary_size=16_384, attention_heads=6, initializer_std=0.05, remat=False, scan_layers=False
            ),
            data=DataConfig(
                **text,
                sequence_length=4096,
                batch_size=16,
                max_train_bytes=400_000_000,
                max_validation_bytes=8_000_000,
            ),
            optimizer=OptimizerConfig(),
            evaluation=EvaluationConfig(every=400, batches=8),
            checkpoint=CheckpointConfig(every=800, keep=1),
            steps=1600,
            # Speed: the studies compare losses, not bits. See the throughput study for what it costs.
            deterministic=False,
            **quiet,
        ),
        vocabulary_size=16_384,
        learning_rates=RATES,
        seeds=(0,),
        lengths=(2048, 4096, 8192, 16_384, 32_768),
        test_tokens=32_768,
    )

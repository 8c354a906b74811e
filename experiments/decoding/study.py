"""Which models continue texts, at which batches."""

import dataclasses
from collections.abc import Sequence
from typing import Literal, get_args

from rnnlib.models import ModelConfig, every_other_sliding_window, model_preset

DecodingSetting = Literal["small", "real", "long_32k", "long_131k"]
SETTINGS: tuple[DecodingSetting, ...] = get_args(DecodingSetting)
KLA, BASELINE = "KLA 340M", "Gated DeltaNet 340M"
LONG = {"long_32k": 32_768, "long_131k": 131_072}
"""Tokens of the prompts of settings with long ones; PLAN.md has what they decide."""


@dataclasses.dataclass(frozen=True)
class DecodingStudy:
    """Greedy decoding of some models, timed.

    Attributes:
        models: label and configuration of each row.
        batches: texts that are continued together.
        prompt: tokens of each prompt.
        block: new tokens whose time is taken together.
        blocks: of each text; the first compiles and is not timed.
        peer_blocks: of each text in the long one of a peer's two calls.
        readings: how often the time to the first new token is taken; 0 leaves it out.
    """

    models: tuple[tuple[str, ModelConfig], ...]
    batches: tuple[int, ...]
    prompt: int = 128
    block: int = 128
    blocks: int = 4
    peer_blocks: int = 4
    readings: int = 0


def configurations(plan: DecodingStudy, labels: Sequence[str]) -> dict[str, ModelConfig]:
    """Configurations of the models with these labels; ValueError where the study has no such model."""
    models = dict(plan.models)
    if unknown := [label for label in labels if label not in models]:
        raise ValueError(f"models: {unknown} are not in the study, expected some of {list(models)}")
    return {label: models[label] for label in labels}


def study(setting: DecodingSetting) -> DecodingStudy:
    """The study at a setting.

    "small" is for two cores of a CPU, "real" for one GPU with models of 340M and 1.3B, "long_32k" and "long_131k" read
    long prompts with models of 340M.
    """
    if setting == "small":
        size = ModelConfig(
            vocabulary_size=4096, width=256, num_layers=4, num_heads=4, mlp_width=704, tie_embeddings=True
        )
        mixers = {
            "Transformer++": ("attention",),
            "DeltaNet": ("deltanet",),
            "Gated DeltaNet": ("gated_deltanet",),
            "KDA": ("kda",),
            "Mamba-2": ("mamba2",),
            "Gated DeltaNet + sliding window": every_other_sliding_window("gated_deltanet"),
        }
        models = tuple((label, size.replace(mixers=mixer)) for label, mixer in mixers.items())
        return DecodingStudy(models, batches=(1, 64))
    presets = {
        "Gated DeltaNet 340M": "gated_deltanet_340m",
        "KDA 340M": "kda_340m",
        "Transformer++ 340M": "transformer_340m",
        "Gated DeltaNet 1.3B": "1.3b",
    }
    models = tuple((label, model_preset(name, param_dtype="bfloat16")) for label, name in presets.items())
    if setting in LONG:
        delta, attention = (dict(models)[f"{name} 340M"] for name in ("Gated DeltaNet", "Transformer++"))
        long = ((KLA, delta.replace(mixers=("kla",))), (BASELINE, delta), ("Transformer++ 340M", attention))
        return DecodingStudy(long, batches=(1,), prompt=LONG[setting], readings=15)
    # A peer's token takes some 50 ms: few of them are enough, and a card's time is short.
    return DecodingStudy(models, batches=(1, 16, 64, 256), peer_blocks=2)

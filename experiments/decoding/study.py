"""Which models continue texts, at which batches."""

import dataclasses

from experiments.sweep.study import Setting
from rnnlib.models import ModelConfig, every_other_sliding_window, model_preset


@dataclasses.dataclass(frozen=True)
class DecodingStudy:
    """`generate` of some models, timed.

    Attributes:
        models: label and configuration of each row.
        batches: rows that are continued together.
        prompt: tokens of each prompt.
        new_tokens: tokens added by the two calls whose difference is the time of decoding alone.
        repeats: timed calls of each; the fastest counts.
    """

    models: tuple[tuple[str, ModelConfig], ...]
    batches: tuple[int, ...]
    prompt: int
    new_tokens: tuple[int, int]
    repeats: int = 5


def study(setting: Setting) -> DecodingStudy:
    """The study at a setting: "small" for two cores of a CPU, "real" for one GPU with models of 340M and 1.3B."""
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
        return DecodingStudy(models, batches=(1, 64), prompt=64, new_tokens=(32, 160), repeats=3)
    presets = {
        "Gated DeltaNet 340M": "gated_deltanet_340m",
        "KDA 340M": "kda_340m",
        "Transformer++ 340M": "transformer_340m",
        "Gated DeltaNet 1.3B": "1.3b",
    }
    models = tuple((label, model_preset(name, param_dtype="bfloat16")) for label, name in presets.items())
    return DecodingStudy(models, batches=(1, 16, 64, 256), prompt=512, new_tokens=(32, 288), repeats=3)

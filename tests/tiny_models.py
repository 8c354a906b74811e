"""Configurations of models that compile in seconds."""

from typing import Any

from rnnlib.models import ModelConfig


def tiny_config(*mixers: str, vocabulary_size: int = 29, width: int = 32, **changes: Any) -> ModelConfig:
    """A layer of two heads for each of `mixers`; `changes` are other fields of the configuration."""
    sizes = {"width": width, "num_layers": len(mixers), "num_heads": 2, "mlp_width": width}
    return ModelConfig(vocabulary_size=vocabulary_size, mixers=mixers, **(sizes | changes))

"""From a model's configuration to the mixer of one of its layers."""

from typing import Any

from flax import nnx

from rnnlib.layers.base import TokenMixer
from rnnlib.layers.presets import mixer_preset
from rnnlib.models.config import ModelConfig

ATTENTION = ("attention", "sliding_window_attention")


def mixer_options(config: ModelConfig, mixer: str) -> dict[str, Any]:
    """Options that `config` gives the mixers of one name: shared ones, then the overrides for `"*"` and by name."""
    options: dict[str, Any] = {}
    if config.head_dim is not None:
        options["head_dim"] = config.head_dim
    if mixer in ATTENTION and config.rope_base is not None:
        options["rope_base"] = config.rope_base
    if mixer == "sliding_window_attention" and config.window is not None:
        options["window"] = config.window
    overrides = {name: dict(values) for name, values in config.mixer_overrides}
    if mixer not in ATTENTION:
        options.update(overrides.get("*", {}))
    options.update(overrides.get(mixer, {}))
    return options


def build_mixer(config: ModelConfig, mixer: str, *, rngs: nnx.Rngs) -> TokenMixer:
    """Builds the token mixer of one layer.

    Args:
        config: the model's configuration.
        mixer: the mixer's name.
        rngs: source of its initial weights.

    Returns:
        A module `(x, *, segment_ids, positions, cache) -> (y, cache)` with `init_cache`.
    """
    num_heads = config.num_heads
    if mixer in ATTENTION and config.attention_heads is not None:
        num_heads = config.attention_heads
    return mixer_preset(mixer, **mixer_options(config, mixer)).build(
        config.width, num_heads, rngs=rngs, dtype=config.compute_dtype, param_dtype=config.storage_dtype
    )

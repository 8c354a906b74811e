"""From a model's configuration to the mixer of one of its layers."""

import dataclasses
from typing import Any

from flax import nnx

from rnnlib.layers.base import MixerConfig, TokenMixer
from rnnlib.layers.parallel import SIDE_BY_SIDE, ParallelConfig, ParallelMixer
from rnnlib.layers.presets import mixer_preset
from rnnlib.models.config import ModelConfig, preset_of

ATTENTION = ("attention", "sliding_window_attention", "forgetting_attention", "latent_attention")


def mixer_config(config: ModelConfig, mixer: str) -> MixerConfig:
    """The configuration of a model's mixers of one name: the preset, what the model sets, then its overrides.

    Args:
        config: the model's configuration.
        mixer: the mixer's name, or a variant's, `name/variant`: the overrides of `name`, then its own.

    Returns:
        The mixer's configuration.

    Raises:
        ValueError: where an override names no field of it, or has an invalid value.
    """
    if SIDE_BY_SIDE in mixer:
        parts = tuple(mixer_config(config, name) for name in mixer.split(SIDE_BY_SIDE))
        return _with_options(ParallelConfig(parts), mixer, dict(dict(config.mixer_overrides).get(mixer, ())))
    preset = preset_of(mixer)
    # A feed-forward that stands in a layer as mixer, as it sees the token before, has neither heads nor a recurrence.
    has_heads = any(field.name == "head_dim" for field in dataclasses.fields(mixer_preset(preset)))
    options: dict[str, Any] = {"head_dim": config.head_dim} if has_heads else {}
    if preset in ATTENTION:
        options["rope_base"] = None if preset == "forgetting_attention" else config.rope_base
        if preset == "sliding_window_attention":
            options["window"] = config.window
    options = {name: value for name, value in options.items() if value is not None}
    overrides = {name: dict(values) for name, values in config.mixer_overrides}
    if has_heads and preset not in ATTENTION:
        options |= overrides.get("*", {})
    for name in dict.fromkeys((preset, mixer)):
        options |= overrides.get(name, {})
    return mixer_preset(preset, **options)


def _with_options(config: ParallelConfig, mixer: str, options: dict[str, Any]) -> ParallelConfig:
    known = ("input_scales", "output_scales")
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ValueError(f"mixer_overrides: {mixer} has {unknown[0]!r}, expected {' or '.join(known)}")
    return dataclasses.replace(config, **options)


def heads_of(config: ModelConfig, mixer: str) -> int:
    """The number of heads that a model gives a mixer."""
    is_attention = preset_of(mixer) in ATTENTION
    return config.attention_heads if is_attention and config.attention_heads is not None else config.num_heads


def build_mixer(config: ModelConfig, mixer: str, *, rngs: nnx.Rngs) -> TokenMixer:
    """Builds the token mixer of one layer.

    Args:
        config: the model's configuration.
        mixer: the mixer's name.
        rngs: source of its initial weights.

    Returns:
        A module `(x, *, segment_ids, positions, cache) -> (y, cache)` with `init_cache`.
    """
    found = mixer_config(config, mixer)
    if isinstance(found, ParallelConfig):
        names = mixer.split(SIDE_BY_SIDE)
        return ParallelMixer(found, [build_mixer(config, name, rngs=rngs) for name in names], config.width)
    return found.build(
        config.width, heads_of(config, mixer), rngs=rngs, dtype=config.compute_dtype, param_dtype=config.storage_dtype
    )

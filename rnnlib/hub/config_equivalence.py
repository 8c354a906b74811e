"""The function that a model computes, as a mapping that does not depend on how its configuration is spelled.

The mapping leaves out how variables are initialised. Two configurations with equal mappings compute the same outputs
from the same variables.
"""

import dataclasses
from typing import Any

from rnnlib.layers.attention import AttentionConfig
from rnnlib.layers.latent_attention import LatentAttentionConfig
from rnnlib.layers.mixer import RecurrentMixerConfig
from rnnlib.layers.parallel import SIDE_BY_SIDE, ParallelConfig
from rnnlib.layers.rwkv7 import ChannelMixConfig, RWKV7Config
from rnnlib.layers.shared_transformer import SharedInputMixerConfig
from rnnlib.models.config import NONE, ModelConfig
from rnnlib.models.mixers import heads_of, mixer_config

# Fields that do not change a model's outputs for given variables: auxiliary losses of training, initial values, and
# methods of computation.
_LOSSES = "load_balancing z_loss"
_STARTS = "initializer initializer_std rate step step_floor initial initial_feedback initial_center initial_ridge"
_METHODS = "chunk_size implementation differentiation product_dtype"
_LEFT_OUT = frozenset(f"{_STARTS} {_METHODS} {_LOSSES}".split())
# Fields of the model's configuration that are left out. The first are defaults of the layers: each layer's own fields
# are compared instead. The others set dtypes and memory.
_LAYERS = (
    "mixers mixer_overrides num_heads attention_heads head_dim window rope_base mlp_ratio mlp_width norm_positions "
    "feed_forwards"
)
_STORAGE = "dtype param_dtype remat remat_keeps scan_layers"
_SAID_BY_LAYERS = frozenset(f"{_LAYERS} {_STORAGE}".split())
# Fields of a recurrent mixer that are left out: its other fields give the same sizes as numbers.
_SAID_BY_SIZES = frozenset({"head_dim", "key_expansion", "value_expansion"})
# How many differences a message has.
_MOST_DIFFERENCES = 8


def computation(config: ModelConfig) -> dict[str, Any]:
    """Fields of a model's configuration by path, with every size as a number and an entry for each layer's mixer.

    Args:
        config: the model's configuration.

    Returns:
        `{"width": 64, "layer 0: key_heads": 4, ...}`, equal for models that compute the same function.
    """
    fields = _flat(config, "")
    layers = zip(config.layer_mixers, config.layer_norm_positions, config.layer_feed_forwards)
    for i, (mixer, position, feed_forward) in enumerate(layers):
        fields[f"layer {i}: norm position"] = position
        fields |= {f"layer {i}: kind": None} if mixer == NONE else _flat(sized_mixer(config, mixer), f"layer {i}: ")
        hidden_width = config.feed_forward_width
        if isinstance(feed_forward, str):
            fields[f"layer {i}: feed-forward width"] = 0 if feed_forward == NONE else hidden_width
        else:
            fields |= _flat(_with_width(feed_forward, hidden_width), f"layer {i}: feed-forward ")
    return fields


def _with_width(feed_forward: Any, hidden_width: int) -> Any:
    """The feed-forward's configuration, with `hidden_width` in place of a width of None."""
    left_open = getattr(feed_forward, "width", 0) is None
    return dataclasses.replace(feed_forward, width=hidden_width) if left_open else feed_forward


def difference(config: ModelConfig, other: ModelConfig) -> str | None:
    """The differences between two configurations' computations, in words; None if there are none.

    Layers that differ in the same way are named together. Of a part of another kind, the kind alone is named.
    """
    ours, theirs = computation(config), computation(other)
    differing = [name for name in ours | theirs if ours.get(name) != theirs.get(name)]
    kinds = [name for name in differing if name.endswith("kind")]
    layers: dict[tuple[str, str], list[str]] = {}
    for name in differing:
        if any(_is_said_by(kind, name) for kind in kinds):
            continue
        layer, _, field = name.partition(": ") if name.startswith("layer ") else ("", "", name)
        values = f"{ours.get(name)!r}, expected {theirs.get(name)!r}"
        layers.setdefault((field, values), []).append(layer.removeprefix("layer "))
    found = [f"{_layers(numbers)}{field} is {values}" for (field, values), numbers in layers.items()]
    more = f"; and {len(found) - _MOST_DIFFERENCES} more" if len(found) > _MOST_DIFFERENCES else ""
    return "; ".join(found[:_MOST_DIFFERENCES]) + more if found else None


def _is_said_by(kind: str, name: str) -> bool:
    """Whether a field is of a part whose kind differs, such as `layer 0: key_heads` where `layer 0: kind` does."""
    part = kind.removesuffix("kind")
    is_mixer = part.endswith(": ")  # fields of a layer that are not its mixer's begin like that, too
    is_of_mixer = not name.removeprefix(part).startswith(("feed-forward", "norm position"))
    return name != kind and name.startswith(part) and (is_of_mixer or not is_mixer)


def _layers(numbers: list[str]) -> str:
    """`layers 0, 2: `, or nothing for a field of the model itself."""
    return "" if numbers == [""] else f"layer{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}: "


def sized_mixer(config: ModelConfig, mixer: str) -> Any:
    """A layer's mixer with every size as a number: `key_heads`, `key_head_dim` and so on are set. None for `"none"`."""
    if mixer == NONE:
        return None
    given, heads = mixer_config(config, mixer), heads_of(config, mixer)
    if isinstance(given, ParallelConfig):
        sized = tuple(sized_mixer(config, name) for name in mixer.split(SIDE_BY_SIDE))
        ones = (1.0,) * len(sized)
        scales = given.input_scales or ones, given.output_scales or ones
        return ParallelConfig(sized, *scales)
    if isinstance(given, RecurrentMixerConfig):
        shape = given.shape(config.width, heads)
        if isinstance(given, SharedInputMixerConfig):
            given = dataclasses.replace(given, transformer=given.transformer.sized(config.width, heads))
        return dataclasses.replace(
            given,
            key_heads=shape.key_heads,
            value_heads=shape.value_heads,
            key_head_dim=shape.projected_key_size or shape.key_size,
            value_head_dim=shape.value_size,
            scale=shape.key_size**-0.5 if given.scale is None else given.scale,
        )
    if isinstance(given, RWKV7Config):
        heads = given.num_heads or heads
        return dataclasses.replace(given, num_heads=heads, head_dim=given.head_dim or config.width // heads)
    if isinstance(given, ChannelMixConfig):
        return dataclasses.replace(given, hidden_width=given.hidden_width or 4 * config.width)
    if isinstance(given, LatentAttentionConfig):
        return given.sized(config.width, heads)
    if isinstance(given, AttentionConfig):
        heads = heads if given.num_heads is None else given.num_heads
        head_dim = config.width // heads if given.head_dim is None else given.head_dim
        turned = None if given.rope_base is None else given.rope_channels or head_dim
        return dataclasses.replace(
            given,
            num_heads=heads,
            key_heads=heads if given.key_heads is None else given.key_heads,
            head_dim=head_dim,
            rope_channels=turned,
            scale=head_dim**-0.5 if given.scale is None else given.scale,
        )
    return given


def _flat(value: Any, path: str) -> dict[str, Any]:
    """Fields of a dataclass and of the dataclasses nested in it, by path, without those that are left out."""
    left_out = _LEFT_OUT
    if isinstance(value, ModelConfig):
        left_out |= _SAID_BY_LAYERS
    elif isinstance(value, RecurrentMixerConfig):
        left_out |= _SAID_BY_SIZES
    fields: dict[str, Any] = {} if isinstance(value, ModelConfig) else {f"{path}kind": type(value).__name__}
    for field in dataclasses.fields(value):
        entry = getattr(value, field.name)
        if field.name == "rate":
            fields[f"{path}rate given by the token"] = entry is None
        elif isinstance(value, ParallelConfig) and field.name == "mixers":
            for i, mixer in enumerate(entry):
                fields |= _flat(mixer, f"{path}mixer {i}: ")
        elif field.name not in left_out:
            inner = f"{path}{field.name}"
            fields |= _flat(entry, f"{inner}.") if dataclasses.is_dataclass(entry) else {inner: entry}
    return fields

"""Code shared by flash-linear-attention's families: the block around a mixer, and attention layers of hybrids.

A model is `model.embeddings`, layers of `attn_norm`, `attn`, `mlp_norm`, `mlp`, then `model.norm` and `lm_head`. In a
hybrid model, the key `attn: {layers, num_heads, num_kv_heads, window_size, rope_theta, qkv_bias}`, or a list of these
objects, gives the layers with softmax attention.
"""

from collections.abc import Callable, Mapping
from typing import Any

from rnnlib.hub.config_equivalence import sized_mixer
from rnnlib.hub.config_reader import ConfigKeys, expansion
from rnnlib.hub.rows import attention_rows, swiglu_rows
from rnnlib.hub.weight_layouts import TRANSPOSED, Joined
from rnnlib.hub.weight_mapping import Family, Row, by_mixer, row
from rnnlib.layers.attention import AttentionConfig
from rnnlib.layers.mixer import RecurrentMixerConfig
from rnnlib.models.block import Block
from rnnlib.models.config import ModelConfig, swiglu_width

# Keys that choose kernels or set options of training. None changes a logit.
_WITHOUT_EFFECT = (
    "attn_mode",
    "fuse_norm",
    "fuse_swiglu",
    "fuse_cross_entropy",
    "fuse_linear_cross_entropy",
    "use_l2warp",
    "safe_gate",
    "allow_inplace_update",
    "elementwise_affine",  # families in which this key has an effect read it first
)

# Sizes of a file that lacks them.
DEFAULTS = {"vocab_size": 32000, "hidden_size": 2048, "num_hidden_layers": 24}

ROWS = (
    row("model.embeddings.weight", "embedding"),
    row("model.norm.weight", "norm.scale"),
    row("lm_head.weight", "head"),
    row("lm_head.weight", "embedding", copy=True),
)

BLOCK = (
    row("attn_norm.weight", "mixer_norm.scale"),
    row("mlp_norm.weight", "feed_forward_norm.scale"),
    # Older files (before February 2025) have gate and up in one array.
    row(
        "mlp.gate_proj.weight",
        ("feed_forward.gate.kernel", "feed_forward.up.kernel"),
        Joined(TRANSPOSED),
        unless="mlp.up_proj.weight",
    ),
    *swiglu_rows("mlp"),
)

ATTENTION = (
    *attention_rows("attn"),
    row("attn.q_norm.weight", "mixer.query_norm.scale"),
    row("attn.k_norm.weight", "mixer.key_norm.scale"),
)

# Options of a preset by path, in the form of `ModelConfig.mixer_overrides`.
Options = dict[str, Any]


def fla_family(
    name: str,
    preset: str,
    architecture: str,
    *,
    rows: tuple[Row, ...] | Callable[[Block], tuple[Row, ...]],
    read: Callable[[ConfigKeys, int], Options],
    write: Callable[[Any, int], dict[str, Any]],
    mixers: tuple[str, ...] = (),
    hidden_ratio: float | int = 4,
    unused: tuple[str, ...] = (),
    **defaults: int,
) -> Family:
    """A family of flash-linear-attention.

    Args:
        name: the family's name, which is its `model_type`.
        preset: the mixer of all layers without softmax attention.
        architecture: the class named in published files.
        rows: the table of the mixer's arrays, or a function from a layer's block to that table.
        read: from the keys of config.json and the width to options of the preset, `key_heads` among them.
        write: from the mixer's configuration, with every size as a number, and the width to the mixer's keys.
        mixers: further presets that are written as this family.
        hidden_ratio: the default of the key `hidden_ratio`.
        unused: as in `Family`.
        defaults: as in `Family`, where they differ from those of most classes.
    """

    def read_config(keys: ConfigKeys) -> ModelConfig:
        layers, width = keys.size("num_hidden_layers"), keys.size("hidden_size")
        options = read(keys, width)
        pattern, overrides = _read_attention(keys, preset, layers, width)
        return ModelConfig(
            width=width,
            num_layers=layers,
            num_heads=options.get("key_heads") or options["num_heads"],
            mixers=pattern,
            mixer_overrides={preset: options, **overrides},
            **read_block(keys, width, hidden_ratio),
        )

    def write_config(config: ModelConfig) -> dict[str, Any]:
        kinds = [sized_mixer(config, mixer) for mixer in config.layer_mixers]
        own = [kind for kind in kinds if isinstance(kind, RecurrentMixerConfig)]
        if not own:
            raise ValueError(f"no layer has the mixer {preset!r}")
        return (
            {"model_type": name, "num_hidden_layers": config.num_layers, "hidden_size": config.width}
            | write_block(config, hidden_ratio)
            | write(own[0], config.width)
            | {"attn": _write_attention(kinds)}
        )

    return Family(
        name=name,
        mixers=(preset, *mixers),
        architecture=architecture,
        read=read_config,
        write=write_config,
        rows=ROWS,
        layer_rows=lambda block: by_mixer(BLOCK, rows(block) if callable(rows) else rows, ATTENTION)(block),
        unused=unused,
        defaults=DEFAULTS | defaults,
    )


def read_block(keys: ConfigKeys, width: int, hidden_ratio: float | int) -> dict[str, Any]:
    """Fields of the model that do not depend on its mixers."""
    keys.ignore(*_WITHOUT_EFFECT)
    keys.only("hidden_act", "swish", "silu")
    keys.only("attnres_block_size", None)
    ratio = keys.take("hidden_ratio", float | int | None, None)
    return {
        "vocabulary_size": keys.size("vocab_size"),
        "mlp_width": keys.size("intermediate_size", swiglu_width(width, hidden_ratio if ratio is None else ratio)),
        "norm_eps": keys.number("norm_eps", 1e-6),
        "tie_embeddings": keys.flag("tie_word_embeddings", False),
    }


def write_block(config: ModelConfig, hidden_ratio: float | int) -> dict[str, Any]:
    """The keys that `read_block` reads."""
    return {
        "vocab_size": config.vocabulary_size,
        "hidden_act": "swish",
        "hidden_ratio": hidden_ratio,
        "intermediate_size": config.feed_forward_width,
        "norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
    }


def _read_attention(
    keys: ConfigKeys, preset: str, layers: int, width: int
) -> tuple[tuple[str, ...], dict[str, Options]]:
    """The mixer of each layer, and the options of the attention mixers by name."""
    given = keys.take("attn", dict | list | None, None)
    groups = given if isinstance(given, list) else [given] if given else []
    pattern, overrides = [preset] * layers, {}
    for i, group in enumerate(groups):
        if not isinstance(group, Mapping):
            raise ValueError(f"{keys.where}: attn has the entry {group!r}, expected an object")
        name = "attention" if len(groups) == 1 else f"attention/{i}"
        inner = keys.nested("attn", group)
        chosen = inner.take("layers", list)
        heads = inner.size("num_heads")
        overrides[name] = attention_options(inner, heads, width)
        for layer in chosen:
            if not isinstance(layer, int) or not 0 <= layer < layers:
                raise ValueError(f"{keys.where}: attn.layers has {layer!r}, expected layers from 0 to {layers - 1}")
            if pattern[layer] != preset:
                raise ValueError(f"{keys.where}: attn.layers has {layer} twice, expected each layer once")
            pattern[layer] = name
    return tuple(pattern), overrides


def attention_options(keys: ConfigKeys, heads: int, width: int) -> Options:
    """Options of attention layers, from the keys of the file or of its object `attn`."""
    if width % heads:
        raise ValueError(f"{keys.where}: num_heads is {heads}, expected a divisor of hidden_size = {width}")
    return {
        "num_heads": heads,
        "key_heads": keys.size("num_kv_heads", heads),
        "head_dim": width // heads,
        "window": keys.size("window_size", None),
        "rope_base": keys.number("rope_theta", 10000.0),
        "use_bias": keys.flag("qkv_bias", False),
    }


def attention_keys(config: AttentionConfig) -> dict[str, Any]:
    """The keys that `attention_options` reads."""
    return {
        "num_heads": config.num_heads,
        "num_kv_heads": config.key_heads,
        "window_size": config.window,
        "rope_theta": config.rope_base,
        "qkv_bias": config.use_bias,
    }


def _write_attention(kinds: list[Any]) -> Any:
    groups: dict[AttentionConfig, list[int]] = {}
    for layer, kind in enumerate(kinds):
        if isinstance(kind, AttentionConfig):
            groups.setdefault(kind, []).append(layer)
    entries = [{"layers": layers, **attention_keys(kind)} for kind, layers in groups.items()]
    return entries if len(entries) > 1 else entries[0] if entries else None


def expanded(keys: ConfigKeys, name: str, default: float, width: int, heads: int) -> int:
    """Channels per head, where all `heads` heads together have `int(width * factor)` for the factor at key `name`."""
    channels = int(width * keys.number(name, default))
    if channels < heads or channels % heads:
        raise ValueError(
            f"{keys.where}: {name} gives {channels} channels of {width}, expected a multiple of {heads} heads"
        )
    return channels // heads


def read_streams(keys: ConfigKeys, default_expand_v: float) -> Options:
    """Heads, channels per head and filters of the streams, for families with the key `head_dim`."""
    size, heads = keys.size("head_dim"), keys.size("num_heads")
    value_heads = keys.size("num_v_heads", heads)
    if value_heads % heads:
        raise ValueError(f"{keys.where}: num_v_heads is {value_heads}, expected a multiple of num_heads = {heads}")
    return {
        "key_heads": heads,
        "value_heads": value_heads,
        "key_head_dim": size,
        "value_head_dim": expanded(keys, "expand_v", default_expand_v, size, 1),
        **read_convolution(keys),
    }


def write_streams(mixer: RecurrentMixerConfig) -> dict[str, Any]:
    """The keys that `read_streams` reads."""
    heads, value_heads, size, value_size = sizes_of(mixer)
    return {
        "head_dim": size,
        "num_heads": heads,
        "num_v_heads": None if value_heads == heads else value_heads,
        "expand_v": expansion(value_size, size),
        **write_convolution(mixer),
    }


def sizes_of(mixer: RecurrentMixerConfig) -> tuple[int, int, int, int]:
    """The numbers of key heads, value heads, channels per key head and channels per value head."""
    sizes = (mixer.key_heads, mixer.value_heads, mixer.key_head_dim, mixer.value_head_dim)
    heads, value_heads, size, value_size = (0 if number is None else number for number in sizes)
    return heads, value_heads, size, value_size


def read_convolution(keys: ConfigKeys, default: bool = True) -> Options:
    """The filters of the streams, or none. Families that apply SiLU keep it without filters."""
    used, size = keys.flag("use_short_conv", default), keys.size("conv_size", 4)
    keys.only("conv_bias", False, None)
    return {"convolution.size": size} if used else {"convolution": None}


def write_convolution(mixer: RecurrentMixerConfig) -> dict[str, Any]:
    """The keys that `read_convolution` reads."""
    filters = mixer.convolution
    return {"use_short_conv": filters is not None, "conv_size": 4 if filters is None else filters.size}


GATES = {"swish": "silu", "silu": "silu", "sigmoid": "sigmoid"}

"""`gla`: Gated Linear Attention."""

from typing import Any

from rnnlib.hub.config_reader import ConfigKeys, expansion
from rnnlib.hub.fla.common import Options, expanded, fla_family, sizes_of
from rnnlib.hub.fla.rows import CONVOLUTIONS, STREAMS
from rnnlib.hub.weight_mapping import Row, linear, row
from rnnlib.layers.convolution import ConvolutionConfig
from rnnlib.layers.decay import LogSigmoidDecay
from rnnlib.layers.mixer import RecurrentMixer, RecurrentMixerConfig
from rnnlib.models.block import Block

# The norm is named `g_norm_swish_gate` in files whose model fuses it with the gate, and `g_norm` in others. New files
# use the fused name for gated layers.
_FUSED_NORM = row("attn.g_norm_swish_gate.weight", "mixer.output_projection.norm.scale")
_NORM = row("attn.g_norm.weight", "mixer.output_projection.norm.scale")


def norm_and_gate(block: Block) -> tuple[Row, ...]:
    """The rows of a layer's gate, norm and output."""
    is_gated = isinstance(block.mixer, RecurrentMixer) and block.mixer.config.output_projection.gate != "none"
    return (
        *linear("attn.g_proj", "mixer.input_projection.output_gate"),
        *((_FUSED_NORM, _NORM) if is_gated else (_NORM, _FUSED_NORM)),
        *linear("attn.o_proj", "mixer.output_projection.output"),
    )


def _rows(block: Block) -> tuple[Row, ...]:
    return (
        *STREAMS,
        *CONVOLUTIONS,
        *linear("attn.gk_proj.0", "mixer.input_projection.decay.down"),
        *linear("attn.gk_proj.1", "mixer.input_projection.decay.up"),
        *norm_and_gate(block),
    )


# Feature maps of queries and keys, applied after the filters and their SiLU.
_FEATURE_MAPS = {
    None: "identity",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
    "sigmoid": "sigmoid",
    "sqrelu": "squared_relu",
    "gelu": "gelu",
}


def read_sizes(keys: ConfigKeys, width: int, expand_k: float, expand_v: float) -> Options:
    """Heads and channels per head, for families whose heads split a multiple of the width."""
    heads = keys.size("num_heads")
    shared = keys.size("num_kv_heads", heads)
    if heads % shared:
        raise ValueError(f"{keys.where}: num_kv_heads is {shared}, expected a divisor of num_heads = {heads}")
    return {
        "key_heads": heads,
        "value_heads": heads,
        "shared_heads": None if shared == heads else shared,
        "key_head_dim": expanded(keys, "expand_k", expand_k, width, heads),
        "value_head_dim": expanded(keys, "expand_v", expand_v, width, heads),
    }


def write_sizes(mixer: RecurrentMixerConfig, width: int) -> dict[str, Any]:
    """The keys that `read_sizes` reads."""
    heads, value_heads, size, value_size = sizes_of(mixer)
    return {
        "num_heads": heads,
        "num_kv_heads": mixer.shared_heads,
        "expand_k": expansion(heads * size, width),
        "expand_v": expansion(value_heads * value_size, width),
    }


def read_output_projection(keys: ConfigKeys) -> Options:
    """The output gate and the norm per head, with or without a scale."""
    return {"output_projection.gate": "silu" if keys.flag("use_output_gate", True) else "none", **read_norm(keys)}


def read_norm(keys: ConfigKeys) -> Options:
    """The norm per head. It has no scale if `elementwise_affine` is false or null."""
    return {
        "output_projection.norm_scale": bool(keys.take("elementwise_affine", bool | None, True)),
        "output_projection.eps": keys.number("norm_eps", 1e-6),
    }


def write_output_projection(mixer: RecurrentMixerConfig) -> dict[str, Any]:
    """The keys that `read_output_projection` reads."""
    gated = mixer.output_projection.gate != "none"
    return {"use_output_gate": gated, "fuse_norm": gated, "elementwise_affine": mixer.output_projection.norm_scale}


def read_feature_map(keys: ConfigKeys) -> Options:
    """The activation of queries and keys."""
    return {"feature_map": keys.one_of("feature_map", _FEATURE_MAPS, None)}


def write_feature_map(mixer: RecurrentMixerConfig) -> dict[str, Any]:
    """The key that `read_feature_map` reads."""
    names: dict[Any, str | None] = {ours: theirs for theirs, ours in reversed(_FEATURE_MAPS.items())}
    if mixer.feature_map not in names:
        raise ValueError(f"feature_map is {mixer.feature_map!r}, expected one of {', '.join(names)}")
    return {"feature_map": names[mixer.feature_map]}


def _read(keys: ConfigKeys, width: int) -> Options:
    keys.ignore("use_gk", "use_gv")  # the model ignores them too
    sizes = read_sizes(keys, width, 0.5, 1.0)
    filtered, size = keys.flag("use_short_conv", False), keys.size("conv_size", 4)
    lowest = keys.take("clamp_min", float | int | None, None)
    return {
        **sizes,
        **read_feature_map(keys),
        **read_output_projection(keys),
        "convolution": ConvolutionConfig(size, activation="silu") if filtered else None,
        "decay.lowest": None if lowest is None else float(lowest),
        "decay.heads": "value" if sizes["shared_heads"] is None else "shared",
    }


def _write(mixer: RecurrentMixerConfig, width: int) -> dict[str, Any]:
    if not isinstance(mixer.decay, LogSigmoidDecay):
        raise ValueError(f"decay is {type(mixer.decay).__name__}, expected LogSigmoidDecay")
    filters = mixer.convolution
    return {
        **write_sizes(mixer, width),
        **write_feature_map(mixer),
        **write_output_projection(mixer),
        "use_short_conv": filters is not None,
        "conv_size": 4 if filters is None else filters.size,
        "clamp_min": mixer.decay.lowest,
    }


GLA = fla_family("gla", "gla", "GLAForCausalLM", rows=_rows, read=_read, write=_write, num_heads=4)

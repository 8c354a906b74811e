"""`olmo_hybrid`: Gated DeltaNet layers with a norm on the input, and attention layers with a norm on the output."""

from typing import Any

from rnnlib.hub.config_reader import ConfigKeys
from rnnlib.hub.rows import filter_rows, stream_rows
from rnnlib.hub.transformers.common import (
    ATTENTION,
    FEED_FORWARD,
    LAYER_TYPES,
    ROWS,
    mixers_by_kind,
    read_attention,
    read_delta_heads,
    read_layer_types,
    read_model,
    read_rotary,
    write_delta_heads,
    write_layer_types,
    write_model,
)
from rnnlib.hub.weight_layouts import FILTER, EqualParts
from rnnlib.hub.weight_mapping import Family, Row, linear, row
from rnnlib.models.block import Block
from rnnlib.models.config import ModelConfig

# Epsilon of the output norm in Gated DeltaNet layers. It does not depend on `rms_norm_eps`.
_EPS = 1e-5

_FILTERS = tuple(f"linear_attn.{stream}_conv1d.weight" for stream in "qkv")

# Files that transformers wrote differ in two ways. The norms of an attention layer have other names, and the filters of
# a Gated DeltaNet layer are concatenated and split into three equal parts.
_ATTENTION = (
    row("post_attention_layernorm.weight", "mixer_norm.scale"),
    row("feedforward_layer_norm.weight", "mixer_norm.scale"),
    row("post_feedforward_layernorm.weight", "feed_forward_norm.scale"),
    *FEED_FORWARD,
    *ATTENTION,
)

_DELTA = (
    row("attention_layer_norm.weight", "mixer_norm.scale"),
    row("feedforward_layer_norm.weight", "feed_forward_norm.scale"),
    *FEED_FORWARD,
    *stream_rows("linear_attn"),
    *filter_rows("linear_attn"),
    row(
        _FILTERS,
        tuple(f"mixer.{stream}.convolution.kernel" for stream in ("query", "key", "value")),
        EqualParts(FILTER),
    ),
    *linear("linear_attn.a_proj", "mixer.input_projection.decay"),
    row("linear_attn.A_log", "mixer.decay.A_log"),
    row("linear_attn.dt_bias", "mixer.decay.dt_bias"),
    *linear("linear_attn.b_proj", "mixer.input_projection.write_gate"),
    *linear("linear_attn.g_proj", "mixer.input_projection.output_gate"),
    row("linear_attn.o_norm.weight", "mixer.output_projection.norm.scale"),
    *linear("linear_attn.o_proj", "mixer.output_projection.output"),
)


def _rows(block: Block) -> tuple[Row, ...]:
    return _ATTENTION if block.norm_position == "output" else _DELTA


def _read(keys: ConfigKeys) -> ModelConfig:
    # Keys of initialisation.
    keys.ignore("linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max", "linear_dt_init_floor")
    model = read_model(keys)
    width = model["width"]
    base, _ = read_rotary(keys)
    attention = read_attention(keys, width, heads=30) | {"rope_base": base, "qk_norm": "all", "eps": model["norm_eps"]}
    heads = attention["num_heads"]
    key_size = int(0.75 * width / keys.size("linear_num_key_heads", heads))
    defaults = {
        "linear_num_key_heads": heads,
        "linear_num_value_heads": heads,
        "linear_key_head_dim": key_size,
        "linear_value_head_dim": 2 * keys.size("linear_key_head_dim", key_size),
    }
    delta = {
        **read_delta_heads(keys, defaults),
        "gain.negative_eigenvalues": keys.flag("linear_allow_neg_eigval", True),
        "output_projection.eps": _EPS,
    }
    # A model of fewer than four layers still ends with one of attention.
    linear = min(keys.size("num_hidden_layers"), 4) - 1
    mixers = read_layer_types(keys, LAYER_TYPES, ("linear_attention",) * linear + ("full_attention",))
    return ModelConfig(
        **model,
        mixers=mixers,
        num_layers=len(mixers),
        num_heads=delta["key_heads"],
        mixer_overrides={"gated_deltanet": delta, "attention": attention},
        norm_positions=tuple("output" if mixer == "attention" else "input" for mixer in mixers),
        mlp_width=keys.size("intermediate_size"),
    )


def _write(config: ModelConfig) -> dict[str, Any]:
    kinds, recurrent, attention = mixers_by_kind(config)
    layer = attention[0] if attention else None
    return {
        "model_type": "olmo_hybrid",
        **write_model(config),
        **write_delta_heads(recurrent),
        "linear_allow_neg_eigval": any(getattr(mixer.gain, "negative_eigenvalues", False) for mixer in recurrent),
        "intermediate_size": config.feed_forward_width,
        "layer_types": write_layer_types(kinds),
        "num_attention_heads": layer.num_heads if layer else 1,
        "num_key_value_heads": layer.key_heads if layer else 1,
        "head_dim": layer.head_dim if layer else 1,
        "attention_bias": layer.use_bias if layer else False,
        "rope_parameters": {"rope_type": "default", "rope_theta": layer.rope_base if layer else None},
    }


OLMO_HYBRID = Family(
    name="olmo_hybrid",
    mixers=("gated_deltanet",),
    architecture="OlmoHybridForCausalLM",
    read=_read,
    write=_write,
    rows=ROWS,
    layer_rows=_rows,
    defaults={
        "vocab_size": 100352,
        "hidden_size": 3840,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
    },
)

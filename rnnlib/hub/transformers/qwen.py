"""Qwen3.5, Qwen3-Next and Qwen3.5 with experts: by default, every fourth layer has gated attention.

All other layers are of Gated DeltaNet.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from rnnlib.hub.config_reader import ConfigKeys, expansion
from rnnlib.hub.transformers.common import (
    EXPERTS,
    FEED_FORWARD,
    LAYER_TYPES,
    NORMS,
    ROWS,
    mixers_by_kind,
    read_delta_heads,
    read_layer_types,
    read_model,
    read_rotary,
    write_attention,
    write_delta_heads,
    write_layer_types,
    write_model,
)
from rnnlib.hub.weight_layouts import FILTER, SAME, TRANSPOSED, Interleaved, Joined
from rnnlib.hub.weight_mapping import Family, by_mixer, linear, row
from rnnlib.layers.experts import Experts, RouterConfig
from rnnlib.layers.feed_forward import FeedForwardConfig
from rnnlib.models.config import ModelConfig

_BLOCK = (
    *NORMS,
    *FEED_FORWARD,
    *EXPERTS,
)

_BRANCHES = ("query", "key", "value")
_IN = "mixer.input_projection"

# For each head, the query projection has the rows of its query, then those of its gate.
_ATTENTION = (
    row(
        "self_attn.q_proj.weight",
        (f"{_IN}.query.kernel", f"{_IN}.output_gate.kernel"),
        Interleaved(TRANSPOSED, "value_heads"),
    ),
    row("self_attn.q_proj.bias", (f"{_IN}.query.bias", f"{_IN}.output_gate.bias"), Interleaved(SAME, "value_heads")),
    *linear("self_attn.k_proj", "mixer.input_projection.key"),
    *linear("self_attn.v_proj", "mixer.input_projection.value"),
    *linear("self_attn.o_proj", "mixer.output"),
    row("self_attn.q_norm.weight", "mixer.query_norm.scale"),
    row("self_attn.k_norm.weight", "mixer.key_norm.scale"),
)

# The filters of queries, keys and values are one array.
_DELTA = (
    row(
        "linear_attn.conv1d.weight", tuple(f"mixer.{branch}.convolution.kernel" for branch in _BRANCHES), Joined(FILTER)
    ),
    row("linear_attn.A_log", "mixer.decay.A_log"),
    row("linear_attn.dt_bias", "mixer.decay.dt_bias"),
    row("linear_attn.norm.weight", "mixer.output_projection.norm.scale"),
    *linear("linear_attn.out_proj", "mixer.output_projection.output"),
)

# Qwen3.5: one projection for queries, keys and values, concatenated; a projection for each gate.
_APART = (
    row(
        "linear_attn.in_proj_qkv.weight",
        tuple(f"{_IN}.{branch}.kernel" for branch in _BRANCHES),
        Joined(TRANSPOSED),
    ),
    *linear("linear_attn.in_proj_z", "mixer.input_projection.output_gate"),
    *linear("linear_attn.in_proj_b", "mixer.input_projection.write_gate"),
    *linear("linear_attn.in_proj_a", "mixer.input_projection.decay"),
)

# Qwen3-Next: one projection, interleaved by key head: a head's query, its key, its group's values and their gates. The
# projections of b and a are interleaved likewise.
_FUSED = (
    row(
        "linear_attn.in_proj_qkvz.weight",
        (*(f"{_IN}.{branch}.kernel" for branch in _BRANCHES), "mixer.input_projection.output_gate.kernel"),
        Interleaved(TRANSPOSED, "key_heads"),
    ),
    row(
        "linear_attn.in_proj_ba.weight",
        ("mixer.input_projection.write_gate.kernel", "mixer.input_projection.decay.kernel"),
        Interleaved(TRANSPOSED, "key_heads"),
    ),
)

# Keys of multi-token prediction, of caches and of losses in training.
_WITHOUT_EFFECT = (
    "mtp_num_hidden_layers",
    "mtp_use_dedicated_embeddings",
    "mtp_loss_coef",
    "mamba_ssm_dtype",
    "output_router_logits",
    "router_aux_loss_coef",
    "max_window_layers",
)

# Keys beside `text_config` in multimodal files: the vision tower, and ids of the tokens that stand for images.
_MULTIMODAL = (
    "vision_config",
    "image_token_id",
    "video_token_id",
    "vision_start_token_id",
    "vision_end_token_id",
)

_DEFAULTS = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}


def _read(keys: ConfigKeys, feed_forwards: tuple[Any, ...], mlp_width: int | None) -> ModelConfig:
    keys.ignore(*_WITHOUT_EFFECT)
    keys.only("use_sliding_window", False, None)
    keys.only("sliding_window", None)
    keys.only("attn_output_gate", True)
    model = read_model(keys)
    heads, size = keys.size("num_attention_heads"), keys.size("head_dim", 256)
    base, factor = read_rotary(keys, factor=0.25)
    biases = keys.flag("attention_bias", False)
    attention = {
        "num_heads": heads,
        "key_heads": keys.size("num_key_value_heads"),
        "head_dim": size,
        "rope_base": base,
        "rope_channels": int(size * factor),
        "qk_norm": True,
        "zero_centred": True,
        "eps": model["norm_eps"],
        "output_gate": True,
        "use_bias": biases,
        "output_bias": biases,
    }
    delta = {**read_delta_heads(keys, _DEFAULTS), "output_projection.eps": model["norm_eps"]}
    every = keys.size("full_attention_interval", 4)  # in older files
    mixers = read_layer_types(keys, LAYER_TYPES, ("linear_attention",) * (every - 1) + ("full_attention",))
    return ModelConfig(
        **model,
        mixers=mixers,
        num_layers=len(mixers),
        num_heads=delta["key_heads"],
        mixer_overrides={"gated_deltanet": delta, "attention": attention},
        zero_centred_norms=True,
        mlp_width=mlp_width,
        feed_forwards=feed_forwards,
    )


def _write(config: ModelConfig, model_type: str) -> dict[str, Any]:
    kinds, recurrent, attention = mixers_by_kind(config)
    values = {
        "model_type": model_type,
        **write_model(config),
        **write_delta_heads(recurrent),
        "layer_types": write_layer_types(kinds),
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 2,
        "attention_bias": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
    }
    if attention:
        layer = attention[0]
        size, turned = layer.head_dim or 0, layer.rope_channels or 0
        values |= write_attention(layer)
        values["rope_parameters"] |= {"rope_theta": layer.rope_base, "partial_rotary_factor": expansion(turned, size)}
    return values


def _text(keys: ConfigKeys) -> ConfigKeys:
    """The keys of the language model. In a multimodal file they are in the object `text_config`."""
    if "text_config" not in keys:
        return keys
    text = dict(keys.take("text_config", dict))
    if "tie_word_embeddings" in keys:
        text["tie_word_embeddings"] = keys.flag("tie_word_embeddings", False)
    keys.ignore(*_MULTIMODAL)
    return keys.nested("text_config", text, keys.defaults)


def _read_dense(keys: ConfigKeys) -> ModelConfig:
    text = _text(keys)
    text.only("mlp_only_layers", [], None)
    return _read(text, ("dense",), text.size("intermediate_size"))


def _experts(keys: ConfigKeys, renormalize: bool) -> Experts:
    shared = keys.take("shared_expert_intermediate_size", int, 512)
    return Experts(
        num_experts=keys.size("num_experts"),
        experts_per_token=keys.size("num_experts_per_tok"),
        width=keys.size("moe_intermediate_size"),
        router=RouterConfig(renormalize=renormalize),
        shared_width=shared,
        shared_gate=shared > 0,
    )


def _write_experts(layers: tuple[FeedForwardConfig | str, ...]) -> dict[str, Any]:
    chosen = [layer for layer in layers if isinstance(layer, Experts)]
    if not chosen:
        raise ValueError("no layer has experts")
    return {
        "num_experts": chosen[0].num_experts,
        "num_experts_per_tok": chosen[0].experts_per_token,
        "moe_intermediate_size": chosen[0].width,
        "shared_expert_intermediate_size": chosen[0].shared_width,
    }


def _read_moe(keys: ConfigKeys) -> ModelConfig:
    text = _text(keys)
    text.only("norm_topk_prob", True)
    text.only("mlp_only_layers", [], None)
    text.only("decoder_sparse_step", 1)
    text.ignore("intermediate_size")  # every layer has experts
    return _read(text, (_experts(text, True),), text.size("moe_intermediate_size"))


def _read_next(keys: ConfigKeys) -> ModelConfig:
    renormalize = keys.flag("norm_topk_prob", True)
    step = keys.size("decoder_sparse_step", 1)
    dense = keys.take("mlp_only_layers", list | None, None) or []
    number = keys.take("num_experts", int, 512)
    layers = keys.size("num_hidden_layers")
    sparse = [bool(number) and i not in dense and (i + 1) % step == 0 for i in range(layers)]
    part: Any = "dense"
    if any(sparse):
        part = _experts(keys, renormalize)
    else:
        keys.ignore("num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")
    width = keys.size("intermediate_size", 5632)
    return _read(keys, tuple(part if is_sparse else "dense" for is_sparse in sparse), width)


def _write_next(config: ModelConfig) -> dict[str, Any]:
    layers = config.layer_feed_forwards
    values = _write(config, "qwen3_next") | {
        "intermediate_size": config.feed_forward_width or 1,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i, layer in enumerate(layers) if layer == "dense"],
        "num_experts": 0,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 1,
    }
    routers = [layer.router for layer in layers if isinstance(layer, Experts)]
    if routers:
        values |= _write_experts(layers) | {"norm_topk_prob": routers[0].renormalize}
    return values


def _is(*types: str) -> Any:
    def matches(values: Mapping[str, Any]) -> bool:
        return values.get("model_type") in types

    return matches


_UNUSED = ("model.visual.", "mtp.", "model.mtp.")

QWEN3_5 = Family(
    name="qwen3_5",
    matches=_is("qwen3_5", "qwen3_5_text"),
    mixers=("gated_deltanet",),
    architecture="Qwen3_5ForCausalLM",
    read=_read_dense,
    write=lambda config: _write(config, "qwen3_5_text") | {"intermediate_size": config.feed_forward_width},
    rows=ROWS,
    layer_rows=by_mixer(_BLOCK, (*_APART, *_DELTA), _ATTENTION),
    prefixes=("model.", "model.language_model."),
    unused=_UNUSED,
    defaults={
        "vocab_size": 248320,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
    },
)

QWEN3_5_MOE = dataclasses.replace(
    QWEN3_5,
    name="qwen3_5_moe",
    matches=_is("qwen3_5_moe", "qwen3_5_moe_text"),
    architecture="Qwen3_5MoeForCausalLM",
    read=_read_moe,
    write=lambda config: _write(config, "qwen3_5_moe_text") | _write_experts(config.layer_feed_forwards),
    defaults={
        "vocab_size": 248320,
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
    },
)

QWEN3_NEXT = Family(
    name="qwen3_next",
    matches=_is("qwen3_next"),
    mixers=("gated_deltanet",),
    architecture="Qwen3NextForCausalLM",
    read=_read_next,
    write=_write_next,
    rows=ROWS,
    layer_rows=by_mixer(_BLOCK, (*_FUSED, *_DELTA), _ATTENTION),
    unused=_UNUSED,
    defaults={
        "vocab_size": 151936,
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
    },
)

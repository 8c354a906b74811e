"""`lara_mini`: Gated DeltaNet, sliding-window attention and full attention without positions, with experts."""

from typing import Any

from rnnlib.hub.config_reader import ConfigKeys
from rnnlib.hub.transformers.common import (
    ATTENTION,
    EXPERTS,
    NORMS,
    ROWS,
    mixers_by_kind,
    read_delta_heads,
    read_layer_types,
    read_model,
    read_rotary,
    write_attention,
    write_delta_heads,
    write_model,
)
from rnnlib.hub.weight_layouts import FILTER, TRANSPOSED, Joined
from rnnlib.hub.weight_mapping import Family, by_mixer, linear, row
from rnnlib.layers.attention import AttentionConfig
from rnnlib.layers.experts import Experts, RouterConfig
from rnnlib.models.config import ModelConfig

_MIXERS = {
    "linear_attention": "gated_deltanet",
    "sliding_attention": "sliding_window_attention",
    "full_attention": "attention",
}
# The layers of a file without `layer_types`, repeated.
_PATTERN = ("linear_attention", "sliding_attention", "linear_attention", "full_attention", "sliding_attention")

_BRANCHES = ("mixer.query", "mixer.key", "mixer.value")
_COLUMNS = ("query", "key", "value", "output_gate", "write_gate", "decay")
_KERNELS = tuple(f"mixer.input_projection.{name}.kernel" for name in _COLUMNS)

_BLOCK = (
    *NORMS,
    *EXPERTS,
)

_DELTA = (
    row("linear_attn.in_proj.weight", _KERNELS, Joined(TRANSPOSED)),
    row("linear_attn.conv1d.weight", tuple(f"{branch}.convolution.kernel" for branch in _BRANCHES), Joined(FILTER)),
    row("linear_attn.A_log", "mixer.decay.A_log"),
    row("linear_attn.dt_bias", "mixer.decay.dt_bias"),
    row("linear_attn.out_norm.weight", "mixer.output_projection.norm.scale"),
    *linear("linear_attn.out_proj", "mixer.output_projection.output"),
)

_DEFAULTS = {
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}


def _read(keys: ConfigKeys) -> ModelConfig:
    keys.ignore("output_router_logits", "router_aux_loss_coef")
    model = read_model(keys) | {"tie_embeddings": keys.flag("tie_word_embeddings", True)}
    base, _ = read_rotary(keys)
    size, biases = keys.size("head_dim", 128), keys.flag("attention_bias", False)
    attention = {
        "num_heads": keys.size("num_attention_heads", 16),
        "key_heads": keys.size("num_key_value_heads", 4),
        "head_dim": size,
        "qk_norm": True,
        "eps": model["norm_eps"],
        "use_bias": biases,
        "output_bias": biases,
    }
    sliding = {"window": keys.size("sliding_window", 512), "rope_base": base}
    delta = {**read_delta_heads(keys, _DEFAULTS), "output_projection.eps": model["norm_eps"]}
    mixers = read_layer_types(keys, _MIXERS, _PATTERN)
    return ModelConfig(
        **model,
        mixers=mixers,
        num_layers=len(mixers),
        num_heads=delta["key_heads"],
        mixer_overrides={
            "gated_deltanet": delta,
            "attention": attention | {"rope_base": None},
            "sliding_window_attention": attention | sliding,
        },
        mlp_ratio=0,
        feed_forwards=(
            Experts(
                num_experts=keys.size("num_experts", 128),
                experts_per_token=keys.size("num_experts_per_tok", 4),
                width=keys.size("moe_intermediate_size", 512),
                router=RouterConfig(renormalize=keys.flag("norm_topk_prob", True)),
                shared_width=keys.size("shared_expert_intermediate_size", 512),
            ),
        ),
    )


def _kind(mixer: Any) -> str:
    if not isinstance(mixer, AttentionConfig):
        return "linear_attention"
    return "full_attention" if mixer.window is None else "sliding_attention"


def _write(config: ModelConfig) -> dict[str, Any]:
    kinds, recurrent, attention = mixers_by_kind(config)
    sliding = [layer for layer in attention if layer.window is not None]
    experts = [part for part in config.layer_feed_forwards if isinstance(part, Experts)]
    if not experts:
        raise ValueError("no layer has experts")
    values = {
        "model_type": "lara_mini",
        **write_model(config),
        **write_delta_heads(recurrent),
        "layer_types": [_kind(kind) for kind in kinds],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "num_experts": experts[0].num_experts,
        "num_experts_per_tok": experts[0].experts_per_token,
        "norm_topk_prob": experts[0].router.renormalize,
        "moe_intermediate_size": experts[0].width,
        "shared_expert_intermediate_size": experts[0].shared_width or 1,
    }
    for layer in attention[:1]:
        values |= write_attention(layer)
    for layer in sliding[:1]:
        values["sliding_window"] = layer.window
        values["rope_parameters"] = {"rope_type": "default", "rope_theta": layer.rope_base}
    return values


LARA_MINI = Family(
    name="lara_mini",
    mixers=("gated_deltanet",),
    architecture="LaraMiniForCausalLM",
    read=_read,
    write=_write,
    rows=ROWS,
    layer_rows=by_mixer(_BLOCK, _DELTA, ATTENTION),
    defaults={"vocab_size": 151936, "hidden_size": 1024, "num_hidden_layers": 34},
)

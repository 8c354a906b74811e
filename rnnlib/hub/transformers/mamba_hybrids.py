"""Hybrids of Mamba-2 and attention in transformers: `bamba` and `granitemoehybrid` (Granite 4)."""

from typing import Any

from rnnlib.fields import NaturalNumber
from rnnlib.hub.config_reader import ConfigKeys, expansion
from rnnlib.hub.mamba2 import mamba_rows, write_expansion, write_mamba, written_limits
from rnnlib.hub.transformers.common import (
    ATTENTION,
    MAMBA_BLOCK,
    MAMBA_FORMAT,
    MAMBA_ROWS,
    NORMS,
    ROWS,
    Options,
    mixers_by_kind,
    read_attention,
    read_factor,
    read_layer_types,
    read_mamba_layers,
    read_model,
    read_rotary,
    write_attention,
    write_layer_types,
    write_model,
)
from rnnlib.hub.weight_layouts import TRANSPOSED, Joined, JoinedExperts
from rnnlib.hub.weight_mapping import Family, row
from rnnlib.layers.attention import AttentionConfig
from rnnlib.layers.experts import Experts, RouterConfig
from rnnlib.layers.feed_forward import SwiGLUConfig
from rnnlib.layers.mixer import RecurrentMixerConfig
from rnnlib.models.config import ModelConfig

_MIXERS = {"linear_attention": "mamba2", "full_attention": "attention"}
# Keys of kernels, of losses and of how logits are kept.
_WITHOUT_EFFECT = (
    "mamba_chunk_size",
    "use_mamba_kernels",
    "z_loss_coefficient",
    "num_logits_to_keep",
    "output_router_logits",
    "router_aux_loss_coef",
)


def _read_mamba(keys: ConfigKeys, model: dict[str, Any]) -> Options:
    keys.ignore(*_WITHOUT_EFFECT)
    channels = keys.size("mamba_expand", 2) * model["width"]
    return read_mamba_layers(keys, channels, "mamba_expand * hidden_size", model["norm_eps"])


def _write_mixers(mamba: list[RecurrentMixerConfig], attention: list[AttentionConfig], width: int) -> dict[str, Any]:
    """The keys of both kinds of layers."""
    values = {"mamba_n_heads": 1, "mamba_d_head": "auto", "num_attention_heads": 1, "num_key_value_heads": 1}
    for mixer in mamba[:1]:
        values |= write_mamba(mixer, MAMBA_FORMAT)
        expand = write_expansion(mixer, width)
        if not isinstance(expand, int):
            raise ValueError(f"Mamba-2's channels are {expand} times the width {width}, expected a multiple")
        values |= {"mamba_expand": expand, "time_step_limit": written_limits(mixer)}
    return values | (write_attention(attention[0]) if attention else {})


def _read_bamba(keys: ConfigKeys) -> ModelConfig:
    model = read_model(keys, eps=1e-5)
    width, layers = model["width"], keys.size("num_hidden_layers")
    chosen = keys.take("attn_layer_indices", list | None, None) or []
    for layer in chosen:
        if not isinstance(layer, int) or not 0 <= layer < layers:
            raise ValueError(f"{keys.where}: attn_layer_indices has {layer!r}, expected layers from 0 to {layers - 1}")
    # The class sets 0.5 where `rope_parameters` has no fraction, whatever stands at the top level.
    base, factor = read_rotary(keys, factor=0.5, reads_outer_factor=False)
    attention = read_attention(keys, width, key_heads=8)
    mamba = _read_mamba(keys, model)
    rotary = {"rope_base": base, "rope_channels": int(attention["head_dim"] * factor)}
    return ModelConfig(
        **model,
        num_layers=layers,
        num_heads=mamba["value_heads"],
        mixers=tuple("attention" if i in chosen else "mamba2" for i in range(layers)),
        mixer_overrides={"mamba2": mamba, "attention": attention | rotary},
        mlp_width=keys.size("intermediate_size", 14336),
        feed_forwards=(SwiGLUConfig(use_bias=True) if keys.flag("mlp_bias", False) else "dense",),
    )


def _write_bamba(config: ModelConfig) -> dict[str, Any]:
    kinds, recurrent, attention = mixers_by_kind(config)
    rotary: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    for layer in attention[:1]:
        size, turned = layer.head_dim or 0, layer.rope_channels or 0
        rotary |= {"rope_theta": layer.rope_base, "partial_rotary_factor": expansion(turned, size)}
    return {
        "model_type": "bamba",
        **write_model(config),
        **_write_mixers(recurrent, attention, config.width),
        "attn_layer_indices": [i for i, kind in enumerate(kinds) if isinstance(kind, AttentionConfig)],
        "intermediate_size": config.feed_forward_width,
        "mlp_bias": any(isinstance(part, SwiGLUConfig) and part.use_bias for part in config.layer_feed_forwards),
        "rope_parameters": rotary,
    }


BAMBA = Family(
    name="bamba",
    mixers=("mamba2",),
    architecture="BambaForCausalLM",
    read=_read_bamba,
    write=_write_bamba,
    rows=MAMBA_ROWS,
    layer_rows=(*MAMBA_BLOCK, *mamba_rows("mamba"), *ATTENTION),
    defaults={"vocab_size": 128000, "hidden_size": 4096, "num_hidden_layers": 32},
)


def _read_granite(keys: ConfigKeys) -> ModelConfig:
    # Keys of older files that say what the class does in any case.
    keys.ignore("init_method", "normalization_function", "mlp_bias")
    model = read_model(keys)
    width = model["width"]
    positions = keys.take("position_embedding_type", str | None, None)
    base, _ = read_rotary(keys)
    attention = read_attention(keys, width)
    rotary = {"rope_base": base if positions == "rope" else None}
    mamba = _read_mamba(keys, model)
    count, shared = keys.take("num_local_experts", NaturalNumber, 8), keys.size("shared_intermediate_size", 1024)
    per_token, expert_width = keys.size("num_experts_per_tok", 2), keys.size("intermediate_size", 11008)
    keys.only("shared_mlp_bias", False)
    feed_forward: Any = "dense"
    if count:
        feed_forward = Experts(
            num_experts=count,
            experts_per_token=per_token,
            width=expert_width,
            router=RouterConfig(),
            shared_width=shared,
        )
    mixers = read_layer_types(keys, _MIXERS, ("linear_attention",), name=keys.named("layers_block_type", "layer_types"))
    return ModelConfig(
        **model,
        num_layers=len(mixers),
        num_heads=mamba["value_heads"],
        mixers=mixers,
        mixer_overrides={
            "mamba2": mamba,
            "attention": attention | rotary | {"scale": read_factor(keys, "attention_multiplier")},
        },
        mlp_width=shared,
        feed_forwards=(feed_forward,),
        embedding_scale=read_factor(keys, "embedding_multiplier"),
        residual_scale=read_factor(keys, "residual_multiplier"),
        logits_scale=1 / read_factor(keys, "logits_scaling"),
    )


def _write_granite(config: ModelConfig) -> dict[str, Any]:
    kinds, recurrent, attention = mixers_by_kind(config)
    experts = [part for part in config.layer_feed_forwards if isinstance(part, Experts)]
    layer = attention[0] if attention else None
    values = {
        "model_type": "granitemoehybrid",
        **write_model(config),
        **_write_mixers(recurrent, attention, config.width),
        "layer_types": write_layer_types(kinds),
        "position_embedding_type": "rope" if layer and layer.rope_base is not None else None,
        "rope_parameters": {"rope_type": "default", "rope_theta": (layer and layer.rope_base) or 10000.0},
        "attention_multiplier": 1.0 if layer is None else layer.scale,
        "embedding_multiplier": config.embedding_scale,
        "residual_multiplier": config.residual_scale,
        "logits_scaling": 1 / config.logits_scale,
        "num_local_experts": 0,
        "num_experts_per_tok": 1,
        "intermediate_size": config.feed_forward_width or 1,
        "shared_intermediate_size": config.feed_forward_width or 1,
    }
    for part in experts[:1]:
        values |= {
            "num_local_experts": part.num_experts,
            "num_experts_per_tok": part.experts_per_token,
            "intermediate_size": part.width,
            "shared_intermediate_size": part.shared_width or 1,
        }
    return values


_GATE_AND_UP = ("gate.kernel", "up.kernel")

GRANITE = Family(
    name="granitemoehybrid",
    mixers=("mamba2",),
    architecture="GraniteMoeHybridForCausalLM",
    read=_read_granite,
    write=_write_granite,
    rows=ROWS,
    layer_rows=(
        *NORMS,
        # The feed-forward of all tokens: beside experts, or alone.
        *(
            entry
            for place in ("feed_forward.shared", "feed_forward")
            for entry in (
                row(
                    "shared_mlp.input_linear.weight",
                    tuple(f"{place}.{name}" for name in _GATE_AND_UP),
                    Joined(TRANSPOSED),
                ),
                row("shared_mlp.output_linear.weight", f"{place}.down.kernel", TRANSPOSED),
            )
        ),
        row("block_sparse_moe.input_linear.weight", ("feed_forward.gate", "feed_forward.up"), JoinedExperts()),
        row("block_sparse_moe.output_linear.weight", "feed_forward.down", TRANSPOSED),
        row("block_sparse_moe.router.layer.weight", "feed_forward.router.projection.kernel", TRANSPOSED),
        *mamba_rows("mamba"),
        *ATTENTION,
    ),
    defaults={"vocab_size": 32000, "hidden_size": 4096, "num_hidden_layers": 32},
)

"""`falcon_h1`: Falcon-H1. Attention and Mamba-2 side by side in every layer, with multipliers of muP."""

import math
from typing import Any

from rnnlib.hub.config_equivalence import sized_mixer
from rnnlib.hub.config_reader import ConfigKeys
from rnnlib.hub.mamba2 import MAMBA_KEYS, mamba_rows, write_mamba, written_limits
from rnnlib.hub.transformers.common import (
    ATTENTION,
    MAMBA_BLOCK,
    MAMBA_FORMAT,
    MAMBA_ROWS,
    Options,
    inner_mixer_rows,
    read_attention,
    read_factor,
    read_mamba_layers,
    read_model,
    read_rotary,
    write_attention,
    write_model,
)
from rnnlib.hub.weight_mapping import Family
from rnnlib.layers.attention import AttentionConfig
from rnnlib.layers.decay import SoftplusDecay
from rnnlib.layers.feed_forward import SwiGLUConfig
from rnnlib.layers.mixer import RecurrentMixerConfig
from rnnlib.layers.parallel import ParallelConfig
from rnnlib.models.config import ModelConfig

_MIXER = "mamba2+attention"
# Multipliers of the rows z, x, B, C and dt of Mamba-2's input projection, as options.
_ROWS = (
    "output_projection.gate_scale",
    "convolution.value_scale",
    "convolution.key_scale",
    "convolution.query_scale",
    "decay.scale",
)


def _factors(keys: ConfigKeys, name: str, count: int) -> tuple[float, ...]:
    """So many positive factors; null is 1."""
    values = keys.take(name, list | None, None)
    if values is None:
        return (1.0,) * count
    if len(values) != count or not all(isinstance(x, int | float) and x > 0 for x in values):
        raise ValueError(f"{keys.where}: {name} is {values}, expected {count} numbers above 0")
    return tuple(map(float, values))


def _read(keys: ConfigKeys) -> ModelConfig:
    # The last three are in published files, and the class does not read them.
    keys.ignore(*MAMBA_KEYS, "mamba_use_mlp", "mlp_expansion_factor", "attn_layer_indices")
    model = read_model(keys, eps=1e-5)
    width = model["width"]
    mamba = _read_mamba(keys, width, model["norm_eps"])
    gate, down = _factors(keys, "mlp_multipliers", 2)
    feed_forward = SwiGLUConfig(use_bias=keys.flag("mlp_bias", False), gate_scale=gate, output_scale=down)
    scales = {
        "input_scales": (read_factor(keys, "ssm_in_multiplier"), read_factor(keys, "attention_in_multiplier")),
        "output_scales": (read_factor(keys, "ssm_out_multiplier"), read_factor(keys, "attention_out_multiplier")),
    }
    return ModelConfig(
        **model,
        num_layers=keys.size("num_hidden_layers", 32),
        num_heads=mamba["value_heads"],
        mixers=(_MIXER,),
        mixer_overrides={"mamba2": mamba, "attention": _read_attention(keys, width), _MIXER: scales},
        mlp_width=keys.size("intermediate_size", 14336),
        feed_forwards=(feed_forward,),
        embedding_scale=read_factor(keys, "embedding_multiplier"),
        logits_scale=read_factor(keys, "lm_head_multiplier"),
    )


def _read_mamba(keys: ConfigKeys, width: int, eps: float) -> Options:
    expand = keys.size("mamba_expand", 2)
    channels = keys.size("mamba_d_ssm", 1024 if "mamba_d_ssm" not in keys else expand * width)
    options = read_mamba_layers(keys, channels, "mamba_d_ssm", eps)
    options["output_projection.use_bias"] = keys.flag("projectors_bias", False)
    norm_first = keys.flag("mamba_norm_before_gate", True)
    if keys.flag("mamba_rms_norm", False):
        options["output_projection.gate_first"] = not norm_first
    else:
        options["output_projection.norm"] = "none"
    return options | dict(zip(_ROWS, _factors(keys, "ssm_multipliers", len(_ROWS))))


def _read_attention(keys: ConfigKeys, width: int) -> Options:
    options, (base, _) = read_attention(keys, width, key_heads=8), read_rotary(keys)
    # Keys are multiplied before they turn, which is the same as multiplying the scores.
    scale = options["head_dim"] ** -0.5 * read_factor(keys, "key_multiplier")
    return options | {"rope_base": base, "scale": scale}


def _write(config: ModelConfig) -> dict[str, Any]:
    found = sized_mixer(config, config.layer_mixers[0])
    kinds = (RecurrentMixerConfig, AttentionConfig)
    if not isinstance(found, ParallelConfig) or tuple(map(type, found.mixers)) != kinds:
        raise ValueError(f"its first layer is {config.layer_mixers[0]!r}, expected {_MIXER}")
    mamba: Any = found.mixers[0]
    attention: Any = found.mixers[1]
    if not isinstance(mamba.decay, SoftplusDecay) or mamba.convolution is None:
        raise ValueError("its first mixer is not Mamba-2's, expected SoftplusDecay and a convolution")
    feed_forward = config.layer_feed_forwards[0]
    mlp = feed_forward if isinstance(feed_forward, SwiGLUConfig) else SwiGLUConfig()
    filters, output_projection = mamba.convolution, mamba.output_projection
    return {
        "model_type": "falcon_h1",
        **write_model(config),
        "intermediate_size": mlp.width or config.feed_forward_width,
        "embedding_multiplier": config.embedding_scale,
        "lm_head_multiplier": config.logits_scale,
        **write_mamba(mamba, MAMBA_FORMAT),
        "mamba_d_ssm": mamba.value_heads * mamba.value_head_dim,
        "projectors_bias": output_projection.use_bias,
        "mamba_rms_norm": output_projection.norm != "none",
        "mamba_norm_before_gate": output_projection.norm == "none" or not output_projection.gate_first,
        "time_step_limit": written_limits(mamba),
        "ssm_multipliers": [
            output_projection.gate_scale,
            filters.value_scale,
            filters.key_scale,
            filters.query_scale,
            mamba.decay.scale,
        ],
        "ssm_in_multiplier": found.input_scales[0],
        "ssm_out_multiplier": found.output_scales[0],
        "attention_in_multiplier": found.input_scales[1],
        "attention_out_multiplier": found.output_scales[1],
        **write_attention(attention),
        "key_multiplier": _key_multiplier(attention.scale, attention.head_dim),
        "rope_parameters": {"rope_type": "default", "rope_theta": attention.rope_base},
        "mlp_bias": mlp.use_bias,
        "mlp_multipliers": [mlp.gate_scale, mlp.output_scale],
    }


def _key_multiplier(scale: float, size: int) -> float:
    """The factor from which `_read_attention` computes this scale, to the last digit."""
    nearest = scale / size**-0.5
    around = (nearest, math.nextafter(nearest, math.inf), math.nextafter(nearest, 0.0))
    return next((factor for factor in around if size**-0.5 * factor == scale), nearest)


FALCON_H1 = Family(
    name="falcon_h1",
    mixers=(_MIXER,),
    architecture="FalconH1ForCausalLM",
    read=_read,
    write=_write,
    rows=MAMBA_ROWS,
    layer_rows=(
        *MAMBA_BLOCK,
        *inner_mixer_rows(mamba_rows("mamba"), "mixers.0"),
        *inner_mixer_rows(ATTENTION, "mixers.1"),
    ),
    defaults={"vocab_size": 128000, "hidden_size": 4096},
)

"""`falcon_h1`: Falcon-H1. Attention and Mamba-2 side by side in every layer, with multipliers of muP."""

import math
from typing import Any

from rnnlib.hub.config_equivalence import sized_mixer
from rnnlib.hub.config_reader import ConfigKeys
from rnnlib.hub.mamba2 import MAMBA_KEYS, mamba_options, mamba_rows, read_limits, written_limits
from rnnlib.hub.transformers.common import (
    ATTENTION,
    MAMBA_BLOCK,
    MAMBA_ROWS,
    Options,
    read_factor,
    read_model,
    read_rotary,
    write_model,
)
from rnnlib.hub.weight_mapping import Family, Row
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
    heads, expand = keys.size("mamba_n_heads", 128), keys.size("mamba_expand", 2)
    channels = keys.size("mamba_d_ssm", 1024 if "mamba_d_ssm" not in keys else expand * width)
    if channels % heads:
        raise ValueError(f"{keys.where}: mamba_n_heads is {heads}, expected a divisor of mamba_d_ssm = {channels}")
    if keys.values.get("mamba_d_head", "auto") in ("auto", None):
        keys.ignore("mamba_d_head")
    elif keys.size("mamba_d_head") * heads != channels:
        found = keys.values["mamba_d_head"]
        raise ValueError(f"{keys.where}: mamba_d_head is {found}, expected {channels // heads}")
    options = mamba_options(
        heads=heads,
        groups=keys.size("mamba_n_groups", 1),
        head_dim=channels // heads,
        state_size=keys.size("mamba_d_state", 256),
        taps=keys.size("mamba_d_conv", 4),
        conv_bias=keys.flag("mamba_conv_bias", True),
        bias=keys.flag("mamba_proj_bias", False),
        eps=eps,
        limits=read_limits(keys, "time_step_limit"),
    )
    options["output_projection.use_bias"] = keys.flag("projectors_bias", False)
    norm_first = keys.flag("mamba_norm_before_gate", True)
    if keys.flag("mamba_rms_norm", False):
        options["output_projection.gate_first"] = not norm_first
    else:
        options["output_projection.norm"] = "none"
    return options | dict(zip(_ROWS, _factors(keys, "ssm_multipliers", len(_ROWS))))


def _read_attention(keys: ConfigKeys, width: int) -> Options:
    heads, bias = keys.size("num_attention_heads", 32), keys.flag("attention_bias", False)
    if "head_dim" not in keys and width % heads:
        raise ValueError(f"{keys.where}: num_attention_heads is {heads}, expected a divisor of hidden_size = {width}")
    base, _ = read_rotary(keys)
    size = keys.size("head_dim", width // heads)
    return {
        "num_heads": heads,
        "key_heads": keys.size("num_key_value_heads", 8 if "num_key_value_heads" not in keys else heads),
        "head_dim": size,
        "use_bias": bias,
        "output_bias": bias,
        "rope_base": base,
        # Keys are multiplied before they turn, which is the same as multiplying the scores.
        "scale": size**-0.5 * read_factor(keys, "key_multiplier"),
    }


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
    filters, output_projection, size = mamba.convolution, mamba.output_projection, attention.head_dim
    return {
        "model_type": "falcon_h1",
        **write_model(config),
        "intermediate_size": mlp.width or config.feed_forward_width,
        "embedding_multiplier": config.embedding_scale,
        "lm_head_multiplier": config.logits_scale,
        "mamba_n_heads": mamba.value_heads,
        "mamba_d_head": mamba.value_head_dim,
        "mamba_d_ssm": mamba.value_heads * mamba.value_head_dim,
        "mamba_n_groups": mamba.key_heads,
        "mamba_d_state": mamba.key_head_dim,
        "mamba_d_conv": filters.size,
        "mamba_conv_bias": filters.use_bias,
        "mamba_proj_bias": mamba.use_bias,
        "projectors_bias": output_projection.use_bias,
        "mamba_rms_norm": output_projection.norm != "none",
        "mamba_norm_before_gate": output_projection.norm == "none" or not output_projection.gate_first,
        "time_step_limit": written_limits(mamba.decay),
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
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.key_heads,
        "attention_bias": attention.use_bias,
        "key_multiplier": _key_multiplier(attention.scale, size),
        "head_dim": size,
        "rope_parameters": {"rope_type": "default", "rope_theta": attention.rope_base},
        "mlp_bias": mlp.use_bias,
        "mlp_multipliers": [mlp.gate_scale, mlp.output_scale],
    }


def _key_multiplier(scale: float, size: int) -> float:
    """The factor from which `_read_attention` computes this scale, to the last digit."""
    nearest = scale / size**-0.5
    around = (nearest, math.nextafter(nearest, math.inf), math.nextafter(nearest, 0.0))
    return next((factor for factor in around if size**-0.5 * factor == scale), nearest)


def _beside(rows: tuple[Row, ...], number: int) -> tuple[Row, ...]:
    """The rows of a mixer, for one that stands beside others."""
    return tuple(
        given._replace(ours=tuple(path.replace("mixer.", f"mixer.mixers.{number}.", 1) for path in given.ours))
        for given in rows
    )


FALCON_H1 = Family(
    name="falcon_h1",
    mixers=(_MIXER,),
    architecture="FalconH1ForCausalLM",
    read=_read,
    write=_write,
    rows=MAMBA_ROWS,
    layer_rows=(*MAMBA_BLOCK, *_beside(mamba_rows("mamba"), 0), *_beside(ATTENTION, 1)),
    defaults={"vocab_size": 128000, "hidden_size": 4096},
)

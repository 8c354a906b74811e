"""`mamba2`: Mamba-2, in the formats of transformers and of flash-linear-attention.

Both formats have the same `model_type` and the same names of arrays. A file with the key `norm_eps` is in the format of
flash-linear-attention; transformers calls this key `layer_norm_epsilon`.
"""

import dataclasses
import math
from typing import Any, NamedTuple

from rnnlib.hub.config_equivalence import sized_mixer
from rnnlib.hub.config_reader import ConfigKeys
from rnnlib.hub.weight_layouts import FILTER, SAME, TRANSPOSED, Joined
from rnnlib.hub.weight_mapping import Family, Row, linear, row
from rnnlib.layers.decay import SoftplusDecay
from rnnlib.layers.mixer import RecurrentMixerConfig
from rnnlib.models.config import ModelConfig

# The input projection's rows in order: gate, value, key, query and step (z, x, B, C and dt in the paper).
_INPUTS = tuple(f"input_projection.{name}" for name in ("output_gate", "value", "key", "query", "decay"))
_FILTERED = ("value.convolution", "key.convolution", "query.convolution")


def _paths(parts: tuple[str, ...], variable: str) -> tuple[str, ...]:
    return tuple(f"mixer.{part}.{variable}" for part in parts)


ROWS = (
    row("backbone.embeddings.weight", "embedding"),
    row("backbone.embedding.weight", "embedding"),  # in older files
    row("backbone.norm_f.weight", "norm.scale"),
    row("lm_head.weight", "head"),
    row("lm_head.weight", "embedding", copy=True),
)


def mamba_rows(prefix: str) -> tuple[Row, ...]:
    """The rows of a Mamba-2 mixer, whose arrays' names begin with `prefix`."""
    return (
        row(f"{prefix}.in_proj.weight", _paths(_INPUTS, "kernel"), Joined(TRANSPOSED)),
        row(f"{prefix}.in_proj.bias", _paths(_INPUTS, "bias"), Joined(SAME)),
        row(f"{prefix}.conv1d.weight", _paths(_FILTERED, "kernel"), Joined(FILTER)),
        row(f"{prefix}.conv1d.bias", _paths(_FILTERED, "bias"), Joined(SAME)),
        row(f"{prefix}.A_log", "mixer.decay.A_log"),
        row(f"{prefix}.dt_bias", "mixer.decay.dt_bias"),
        row(f"{prefix}.D", "mixer.output_projection.skip"),
        row(f"{prefix}.norm.weight", "mixer.output_projection.norm.scale"),
        *linear(f"{prefix}.out_proj", "mixer.output_projection.output"),
    )


LAYER_ROWS = (row("norm.weight", "mixer_norm.scale"), *mamba_rows("mixer"))

# Keys of initialisation and training. `residual_in_fp32` sets only how residual sums in lower precision are rounded.
_WITHOUT_EFFECT = ("chunk_size", "rescale_prenorm_residual", "residual_in_fp32", "time_step_rank")


# Keys of a Mamba-2 layer that say how it is initialised, or which kernels run it.
MAMBA_KEYS = (
    "chunk_size",
    "mamba_chunk_size",
    "use_mamba_kernels",
    "use_mem_eff_path",
    "time_step_max",
    "mamba_dt_max",
    "time_step_floor",
    "mamba_dt_init_floor",
    "residual_in_fp32",
    "rescale_prenorm_residual",
    "num_logits_to_keep",
    "output_router_logits",
)


class MambaFormat(NamedTuple):
    """What a format calls the keys of a Mamba-2 mixer, as `mamba2` does unless it says otherwise, and two defaults."""

    heads: str = "num_heads"
    head_dim: str = "head_dim"
    groups: str = "n_groups"
    state_size: str = "state_size"
    taps: str = "conv_kernel"
    conv_bias: str = "use_conv_bias"
    bias: str = "use_bias"
    default_groups: int = 1
    default_state_size: int = 128


def _read(
    keys: ConfigKeys, *, eps: str, limits: str, heads: int | None, groups: int, mixer: dict[str, Any]
) -> ModelConfig:
    """The model's configuration, from keys that both formats have.

    Args:
        keys: the keys of the file.
        eps: name of the key with the norms' epsilon.
        limits: name of the key with the limits of dt.
        heads: the default number of heads; None derives it from the sizes.
        groups: the default number of groups.
        mixer: further options of the mixer.
    """
    keys.ignore(*_WITHOUT_EFFECT)
    keys.only("hidden_act", "silu", "swish")
    width, size = keys.size("hidden_size"), keys.size("head_dim", 64)
    channels = int(keys.number("expand", 2) * width)
    found = keys.size("num_heads", channels // size if heads is None else heads)
    if found * size != channels:
        raise ValueError(
            f"{keys.where}: num_heads is {found}, expected expand * hidden_size = {channels} channels in heads of "
            f"head_dim = {size}"
        )
    epsilon = keys.number(eps, 1e-5)
    names = MambaFormat(default_groups=groups)
    options = read_mamba(keys, names, found, size, eps=epsilon, limits=read_limits(keys, limits))
    return ModelConfig(
        vocabulary_size=keys.size("vocab_size"),
        width=width,
        num_layers=keys.size("num_hidden_layers"),
        num_heads=found,
        mixers=("mamba2",),
        mixer_overrides={"mamba2": options | mixer},
        mlp_ratio=0,
        norm_eps=epsilon,
        tie_embeddings=keys.flag("tie_word_embeddings", False),
    )


def read_mamba(
    keys: ConfigKeys,
    names: MambaFormat,
    heads: int,
    head_dim: int,
    *,
    eps: float,
    limits: tuple[float, float] | None,
) -> dict[str, Any]:
    """Options of the preset `mamba2`.

    Args:
        keys: the keys of the file.
        names: what the format calls them.
        heads: value heads, which the key heads (groups) divide.
        head_dim: channels of a value head.
        eps: of the gated norm.
        limits: of dt, or None.

    Raises:
        ValueError: a key's value is wrong, or the heads do not divide into groups.
    """
    groups, bias = keys.size(names.groups, names.default_groups), keys.flag(names.bias, False)
    if heads % groups:
        raise ValueError(f"{keys.where}: {names.groups} is {groups}, expected a divisor of {names.heads} = {heads}")
    return {
        "key_heads": groups,
        "value_heads": heads,
        "key_head_dim": keys.size(names.state_size, names.default_state_size),
        "value_head_dim": head_dim,
        "use_bias": bias,
        "decay.use_bias": bias,
        "decay.step_limits": limits,
        "convolution.size": keys.size(names.taps, 4),
        "convolution.use_bias": keys.flag(names.conv_bias, True),
        "output_projection.norm": "all" if groups == 1 else "group",
        "output_projection.eps": eps,
        "output_projection.gate_bias": bias,
        "output_projection.use_bias": bias,
    }


def write_mamba(mixer: RecurrentMixerConfig, names: MambaFormat) -> dict[str, Any]:
    """The keys that `read_mamba` reads."""
    filters = mixer.convolution
    return {
        names.heads: mixer.value_heads,
        names.head_dim: mixer.value_head_dim,
        names.groups: mixer.key_heads,
        names.state_size: mixer.key_head_dim,
        names.taps: 4 if filters is None else filters.size,
        names.conv_bias: filters is not None and filters.use_bias,
        names.bias: mixer.use_bias,
    }


def write_expansion(mixer: RecurrentMixerConfig, width: int) -> float | int:
    """The number of channels of all value heads over the model's width; a whole number is an int."""
    expand = (mixer.value_heads or 0) * (mixer.value_head_dim or 0) / width
    return int(expand) if expand == int(expand) else expand


def read_limits(keys: ConfigKeys, name: str) -> tuple[float, float] | None:
    """Limits of dt; None if they have no effect, since dt is always positive."""
    given = keys.take(name, list | tuple | None, None)
    if given is None:
        return None
    if len(given) != 2 or not all(isinstance(limit, int | float) for limit in given):
        raise ValueError(f"{keys.where}: {name} is {given!r}, expected two numbers")
    low, high = (float(limit) for limit in given)
    return None if low <= 0 and high == math.inf else (max(low, 0.0), high)


def _write(config: ModelConfig) -> tuple[dict[str, Any], RecurrentMixerConfig, list[float]]:
    """Keys that both formats have, the mixer, and the limits of dt."""
    mixer = sized_mixer(config, config.layer_mixers[0])
    if not isinstance(mixer, RecurrentMixerConfig) or not isinstance(mixer.decay, SoftplusDecay):
        raise ValueError(f"its first layer is {config.layer_mixers[0]!r}, expected mamba2")
    if config.feed_forward_width:
        raise ValueError(f"the feed-forward's width is {config.feed_forward_width}, expected none: mlp_ratio=0")
    keys = {
        "model_type": "mamba2",
        "vocab_size": config.vocabulary_size,
        "hidden_size": config.width,
        "num_hidden_layers": config.num_layers,
        **write_mamba(mixer, MambaFormat()),
        "expand": write_expansion(mixer, config.width),
        "hidden_act": "silu",
        "tie_word_embeddings": config.tie_embeddings,
    }
    return keys, mixer, written_limits(mixer)


def written_limits(mixer: RecurrentMixerConfig) -> list[float]:
    """The limits of dt, as files have them.

    Raises:
        ValueError: the mixer's decay is not Mamba-2's.
    """
    if not isinstance(mixer.decay, SoftplusDecay):
        raise ValueError(f"decay is {type(mixer.decay).__name__}, expected SoftplusDecay")
    return [0.0, math.inf] if mixer.decay.step_limits is None else list(mixer.decay.step_limits)


def _read_transformers(keys: ConfigKeys) -> ModelConfig:
    keys.ignore("time_step_min", "time_step_max", "time_step_floor")
    keys.only("rms_norm", True)
    return _read(keys, eps="layer_norm_epsilon", limits="time_step_limit", heads=128, groups=8, mixer={})


def _write_transformers(config: ModelConfig) -> dict[str, Any]:
    keys, _, limits = _write(config)
    return keys | {"layer_norm_epsilon": config.norm_eps, "time_step_limit": limits}


def _read_fla(keys: ConfigKeys) -> ModelConfig:
    keys.ignore("A_init_range", "conv_init", "dt_min", "dt_max", "dt_init_floor")
    keys.ignore("fuse_norm", "fuse_cross_entropy", "fuse_linear_cross_entropy", "use_l2warp")
    options: dict[str, Any] = {"output_projection.gate_first": not keys.flag("norm_before_gate", False)}
    if not keys.flag("rmsnorm", True):
        options |= {"output_projection.norm": "none", "output_projection.gate_first": True}
    if keys.flag("D_has_hdim", False):
        options["output_projection.skip"] = "channel"
    return _read(keys, eps="norm_eps", limits="dt_limit", heads=None, groups=1, mixer=options)


def _write_fla(config: ModelConfig) -> dict[str, Any]:
    keys, mixer, limits = _write(config)
    return keys | {
        "norm_eps": config.norm_eps,
        "dt_limit": limits,
        "rmsnorm": mixer.output_projection.norm != "none",
        "norm_before_gate": not mixer.output_projection.gate_first,
        "D_has_hdim": mixer.output_projection.skip == "channel",
    }


MAMBA2 = Family(
    name="mamba2",
    matches=lambda values: values.get("model_type") == "mamba2" and "norm_eps" not in values,
    mixers=("mamba2",),
    architecture="Mamba2ForCausalLM",
    read=_read_transformers,
    write=_write_transformers,
    rows=ROWS,
    layer_rows=LAYER_ROWS,
    layer_prefix="backbone.layers.{}.",
    prefixes=("backbone.",),
    defaults={"vocab_size": 32768, "hidden_size": 4096, "num_hidden_layers": 64},
)

MAMBA2_FLA = dataclasses.replace(
    MAMBA2,
    name="mamba2_fla",
    matches=lambda values: values.get("model_type") == "mamba2" and "norm_eps" in values,
    read=_read_fla,
    write=_write_fla,
    defaults={"vocab_size": 32000, "hidden_size": 2048, "num_hidden_layers": 48},
)

"""`nemotron_h`: Nemotron-H and Nemotron 3. Each layer is Mamba-2, attention, a feed-forward or experts alone."""

import math
from typing import Any

from rnnlib.fields import PositiveNumber
from rnnlib.hub.config_reader import ConfigKeys
from rnnlib.hub.mamba2 import MAMBA_KEYS, MambaFormat, mamba_rows, read_mamba, write_mamba, written_limits
from rnnlib.hub.rows import attention_rows
from rnnlib.hub.transformers.common import Options, mixers_by_kind
from rnnlib.hub.weight_layouts import TRANSPOSED, Stacked
from rnnlib.hub.weight_mapping import Family, linear, row
from rnnlib.layers.attention import AttentionConfig
from rnnlib.layers.experts import Experts, RouterConfig
from rnnlib.layers.feed_forward import MLPConfig
from rnnlib.layers.mixer import RecurrentMixerConfig
from rnnlib.models.config import NONE, ModelConfig

_LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
# Also the words of older files.
_MIXERS = {
    "linear_attention": "mamba2",
    "mamba": "mamba2",
    "full_attention": "attention",
    "attention": "attention",
    "mlp": NONE,
    "moe": NONE,
}
_FORMAT = MambaFormat(heads="mamba_num_heads", head_dim="mamba_head_dim", state_size="ssm_state_size", default_groups=8)
_PATTERN = ("linear_attention", "moe", "full_attention", "mlp")
_ACTIVATIONS = {"relu2": "squared_relu", "relu": "relu", "silu": "silu"}

# Keys of initialisation, kernels and further predicted tokens, and keys that the class does not read.
_WITHOUT_EFFECT = (
    *MAMBA_KEYS,
    "num_hidden_layers",  # the list of layers counts
    "attention_bias",
    "sliding_window",
    "expand",
    "mamba_expand",
    "mamba_proj_bias",
    "mamba_ssm_cache_dtype",
    "time_step_limit",
    "mamba_dt_limit",
    "n_shared_experts",
    "moe_shared_expert_overlap",
    "num_nextn_predict_layers",
    "mtp_layers_block_type",
    "mtp_hybrid_override_pattern",
    "tie_word_embeddings",  # the class never ties its head
    # Of published files, and not read by the class: it has no positions, and `layer_norm_epsilon` for all norms.
    "rms_norm_eps",
    "norm_eps",
    "partial_rotary_factor",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
)


def _read(keys: ConfigKeys) -> ModelConfig:
    keys.ignore(*_WITHOUT_EFFECT)
    kinds = _read_kinds(keys)
    eps, heads = keys.number("layer_norm_epsilon", 1e-5), keys.size("mamba_num_heads", 128)
    least = keys.number(keys.named("mamba_dt_min", "time_step_min"), 0.001)
    names = _FORMAT._replace(
        groups=keys.named("mamba_n_groups", "n_groups"),
        taps=keys.named("mamba_d_conv", "conv_kernel"),
        conv_bias=keys.named("mamba_conv_bias", "use_conv_bias"),
    )
    limits = (least, math.inf) if least > 0 else None
    mamba = read_mamba(keys, names, heads, keys.size("mamba_head_dim", 64), eps=eps, limits=limits)
    attention = _read_attention(keys)
    keys.only("mamba_hidden_act", "silu", "swish")
    activation = keys.one_of("mlp_hidden_act", _ACTIVATIONS, "relu2")
    bias = keys.flag("mlp_bias", False)
    feed_forwards = {
        "mlp": MLPConfig(activation=activation, use_bias=bias),
        "moe": _read_experts(keys, activation, bias),
    }
    return ModelConfig(
        vocabulary_size=keys.size("vocab_size", 131072),
        width=keys.size("hidden_size", 4096),
        num_layers=len(kinds),
        num_heads=heads,
        mixers=tuple(_MIXERS[kind] for kind in kinds),
        mixer_overrides={"mamba2": mamba, "attention": attention},
        mlp_width=keys.size("intermediate_size", 21504),
        feed_forwards=tuple(feed_forwards.get(kind, NONE) for kind in kinds),
        norm_eps=eps,
        tie_embeddings=False,
    )


def _read_kinds(keys: ConfigKeys) -> list[str]:
    """What each layer is, from a list of words or a string of letters; the list wins."""
    pattern = keys.take("hybrid_override_pattern", str | None, None)
    kinds = keys.take(keys.named("layer_types", "layers_block_type"), list | None, None)
    if kinds is None and pattern is not None:
        unknown = [letter for letter in pattern if letter not in _LETTERS]
        if unknown or not pattern:
            raise ValueError(
                f"{keys.where}: hybrid_override_pattern is {pattern!r}, expected letters of {''.join(_LETTERS)}"
            )
        kinds = [_LETTERS[letter] for letter in pattern]
    kinds = list(_PATTERN) if kinds is None else kinds
    unknown = [kind for kind in kinds if kind not in _MIXERS]
    if unknown or not kinds:
        raise ValueError(f"{keys.where}: layers_block_type is {kinds}, expected words of {', '.join(_MIXERS)}")
    return kinds


def _read_attention(keys: ConfigKeys) -> Options:
    heads = keys.size("num_attention_heads", 32)
    shared = keys.size("num_key_value_heads", 8 if "num_key_value_heads" not in keys else heads)
    if heads % shared:
        raise ValueError(
            f"{keys.where}: num_key_value_heads is {shared}, expected a divisor of num_attention_heads = {heads}"
        )
    size = keys.size("head_dim", 128)
    keys.only("attention_head_dim", size)  # in published files, beside `head_dim` or for its default
    return {"num_heads": heads, "key_heads": shared, "head_dim": size, "rope_base": None}


def _read_experts(keys: ConfigKeys, activation: Any, bias: bool) -> Experts:
    router = RouterConfig(
        "sigmoid",
        renormalize=keys.flag("norm_topk_prob", True),
        correction_bias=True,
        groups=keys.size("n_group", 1),
        groups_kept=keys.size("topk_group", 1),
        scale=float(keys.take("routed_scaling_factor", PositiveNumber, 1.0)),
    )
    return Experts(
        num_experts=keys.size(keys.named("num_local_experts", "n_routed_experts"), 8),
        experts_per_token=keys.size("num_experts_per_tok", 2),
        width=keys.size("moe_intermediate_size", 7688),
        router=router,
        shared_width=keys.size("moe_shared_expert_intermediate_size", 7688),
        gated=False,
        activation=activation,
        latent_size=keys.size("moe_latent_size", None),
        use_bias=bias,
    )


def _write(config: ModelConfig) -> dict[str, Any]:
    mixers, recurrent, attention = mixers_by_kind(config)
    values: dict[str, Any] = {
        "model_type": "nemotron_h",
        "vocab_size": config.vocabulary_size,
        "hidden_size": config.width,
        "num_hidden_layers": config.num_layers,
        "layer_norm_epsilon": config.norm_eps,
        "tie_word_embeddings": False,
        "intermediate_size": config.feed_forward_width or 1,
        "layers_block_type": [
            _kind(mixer, feed_forward) for mixer, feed_forward in zip(mixers, config.layer_feed_forwards)
        ],
    }
    for mixer in recurrent[:1]:
        values |= write_mamba(mixer, _FORMAT) | {"time_step_min": written_limits(mixer)[0]}
    for layer in attention[:1]:
        values |= {
            "num_attention_heads": layer.num_heads,
            "num_key_value_heads": layer.key_heads,
            "head_dim": layer.head_dim,
        }
    names = {ours: theirs for theirs, ours in _ACTIVATIONS.items()}
    for part in config.layer_feed_forwards:
        if isinstance(part, MLPConfig | Experts) and part.activation in names:
            values |= {"mlp_hidden_act": names[part.activation], "mlp_bias": part.use_bias}
        if isinstance(part, Experts):
            values |= _write_experts(part)
    return values


def _kind(mixer: Any, feed_forward: Any) -> str:
    if isinstance(mixer, RecurrentMixerConfig):
        return "linear_attention"
    if isinstance(mixer, AttentionConfig):
        return "full_attention"
    return "moe" if isinstance(feed_forward, Experts) else "mlp"


def _write_experts(part: Experts) -> dict[str, Any]:
    return {
        "n_routed_experts": part.num_experts,
        "num_experts_per_tok": part.experts_per_token,
        "moe_intermediate_size": part.width,
        "moe_shared_expert_intermediate_size": part.shared_width or 1,
        "moe_latent_size": part.latent_size,
        "norm_topk_prob": part.router.renormalize,
        "n_group": part.router.groups,
        "topk_group": part.router.groups_kept,
        "routed_scaling_factor": part.router.scale,
    }


NEMOTRON_H = Family(
    name="nemotron_h",
    mixers=("mamba2",),
    architecture="NemotronHForCausalLM",
    read=_read,
    write=_write,
    rows=(
        row("backbone.embeddings.weight", "embedding"),
        row("backbone.norm_f.weight", "norm.scale"),
        row("lm_head.weight", "head"),
    ),
    layer_rows=(
        row("norm.weight", "mixer_norm.scale"),
        row("norm.weight", "feed_forward_norm.scale"),
        *mamba_rows("mixer"),
        *attention_rows("mixer"),
        *linear("mixer.up_proj", "feed_forward.up"),
        *linear("mixer.down_proj", "feed_forward.down"),
        row("mixer.gate.weight", "feed_forward.router.projection.kernel", TRANSPOSED),
        row("mixer.gate.e_score_correction_bias", "feed_forward.router.correction_bias"),
        row("mixer.experts.*.up_proj.weight", "feed_forward.up", Stacked(TRANSPOSED)),
        row("mixer.experts.*.down_proj.weight", "feed_forward.down", Stacked(TRANSPOSED)),
        *linear("mixer.fc1_latent_proj", "feed_forward.latent_in"),
        *linear("mixer.fc2_latent_proj", "feed_forward.latent_out"),
        *linear("mixer.shared_experts.up_proj", "feed_forward.shared.up"),
        *linear("mixer.shared_experts.down_proj", "feed_forward.shared.down"),
    ),
    layer_prefix="backbone.layers.{}.",
    prefixes=("backbone.", "model."),
    unused=("mtp.", "backbone.mtp.", "model.mtp."),
)

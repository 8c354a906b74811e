"""Code shared by transformers' families: rows, experts, rotary positions, latent attention, types of layers."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rnnlib.fields import NaturalNumber, PositiveNumber
from rnnlib.hub.config_equivalence import sized_mixer
from rnnlib.hub.config_reader import ConfigKeys
from rnnlib.hub.mamba2 import MambaFormat, read_limits, read_mamba
from rnnlib.hub.rows import attention_rows, swiglu_rows
from rnnlib.hub.weight_layouts import TRANSPOSED, JoinedExperts, Stacked
from rnnlib.hub.weight_mapping import Row, linear, row
from rnnlib.layers.attention import AttentionConfig
from rnnlib.layers.experts import Experts, RouterConfig
from rnnlib.layers.latent_attention import LatentAttentionConfig
from rnnlib.layers.mixer import RecurrentMixerConfig
from rnnlib.models.config import ModelConfig

ROWS = (
    row("model.embed_tokens.weight", "embedding"),
    row("model.norm.weight", "norm.scale"),
    row("lm_head.weight", "head"),
    row("lm_head.weight", "embedding", copy=True),
)

# Of models with Mamba-2, whose last norm has a name of its own.
MAMBA_ROWS = (
    *(entry for entry in ROWS if entry.ours != ("norm.scale",)),
    row("model.final_layernorm.weight", "norm.scale"),
)

MAMBA_BLOCK = (
    row("input_layernorm.weight", "mixer_norm.scale"),
    row("pre_ff_layernorm.weight", "feed_forward_norm.scale"),
    *swiglu_rows("feed_forward"),
)

NORMS = (
    row("input_layernorm.weight", "mixer_norm.scale"),
    row("post_attention_layernorm.weight", "feed_forward_norm.scale"),
)

FEED_FORWARD = swiglu_rows("mlp")

# Files have either separate matrices for each expert, or two arrays with the matrices of all experts.
EXPERTS = (
    *linear("mlp.gate", "feed_forward.router.projection"),
    row("mlp.experts.*.gate_proj.weight", "feed_forward.gate", Stacked(TRANSPOSED)),
    row("mlp.experts.*.up_proj.weight", "feed_forward.up", Stacked(TRANSPOSED)),
    row("mlp.experts.*.down_proj.weight", "feed_forward.down", Stacked(TRANSPOSED)),
    row("mlp.experts.gate_up_proj", ("feed_forward.gate", "feed_forward.up"), JoinedExperts()),
    row("mlp.experts.down_proj", "feed_forward.down", TRANSPOSED),
    *swiglu_rows("mlp.shared_expert", "feed_forward.shared"),
    *linear("mlp.shared_expert_gate", "feed_forward.shared_gate"),
)

ATTENTION = (
    *attention_rows("self_attn"),
    row("self_attn.q_norm.weight", "mixer.query_norm.scale"),
    row("self_attn.k_norm.weight", "mixer.key_norm.scale"),
)

# Options of a preset by path, in the form of `ModelConfig.mixer_overrides`.
Options = dict[str, Any]

LAYER_TYPES = {"linear_attention": "gated_deltanet", "full_attention": "attention"}
# Words of older files for types of layers.
OLDER_LAYER_TYPES = {"mamba": "linear_attention", "attention": "full_attention"}


def read_model(keys: ConfigKeys, *, eps: float = 1e-6) -> dict[str, Any]:
    """Fields of the model that do not depend on its mixers; `eps` is the default of the norms' epsilon."""
    keys.only("hidden_act", "silu", "swish")
    return {
        "vocabulary_size": keys.size("vocab_size"),
        "width": keys.size("hidden_size"),
        "norm_eps": keys.number("rms_norm_eps", eps),
        "tie_embeddings": keys.flag("tie_word_embeddings", False),
    }


def write_model(config: ModelConfig) -> dict[str, Any]:
    """The keys that `read_model` reads, and the number of layers."""
    return {
        "vocab_size": config.vocabulary_size,
        "hidden_size": config.width,
        "hidden_act": "silu",
        "num_hidden_layers": config.num_layers,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
    }


def read_layer_types(
    keys: ConfigKeys, mixers: Mapping[str, str], pattern: Sequence[str], *, name: str = "layer_types"
) -> tuple[str, ...]:
    """The mixer of each layer.

    Args:
        keys: the file's keys.
        mixers: the mixer of each type of layer.
        pattern: the types of layers that are repeated in a file that does not name them.
        name: the key that names them.
    """
    layers = keys.size("num_hidden_layers")
    types = keys.take(name, list | None, None)
    types = [pattern[i % len(pattern)] for i in range(layers)] if types is None else types
    return tuple(mixers[kind] for kind in checked_types(keys, name, types, mixers))


def checked_types(keys: ConfigKeys, name: str, types: Sequence[Any], known: Collection[str]) -> list[str]:
    """One type a layer, in today's words.

    Raises:
        ValueError: there are more or fewer than layers, or one is not `known`.
    """
    layers = keys.size("num_hidden_layers")
    if len(types) != layers:
        raise ValueError(f"{keys.where}: {name} has {len(types)} entries, expected num_hidden_layers = {layers}")
    found = [OLDER_LAYER_TYPES.get(kind, kind) if isinstance(kind, str) else kind for kind in types]
    for given, kind in zip(types, found):
        if not isinstance(kind, str) or kind not in known:
            raise ValueError(f"{keys.where}: {name} has {given!r}, expected {' or '.join(known)}")
    return found


def read_feed_forward_types(keys: ConfigKeys, dense: int) -> list[str]:
    """Of each layer "dense" or "sparse", which has experts, as Kimi Linear and Ling say it.

    Args:
        keys: the file's keys.
        dense: the default number of dense layers, which are the first.
    """
    given = keys.take("mlp_layer_types", list | None, None)
    first = keys.take("first_k_dense_replace", NaturalNumber, dense)
    if given is None:
        return ["dense" if i < first else "sparse" for i in range(keys.size("num_hidden_layers"))]
    return checked_types(keys, "mlp_layer_types", given, ("dense", "sparse"))


def write_layer_types(kinds: Sequence[Any]) -> list[str]:
    """The key `layer_types` for the mixers of a model."""
    return ["full_attention" if isinstance(kind, AttentionConfig) else "linear_attention" for kind in kinds]


def read_rotary(
    keys: ConfigKeys, *, base: float = 10000.0, factor: float | None = None, reads_outer_factor: bool = True
) -> tuple[float | None, float]:
    """The base of rotary positions (None for no positions), and the fraction of a head's channels that are rotated.

    Newer files have the object `rope_parameters`. Older ones have `rope_scaling`, which wins where both are there, as
    in transformers. What the object lacks is at the top level: `rope_theta`, `partial_rotary_factor`.

    Args:
        keys: the file's keys.
        base: the default of the base.
        factor: the default of the fraction; None for a class that reads none, and rotates all channels whatever the
            file says.
        reads_outer_factor: whether the fraction at the top level counts.
    """
    outer_base = keys.take("rope_theta", float | int | None, base)
    given_factor = keys.number("partial_rotary_factor", factor or 1.0)
    outer_factor = given_factor if reads_outer_factor else factor or 1.0
    keys.take("rope_parameters", dict | None, None)
    inner = keys.within("rope_scaling" if keys.take("rope_scaling", dict | None, None) else "rope_parameters")
    inner.only("rope_type", "default")
    inner.ignore("type") if "rope_type" in inner else inner.only("type", "default")
    inner.ignore("mrope_section", "mrope_interleaved")  # the three positions of a token are equal in text
    theta = inner.take("rope_theta", float | int | None, outer_base)
    found = inner.number("partial_rotary_factor", outer_factor)
    return None if theta is None else float(theta), 1.0 if factor is None else found


def inner_mixer_rows(rows: Sequence[Row], path: str) -> tuple[Row, ...]:
    """The rows of a mixer, for one that a layer's mixer has at `path`."""
    return tuple(
        given._replace(ours=tuple(ours.replace("mixer.", f"mixer.{path}.", 1) for ours in given.ours)) for given in rows
    )


MAMBA_FORMAT = MambaFormat(
    heads="mamba_n_heads",
    head_dim="mamba_d_head",
    groups="mamba_n_groups",
    state_size="mamba_d_state",
    taps="mamba_d_conv",
    conv_bias="mamba_conv_bias",
    bias="mamba_proj_bias",
    default_state_size=256,
)


def read_mamba_layers(keys: ConfigKeys, channels: int, origin: str, eps: float) -> Options:
    """Options of the Mamba-2 layers of a hybrid, from keys that begin with `mamba_`.

    Args:
        keys: the file's keys.
        channels: those of all heads together.
        origin: the keys that they come from.
        eps: the epsilon of the gated norm.
    """
    heads = keys.size(MAMBA_FORMAT.heads, 128)
    if channels % heads:
        raise ValueError(f"{keys.where}: mamba_n_heads is {heads}, expected a divisor of {origin} = {channels}")
    if keys.values.get("mamba_d_head", "auto") in ("auto", None):
        keys.ignore("mamba_d_head")
    elif keys.size("mamba_d_head") * heads != channels:
        found = keys.values["mamba_d_head"]
        raise ValueError(f"{keys.where}: mamba_d_head is {found}, expected {channels // heads}")
    limits = read_limits(keys, "time_step_limit")
    return read_mamba(keys, MAMBA_FORMAT, heads, channels // heads, eps=eps, limits=limits)


def read_attention(keys: ConfigKeys, width: int, *, heads: int = 32, key_heads: int | None = None) -> Options:
    """Options of the attention layers of a hybrid; `heads` and `key_heads` are defaults, the latter not of null."""
    heads, biases = keys.size("num_attention_heads", heads), keys.flag("attention_bias", False)
    if "head_dim" not in keys and width % heads:
        raise ValueError(f"{keys.where}: num_attention_heads is {heads}, expected a divisor of hidden_size = {width}")
    return {
        "num_heads": heads,
        "key_heads": keys.size("num_key_value_heads", heads if "num_key_value_heads" in keys else key_heads or heads),
        "head_dim": keys.size("head_dim", width // heads),
        "use_bias": biases,
        "output_bias": biases,
    }


def write_attention(layer: AttentionConfig) -> dict[str, Any]:
    """The keys that `read_attention` reads."""
    return {
        "num_attention_heads": layer.num_heads,
        "num_key_value_heads": layer.key_heads,
        "head_dim": layer.head_dim,
        "attention_bias": layer.use_bias,
    }


def mixers_by_kind(
    config: ModelConfig,
) -> tuple[list[Any], list[RecurrentMixerConfig], list[AttentionConfig]]:
    """The mixers of all layers, of recurrent layers and of attention layers, with every size as a number."""
    kinds = [sized_mixer(config, mixer) for mixer in config.layer_mixers]
    recurrent = [kind for kind in kinds if isinstance(kind, RecurrentMixerConfig)]
    attention = [kind for kind in kinds if isinstance(kind, AttentionConfig)]
    return kinds, recurrent, attention


def read_delta_heads(keys: ConfigKeys, defaults: Mapping[str, int]) -> Options:
    """Heads, channels per head and filter length of Gated DeltaNet layers."""

    def size(name: str) -> int:
        return keys.size(name, defaults.get(name, ...))

    heads, value_heads = size("linear_num_key_heads"), size("linear_num_value_heads")
    if value_heads % heads:
        raise ValueError(
            f"{keys.where}: linear_num_value_heads is {value_heads}, expected a multiple of linear_num_key_heads = "
            f"{heads}"
        )
    return {
        "key_heads": heads,
        "value_heads": value_heads,
        "key_head_dim": size("linear_key_head_dim"),
        "value_head_dim": size("linear_value_head_dim"),
        "convolution.size": keys.size("linear_conv_kernel_dim", 4),
    }


def write_delta_heads(mixers: Sequence[RecurrentMixerConfig]) -> dict[str, Any]:
    """The keys that `read_delta_heads` reads, from the first mixer; no keys if there is no mixer."""
    if not mixers:
        return {}
    mixer = mixers[0]
    return {
        "linear_num_key_heads": mixer.key_heads,
        "linear_num_value_heads": mixer.value_heads,
        "linear_key_head_dim": mixer.key_head_dim,
        "linear_value_head_dim": mixer.value_head_dim,
        "linear_conv_kernel_dim": 4 if mixer.convolution is None else mixer.convolution.size,
    }


def read_experts(
    keys: ConfigKeys, *, num_experts: int, width: int, groups: int, groups_kept: int, scale: float
) -> Experts:
    """Experts of Kimi Linear and Ling, whose keys have two names each; arguments are the defaults."""
    width = keys.size("moe_intermediate_size", width)
    router = RouterConfig(
        "sigmoid",
        renormalize=keys.flag(keys.named("moe_renormalize", "norm_topk_prob"), True),
        correction_bias=True,
        groups=keys.size(keys.named("num_expert_group", "n_group"), groups),
        groups_kept=keys.size("topk_group", groups_kept),
        scale=float(keys.take("routed_scaling_factor", PositiveNumber, scale)),
    )
    return Experts(
        num_experts=keys.size(keys.named("num_experts", "num_local_experts"), num_experts),
        experts_per_token=keys.size(keys.named("num_experts_per_token", "num_experts_per_tok"), 8),
        width=width,
        router=router,
        shared_width=width * keys.size(keys.named("num_shared_experts", "n_shared_experts"), 1),
    )


def write_experts(part: Experts) -> dict[str, Any]:
    """The keys that `read_experts` reads.

    Raises:
        ValueError: the shared expert is no whole number of experts wide.
    """
    width = part.width or 0
    if not width or not part.shared_width or part.shared_width % width:
        raise ValueError(
            f"the shared expert's width is {part.shared_width}, expected a multiple of the experts' {width}"
        )
    return {
        "num_experts": part.num_experts,
        "num_experts_per_token": part.experts_per_token,
        "num_shared_experts": part.shared_width // width,
        "moe_intermediate_size": width,
        "moe_renormalize": part.router.renormalize,
        "num_expert_group": part.router.groups,
        "topk_group": part.router.groups_kept,
        "routed_scaling_factor": part.router.scale,
    }


def read_factor(keys: ConfigKeys, name: str) -> float:
    """A positive factor; null is 1."""
    value = keys.take(name, PositiveNumber | None, 1.0)
    return 1.0 if value is None else float(value)


def read_latent_attention(keys: ConfigKeys, *, num_heads: int, rope_base: float | None, eps: float) -> Options:
    """Options of latent attention, with DeepSeek's keys of its sizes."""
    bias = keys.flag("attention_bias", False)
    return {
        "num_heads": num_heads,
        "head_dim": keys.size("qk_nope_head_dim", 128),
        "shared_key_dim": keys.size("qk_rope_head_dim", 64),
        "value_head_dim": keys.size("v_head_dim", 128),
        "latent_size": keys.size("kv_lora_rank", 512),
        "query_latent_size": keys.size("q_lora_rank", None),
        "rope_base": rope_base,
        "eps": eps,
        "use_bias": bias,
        "output_bias": bias,
    }


def write_latent_attention(layer: LatentAttentionConfig) -> dict[str, Any]:
    """The keys that `read_latent_attention` reads."""
    return {
        "qk_nope_head_dim": layer.head_dim,
        "qk_rope_head_dim": layer.shared_key_dim,
        "v_head_dim": layer.value_head_dim,
        "kv_lora_rank": layer.latent_size,
        "q_lora_rank": layer.query_latent_size,
        "attention_bias": layer.use_bias,
    }

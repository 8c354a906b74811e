"""`kimi_linear`: Kimi Delta Attention, with latent attention without positions in some layers and experts in most."""

from typing import Any

from rnnlib.hub.config_equivalence import sized_mixer
from rnnlib.hub.config_reader import ConfigKeys
from rnnlib.hub.rows import filter_rows, stream_rows, swiglu_rows
from rnnlib.hub.transformers.common import (
    FEED_FORWARD,
    NORMS,
    ROWS,
    Options,
    checked_types,
    read_experts,
    read_feed_forward_types,
    read_latent_attention,
    read_model,
    write_experts,
    write_latent_attention,
    write_model,
)
from rnnlib.hub.weight_layouts import TRANSPOSED, Interleaved, Reshaped, Stacked
from rnnlib.hub.weight_mapping import Family, linear, row
from rnnlib.layers.experts import Experts
from rnnlib.layers.latent_attention import LatentAttentionConfig
from rnnlib.layers.mixer import RecurrentMixerConfig
from rnnlib.models.config import ModelConfig

# Epsilon of latent attention's norms. It does not depend on `rms_norm_eps`.
_EPS = 1e-6

_BLOCK = (
    *NORMS,
    # Dense layers: the names of the published files, then those that transformers writes.
    *FEED_FORWARD,
    *swiglu_rows("block_sparse_moe"),
    *linear("block_sparse_moe.gate", "feed_forward.router.projection"),
    row("block_sparse_moe.gate.e_score_correction_bias", "feed_forward.router.correction_bias"),
    row("block_sparse_moe.experts.*.w1.weight", "feed_forward.gate", Stacked(TRANSPOSED)),
    row("block_sparse_moe.experts.*.w3.weight", "feed_forward.up", Stacked(TRANSPOSED)),
    row("block_sparse_moe.experts.*.w2.weight", "feed_forward.down", Stacked(TRANSPOSED)),
    *swiglu_rows("block_sparse_moe.shared_experts", "feed_forward.shared"),
)

_DELTA = (
    *stream_rows("self_attn"),
    *filter_rows("self_attn"),
    *linear("self_attn.f_a_proj", "mixer.input_projection.decay.down"),
    *linear("self_attn.f_b_proj", "mixer.input_projection.decay.up"),
    row("self_attn.A_log", "mixer.decay.A_log", Reshaped((1, 1, -1, 1))),
    row("self_attn.dt_bias", "mixer.decay.dt_bias"),
    *linear("self_attn.b_proj", "mixer.input_projection.write_gate"),
    *linear("self_attn.g_a_proj", "mixer.input_projection.output_gate.down"),
    *linear("self_attn.g_b_proj", "mixer.input_projection.output_gate.up"),
    row("self_attn.o_norm.weight", "mixer.output_projection.norm.scale"),
    *linear("self_attn.o_proj", "mixer.output_projection.output"),
)

_LATENT = (
    *linear("self_attn.q_proj", "mixer.query"),
    *linear("self_attn.q_a_proj", "mixer.query.down"),
    row("self_attn.q_a_layernorm.weight", "mixer.query.norm.scale"),
    *linear("self_attn.q_b_proj", "mixer.query.up"),
    *linear("self_attn.kv_a_proj_with_mqa", "mixer.latent"),
    row("self_attn.kv_a_layernorm.weight", "mixer.latent_norm.scale"),
    # For each head: the rows of its key, then those of its value.
    row(
        "self_attn.kv_b_proj.weight",
        ("mixer.key.kernel", "mixer.value.kernel"),
        Interleaved(TRANSPOSED, "value_heads"),
    ),
    *linear("self_attn.o_proj", "mixer.output"),
)

_LAYER_TYPES = {"linear_attention": "kda", "full_attention": "latent_attention"}

# Keys of rotary positions, which the model does not use; sizes that follow from others; losses in training.
_WITHOUT_EFFECT = (
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "head_dim",
    "qk_head_dim",
    "output_router_logits",
    "tie_word_embeddings",  # the class never ties its head
)


def _read(keys: ConfigKeys) -> ModelConfig:
    keys.ignore(*_WITHOUT_EFFECT)
    keys.only("mla_use_nope", True)
    keys.only("num_nextn_predict_layers", 0, None)
    # Keys of this object take precedence over the file's own keys of the same meaning.
    published = keys.within("linear_attn_config")
    layers = keys.size("num_hidden_layers")
    mixers = tuple(_LAYER_TYPES[kind] for kind in _layer_types(keys, published, layers))
    model = read_model(keys, eps=1e-5) | {"tie_embeddings": False}
    heads = published.size("num_heads", keys.size("linear_num_heads", 32))
    size = published.size("head_dim", keys.size("linear_head_dim", 128))
    taps = published.size("short_conv_kernel_size", keys.size("linear_conv_kernel_dim", 4))
    delta = {
        "key_heads": heads,
        "value_heads": heads,
        "key_head_dim": size,
        "value_head_dim": size,
        "convolution.size": taps,
        "output_projection.gate_bias": False,
        "output_projection.eps": model["norm_eps"],
    }
    keys.only("moe_layer_freq", 1)
    dense = [kind == "dense" for kind in read_feed_forward_types(keys, 1)]
    experts: Any = "dense" if all(dense) else _read_experts(keys)
    if all(dense):
        keys.ignore(*_EXPERT_KEYS)
    return ModelConfig(
        **model,
        num_layers=layers,
        num_heads=heads,
        mixers=mixers,
        mixer_overrides={"kda": delta, "latent_attention": _read_attention(keys)},
        mlp_width=keys.size("intermediate_size", 9216),
        feed_forwards=tuple("dense" if is_dense else experts for is_dense in dense),
    )


def _layer_types(keys: ConfigKeys, published: ConfigKeys, layers: int) -> list[str]:
    """The type of each layer's mixer, from `layer_types` or from lists of layers that are numbered from 1."""
    given = keys.take("layer_types", list | None, None)
    delta = published.take("kda_layers", list | None, None)
    full = published.take("full_attn_layers", list | None, None)
    if given is None and delta is not None and full is not None:
        if sorted([*delta, *full]) != list(range(1, layers + 1)):
            raise ValueError(
                f"{published.where}: kda_layers and full_attn_layers are {delta} and {full}, expected each layer from "
                f"1 to {layers} in one of them"
            )
        return ["linear_attention" if layer in delta else "full_attention" for layer in range(1, layers + 1)]
    if given is None:
        return ["full_attention" if i and i % 4 == 0 else "linear_attention" for i in range(layers)]
    return checked_types(keys, "layer_types", given, _LAYER_TYPES)


def _read_attention(keys: ConfigKeys) -> Options:
    heads = keys.size("num_attention_heads", 32)
    if keys.size("num_key_value_heads", heads) != heads:
        found = keys.values["num_key_value_heads"]
        raise ValueError(f"{keys.where}: num_key_value_heads is {found}, expected num_attention_heads = {heads}")
    return read_latent_attention(keys, num_heads=heads, rope_base=None, eps=_EPS)


_EXPERT_KEYS = (
    "num_experts",
    "num_experts_per_token",
    "num_shared_experts",
    "moe_intermediate_size",
    "moe_renormalize",
    "moe_router_activation_func",
    "use_grouped_topk",
    "num_expert_group",
    "topk_group",
    "routed_scaling_factor",
    # Names that transformers reads, too.
    "num_local_experts",
    "num_experts_per_tok",
    "n_shared_experts",
    "norm_topk_prob",
    "n_group",
)


def _read_experts(keys: ConfigKeys) -> Experts:
    keys.only("moe_router_activation_func", "sigmoid")
    groups = keys.size(keys.named("num_expert_group", "n_group"), 1)
    # With one group, choosing experts with groups and without gives the same result.
    keys.only("use_grouped_topk", True, *([False] if groups == 1 else []))
    return read_experts(keys, num_experts=256, width=1024, groups=1, groups_kept=1, scale=2.446)


def _write(config: ModelConfig) -> dict[str, Any]:
    kinds = [sized_mixer(config, mixer) for mixer in config.layer_mixers]
    delta = [kind for kind in kinds if isinstance(kind, RecurrentMixerConfig)]
    latent = [kind for kind in kinds if isinstance(kind, LatentAttentionConfig)]
    experts = [part for part in config.layer_feed_forwards if isinstance(part, Experts)]
    if not delta and not latent:
        raise ValueError("no layer has the mixer 'kda' or 'latent_attention'")
    values = {
        "model_type": "kimi_linear",
        **write_model(config),
        "tie_word_embeddings": False,
        "intermediate_size": config.feed_forward_width or 1,
        "layer_types": [
            "full_attention" if isinstance(kind, LatentAttentionConfig) else "linear_attention" for kind in kinds
        ],
        "mlp_layer_types": ["sparse" if isinstance(part, Experts) else "dense" for part in config.layer_feed_forwards],
    }
    for mixer in delta[:1]:
        values |= {
            "linear_num_heads": mixer.key_heads,
            "linear_head_dim": mixer.key_head_dim,
            "linear_conv_kernel_dim": 4 if mixer.convolution is None else mixer.convolution.size,
        }
    for layer in latent[:1]:
        values |= {"num_attention_heads": layer.num_heads, "num_key_value_heads": layer.num_heads}
        values |= write_latent_attention(layer)
    if experts:
        values |= write_experts(experts[0])
    return values


KIMI_LINEAR = Family(
    name="kimi_linear",
    mixers=("kda",),
    architecture="KimiLinearForCausalLM",
    read=_read,
    write=_write,
    rows=ROWS,
    layer_rows=(*_BLOCK, *_DELTA, *_LATENT),
    defaults={"vocab_size": 163840, "hidden_size": 2304, "num_hidden_layers": 27},
)

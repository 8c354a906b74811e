"""`bailing_hybrid`: Ling 3. Kimi Delta Attention with a bounded decay, latent attention with positions, experts."""

from typing import Any

from rnnlib.hub.config_equivalence import sized_mixer
from rnnlib.hub.config_reader import ConfigKeys
from rnnlib.hub.rows import filter_rows, stream_rows, swiglu_rows
from rnnlib.hub.transformers.common import (
    EXPERTS,
    FEED_FORWARD,
    NORMS,
    Options,
    read_experts,
    read_feed_forward_types,
    read_latent_attention,
    read_layer_types,
    read_model,
    read_rotary,
    write_experts,
    write_latent_attention,
    write_model,
)
from rnnlib.hub.weight_layouts import SAME, TRANSPOSED, Interleaved, PairsApart
from rnnlib.hub.weight_mapping import Family, linear, row
from rnnlib.layers.decay import BoundedDecay, SoftplusDecay
from rnnlib.layers.experts import Experts
from rnnlib.layers.latent_attention import LatentAttentionConfig
from rnnlib.layers.mixer import RecurrentMixerConfig
from rnnlib.models.config import ModelConfig

# Epsilon of latent attention's norms. It does not depend on `rms_norm_eps`.
_EPS = 1e-6
_RATE = (1.0, 16.0)
_MIXERS = {"linear_attention": "kda", "full_attention": "latent_attention"}

_BLOCK = (
    *NORMS,
    *FEED_FORWARD,
    *EXPERTS,
    row("mlp.gate.expert_bias", "feed_forward.router.correction_bias"),
    *swiglu_rows("mlp.shared_experts", "feed_forward.shared"),
)

_DELTA = (
    *stream_rows("attention"),
    *filter_rows("attention"),
    *linear("attention.f_proj", "mixer.input_projection.decay"),
    row("attention.A_log", "mixer.decay.A_log"),
    row("attention.dt_bias", "mixer.decay.dt_bias"),
    *linear("attention.b_proj", "mixer.input_projection.write_gate"),
    *linear("attention.g_proj", "mixer.input_projection.output_gate"),
    row("attention.o_norm.weight", "mixer.output_projection.norm.scale"),
    *linear("attention.dense", "mixer.output_projection.output"),
)

_LATENT = (
    row("attention.q_proj.weight", "mixer.query.kernel", PairsApart(TRANSPOSED, by_head=True)),
    *linear("attention.q_a_proj", "mixer.query.down"),
    row("attention.q_a_layernorm.weight", "mixer.query.norm.scale"),
    row("attention.q_b_proj.weight", "mixer.query.up.kernel", PairsApart(TRANSPOSED, by_head=True)),
    row("attention.kv_a_proj_with_mqa.weight", "mixer.latent.kernel", PairsApart(TRANSPOSED, by_head=False)),
    row("attention.kv_a_proj_with_mqa.bias", "mixer.latent.bias", PairsApart(SAME, by_head=False)),
    row("attention.kv_a_layernorm.weight", "mixer.latent_norm.scale"),
    # For each head: the rows of its key, then those of its value.
    row(
        "attention.kv_b_proj.weight",
        ("mixer.key.kernel", "mixer.value.kernel"),
        Interleaved(TRANSPOSED, "value_heads"),
    ),
    *linear("attention.g_proj", "mixer.gate"),
    *linear("attention.dense", "mixer.output"),
)

# Sizes that follow from others, further predicted tokens, losses, and a key that the class does not read.
_WITHOUT_EFFECT = (
    "qk_head_dim",
    "num_nextn_predict_layers",
    "num_mtp_layers",
    "mtp_loss_scaling_factor",
    "output_router_logits",
    "tie_word_embeddings",
)


def _read(keys: ConfigKeys) -> ModelConfig:
    keys.ignore(*_WITHOUT_EFFECT)
    model = read_model(keys) | {"tie_embeddings": False}
    layers, heads = keys.size("num_hidden_layers"), keys.size("num_attention_heads", 32)
    if keys.size("num_key_value_heads", 32 if "num_key_value_heads" not in keys else heads) != heads:
        found = keys.values.get("num_key_value_heads", 32)
        raise ValueError(f"{keys.where}: num_key_value_heads is {found}, expected num_attention_heads = {heads}")
    if keys.size("linear_num_heads", heads) != heads:
        found = keys.values["linear_num_heads"]
        raise ValueError(f"{keys.where}: linear_num_heads is {found}, expected num_attention_heads = {heads}")
    every = keys.size("layer_group_size", 6)
    pattern = ["full_attention" if (i + 1) % every == 0 else "linear_attention" for i in range(layers)]
    mixers = read_layer_types(keys, _MIXERS, pattern)
    # transformers writes `head_dim` as that of the rotated channels, and the delta rule's beside it.
    size = keys.size("head_dim", 128)
    size = keys.size("linear_head_dim", size)
    taps = keys.size("short_conv_kernel_size", 4)
    is_bounded, bound = keys.flag("kda_safe_gate", True), keys.number("kda_lower_bound", -5.0)
    decay = (
        BoundedDecay(channelwise=True, rate=_RATE, lower_bound=bound)
        if is_bounded
        else SoftplusDecay(channelwise=True, rate=_RATE)
    )
    delta = {
        "key_heads": heads,
        "value_heads": heads,
        "key_head_dim": size,
        "value_head_dim": size,
        "convolution.size": keys.size("linear_conv_kernel_dim", taps),
        "decay": decay,
        "output_projection.gate_rank": None,
        "output_projection.gate_bias": False,
        "output_projection.eps": model["norm_eps"],
    }
    kinds = read_feed_forward_types(keys, 2)
    experts = read_experts(keys, num_experts=512, width=768, groups=8, groups_kept=4, scale=2.5)
    return ModelConfig(
        **model,
        num_layers=layers,
        num_heads=heads,
        mixers=mixers,
        mixer_overrides={"kda": delta, "latent_attention": _read_attention(keys, heads)},
        mlp_width=keys.size("intermediate_size", 6144),
        feed_forwards=tuple("dense" if kind == "dense" else experts for kind in kinds),
    )


def _read_attention(keys: ConfigKeys, heads: int) -> Options:
    base, _ = read_rotary(keys, base=6e6)
    given = read_latent_attention(keys, num_heads=heads, rope_base=base, eps=_EPS)
    return given | {"head_gate": True}


def _write(config: ModelConfig) -> dict[str, Any]:
    kinds = [sized_mixer(config, mixer) for mixer in config.layer_mixers]
    delta = [kind for kind in kinds if isinstance(kind, RecurrentMixerConfig)]
    latent = [kind for kind in kinds if isinstance(kind, LatentAttentionConfig)]
    experts = [part for part in config.layer_feed_forwards if isinstance(part, Experts)]
    if not delta and not latent:
        raise ValueError("no layer has the mixer 'kda' or 'latent_attention'")
    heads = delta[0].key_heads if delta else latent[0].num_heads
    values = {
        "model_type": "bailing_hybrid",
        **write_model(config),
        "tie_word_embeddings": False,
        "intermediate_size": config.feed_forward_width or 1,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "layer_types": [
            "full_attention" if isinstance(kind, LatentAttentionConfig) else "linear_attention" for kind in kinds
        ],
        "mlp_layer_types": ["sparse" if isinstance(part, Experts) else "dense" for part in config.layer_feed_forwards],
        # Sizes of experts must be served even if no layer has any.
        "num_experts": 1,
        "num_experts_per_token": 1,
        "num_expert_group": 1,
        "topk_group": 1,
    }
    for mixer in delta[:1]:
        bound = mixer.decay.lower_bound if isinstance(mixer.decay, BoundedDecay) else None
        values |= {
            # transformers takes the delta rule's size from this key, whatever it writes.
            "head_dim": mixer.key_head_dim,
            "short_conv_kernel_size": 4 if mixer.convolution is None else mixer.convolution.size,
            "kda_safe_gate": bound is not None,
            "kda_lower_bound": -5.0 if bound is None else bound,
        }
    for layer in latent[:1]:
        values |= write_latent_attention(layer)
        values["rope_parameters"] = {"rope_type": "default", "rope_theta": layer.rope_base}
    for part in experts[:1]:
        values |= write_experts(part)
    return values


BAILING_HYBRID = Family(
    name="bailing_hybrid",
    mixers=("kda",),
    architecture="BailingHybridForCausalLM",
    read=_read,
    write=_write,
    rows=(
        row("model.word_embeddings.weight", "embedding"),
        row("model.norm.weight", "norm.scale"),
        row("lm_head.weight", "head"),
    ),
    layer_rows=(*_BLOCK, *_DELTA, *_LATENT),
    unused=("mtp.", "model.mtp."),
    has_more_layers=True,
    defaults={"vocab_size": 157184, "hidden_size": 2560, "num_hidden_layers": 42},
)

"""`forgetting_transformer`: softmax attention whose weights decay by forget gates (FoX)."""

from typing import Any

from rnnlib.hub.config_equivalence import sized_mixer
from rnnlib.hub.config_reader import ConfigKeys
from rnnlib.hub.fla.common import ATTENTION, BLOCK, DEFAULTS, ROWS, read_block, write_block
from rnnlib.hub.weight_mapping import Family, linear
from rnnlib.layers.attention import AttentionConfig
from rnnlib.models.config import ModelConfig

# Epsilon of the norms of queries and keys. It does not depend on `norm_eps`.
_EPS = 1e-5


def _read(keys: ConfigKeys) -> ModelConfig:
    keys.ignore("window_size")  # only shortens the published model's cache: its full pass sees all tokens
    width, heads = keys.size("hidden_size"), keys.size("num_heads", 32)
    if width % heads:
        raise ValueError(f"{keys.where}: num_heads is {heads}, expected a divisor of hidden_size = {width}")
    options = {
        "num_heads": heads,
        "key_heads": keys.size("num_kv_heads", heads),
        "head_dim": width // heads,
        "use_bias": keys.flag("qkv_bias", False),
        "output_gate": keys.flag("use_output_gate", False),
        "gate_bias": False,
    }
    if keys.flag("qk_norm", False):
        options |= {"qk_norm": "each", "eps": _EPS}
    return ModelConfig(
        width=width,
        num_layers=keys.size("num_hidden_layers", 24),
        num_heads=heads,
        mixers=("forgetting_attention",),
        mixer_overrides={"forgetting_attention": options},
        **read_block(keys, width, 4),
    )


def _write(config: ModelConfig) -> dict[str, Any]:
    mixer = sized_mixer(config, config.layer_mixers[0])
    if not isinstance(mixer, AttentionConfig) or not mixer.forget_gate:
        raise ValueError(f"its first layer is {config.layer_mixers[0]!r}, expected forgetting_attention")
    return {
        "model_type": "forgetting_transformer",
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.width,
        **write_block(config, 4),
        "num_heads": mixer.num_heads,
        "num_kv_heads": mixer.key_heads,
        "window_size": None,
        "qkv_bias": mixer.use_bias,
        "qk_norm": bool(mixer.qk_norm),
        "use_output_gate": mixer.output_gate,
    }


FORGETTING_TRANSFORMER = Family(
    name="forgetting_transformer",
    mixers=("forgetting_attention",),
    architecture="ForgettingTransformerForCausalLM",
    read=_read,
    write=_write,
    rows=ROWS,
    layer_rows=(
        *BLOCK,
        *ATTENTION,
        *linear("attn.f_proj", "mixer.input_projection.forget_gate"),
        *linear("attn.g_proj", "mixer.input_projection.output_gate"),
    ),
    defaults=DEFAULTS | {"num_heads": 32},
)

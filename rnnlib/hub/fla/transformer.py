"""`transformer`: Transformer++."""

from typing import Any

from rnnlib.hub.config_equivalence import sized_mixer
from rnnlib.hub.config_reader import ConfigKeys
from rnnlib.hub.fla.common import (
    ATTENTION,
    BLOCK,
    DEFAULTS,
    ROWS,
    attention_keys,
    attention_options,
    read_block,
    write_block,
)
from rnnlib.hub.weight_mapping import Family
from rnnlib.layers.attention import AttentionConfig
from rnnlib.models.config import ModelConfig

# Epsilon of the norms of queries and keys. It does not depend on `norm_eps`.
_EPS = 1e-5


def _read(keys: ConfigKeys) -> ModelConfig:
    width, heads = keys.size("hidden_size"), keys.size("num_heads")
    options = attention_options(keys, heads, width)
    if keys.flag("qk_norm", False):
        options |= {"qk_norm": True, "eps": _EPS}
    return ModelConfig(
        width=width,
        num_layers=keys.size("num_hidden_layers"),
        num_heads=heads,
        mixers=("attention",),
        mixer_overrides={"attention": options},
        **read_block(keys, width, 4),
    )


def _write(config: ModelConfig) -> dict[str, Any]:
    mixer = sized_mixer(config, config.layer_mixers[0])
    if not isinstance(mixer, AttentionConfig):
        raise ValueError(f"its first layer is {config.layer_mixers[0]!r}, expected attention")
    return {
        "model_type": "transformer",
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.width,
        **write_block(config, 4),
        **attention_keys(mixer),
        "qk_norm": bool(mixer.qk_norm),
    }


TRANSFORMER = Family(
    name="transformer",
    mixers=("attention", "sliding_window_attention"),
    architecture="TransformerForCausalLM",
    read=_read,
    write=_write,
    rows=ROWS,
    layer_rows=(*BLOCK, *ATTENTION),
    defaults=DEFAULTS | {"num_heads": 32},
)

"""`rwkv7`: RWKV-7. A layer of the file is two of the model: time mixing, then channel mixing."""

from typing import Any

from rnnlib.hub.config_equivalence import sized_mixer
from rnnlib.hub.config_reader import ConfigKeys
from rnnlib.hub.weight_layouts import Reshaped, SplitRows
from rnnlib.hub.weight_mapping import Family, Row, linear, row
from rnnlib.layers.rwkv7 import RWKV7, ChannelMixConfig, RWKV7Config
from rnnlib.models.block import Block
from rnnlib.models.config import ModelConfig

_FIRST, _TIME, _CHANNEL = "rwkv7/first", "rwkv7", "rwkv7_channel_mix"
_ACTIVATIONS = {"sqrelu": "squared_relu", "relu": "relu", "silu": "silu", "swish": "silu"}
_MIXTURES = tuple(f"attn.x_{name}" for name in "rwkvag")

ROWS = (
    row("model.embeddings.weight", "embedding"),
    row("model.layers.0.pre_norm.weight", "embedding_norm.scale"),
    row("model.layers.0.pre_norm.bias", "embedding_norm.bias"),
    row("model.norm.weight", "norm.scale"),
    row("model.norm.bias", "norm.bias"),
    row("lm_head.weight", "head"),
    row("lm_head.weight", "embedding", copy=True),
)


def _low_rank(theirs: str, ours: str) -> tuple[Row, ...]:
    return *linear(f"attn.{theirs}.lora.0", f"mixer.{ours}.down"), *linear(f"attn.{theirs}.lora.2", f"mixer.{ours}.up")


_TIME_ROWS = (
    row("attn_norm.weight", "mixer_norm.scale"),
    row("attn_norm.bias", "mixer_norm.bias"),
    row(_MIXTURES, "mixer.mixtures", SplitRows((1, 1, -1))),
    row("attn.x_x", "mixer.mixtures", Reshaped((6, 1, 1, -1))),  # in old files
    *linear("attn.r_proj", "mixer.query"),
    *linear("attn.k_proj", "mixer.key"),
    *linear("attn.v_proj", "mixer.value"),
    *linear("attn.o_proj", "mixer.output"),
    *_low_rank("w_lora", "decay"),
    *_low_rank("a_lora", "gain"),
    *_low_rank("g_lora", "gate"),
    *_low_rank("v_lora", "value_gate"),
    row("attn.k_k", "mixer.key_removal"),
    row("attn.k_a", "mixer.key_gain"),
    row("attn.r_k", "mixer.bonus"),
    row("attn.g_norm.weight", "mixer.norm_scale"),
    row("attn.g_norm.bias", "mixer.norm_bias"),
)

_CHANNEL_ROWS = (
    row("ffn_norm.weight", "mixer_norm.scale"),
    row("ffn_norm.bias", "mixer_norm.bias"),
    row("ffn.x_k", "mixer.mixture"),
    *linear("ffn.key", "mixer.up"),
    *linear("ffn.value", "mixer.down"),
)


def _rows(block: Block) -> tuple[Row, ...]:
    return _TIME_ROWS if isinstance(block.mixer, RWKV7) else _CHANNEL_ROWS


def _read(keys: ConfigKeys) -> ModelConfig:
    keys.ignore("attn_mode", "fuse_cross_entropy", "fuse_linear_cross_entropy", "use_l2warp")
    keys.only("attn", None)
    layers, width = keys.size("num_hidden_layers", 24), keys.size("hidden_size", 2048)
    given, size = keys.size("num_heads", None), keys.size("head_dim", 64 if "head_dim" not in keys else None)
    if size is None and given is None:
        raise ValueError(f"{keys.where}: head_dim and num_heads are null, expected one of them")
    heads = given if size is None else width // size
    if heads < 1 or width % heads or (size is not None and heads * size != width):
        name, value = ("num_heads", given) if size is None else ("head_dim", size)
        raise ValueError(f"{keys.where}: {name} is {value}, expected a divisor of hidden_size = {width}")
    values = keys.take("value_dim", int | list | None, None)
    sizes = values if isinstance(values, list) else [width if values is None else values] * layers
    if len(sizes) != layers or any(value != width for value in sizes):
        raise ValueError(f"{keys.where}: value_dim is {values}, expected hidden_size = {width} in each layer")
    ratio = keys.take("hidden_ratio", float | int | None, 4)
    hidden = 32 * -(-int(width * (4 if ratio is None else ratio)) // 32)
    eps, value_rank = keys.number("norm_eps", 1e-5), keys.size("v_low_rank_dim", 16)
    time = {
        "num_heads": heads,
        "head_dim": width // heads,
        "decay_rank": keys.size("decay_low_rank_dim", 64),
        "gain_rank": keys.size("a_low_rank_dim", 64),
        "gate_rank": keys.size("gate_low_rank_dim", 128),
        "value_rank": value_rank,
        "eps": eps,
        "key_norm": "sum" if keys.flag("fuse_norm", True) else "floor",
    }
    channel = {
        "hidden_width": keys.size("intermediate_size", hidden),
        "activation": keys.one_of("hidden_act", _ACTIVATIONS, "sqrelu"),
    }
    return ModelConfig(
        vocabulary_size=keys.size("vocab_size"),
        width=width,
        num_layers=2 * layers,
        num_heads=heads,
        mixers=(_FIRST, _CHANNEL, *(_TIME, _CHANNEL) * (layers - 1)),
        mixer_overrides={_TIME: time, _FIRST: {"value_rank": None}, _CHANNEL: channel},
        mlp_ratio=0,
        norm="layer",
        norm_bias=keys.flag("norm_bias", True),
        norm_eps=eps,
        embedding_norm=keys.flag("norm_first", True),
        tie_embeddings=keys.flag("tie_word_embeddings", False),
    )


def _write(config: ModelConfig) -> dict[str, Any]:
    kinds = [sized_mixer(config, mixer) for mixer in config.layer_mixers]
    time, channel = kinds[0::2], kinds[1::2]
    is_alternating = len(time) == len(channel) and all(isinstance(kind, RWKV7Config) for kind in time)
    if not is_alternating or not all(isinstance(kind, ChannelMixConfig) for kind in channel):
        raise ValueError(f"its layers are not {_TIME} and {_CHANNEL} in turn")
    mixer, part = time[-1], channel[0]
    names = {ours: theirs for theirs, ours in reversed(_ACTIVATIONS.items())}
    return {
        "model_type": "rwkv7",
        "vocab_size": config.vocabulary_size,
        "hidden_size": config.width,
        "num_hidden_layers": len(time),
        "num_heads": mixer.num_heads,
        "head_dim": mixer.head_dim,
        "value_dim": [config.width] * len(time),
        "decay_low_rank_dim": mixer.decay_rank,
        "a_low_rank_dim": mixer.gain_rank,
        "gate_low_rank_dim": mixer.gate_rank,
        "v_low_rank_dim": mixer.value_rank or 16,
        "fuse_norm": mixer.key_norm == "sum",
        "intermediate_size": part.hidden_width,
        "hidden_act": names.get(part.activation),
        "norm_first": config.embedding_norm,
        "norm_bias": config.norm_bias,
        "norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
    }


RWKV7_FAMILY = Family(
    name="rwkv7",
    mixers=(_TIME, _CHANNEL),
    architecture="RWKV7ForCausalLM",
    read=_read,
    write=_write,
    rows=ROWS,
    layer_rows=_rows,
    blocks_per_layer=2,
    defaults={"vocab_size": 32000},
)

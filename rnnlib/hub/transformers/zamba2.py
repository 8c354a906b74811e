"""`zamba2`: Zamba2. Mamba-2, in some layers behind attention and a feed-forward that these layers share.

The file has a shared layer's arrays under the first layer that uses it, and there the adapters of all that do.
"""

from typing import Any

from rnnlib.hub.config_equivalence import sized_mixer
from rnnlib.hub.config_reader import ConfigKeys
from rnnlib.hub.mamba2 import (
    MAMBA_KEYS,
    MambaFormat,
    mamba_rows,
    read_mamba,
    write_expansion,
    write_mamba,
    written_limits,
)
from rnnlib.hub.rows import attention_rows
from rnnlib.hub.transformers.common import MAMBA_ROWS, inner_mixer_rows, read_rotary, write_model
from rnnlib.hub.weight_layouts import SAME, TRANSPOSED, Joined
from rnnlib.hub.weight_mapping import Family, Row, linear, row
from rnnlib.layers.decay import SoftplusDecay
from rnnlib.layers.mixer import RecurrentMixerConfig
from rnnlib.layers.shared_transformer import SharedInputMixer, SharedInputMixerConfig, SharedTransformer
from rnnlib.models.config import ModelConfig
from rnnlib.models.decoder import Block, DecoderLM

_PLAIN, _HYBRID = "mamba2", "zamba2"
_TYPES = {"linear_attention": False, "mamba": False, "hybrid": True}
# The class's own: a layer, six times seven, and some more.
_DEFAULT_TYPES = (
    "linear_attention",
    *(*("linear_attention",) * 5, "hybrid") * 7,
    *("linear_attention",) * 4,
    "hybrid",
    *("linear_attention",) * 3,
    "hybrid",
    *("linear_attention",) * 2,
)
# Keys that saved files have, and that follow from others.
_DERIVED = (
    "hybrid_layer_ids",
    "kv_channels",
    "num_query_groups",
    "attention_head_dim",
    "attention_hidden_size",
    "head_dim",
)
_FORMAT = MambaFormat(
    heads="n_mamba_heads",
    head_dim="mamba_headdim",
    groups="mamba_ngroups",
    state_size="mamba_d_state",
    taps="mamba_d_conv",
    bias="add_bias_linear",
    default_state_size=64,
)
_ACTIVATIONS = {"gelu": "gelu_exact", "gelu_pytorch_tanh": "gelu", "gelu_new": "gelu", "silu": "silu", "relu": "relu"}


def _read(keys: ConfigKeys) -> ModelConfig:
    keys.ignore(*MAMBA_KEYS, *_DERIVED, "mamba_headdim", "use_conv_bias", "use_long_context")
    keys.only("use_shared_mlp_adapter", True)  # of published files: the class always has it
    keys.ignore("time_step_limit")  # the class does not read it
    width, eps = keys.size("hidden_size", 2560), keys.number("rms_norm_eps", 1e-5)
    is_hybrid = _read_types(keys)
    tied, bias = keys.flag("tie_word_embeddings", True), keys.flag("add_bias_linear", False)
    mamba = _read_mamba(keys, width)
    heads = keys.size("num_attention_heads", 32)
    if 2 * width % heads:
        raise ValueError(f"{keys.where}: num_attention_heads is {heads}, expected a divisor of {2 * width}")
    adapts_attention = keys.flag("use_shared_attention_adapter", False)
    key_heads = keys.size("num_key_value_heads", heads)
    if heads % key_heads or (adapts_attention and key_heads != heads):
        expected = f"num_attention_heads = {heads}" if adapts_attention else f"a divisor of {heads}"
        raise ValueError(f"{keys.where}: num_key_value_heads is {key_heads}, expected {expected}")
    base, _ = read_rotary(keys)
    shared = SharedTransformer(
        num_heads=heads,
        key_heads=key_heads,
        head_dim=2 * width // heads,
        rope_base=base if keys.flag("use_mem_rope", False) else None,
        hidden_width=keys.size("intermediate_size", 4 * width),
        activation=keys.one_of("hidden_act", _ACTIVATIONS, "gelu"),
        use_bias=bias,
        adapter_rank=keys.size("adapter_rank", 128),
        adapts_attention=adapts_attention,
        eps=eps,
    )
    blocks = keys.size("num_mem_blocks", 1)
    mixers, overrides, number = [], {_PLAIN: mamba, _HYBRID: mamba | {"transformer": shared}}, 0
    for hybrid in is_hybrid:
        # Without tied embeddings, transformers ties no layers either.
        group = number % blocks if tied else number
        name = f"{_HYBRID}/{group}" if hybrid and group else _HYBRID
        if hybrid and group:
            overrides[name] = {"transformer.group": group}
        mixers.append(name if hybrid else _PLAIN)
        number += hybrid
    return ModelConfig(
        vocabulary_size=keys.size("vocab_size", 32000),
        width=width,
        num_layers=len(mixers),
        num_heads=mamba["value_heads"],
        mixers=tuple(mixers),
        mixer_overrides={name: options for name, options in overrides.items() if name in (*mixers, _HYBRID)},
        mlp_ratio=0,
        norm_eps=eps,
        tie_embeddings=tied,
    )


def _read_types(keys: ConfigKeys) -> list[bool]:
    """Of each layer whether it has the shared layer."""
    layers = keys.size("num_hidden_layers", 54)
    types = keys.take("layers_block_type", list | None, None)
    types = keys.take("layer_types", list | None, None) if types is None else types
    types = list(_DEFAULT_TYPES) if types is None else types
    if len(types) != layers:
        raise ValueError(f"{keys.where}: layers_block_type has {len(types)} entries, expected {layers}")
    for kind in types:
        if kind not in _TYPES:
            raise ValueError(f"{keys.where}: layers_block_type has {kind!r}, expected {' or '.join(_TYPES)}")
    return [_TYPES[kind] for kind in types]


def _read_mamba(keys: ConfigKeys, width: int) -> dict[str, Any]:
    heads, channels = keys.size("n_mamba_heads", 8), int(keys.number("mamba_expand", 2) * width)
    if channels % heads:
        raise ValueError(f"{keys.where}: n_mamba_heads is {heads}, expected a divisor of {channels} channels")
    least = keys.number("time_step_min", 0.001)
    limits = None if least <= 0 else (least, float("inf"))
    options = read_mamba(keys, _FORMAT, heads, channels // heads, eps=1e-5, limits=limits)
    return options | {"convolution.use_bias": True}  # whatever the file says


def _write(config: ModelConfig) -> dict[str, Any]:
    kinds = [sized_mixer(config, mixer) for mixer in config.layer_mixers]
    if not all(isinstance(kind, RecurrentMixerConfig) and isinstance(kind.decay, SoftplusDecay) for kind in kinds):
        raise ValueError(f"its layers are {', '.join(dict.fromkeys(config.layer_mixers))}, expected mamba2 and zamba2")
    hybrid = [kind.transformer for kind in kinds if isinstance(kind, SharedInputMixerConfig)]
    shared = hybrid[0] if hybrid else SharedTransformer().sized(config.width, config.num_heads)
    mixer, names = kinds[0], {ours: theirs for theirs, ours in reversed(_ACTIVATIONS.items())}
    if shared.adapter_rank is None:
        raise ValueError("its shared layer has no adapters, expected some")
    return {
        "model_type": "zamba2",
        **write_model(config),
        "hidden_act": names.get(shared.activation),
        "layers_block_type": [
            "hybrid" if isinstance(kind, SharedInputMixerConfig) else "linear_attention" for kind in kinds
        ],
        **write_mamba(mixer, _FORMAT),
        "mamba_expand": write_expansion(mixer, config.width),
        "time_step_min": written_limits(mixer)[0],
        "num_attention_heads": shared.num_heads,
        "num_key_value_heads": shared.key_heads,
        "use_mem_rope": shared.rope_base is not None,
        "rope_parameters": {"rope_type": "default", "rope_theta": shared.rope_base or 10000.0},
        "intermediate_size": shared.hidden_width,
        "adapter_rank": shared.adapter_rank,
        "use_shared_attention_adapter": shared.adapts_attention,
        "num_mem_blocks": len({part.group for part in hybrid}) if config.tie_embeddings and hybrid else 1,
    }


def _rows(model: DecoderLM) -> tuple[Row, ...]:
    """The arrays outside of layers, and the adapters, which lie under the layer that has the shared arrays."""
    rows = list(MAMBA_ROWS)
    first: dict[int, int] = {}
    hybrid = [(i, block.mixer) for i, block in enumerate(model.blocks) if isinstance(block.mixer, SharedInputMixer)]
    for number, (i, mixer) in enumerate(hybrid):
        theirs = f"model.layers.{first.setdefault(mixer.shared_group, i)}.shared_transformer"
        ours = f"blocks.{i}.mixer.adapters"
        for short, name in (("q", "query"), ("k", "key"), ("v", "value")):
            adapter = f"{theirs}.self_attn.linear_{short}_adapter_list.{number}"
            rows += [
                row(f"{adapter}.0.weight", f"{ours}.{name}.down.kernel", TRANSPOSED),
                row(f"{adapter}.1.weight", f"{ours}.{name}.up.kernel", TRANSPOSED),
            ]
        adapter = f"{theirs}.feed_forward.gate_up_proj_adapter_list.{number}"
        both = (f"{ours}.gate.kernel", f"{ours}.up.kernel")
        rows += [
            row(f"{adapter}.0.weight", f"{ours}.down.kernel", TRANSPOSED),
            row(f"{adapter}.1.weight", both, Joined(TRANSPOSED)),
        ]
    return tuple(rows)


_SHARED = "mixer.transformer"
_GATE_AND_UP = tuple(f"{_SHARED}.feed_forward.{name}" for name in ("gate", "up"))
_PLAIN_ROWS = (row("input_layernorm.weight", "mixer_norm.scale"), *mamba_rows("mamba"))
_HYBRID_ROWS = (
    *inner_mixer_rows(mamba_rows("mamba_decoder.mamba"), "mixer"),
    row("mamba_decoder.input_layernorm.weight", "mixer.norm.scale"),
    *linear("linear", "mixer.projection"),
    row("shared_transformer.input_layernorm.weight", f"{_SHARED}.norm.scale"),
    row("shared_transformer.pre_ff_layernorm.weight", f"{_SHARED}.feed_forward_norm.scale"),
    *attention_rows("shared_transformer.self_attn", f"{_SHARED}.attention"),
    row(
        "shared_transformer.feed_forward.gate_up_proj.weight",
        tuple(f"{path}.kernel" for path in _GATE_AND_UP),
        Joined(TRANSPOSED),
    ),
    row(
        "shared_transformer.feed_forward.gate_up_proj.bias",
        tuple(f"{path}.bias" for path in _GATE_AND_UP),
        Joined(SAME),
    ),
    *linear("shared_transformer.feed_forward.down_proj", f"{_SHARED}.feed_forward.down"),
)


def _layer_rows(block: Block) -> tuple[Row, ...]:
    return _HYBRID_ROWS if isinstance(block.mixer, SharedInputMixer) else _PLAIN_ROWS


ZAMBA2 = Family(
    name="zamba2",
    matches=lambda values: values.get("model_type") == "zamba2",
    mixers=(_HYBRID,),
    architecture="Zamba2ForCausalLM",
    read=_read,
    write=_write,
    rows=_rows,
    layer_rows=_layer_rows,
    # Where layers are not tied, each file's layer has adapters of others that nothing uses.
    unused=(
        "model.layers.*.shared_transformer.feed_forward.gate_up_proj_adapter_list.",
        "model.layers.*.shared_transformer.self_attn.linear_",
    ),
)

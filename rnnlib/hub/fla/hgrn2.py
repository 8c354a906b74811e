"""`hgrn2`: HGRN-2, with lower bounds of the decay that rise from layer to layer."""

import dataclasses
from typing import Any

from rnnlib.hub.config_reader import ConfigKeys
from rnnlib.hub.fla.common import ROWS, Options, fla_family, read_convolution, write_convolution
from rnnlib.hub.weight_mapping import Row, filter_, linear, row
from rnnlib.layers.convolution import ConvolutionConfig
from rnnlib.layers.decay import KeyDecay, KeyDecayGate
from rnnlib.layers.mixer import RecurrentMixer, RecurrentMixerConfig
from rnnlib.models.config import ModelConfig
from rnnlib.models.decoder import DecoderLM

# Epsilon of the norm over all heads. It does not depend on `norm_eps`.
_EPS = 1e-5

_LAYER_ROWS = (
    *linear("attn.q_proj", "mixer.input_projection.query"),
    *linear("attn.f_proj", "mixer.input_projection.key"),
    *linear("attn.i_proj", "mixer.input_projection.value"),
    *filter_("attn.q_conv1d", "mixer.query.convolution"),
    *filter_("attn.f_conv1d", "mixer.key.convolution"),
    *filter_("attn.i_conv1d", "mixer.value.convolution"),
    row("attn.g_norm.weight", "mixer.output_projection.norm.scale"),
    *linear("attn.o_proj", "mixer.output_projection.output"),
)


def _rows(model: DecoderLM) -> tuple[Row, ...]:
    """The rows outside of layers. The lower bounds belong to the first layer that has them."""
    for i, block in enumerate(model.blocks):
        if isinstance(block.mixer, RecurrentMixer) and isinstance(block.mixer.decay, KeyDecayGate):
            return (*ROWS, row("model.lower_bounds", f"blocks.{i}.mixer.decay.lower_bounds"))
    return ROWS


def _read(keys: ConfigKeys, width: int) -> Options:
    keys.only("elementwise_affine", True)
    given, size = keys.size("num_heads", None), keys.size("expand_ratio", None if "expand_ratio" in keys else 128)
    if size is None and given is None:
        raise ValueError(f"{keys.where}: expand_ratio and num_heads are null, expected one of them")
    heads = given if size is None else width // size
    if heads < 1 or width % heads:
        name, value = ("num_heads", given) if size is None else ("expand_ratio", size)
        raise ValueError(f"{keys.where}: {name} is {value}, expected a divisor of hidden_size = {width}")
    filters = read_convolution(keys, default=False)
    if "convolution.size" in filters:
        filters = {"convolution": ConvolutionConfig(size=filters["convolution.size"])}
    layers = keys.size("num_hidden_layers")
    return {
        "key_heads": heads,
        "value_heads": heads,
        "key_head_dim": width // heads,
        "value_head_dim": width // heads,
        "decay": KeyDecay(num_layers=layers if keys.flag("use_lower_bound", True) else None),
        "output_projection.eps": _EPS,
        **filters,
    }


def _write(mixer: RecurrentMixerConfig, width: int) -> dict[str, Any]:
    return {
        "num_heads": mixer.key_heads,
        "expand_ratio": mixer.key_head_dim,
        "use_lower_bound": isinstance(mixer.decay, KeyDecay) and mixer.decay.num_layers is not None,
        **write_convolution(mixer),
    }


_WITHOUT_LAYERS = fla_family("hgrn2", "hgrn2", "HGRN2ForCausalLM", rows=_LAYER_ROWS, read=_read, write=_write)


def _read_model(keys: ConfigKeys) -> ModelConfig:
    """The configuration, in which each layer is a variant that knows its number."""
    config = _WITHOUT_LAYERS.read(keys)
    names = tuple(f"hgrn2/{i}" if name == "hgrn2" else name for i, name in enumerate(config.layer_mixers))
    overrides = {name: dict(options) for name, options in config.mixer_overrides}
    if overrides["hgrn2"]["decay"].num_layers is None:
        return config
    overrides |= {f"hgrn2/{i}": {"decay.layer": i} for i, name in enumerate(names) if name.startswith("hgrn2/")}
    return config.replace(mixers=names, mixer_overrides=overrides)


HGRN2 = dataclasses.replace(_WITHOUT_LAYERS, read=_read_model, rows=_rows)

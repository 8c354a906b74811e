"""`delta_net`: DeltaNet."""

from typing import Any

from rnnlib.hub.config_reader import ConfigKeys, expansion
from rnnlib.hub.fla.common import (
    Options,
    expanded,
    fla_family,
    read_convolution,
    sizes_of,
    write_convolution,
)
from rnnlib.hub.fla.rows import CONVOLUTIONS, STREAMS
from rnnlib.hub.weight_mapping import linear, row
from rnnlib.layers.gain import SigmoidGain, UnitGain
from rnnlib.layers.mixer import RecurrentMixerConfig

_FEATURE_MAPS = {"silu": "silu", "relu": "relu", "elu": "elu_plus_one", "identity": "identity"}
_NORMS = {"l2": "l2", "sum": "l1"}

ROWS = (
    *STREAMS,
    *CONVOLUTIONS,
    *linear("attn.b_proj", "mixer.input_projection.write_gate"),
    *linear("attn.g_proj", "mixer.input_projection.output_gate"),
    row("attn.o_norm.weight", "mixer.output_projection.norm.scale"),
    *linear("attn.o_proj", "mixer.output_projection.output"),
)


def _read(keys: ConfigKeys, width: int) -> Options:
    keys.ignore("use_output_norm")  # the model ignores it too
    heads = keys.size("num_heads")
    negative = keys.flag("allow_neg_eigval", False)
    gain = SigmoidGain(negative_eigenvalues=negative) if keys.flag("use_beta", True) else UnitGain()
    norm = keys.one_of("qk_norm", _NORMS, "l2")
    return {
        "key_heads": heads,
        "value_heads": heads,
        "key_head_dim": expanded(keys, "expand_k", 1.0, width, heads),
        "value_head_dim": expanded(keys, "expand_v", 1.0, width, heads),
        "gain": gain,
        "feature_map": keys.one_of("qk_activation", _FEATURE_MAPS, "silu"),
        "query_norm": norm,
        "key_norm": norm,
        "output_projection.gate": "silu" if keys.flag("use_gate", False) else "none",
        "output_projection.eps": keys.number("norm_eps", 1e-6),
        **read_convolution(keys),
    }


def _write(mixer: RecurrentMixerConfig, width: int) -> dict[str, Any]:
    heads, value_heads, size, value_size = sizes_of(mixer)
    names: dict[Any, str] = {ours: theirs for theirs, ours in _FEATURE_MAPS.items()}
    return {
        "num_heads": heads,
        "expand_k": expansion(heads * size, width),
        "expand_v": expansion(value_heads * value_size, width),
        "use_beta": not isinstance(mixer.gain, UnitGain),
        "allow_neg_eigval": getattr(mixer.gain, "negative_eigenvalues", False),
        "qk_norm": "sum" if mixer.query_norm == "l1" else "l2",
        "qk_activation": names.get(mixer.feature_map, "silu"),
        "use_gate": mixer.output_projection.gate != "none",
        **write_convolution(mixer),
    }


DELTA_NET = fla_family(
    "delta_net", "deltanet", "DeltaNetForCausalLM", rows=ROWS, read=_read, write=_write, num_heads=16
)

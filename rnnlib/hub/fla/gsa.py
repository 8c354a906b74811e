"""`gsa`: gated slot attention."""

from typing import Any

from rnnlib.hub.config_reader import ConfigKeys
from rnnlib.hub.fla.common import Options, fla_family, read_convolution, write_convolution
from rnnlib.hub.fla.gla import read_sizes, write_sizes
from rnnlib.hub.fla.rows import CONVOLUTIONS, STREAMS
from rnnlib.hub.weight_mapping import linear, row
from rnnlib.layers.convolution import ConvolutionConfig
from rnnlib.layers.decay import LogSigmoidDecay
from rnnlib.layers.mixer import RecurrentMixerConfig
from rnnlib.layers.slots import GatedSlots

# Epsilon of the norm over all heads. It does not depend on `norm_eps`.
_EPS = 1e-5

_FEATURE_MAPS = {"swish": "silu", "silu": "silu", "relu": "relu"}

ROWS = (
    *STREAMS,
    *CONVOLUTIONS,
    *linear("attn.f_proj", "mixer.input_projection.decay"),
    row("attn.g_norm.weight", "mixer.output_projection.norm.scale"),
    *linear("attn.o_proj", "mixer.output_projection.output"),
)


def _read(keys: ConfigKeys, width: int) -> Options:
    keys.only("elementwise_affine", True)
    # The model does not read these.
    keys.ignore("use_output_gate", "use_norm", "clamp_min", "clamp_max", "exapnd_k", "exapnd_v")
    sizes = read_sizes(keys, width, 1.0, 1.0)
    filters = read_convolution(keys, default=False)
    if "convolution.size" in filters:
        filters = {"convolution": ConvolutionConfig(size=filters["convolution.size"], activation="silu")}
    return {
        **sizes,
        **filters,
        "feature_map": keys.one_of("feature_map", _FEATURE_MAPS, "swish"),
        "solve.num_slots": keys.size("num_slots", sizes["key_head_dim"] if "num_slots" in keys else 64),
        "decay.divisor": float(keys.number("gate_logit_normalizer", 8)),
        "output_projection.eps": _EPS,
    }


def _write(mixer: RecurrentMixerConfig, width: int) -> dict[str, Any]:
    if not isinstance(mixer.solve, GatedSlots) or not isinstance(mixer.decay, LogSigmoidDecay):
        raise ValueError(f"solve is {type(mixer.solve).__name__}, expected GatedSlots")
    names = {ours: theirs for theirs, ours in reversed(_FEATURE_MAPS.items())}
    if mixer.feature_map not in names:
        raise ValueError(f"feature_map is {mixer.feature_map!r}, expected {', '.join(map(repr, names))}")
    return {
        **write_sizes(mixer, width),
        **write_convolution(mixer),
        "feature_map": names[mixer.feature_map],
        "num_slots": mixer.solve.num_slots,
        "gate_logit_normalizer": mixer.decay.divisor,
    }


GSA = fla_family("gsa", "gsa", "GSAForCausalLM", rows=ROWS, read=_read, write=_write, num_heads=4)

"""`kda`: Kimi Delta Attention."""

from typing import Any

from rnnlib.hub.config_reader import ConfigKeys
from rnnlib.hub.fla.common import Options, fla_family, read_streams, write_streams
from rnnlib.hub.fla.rows import CHANNEL_DECAY, CONVOLUTIONS, LOW_RANK_OUTPUT, STREAMS
from rnnlib.hub.weight_mapping import linear
from rnnlib.layers.decay import BoundedDecay
from rnnlib.layers.mixer import RecurrentMixerConfig

ROWS = (
    *STREAMS,
    *CONVOLUTIONS,
    *CHANNEL_DECAY,
    *linear("attn.b_proj", "mixer.input_projection.write_gate"),
    *LOW_RANK_OUTPUT,
)


def read_lower_bound(keys: ConfigKeys) -> Options:
    """The bounded decay if the file has `lower_bound`: another formula of the same arrays."""
    bound = keys.take("lower_bound", float | int | None, None)
    if bound is None:
        return {}
    return {"decay": BoundedDecay(channelwise=True, rank="value_size", rate=(1.0, 16.0), lower_bound=float(bound))}


def write_lower_bound(mixer: RecurrentMixerConfig) -> dict[str, Any]:
    """The key that `read_lower_bound` reads."""
    return {"lower_bound": mixer.decay.lower_bound if isinstance(mixer.decay, BoundedDecay) else None}


def _read(keys: ConfigKeys, width: int) -> Options:
    return {
        **read_streams(keys, 1.0),
        **read_lower_bound(keys),
        "gain.negative_eigenvalues": keys.flag("allow_neg_eigval", False),
        "output_projection.eps": keys.number("norm_eps", 1e-6),
    }


def _write(mixer: RecurrentMixerConfig, width: int) -> dict[str, Any]:
    return {
        **write_streams(mixer),
        **write_lower_bound(mixer),
        "allow_neg_eigval": getattr(mixer.gain, "negative_eigenvalues", False),
    }


KDA = fla_family("kda", "kda", "KDAForCausalLM", rows=ROWS, read=_read, write=_write, num_heads=16, head_dim=128)

"""`gated_deltanet`: Gated DeltaNet."""

from typing import Any

from rnnlib.hub.config_reader import ConfigKeys
from rnnlib.hub.fla.common import GATES, Options, fla_family, read_streams, write_streams
from rnnlib.hub.fla.rows import CONVOLUTIONS, DECAY, OUTPUT, STREAMS
from rnnlib.hub.weight_mapping import linear
from rnnlib.layers.mixer import RecurrentMixerConfig

ROWS = (*STREAMS, *CONVOLUTIONS, *DECAY, *linear("attn.b_proj", "mixer.input_projection.write_gate"), *OUTPUT)


def _read(keys: ConfigKeys, width: int) -> Options:
    activation = keys.one_of("output_gate_activation", GATES, "swish")
    return {
        **read_streams(keys, 2.0),
        "gain.negative_eigenvalues": keys.flag("allow_neg_eigval", False),
        "output_projection.gate": activation if keys.flag("use_gate", True) else "none",
        "output_projection.eps": keys.number("norm_eps", 1e-6),
    }


def _write(mixer: RecurrentMixerConfig, width: int) -> dict[str, Any]:
    gate = mixer.output_projection.gate
    return {
        **write_streams(mixer),
        "allow_neg_eigval": getattr(mixer.gain, "negative_eigenvalues", False),
        "use_gate": gate != "none",
        "output_gate_activation": "sigmoid" if gate == "sigmoid" else "swish",
    }


GATED_DELTANET = fla_family(
    "gated_deltanet",
    "gated_deltanet",
    "GatedDeltaNetForCausalLM",
    rows=ROWS,
    read=_read,
    write=_write,
    unused=("model.layers.*.attn.D",),  # in older files (before March 2025)
    num_heads=6,
    head_dim=256,
    num_hidden_layers=21,
)

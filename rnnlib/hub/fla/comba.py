"""`comba`: Comba, with its correction before the norms."""

from typing import Any

from rnnlib.hub.config_reader import ConfigKeys
from rnnlib.hub.fla.common import Options, fla_family, read_streams, write_streams
from rnnlib.hub.fla.rows import CONVOLUTIONS, DECAY, OUTPUT, STREAMS
from rnnlib.hub.weight_mapping import linear, row
from rnnlib.layers.keys import CorrectionBeforeNorms
from rnnlib.layers.mixer import RecurrentMixerConfig

ROWS = (
    *STREAMS,
    *CONVOLUTIONS,
    *DECAY,
    *linear("attn.b_proj", "mixer.input_projection.write_gate"),
    row("attn.decay", "mixer.keys.feedback"),
    row("attn.D", "mixer.keys.correction"),
    *OUTPUT,
)


def _read(keys: ConfigKeys, width: int) -> Options:
    keys.ignore("use_output_correction", "use_inner_decay", "correction_factor")  # the model ignores them too
    return {
        **read_streams(keys, 2.0),
        "query_norm": "none",
        "key_norm": "none",
        "keys": CorrectionBeforeNorms(),
        "gain.feedback": False,
        "output_projection.gate": "sigmoid" if keys.flag("use_output_gate", True) else "none",
        "output_projection.eps": keys.number("norm_eps", 1e-6),
    }


def _write(mixer: RecurrentMixerConfig, width: int) -> dict[str, Any]:
    return {
        **write_streams(mixer),
        "use_output_gate": mixer.output_projection.gate != "none",
    }


COMBA = fla_family(
    "comba",
    "comba",
    "CombaForCausalLM",
    rows=ROWS,
    read=_read,
    write=_write,
    num_heads=6,
    head_dim=256,
    num_hidden_layers=21,
)

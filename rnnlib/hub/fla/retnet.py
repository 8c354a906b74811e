"""`retnet`: RetNet."""

from typing import Any

from rnnlib.hub.config_reader import ConfigKeys
from rnnlib.hub.fla.common import Options, fla_family
from rnnlib.hub.fla.gla import (
    norm_and_gate,
    read_feature_map,
    read_output_projection,
    read_sizes,
    write_feature_map,
    write_output_projection,
    write_sizes,
)
from rnnlib.hub.fla.rows import STREAMS
from rnnlib.hub.weight_mapping import Row
from rnnlib.layers.mixer import RecurrentMixerConfig
from rnnlib.models.block import Block


def _rows(block: Block) -> tuple[Row, ...]:
    return (*STREAMS, *norm_and_gate(block))


def _read(keys: ConfigKeys, width: int) -> Options:
    keys.ignore("use_short_conv", "conv_size")  # the model ignores them too
    return {**read_sizes(keys, width, 1.0, 2.0), **read_feature_map(keys), **read_output_projection(keys)}


def _write(mixer: RecurrentMixerConfig, width: int) -> dict[str, Any]:
    return {**write_sizes(mixer, width), **write_feature_map(mixer), **write_output_projection(mixer)}


RETNET = fla_family(
    "retnet", "retnet", "RetNetForCausalLM", rows=_rows, read=_read, write=_write, hidden_ratio=2, num_heads=8
)

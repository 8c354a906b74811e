"""`linear_attn`: linear attention with a feature map."""

from typing import Any

from rnnlib.hub.config_reader import ConfigKeys
from rnnlib.hub.fla.common import Options, fla_family
from rnnlib.hub.fla.gla import read_norm, read_sizes, write_sizes
from rnnlib.hub.fla.rows import STREAMS
from rnnlib.hub.weight_mapping import Row, linear, row
from rnnlib.layers.feature_maps import DPFPMap, FeatureMapConfig, HedgehogMap, ProductMap, ReluMap
from rnnlib.layers.mixer import RecurrentMixerConfig
from rnnlib.layers.solve import LinearAttention

_FEATURE_MAPS = {
    "elementwise_product": ProductMap(),
    "hedgehog": HedgehogMap(),
    "t2r": ReluMap(),
    "dpfp": DPFPMap(),
    "elu": "elu_plus_one",
    "relu": "relu",
    "identity": "identity",
}
_PARTS = {"layer1": "first", "layer2": "second", "layer": "linear"}


def _feature_map(theirs: str, ours: str) -> tuple[Row, ...]:
    """The rows of a learned feature map, which has one linear layer or two."""
    return tuple(
        entry
        for name, part in _PARTS.items()
        for entry in linear(f"attn.{theirs}.{name}", f"mixer.{ours}.feature_map.{part}")
    )


ROWS = (
    *STREAMS,
    *_feature_map("feature_map_q", "query"),
    *_feature_map("feature_map_k", "key"),
    # A map that queries and keys share: files may hold its arrays under both names.
    *(given._replace(copy=True) for given in _feature_map("feature_map_k", "query")),
    row("attn.norm.weight", "mixer.output_projection.norm.scale"),
    *linear("attn.o_proj", "mixer.output_projection.output"),
)


def _read(keys: ConfigKeys, width: int) -> Options:
    feature_map = keys.one_of("feature_map", _FEATURE_MAPS, "elementwise_product")
    tied = keys.flag("tie_feature_map_qk", False)
    return {
        **read_sizes(keys, width, 1.0, 1.0),
        "feature_map": feature_map,
        # DPFP has nothing to tie.
        "tie_feature_maps": tied and isinstance(feature_map, ProductMap | HedgehogMap | ReluMap),
        "query_norm": "sum" if keys.flag("norm_q", False) else "none",
        "key_norm": "sum" if keys.flag("norm_k", False) else "none",
        "solve.normalize": keys.flag("norm_feature_map", False),
        **read_norm(keys),
    }


def _write(mixer: RecurrentMixerConfig, width: int) -> dict[str, Any]:
    names: dict[Any, str] = {ours: theirs for theirs, ours in _FEATURE_MAPS.items()}
    if mixer.feature_map not in names:
        raise ValueError(f"feature_map is {mixer.feature_map!r}, expected {', '.join(map(repr, names))}")
    learned = isinstance(mixer.feature_map, FeatureMapConfig)
    return {
        **write_sizes(mixer, width),
        "feature_map": names[mixer.feature_map],
        "tie_feature_map_qk": learned and mixer.tie_feature_maps,
        "norm_q": mixer.query_norm == "sum",
        "norm_k": mixer.key_norm == "sum",
        "norm_feature_map": isinstance(mixer.solve, LinearAttention) and mixer.solve.normalize,
        "elementwise_affine": mixer.output_projection.norm_scale,
    }


LINEAR_ATTN = fla_family(
    "linear_attn",
    "linear_attention",
    "LinearAttentionForCausalLM",
    rows=ROWS,
    read=_read,
    write=_write,
    num_heads=4,
)

import dataclasses
import json

import pytest

from rnnlib.layers import ApplyToKey, SoftplusDecay
from rnnlib.models import (
    ModelConfig,
    attention_at,
    every_other_sliding_window,
    gated_deltanet2_cell,
    swiglu_width,
    two_global_attention_layers,
)
from rnnlib.models.mixers import mixer_config


@pytest.mark.parametrize(("width", "expected"), [(1024, 2816), (1792, 4864), (2048, 5632), (2304, 6144), (64, 256)])
def test_swiglu_width_is_the_papers(width, expected):
    assert swiglu_width(width) == expected
    assert ModelConfig(width=width).feed_forward_width == expected


def test_one_mixer_fills_all_layers_and_two_alternate():
    assert ModelConfig(num_layers=3, mixers=("kda",)).layer_mixers == ("kda",) * 3
    alternating = ModelConfig(num_layers=5, mixers=every_other_sliding_window("kda")).layer_mixers
    assert alternating == ("kda", "sliding_window_attention", "kda", "sliding_window_attention", "kda")
    assert gated_deltanet2_cell() == ("gated_deltanet2", "sliding_window_attention")


@pytest.mark.parametrize("num_layers", [4, 7, 24])
def test_global_attention_stands_on_the_second_and_the_middle_layer(num_layers):
    layers = two_global_attention_layers("deltanet", num_layers)
    # Counted from one, as the paper does: layers 2 and N/2 + 1.
    assert [i + 1 for i, name in enumerate(layers) if name == "attention"] == [2, num_layers // 2 + 1]
    assert len(layers) == num_layers


def test_two_global_layers_need_four_layers():
    with pytest.raises(ValueError, match="num_layers=3"):
        two_global_attention_layers("deltanet", 3)


def test_attention_stands_where_gated_kalmanets_hybrid_has_it():
    layers = attention_at("gated_kalmanet", 30, (6, 14, 22, 29))
    assert [i for i, name in enumerate(layers) if name == "attention"] == [6, 14, 22, 29]
    assert layers.count("gated_kalmanet") == 26
    with pytest.raises(ValueError, match=r"indices has \[30\], expected layers from 0 to 29"):
        attention_at("gated_kalmanet", 30, (6, 30))


def test_config_is_hashable_and_round_trips_through_plain_values():
    config = ModelConfig(
        num_layers=4,
        mixers=("kda", "attention"),
        mixer_overrides={
            "kda": {"output_projection.gate": "none", "decay": SoftplusDecay(step=(0.01, 0.1))},
            "*": {"convolution": None, "value_expansion": 2.0, "keys": {"ApplyToKey": {"bound": 1.2}}},
        },
        window=16,
    )
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert hash(ModelConfig.from_dict(config.to_dict())) == hash(config)
    assert dataclasses.replace(config) == config
    assert mixer_config(config, "kda").keys == ApplyToKey(bound=1.2)
    assert mixer_config(config, "kda").decay == SoftplusDecay(step=(0.01, 0.1))
    assert config.replace(window=8) != config


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"width": 0}, "ModelConfig: width is 0, expected an integer of at least 1$"),
        ({"num_layers": -1}, "num_layers is -1, expected"),
        ({"mixers": ()}, "at least one mixer"),
        ({"mixers": 3}, "mixers is 3, expected"),
        ({"mixers": ("kda", "no_such_mixer")}, "'no_such_mixer' is no mixer; expected one of .*gated_deltanet"),
        (
            {"mixers": ("gated_deltane",)},
            r"'gated_deltane' is no mixer \(perhaps 'gated_deltanet'\?\); expected one of",
        ),
        ({"num_layers": 1, "mixers": ("kda", "attention")}, "2 entries"),
        ({"norm_bias": True}, "norm_bias=True: expected norm='layer', not 'rms'"),
        ({"mixers": ("none",), "mlp_ratio": 0}, "layer 0 has neither a mixer nor a feed-forward"),
        ({"mixer_overrides": {"no_such_mixer": {}}}, "'no_such_mixer' is no mixer"),
        ({"mixer_overrides": {"kda": 3}}, "mixer_overrides="),
        ({"mixer_overrides": {"kda": {"keys": {"rank": 3}}}}, "kda: keys: {'rank': 3}: expected a part and its fields"),
        ({"mixer_overrides": {"kda": {"keys": {"ApplyToKey": {"x": 3}}}}}, "kda: keys: ApplyToKey has no field 'x'"),
        (
            {"mixer_overrides": {"kda": {"keys": {3}}}},
            r"kda: keys: \{3\} is not hashable \(unhashable type: 'set'\), expected a part",
        ),
        ({"norm_eps": None}, "norm_eps is None, expected a number above 0 and finite"),
        ({"mlp_ratio": "4"}, "mlp_ratio is '4', expected a number of at least 0 and finite"),
        ({"remat": "no"}, "remat is 'no', expected a boolean or 'auto'"),
        ({"dtype": "int8"}, "dtype is 'int8', expected 'float32', 'bfloat16', 'float16' or 'float64'"),
        ({"window": 0}, "window is 0, expected an integer of at least 1 or None"),
        ({"mlp_ratio": -1.0}, "mlp_ratio is -1.0"),
        ({"initializer_std": 0.0}, "initializer_std is 0.0"),
        ({"rope_base": -1.0}, "rope_base is -1.0, expected a number above 0 and finite or None"),
    ],
)
def test_bad_options_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**changes)


def test_an_unknown_field_is_named():
    with pytest.raises(ValueError, match="widht: no such setting; expected one of vocabulary_size, width"):
        ModelConfig.from_dict({"widht": 3})

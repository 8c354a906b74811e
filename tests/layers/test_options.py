"""Options that published models need: each mixer against NumPy in float64, alone, packed, and from a cache."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rnnlib.layers import (
    BoundedDecay,
    ConvolutionConfig,
    CorrectionBeforeNorms,
    DPFPMap,
    HedgehogMap,
    OutputProjectionConfig,
    ProductMap,
    ReluMap,
    RMSNorm,
    SigmoidGain,
)

from . import options_reference as reference
from .tiny import WIDTH, check_documents, check_pieces, inputs, parallel_pass, randomize, tiny

MAMBA2 = {"key_head_dim": 8, "value_heads": 4, "value_head_dim": 6}

# The name of a case: the preset, its overrides, and the layer in NumPy.
CASES = {
    "mamba2 in groups, with biases and limits of dt": (
        "mamba2",
        MAMBA2
        | {
            "key_heads": 2,
            "use_bias": True,
            "decay.use_bias": True,
            "decay.step_limits": (0.4, 1.0),
            "output_projection.norm": "group",
            "output_projection.gate_bias": True,
            "output_projection.use_bias": True,
        },
        functools.partial(reference.mamba2, groups=2, limits=(0.4, 1.0)),
    ),
    "mamba2 with the norm before the gate": (
        "mamba2",
        MAMBA2 | {"key_heads": 2, "output_projection.norm": "group", "output_projection.gate_first": False},
        functools.partial(reference.mamba2, groups=2, gate_first=False),
    ),
    "mamba2 without a norm, skip per channel": (
        "mamba2",
        MAMBA2
        | {"output_projection.norm": "none", "output_projection.skip": "channel", "decay.step_limits": (0.0, np.inf)},
        functools.partial(reference.mamba2, norm=False),
    ),
    "kda with a bounded decay": (
        "kda",
        {"decay": BoundedDecay(channelwise=True, rank="value_size", lower_bound=-3.0)},
        functools.partial(reference.bounded_kda, bound=-3.0),
    ),
    "gla with filters, a feature map and a lowest decay": (
        "gla",
        {
            "convolution": ConvolutionConfig(activation="silu"),
            "feature_map": "squared_relu",
            "value_map": "identity",
            "decay.lowest": -0.05,
        },
        functools.partial(reference.clamped_gla, lowest=-0.05),
    ),
    "linear attention with a product of maps, over its sum": (
        "linear_attention",
        {"feature_map": ProductMap(), "query_norm": "sum", "key_norm": "sum"},
        functools.partial(reference.mapped_attention, feature_map=reference.product_map, norm=reference.over_sum),
    ),
    "linear attention with T2R's map for both": (
        "linear_attention",
        {"feature_map": ReluMap(), "tie_feature_maps": True},
        functools.partial(reference.mapped_attention, feature_map=reference.relu_map, tied=True),
    ),
    "linear attention with Hedgehog's map": (
        "linear_attention",
        {"feature_map": HedgehogMap()},
        functools.partial(reference.mapped_attention, feature_map=reference.hedgehog_map),
    ),
    "linear attention with DPFP": (
        "linear_attention",
        {"feature_map": DPFPMap(nu=3)},
        functools.partial(reference.mapped_attention, feature_map=functools.partial(reference.dpfp_map, nu=3)),
    ),
    "linear attention with elu + 1 over the sum of weights": (
        "linear_attention",
        {"feature_map": "elu_plus_one", "solve.normalize": True, "value_expansion": 2.0},
        functools.partial(
            reference.mapped_attention,
            feature_map=lambda _, x: np.where(x > 0, x + 1, np.exp(np.minimum(x, 0))),
            normalize=True,
        ),
    ),
    "gla with fewer keys and values than queries, norm without a scale": (
        "gla",
        {
            "key_heads": 4,
            "value_heads": 4,
            "shared_heads": 2,
            "decay.heads": "shared",
            "convolution": ConvolutionConfig(activation="silu"),
            "output_projection.norm_scale": False,
        },
        reference.shared_gla,
    ),
    "retnet with one head of keys and values": (
        "retnet",
        {"key_heads": 4, "value_heads": 4, "shared_heads": 1},
        reference.shared_retnet,
    ),
    "comba with the correction before the norms": (
        "comba",
        {
            "keys": CorrectionBeforeNorms(),
            "gain.feedback": False,
            "query_norm": "none",
            "key_norm": "none",
            "value_heads": 4,
        },
        reference.comba,
    ),
    "pkda with a preconditioner per value head and a gain per key head": (
        "pkda",
        {"value_heads": 4, "keys.gram.heads": "value", "gain": SigmoidGain(heads="key")},
        reference.grouped_pkda,
    ),
    "deltanet with elu + 1 over its sum": (
        "deltanet",
        {"feature_map": "elu_plus_one", "query_norm": "l1", "key_norm": "l1"},
        reference.sum_normalised_deltanet,
    ),
}


@functools.cache
def passes(case):
    """The case's mixer and its parallel pass: computed once for the tests below."""
    name, overrides, _ = CASES[case]
    module = tiny(name, **overrides)
    return module, *parallel_pass(module)


@pytest.mark.parametrize("case", CASES)
def test_mixer_is_the_layer_in_numpy(case):
    module, _, x, _, y = passes(case)
    check_documents(CASES[case][2], module, x, y)


@pytest.mark.parametrize("case", CASES)
def test_prefill_in_pieces_and_decoding_give_the_parallel_pass(case):
    check_pieces(*passes(case))


def test_gradients_reach_every_parameter_of_every_option():
    x = inputs(2, 6)

    @nnx.jit
    def gradients(module):
        return nnx.grad(lambda module: jnp.sum(jnp.square(module(x)[0])))(module)

    for case, (name, overrides, _) in CASES.items():
        for path, gradient in nnx.to_flat_state(gradients(tiny(name, **overrides, implementation="scan"))):
            assert np.all(np.isfinite(gradient[...])), (case, path)
            assert np.any(gradient[...] != 0), (case, path)


def test_norm_in_groups_normalises_each_part():
    x = 3 * inputs(2, 5)
    norm = randomize(RMSNorm(WIDTH, eps=1e-3, groups=2))
    parts = np.asarray(x, np.float64).reshape(2, 5, 2, -1)
    expected = (parts / np.sqrt(np.mean(parts**2, axis=-1, keepdims=True) + 1e-3)).reshape(x.shape)
    np.testing.assert_allclose(norm(x), expected * np.asarray(norm.scale[...], np.float64), rtol=1e-5)


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RMSNorm(16, groups=3), "RMSNorm: groups is 3, expected a divisor of features = 16"),
        (
            lambda: tiny("mamba2", **{"decay.step_limits": (2.0, 1.0)}),
            r"SoftplusDecay: step_limits is \(2.0, 1.0\), expected 0 <= low < high",
        ),
        (lambda: BoundedDecay(lower_bound=0.0), "BoundedDecay: lower_bound is 0.0, expected a number below 0"),
        (lambda: tiny("gla", **{"decay.lowest": 0.1}), "LogSigmoidDecay: lowest is 0.1, expected a number below 0"),
        (lambda: tiny("retnet", shared_heads=3), "shared_heads is 3, expected a divisor of key_heads = 2"),
        (
            lambda: OutputProjectionConfig(skip="head"),
            "OutputProjectionConfig: skip is 'head', expected a boolean or 'channel'",
        ),
    ],
)
def test_bad_values_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()

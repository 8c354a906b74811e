"""Each preset is its paper's layer: the whole mixer against NumPy in float64, alone, packed, and from a cache."""

import dataclasses
import functools

import jax
import pytest
import yaml
from flax import nnx

from rnnlib.configuration import to_plain
from rnnlib.layers import (
    AttentionConfig,
    ChannelGain,
    Initializer,
    RecurrentMixerConfig,
    SoftplusDecay,
    mixer_names,
    mixer_preset,
    mixer_table,
    preset_details,
    presets,
    register_preset,
)
from rnnlib.layers.part import part_from_plain
from tests.selection import mostly_slow

from .mamba3_reference import MAMBA3_LAYERS
from .preconditioned_reference import PRECONDITIONED_LAYERS
from .reference import LAYERS as PLAIN_LAYERS
from .ridge_reference import RIDGE_LAYERS
from .tiny import HEADS, WIDTH, check_documents, check_pieces, parallel_pass, parameters, tiny

LAYERS = PLAIN_LAYERS | MAMBA3_LAYERS | PRECONDITIONED_LAYERS | RIDGE_LAYERS
SEVERAL_STEPS = ("deltaproduct", "gated_deltaproduct")
"""Compared with the delta rule's steps one after another in `test_delta_product.py`."""


def test_every_preset_has_a_reference():
    assert set(mixer_names()) == set(LAYERS) | set(SEVERAL_STEPS)


@functools.cache
def tiny_pass(name):
    """A mixer and its parallel pass: computed once for the tests below."""
    module = tiny(name)
    return module, *parallel_pass(module)


@pytest.mark.parametrize("name", LAYERS)
def test_mixer_is_the_papers_layer(name):
    module, _, x, _, y = tiny_pass(name)
    check_documents(LAYERS[name], module, x, y)


# A mixer of each kind of cache.
CACHES = ("gated_deltanet2", "linear_attention", "gsa", "rwkv7", "rwkv7_channel_mix", "mamba2", "mamba3_mimo", "pkda")
CACHES += ("zamba2",)
CACHES += ("gated_kalmanet", "mesanet", "sliding_window_attention", "forgetting_attention", "latent_attention")


@pytest.mark.parametrize("name", mostly_slow(mixer_names(), CACHES))
def test_prefill_in_pieces_and_decoding_give_the_parallel_pass(name):
    check_pieces(*tiny_pass(name))


# Parameters of a mixer at the default tiny size, counted by hand: d = width, 2 heads of K = V = 8.
D, K, LOW = WIDTH, WIDTH // HEADS, WIDTH * (WIDTH // HEADS)
QKVO, CONVOLUTION, PER_HEAD, NORM = 4 * D * D, 3 * 4 * D, D * HEADS, K
COUNTS = {
    "linear_attention": QKVO + NORM,
    "retnet": 2 * D * D + 3 * 2 * D * D + 2 * NORM,
    "gla": 2 * D * D // 2 + 3 * D * D + (16 * D + 16 * D // 2 + D // 2) + NORM,
    "hgrn2": QKVO + D,
    "gsa": QKVO + 6 * PER_HEAD + D,
    "deltanet": QKVO + CONVOLUTION + PER_HEAD + NORM,
    "gated_deltanet": QKVO + CONVOLUTION + (PER_HEAD + 2 * HEADS) + PER_HEAD + D * D + NORM,
    "kda": QKVO + CONVOLUTION + (2 * LOW + HEADS + D) + PER_HEAD + (2 * LOW + D) + NORM,
    "gated_deltanet2": QKVO + CONVOLUTION + (D * D + HEADS + D) + 2 * D * D + (2 * LOW + D) + NORM,
    "kla": QKVO + CONVOLUTION + (PER_HEAD + 2 * HEADS) + PER_HEAD + D * D + NORM,
    "longhorn": QKVO + CONVOLUTION + PER_HEAD + NORM,
    "nlms": QKVO + CONVOLUTION + NORM,
    "efla": QKVO + CONVOLUTION + PER_HEAD + NORM,
    "comba": QKVO + CONVOLUTION + (PER_HEAD + 2 * HEADS) + (PER_HEAD + HEADS) + HEADS + D * D + NORM,
    # Six mixtures; maps of ranks 64, 64 (with biases) and 128; factors on keys, the bonus, scale and bias of the norm.
    "rwkv7": QKVO + 6 * D + 2 * (64 * 2 * D + D) + 128 * 2 * D + 5 * D,
    "rwkv7_channel_mix": D + 2 * 4 * D * D,
    "attention": QKVO,
    "sliding_window_attention": QKVO,
    "forgetting_attention": QKVO + PER_HEAD + HEADS,
    # Queries and the shared key with half a head's channels more; latents as wide as four heads.
    "latent_attention": D * HEADS * (K + K // 2) + D * (4 * K + K // 2) + 4 * K + 2 * (4 * K) * D + D * D,
    # Values 2 d wide, one query and key head of 8 channels, convolution with bias, gate, skip, norm over all heads.
    "mamba2": 2 * D * 8 + 3 * 2 * D * D + 5 * (2 * 8 + 2 * D) + (PER_HEAD + 2 * HEADS) + HEADS + 2 * D,
}
# Norms of 2 d, d and d; attention from 2 d to d, a feed-forward 4 d wide, the map to the stream; adapters of rank 3.
COUNTS["zamba2"] = COUNTS["mamba2"] + 4 * D + 3 * 4 * D * D + 2 * D * D + 3 * 4 * D * D + D * D
COUNTS["zamba2"] += 3 * 3 * (2 * D + 2 * D) + 3 * (D + 2 * 4 * D)
# No convolution, rate and share of a token, norms of q and k, two angles, biases per head, skip, no norm of the output.
COUNTS["mamba3"] = 2 * (D * 8 + 8) + 3 * 2 * D * D + (3 * PER_HEAD + HEADS) + 2 * D + 2 * HEADS * 8 + HEADS
# Three more of each query, key and bias; two scales per pair and value channel.
COUNTS["mamba3_mimo"] = COUNTS["mamba3"] + 3 * 2 * D * 8 + 3 * 2 * HEADS * 8 + 2 * 4 * 2 * D
# A further step's keys, values, their filters and gate; an output gate.
COUNTS["deltaproduct"] = COUNTS["deltanet"] + (2 * D * D + 2 * 4 * D + PER_HEAD) + D * D
COUNTS["gated_deltaproduct"] = COUNTS["deltaproduct"] + PER_HEAD + 2 * HEADS
# The preconditioner's own gates (two projections, A_log, dt_bias) and center; a ridge per head.
ATK, ATQ = 2 * PER_HEAD + 3 * HEADS, HEADS
COUNTS |= {
    "pdn": COUNTS["deltanet"] + ATK,
    "pgdn": COUNTS["gated_deltanet"] - D * D + ATK,
    "pkda": COUNTS["kda"] + ATK,
    "pla": COUNTS["deltanet"] - PER_HEAD + ATQ,
    "pmamba2": COUNTS["gated_deltanet"] - D * D + ATQ,
    "mamba2_atk": COUNTS["gated_deltanet"] - D * D + ATK,
    "pgla": COUNTS["deltanet"] - PER_HEAD + (2 * 16 * D + D) + ATQ,
    "pgdn_atq": COUNTS["gated_deltanet"] - D * D + ATK + ATQ,
    "pgdn2": COUNTS["gated_deltanet2"] + ATK,
    "pkla": COUNTS["kla"] + ATK,
    "plonghorn": COUNTS["longhorn"] + ATK,
    "kla_atq": COUNTS["kla"] + ATQ,
}
# A connection with bias per head in place of the delta rule's gain.
COUNTS["gated_kalmanet"] = COUNTS["gated_deltanet"] + HEADS
# Filters of q and k, two gates with bias, a ridge per channel.
COUNTS["mesanet"] = QKVO + 2 * 4 * D + 2 * (PER_HEAD + HEADS) + D + NORM


@pytest.mark.parametrize("name", mixer_names())
def test_parameter_counts(name):
    assert sum(leaf.size for leaf in jax.tree.leaves(parameters(tiny(name)))) == COUNTS[name]


@pytest.mark.parametrize("name", ["mamba2", "mamba3", "mamba3_mimo"])
def test_mamba_has_the_papers_sizes(name):
    shape = mixer_preset(name).shape(1024, 32)
    assert (shape.key_heads, shape.key_size, shape.value_heads, shape.value_size) == (1, 128, 32, 64)


@pytest.mark.parametrize("name", mixer_names())
def test_no_two_parameters_share_an_array(name):
    # A training step is given its state to overwrite, and on a GPU refuses the same array twice.
    module = mixer_preset(name).build(WIDTH, HEADS, rngs=nnx.Rngs(0))
    arrays = [leaf for leaf in jax.tree.leaves(nnx.state(module)) if isinstance(leaf, jax.Array) and leaf.size]
    arrays = [leaf for leaf in arrays if not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)]
    assert len({leaf.unsafe_buffer_pointer() for leaf in arrays}) == len(arrays)


def test_overrides_reach_fields_axes_and_short_names():
    assert mixer_preset("kda", head_dim=64).head_dim == 64
    assert mixer_preset("kda", **{"decay.rank": None}).decay == SoftplusDecay(channelwise=True, rate=(1.0, 16.0))
    assert mixer_preset("kda", negative_eigenvalues=True).gain.negative_eigenvalues
    assert mixer_preset("gated_deltanet2", negative_eigenvalues=True).gain.negative_eigenvalues
    gates = {True: "sigmoid", False: "none", "silu": "silu"}
    assert {given: mixer_preset("kda", output_gate=given).output_projection.gate for given in gates} == gates
    assert mixer_preset("deltanet", output_gate=True).output_projection.gate == "silu"  # it has none of its own
    # An axis is set before what is in it, in whatever order they are named.
    fields = {"decay.rank": 3, "negative_eigenvalues": True}
    ranked = mixer_preset("kda", **fields, decay=SoftplusDecay(), gain=ChannelGain())
    assert ranked.decay == SoftplusDecay(rank=3) and ranked.gain == ChannelGain(negative_eigenvalues=True)
    nested = mixer_preset("kda", **{"convolution.initializer.scale": 0.5})
    assert nested.convolution.initializer == Initializer("normal", 0.5)
    assert mixer_preset("sliding_window_attention", window=7) == AttentionConfig(window=7)
    with pytest.raises(dataclasses.FrozenInstanceError):
        mixer_preset("kda").head_dim = 3


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        (
            "gated_delta_net",
            {},
            r"mixer is 'gated_delta_net' \(perhaps 'gated_deltanet'\?\), expected one of linear_attention, retnet",
        ),
        ("kda", {"head_size": 3}, r"mixer_preset\('kda'\): RecurrentMixerConfig has no field 'head_size'"),
        ("kda", {"gain.bound": 3}, "SigmoidGain has no field 'bound', expected"),
        ("linear_attention", {"negative_eigenvalues": True}, "UnitGain has no field 'negative_eigenvalues'"),
        ("attention", {"gain": None}, "AttentionConfig has no field 'gain'"),
        ("linear_attention", {"convolution.size": 3}, "NoneType has no field 'size'"),
        ("kda", {"gain": SoftplusDecay()}, r"gain is SoftplusDecay\(.*, expected GainConfig"),
        ("kda", {"convolution": 4}, "convolution is 4, expected ConvolutionConfig or None"),
        ("kla", {"gain.eps": "1e-3"}, "KaczmarzGain: eps is '1e-3', expected a number"),
        ("kda", {"negative_eigenvalues": "no"}, "negative_eigenvalues is 'no', expected a boolean"),
        ("kda", {"decay.rank": "half"}, "rank is 'half', expected an integer of at least 1, 'value_size' or None"),
        ("kda", {"decay.step": (0.1,)}, r"step is \(0.1,\), expected tuple\[float, float\]"),
    ],
)
def test_bad_names_are_named(name, overrides, message):
    with pytest.raises(ValueError, match=message):
        mixer_preset(name, **overrides)


def test_every_part_of_every_preset_has_a_plain_form():
    for name in mixer_names():
        for part in vars(preset_details(name).config).values():
            plain = yaml.safe_load(yaml.safe_dump(to_plain(part)))
            assert part_from_plain(plain) == part, (name, plain)
    assert to_plain(mixer_preset("pkla").gain) == {"PreconditionedGain": {"gain": {"KaczmarzGain": {}}}}


def test_a_new_preset_costs_a_function():
    def gated_deltanet():
        """Twice."""
        return RecurrentMixerConfig()

    with pytest.raises(ValueError, match=r"there is a preset 'gated_deltanet' already, of rnnlib\.layers\.presets"):
        register_preset("Twice", "nowhere")(gated_deltanet)


def test_a_preset_that_is_defined_again_takes_its_own_place(monkeypatch):
    monkeypatch.setattr(presets, "_PRESETS", dict(presets._PRESETS))
    for heads in (2, 4):  # a notebook's cell, changed and run again

        @register_preset("Mine", "composition, 2026")
        def my_mixer():
            """`S_t = S_{t-1} + k_t v_t^T`."""
            return RecurrentMixerConfig(value_heads=heads)

        assert mixer_preset("my_mixer") == RecurrentMixerConfig(value_heads=heads)


def test_presets_name_paper_and_equation():
    for name in mixer_names():
        preset = preset_details(name)
        assert "`" in preset.description, f"{name} gives no equation"
        assert any(character.isdigit() for character in preset.paper), f"{name} gives no year"


def test_table_shows_every_preset_on_its_axes():
    lines = mixer_table().splitlines()
    assert len(lines) == 2 + len(mixer_names())
    assert len({line.count("|") for line in lines}) == 1
    assert any(line.startswith("| `kda` | channel | sigmoid | k | delta rule |") for line in lines)
    assert any(line.startswith("| `mamba2` | scalar | dt | k | additive |") for line in lines)

"""The layers' activations are what the model computes with."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rnnlib import ops
from rnnlib.analysis import (
    condition_number,
    conditions_over_time,
    gram_over_time,
    iterate_layers,
    iterate_reports,
    report,
)
from rnnlib.layers import RecurrentMixer
from rnnlib.models import DecoderLM, ModelConfig

MIXERS = ("pgdn", "attention", "pmamba2", "pgdn_atq", "gated_deltanet")
LENGTH = 24


@pytest.fixture(scope="module")
def model():
    config = ModelConfig(vocabulary_size=11, width=16, num_layers=len(MIXERS), num_heads=2, mixers=MIXERS, mlp_width=16)
    return DecoderLM(config, rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def tokens():
    return jax.random.randint(jax.random.key(0), (2, LENGTH), 0, 11)


SEGMENTS = np.repeat([[1, 2, 1]], 2, axis=0).repeat([10, 3, 11], axis=1)


@pytest.fixture(scope="module")
def layers(model, tokens):
    return {
        activations.layer: activations
        for activations in iterate_layers(model, tokens, segment_ids=jnp.asarray(SEGMENTS))
    }


@nnx.jit
def reference_inputs(model, tokens, segment_ids):
    x = model.embedding[...][tokens]
    activations = []
    for block in model.blocks:
        normalised = block.mixer_norm(x)
        has_recurrence = hasattr(block.mixer, "recurrence_inputs")
        activations.append(
            block.mixer.recurrence_inputs(normalised, segment_ids=segment_ids)[0] if has_recurrence else None
        )
        x = x + block.mixer(normalised, segment_ids=segment_ids)[0]
        x = x + block.feed_forward(block.feed_forward_norm(x))
    return activations


def test_every_recurrent_layer_gives_what_its_operator_gets(model, tokens, layers):
    expected = reference_inputs(model, tokens, jnp.asarray(SEGMENTS))
    assert [(layer, activations.mixer) for layer, activations in layers.items()] == [
        (0, "pgdn"),
        (2, "pmamba2"),
        (3, "pgdn_atq"),
        (4, "gated_deltanet"),
    ]
    for layer, activations in layers.items():
        right = expected[layer]
        for actual, wanted in (
            (activations.query, right.keys.query),
            (activations.key, right.keys.key),
            (activations.write_key, right.keys.key if right.keys.write_key is None else right.keys.write_key),
            (activations.write, right.gates.beta),
            (activations.log_decay, right.decay.log_decay),
        ):
            np.testing.assert_allclose(actual, wanted, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(layers[2].erase, 0.0)  # linear attention erases nothing
    np.testing.assert_array_equal(layers[0].erase, layers[0].write)


def test_preconditioners_are_those_that_were_applied(layers):
    for layer in (0, 3):
        preconditioner = layers[layer].preconditioner
        np.testing.assert_allclose(
            layers[layer].write_key, preconditioner.applied * layers[layer].key, rtol=1e-5, atol=1e-7
        )
        assert preconditioner.center.shape == (2,)
    query_side = layers[2].preconditioner
    assert query_side.applied is None and query_side.center is None
    np.testing.assert_array_equal(query_side.log_decay, layers[2].log_decay)  # tied
    assert layers[4].preconditioner is None
    first = layers[0].preconditioner
    gram, _ = ops.diagonal_gram(
        first.key, log_decay=first.log_decay, gain=first.gain, segment_ids=jnp.asarray(SEGMENTS)
    )
    np.testing.assert_allclose(first.gram, gram, rtol=1e-5)


@pytest.mark.parametrize("packed", [False, True])
def test_diagonal_of_the_gram_over_time_is_the_diagonal_gram(model, tokens, layers, packed):
    activations = layers[0] if packed else next(iterate_layers(model, tokens, layers=[0]))
    preconditioner = activations.preconditioner
    times = [3, 10, 11, 17, LENGTH]
    grams = gram_over_time(
        preconditioner.key,
        times,
        log_decay=preconditioner.log_decay,
        gain=preconditioner.gain,
        segment_ids=activations.segment_ids,
    )
    diagonal = np.diagonal(grams, axis1=-2, axis2=-1)
    for index, time in enumerate(times):
        np.testing.assert_allclose(diagonal[index], preconditioner.gram[:, time - 1], rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(conditions_over_time(activations, times).plain, condition_number(grams))


def test_layers_can_be_chosen_and_are_run_no_further(model, tokens, monkeypatch):
    calls = []
    real = type(model.blocks[0].mixer).recurrence_inputs

    def counted(self, *args, **options):
        calls.append(self)
        return real(self, *args, **options)

    monkeypatch.setattr(type(model.blocks[0].mixer), "recurrence_inputs", counted)
    jax.clear_caches()
    assert [activations.layer for activations in iterate_layers(model, tokens, layers=[0])] == [0]
    ran = len(calls)  # traced once for the activations and once in the block
    assert 1 <= ran <= 2
    assert list(iterate_layers(model, tokens, layers=[])) == []
    assert len(calls) == ran
    with pytest.raises(ValueError, match=r"layers is \[7\], expected numbers of blocks from 0 to 4"):
        next(iterate_layers(model, tokens, layers=[7]))


def test_one_layer_is_held_at_a_time():
    overrides = {"*": {"implementation": "scan"}}
    config = ModelConfig(11, 16, 6, 2, ("pgdn",), mixer_overrides=overrides, mlp_width=16)
    model = DecoderLM(config, rngs=nnx.Rngs(0))
    held = []
    for _ in iterate_reports(model, jnp.zeros((1, LENGTH), jnp.int32), times=[LENGTH]):
        held.append(sum(array.nbytes for array in jax.live_arrays()))
    assert len(held) == 6
    assert max(held) <= held[0] * 1.01


def test_padding_is_not_counted():
    """A batch whose last rows are padding, in part and whole, gives the statistics of its tokens alone."""
    config = ModelConfig(11, 16, 2, 2, ("pgdn", "kda"), mlp_width=16)
    model = DecoderLM(config, rngs=nnx.Rngs(0))
    tokens = jax.random.randint(jax.random.key(1), (3, LENGTH), 0, 11)
    segment_ids = jnp.ones_like(tokens).at[1, 9:].set(0).at[2].set(0)
    padded = tokens * (segment_ids > 0)
    every = {"times": [4, 9, LENGTH], "every": 2}
    reports = list(iterate_reports(model, padded, segment_ids=segment_ids, valid=segment_ids > 0, **every))
    whole = list(iterate_reports(model, tokens[:1], **every))
    part = list(iterate_reports(model, tokens[1:2, :9], times=[4, 9], every=2))
    for found, first, second in zip(reports, whole, part):
        np.testing.assert_allclose(found.spectrum.eigenvalues[:1], first.spectrum.eigenvalues, rtol=1e-4)
        np.testing.assert_allclose(found.spectrum.eigenvalues[1:], second.spectrum.eigenvalues, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(found.conditions.plain[:2, 1:], second.conditions.plain, rtol=1e-3)
        np.testing.assert_array_equal(np.isnan(found.conditions.plain[2]), [[False] * 2, [True] * 2])
        for name in ("key_product", "write_eigenvalue", "decay", "gain"):
            both, one, other = (getattr(r, name) for r in (found, first, second))
            np.testing.assert_allclose(both.counts.sum(axis=1), one.counts.sum(axis=1) + other.counts.sum(axis=1))
            np.testing.assert_allclose(both.maximum, np.maximum(one.maximum, other.maximum), rtol=1e-4)
    logs = [r.preconditioner.log_gram for r in (reports[0], whole[0], part[0])]
    count = [x.counts.sum(axis=1) for x in logs]
    np.testing.assert_allclose(logs[0].mean * count[0], logs[1].mean * count[1] + logs[2].mean * count[2], rtol=1e-4)
    assert np.isnan(reports[0].preconditioner.saturation.rational[1, 9:]).all()
    with pytest.raises(ValueError, match=r"segment_ids is 0 at 39 of 72 tokens, .*expected valid=segment_ids > 0"):
        next(iterate_layers(model, padded, segment_ids=segment_ids))


def test_rotary_keys_of_a_packed_row_are_those_of_training():
    config = ModelConfig(11, 16, 1, 2, ("retnet",), mlp_width=16)
    model = DecoderLM(config, rngs=nnx.Rngs(0))
    tokens = jax.random.randint(jax.random.key(2), (1, 12), 0, 11)
    (packed,) = iterate_layers(model, tokens, segment_ids=jnp.array([[7] * 5 + [3] * 7]))
    (alone,) = iterate_layers(model, tokens[:, 5:])
    np.testing.assert_allclose(packed.key[:, 5:], alone.key, rtol=1e-4, atol=1e-6)
    (running,) = iterate_layers(model, tokens, positions=jnp.arange(12)[None])
    assert np.abs(running.key[:, 5:] - alone.key).max() > 1e-2


def test_the_preconditioner_s_own_eps_is_reported():
    config = ModelConfig(11, 16, 1, 2, ("pgdn",), mixer_overrides={"pgdn": {"keys.eps": 0.1}}, mlp_width=16)
    model = DecoderLM(config, rngs=nnx.Rngs(0))
    tokens = jax.random.randint(jax.random.key(3), (2, LENGTH), 0, 11)
    (activations,) = iterate_layers(model, tokens)
    logs = np.log(np.asarray(activations.preconditioner.gram, np.float64) + 0.1)
    s = logs - np.asarray(activations.preconditioner.center)[:, None]
    np.testing.assert_allclose(
        np.exp(-np.log(1.5) * s / (1 + np.abs(s))), activations.preconditioner.applied, rtol=1e-4
    )
    found = report(activations, times=[LENGTH]).preconditioner
    np.testing.assert_allclose(found.log_gram.mean, logs.mean(axis=(0, 1, 3)), rtol=1e-6)
    np.testing.assert_allclose(found.saturation.rational, np.mean(np.abs(s) / (1 + np.abs(s)), axis=-1), rtol=1e-6)


def test_wrong_texts_are_named(model):
    """Shapes and dtypes are checked twice under pytest, the annotations first; what those do not say is here."""
    with pytest.raises(ValueError, match="tokens has numbers from -1 to 11, expected 0 to 10"):
        next(iterate_layers(model, jnp.array([[-1, 11]])))
    (activations,) = iterate_layers(model, jnp.zeros((1, 3), jnp.int32), layers=[0])
    with pytest.raises(ValueError, match="every is 0, expected at least 1"):
        report(activations, times=[3], every=0)


def test_layers_that_carry_share_or_stand_side_by_side(monkeypatch):
    """Each recurrence is given what it gets in the model's own pass."""
    mixers = ("gated_deltanet+attention", "rwkv7", "zamba2", "rwkv7/later", "kda", "zamba2")
    options = {"rwkv7/later": {"value_rank": 3}, "zamba2": {"transformer.initializer_std": 0.5}}
    options |= {"*": {"implementation": "scan"}, "gated_deltanet+attention": {"input_scales": (0.5, 2.0)}}
    config = ModelConfig(11, 16, len(mixers), 2, mixers, options, mlp_width=16, norm_positions=("input",))
    model, tokens, read = DecoderLM(config, rngs=nnx.Rngs(0)), jnp.arange(8).reshape(2, 4), []
    own = RecurrentMixer._recurrence_inputs

    def recorded(mixer, inputs, *rest):
        read.append((mixer, inputs.x))
        return own(mixer, inputs, *rest)

    with jax.disable_jit():
        monkeypatch.setattr(RecurrentMixer, "_recurrence_inputs", recorded)
        model(tokens)
        monkeypatch.setattr(RecurrentMixer, "_recurrence_inputs", own)
        expected = [mixer.recurrence_inputs(x)[0] for mixer, x in read]
    found = list(iterate_layers(model, tokens))
    assert [(activations.layer, activations.mixer) for activations in found] == [
        (0, "gated_deltanet"),
        (2, "zamba2"),
        (4, "kda"),
        (5, "zamba2"),
    ]
    for activations, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(activations.query, wanted.keys.query, atol=1e-5, err_msg=activations.mixer)
        np.testing.assert_allclose(activations.key, wanted.keys.key, atol=1e-5)
    assert len(list(iterate_reports(model, tokens))) == 4

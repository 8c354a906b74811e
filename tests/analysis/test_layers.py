"""The layers' signals are what the model computes with."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rnnlib import ops
from rnnlib.analysis import condition_number, conditions_over_time, gram_over_time, iterate_layers, iterate_reports
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
    return {signals.layer: signals for signals in iterate_layers(model, tokens, segment_ids=jnp.asarray(SEGMENTS))}


@nnx.jit
def reference_signals(model, tokens, segment_ids):
    x = model.embedding[...][tokens]
    signals = []
    for block in model.blocks:
        normalised = block.mixer_norm(x)
        has_signals = hasattr(block.mixer, "signals")
        signals.append(block.mixer.signals(normalised, segment_ids=segment_ids)[0] if has_signals else None)
        x = x + block.mixer(normalised, segment_ids=segment_ids)[0]
        x = x + block.feed_forward(block.feed_forward_norm(x))
    return signals


def test_every_recurrent_layer_gives_what_its_operator_gets(model, tokens, layers):
    expected = reference_signals(model, tokens, jnp.asarray(SEGMENTS))
    assert [(layer, signals.mixer) for layer, signals in layers.items()] == [
        (0, "pgdn"),
        (2, "pmamba2"),
        (3, "pgdn_atq"),
        (4, "gated_deltanet"),
    ]
    for layer, signals in layers.items():
        right = expected[layer]
        for actual, wanted in (
            (signals.query, right.keys.query),
            (signals.key, right.keys.key),
            (signals.write_key, right.keys.key if right.keys.write_key is None else right.keys.write_key),
            (signals.write, right.gates.beta),
            (signals.log_decay, right.decay.log_decay),
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
    signals = layers[0] if packed else next(iterate_layers(model, tokens, layers=[0]))
    preconditioner = signals.preconditioner
    times = [3, 10, 11, 17, LENGTH]
    grams = gram_over_time(
        preconditioner.key,
        times,
        log_decay=preconditioner.log_decay,
        gain=preconditioner.gain,
        segment_ids=signals.segment_ids,
    )
    diagonal = np.diagonal(grams, axis1=-2, axis2=-1)
    for index, time in enumerate(times):
        np.testing.assert_allclose(diagonal[index], preconditioner.gram[:, time - 1], rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(conditions_over_time(signals, times).plain, condition_number(grams))


def test_layers_can_be_chosen_and_are_run_no_further(model, tokens, monkeypatch):
    calls = []
    real = type(model.blocks[0].mixer).signals

    def counted(self, *args, **options):
        calls.append(self)
        return real(self, *args, **options)

    monkeypatch.setattr(type(model.blocks[0].mixer), "signals", counted)
    jax.clear_caches()
    assert [signals.layer for signals in iterate_layers(model, tokens, layers=[0])] == [0]
    ran = len(calls)  # traced once for the signals and once in the block
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

"""Statistics against what is known in closed form, and the pictures of them."""

import dataclasses

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rnnlib import analysis
from rnnlib.analysis import LayerActivations, Preconditioner, plots

matplotlib.use("Agg")
import matplotlib.pyplot as plt

BATCH, LENGTH, HEADS, CHANNELS = 2, 20, 3, 4


def rotation(seed, size=CHANNELS):
    return np.linalg.qr(np.random.default_rng(seed).normal(size=(size, size)))[0]


def make_signals(seed=0, *, value_heads=HEADS, channel_decay=False, channel_erase=False, preconditioned=True):
    rng = np.random.default_rng(seed)
    key = rng.normal(size=(BATCH, LENGTH, HEADS, CHANNELS))
    key /= np.linalg.norm(key, axis=-1, keepdims=True)
    applied = np.exp(rng.uniform(np.log(2 / 3), np.log(1.5), size=key.shape))
    per_head = (BATCH, LENGTH, value_heads)
    arrays = {
        "query": rng.normal(size=key.shape),
        "key": key,
        "write_key": applied * key if preconditioned else key,
        "erase": rng.uniform(size=(*per_head, CHANNELS) if channel_erase else per_head),
        "write": rng.uniform(size=per_head),
        "log_decay": -rng.exponential(size=(*per_head, CHANNELS) if channel_decay else per_head),
    }
    arrays = {name: jnp.asarray(x, jnp.float32) for name, x in arrays.items()}
    preconditioner = None
    if preconditioned:
        gram = jnp.asarray(rng.lognormal(-2, 1, size=key.shape), jnp.float32)
        center = jnp.array([-2.0, 0.0, 1.0])
        preconditioner = Preconditioner(arrays["key"], gram, None, None, jnp.asarray(applied, jnp.float32), center)
    return LayerActivations(3, "pgdn", **arrays, preconditioner=preconditioner)


def test_spectrum_of_a_diagonal_gram():
    spectrum = analysis.gram_spectrum(np.diag([1.0, 5.0, 2.0, 0.0]))
    np.testing.assert_allclose(spectrum.eigenvalues, [5, 2, 1, 0])
    np.testing.assert_allclose(spectrum.diagonal, [5, 2, 1, 0])
    np.testing.assert_allclose([spectrum.correlation, spectrum.alignment, spectrum.diagonal_share], 1.0)


def test_spectrum_of_a_rotated_gram():
    spectrum = analysis.gram_spectrum(np.array([[2.0, 1.0], [1.0, 2.0]]))
    np.testing.assert_allclose(spectrum.eigenvalues, [3, 1])
    np.testing.assert_allclose(spectrum.alignment, 2**-0.5)
    np.testing.assert_allclose(spectrum.diagonal_share, 8 / 10)
    np.testing.assert_allclose(spectrum.correlation, 0.0)  # the diagonal is flat


@given(seed=st.integers(0, 2**31), scale=st.sampled_from([1e-8, 1.0, 1e8]))
@settings(max_examples=20)
def test_spectrum_ranges(seed, scale):
    keys = np.random.default_rng(seed).normal(size=(3, 6, CHANNELS)) * [1, 2, 3, 0]
    spectrum = analysis.gram_spectrum(scale * np.swapaxes(keys, -1, -2) @ keys)
    assert np.all(np.diff(spectrum.eigenvalues, axis=-1) <= 0) and np.all(spectrum.eigenvalues >= 0)
    np.testing.assert_allclose(spectrum.eigenvalues.sum(-1), spectrum.diagonal.sum(-1), rtol=1e-10)
    assert np.all((spectrum.alignment >= CHANNELS**-0.5 - 1e-9) & (spectrum.alignment <= 1 + 1e-9))
    assert np.all((spectrum.correlation >= -1e-9) & (spectrum.correlation <= 1 + 1e-9))
    assert np.all((spectrum.diagonal_share > 0) & (spectrum.diagonal_share <= 1 + 1e-9))


def test_rounding_is_no_shape():
    """Equal values, off by rounding, have no skewness, and a flat diagonal correlates with nothing."""
    assert analysis.distribution(np.full((1, 1000), 0.1), head_axis=0).skewness == 0
    gram = 0.1 * np.eye(4)
    gram[0, 1] = gram[1, 0] = 1e-17
    assert analysis.gram_spectrum(gram).correlation == 0


def test_spectrum_of_nothing_is_finite():
    assert all(np.all(np.isfinite(x)) for x in analysis.gram_spectrum(np.zeros((2, 3, 3))))


def test_key_gram_and_gram_over_time():
    activations = make_signals(1)
    keys = np.asarray(activations.key, np.float64)
    decay, gain = np.exp(np.asarray(activations.log_decay, np.float64)), np.asarray(activations.erase, np.float64)
    state = np.zeros((BATCH, HEADS, CHANNELS, CHANNELS))
    expected = []
    for t in range(LENGTH):
        outer = keys[:, t, :, :, None] * keys[:, t, :, None, :]
        state = decay[:, t, :, None, None] * state + gain[:, t, :, None, None] * outer
        expected.append(state)
    times = [1, 7, LENGTH]
    grams = analysis.gram_over_time(activations.key, times, log_decay=activations.log_decay, gain=activations.erase)
    np.testing.assert_allclose(grams, np.stack(expected)[np.array(times) - 1], rtol=1e-10)
    plain = analysis.gram_over_time(activations.key, [LENGTH])[0]
    np.testing.assert_allclose(plain, analysis.key_gram(activations.key), rtol=1e-10)
    reset = activations.log_decay.at[:, 5].set(-jnp.inf)
    after = analysis.gram_over_time(activations.key, [6], log_decay=reset)[0]
    np.testing.assert_allclose(after, keys[:, 5, :, :, None] * keys[:, 5, :, None, :], rtol=1e-10)
    for times in ([], [0], [3, 3], [LENGTH + 1]):
        with pytest.raises(ValueError, match="expected increasing numbers from 1 to 20"):
            analysis.gram_over_time(activations.key, times)


def test_condition_numbers():
    gram = rotation(0) @ np.diag([8.0, 4.0, 2.0, 2.0]) @ rotation(0).T
    np.testing.assert_allclose(analysis.condition_number(gram, ridge=0.0), 4.0)
    np.testing.assert_allclose(analysis.condition_number(gram, ridge=0.5), (8 + 2) / (2 + 2))
    np.testing.assert_allclose(analysis.condition_number(1e5 * gram), analysis.condition_number(gram))
    stretched = np.diag([100.0, 1.0, 1.0, 0.01])
    np.testing.assert_allclose(analysis.condition_number(stretched, 1 / np.diagonal(stretched)), 1.0)
    np.testing.assert_allclose(analysis.condition_number(stretched, np.array([0.01, 1, 1, 1]), ridge=0.0), 100.0)
    assert np.isfinite(analysis.condition_number(np.zeros((2, 2))))


def test_conditions_over_time_use_the_preconditioner_of_that_time():
    activations = make_signals(2)
    conditions = analysis.conditions_over_time(activations, [4, 20])
    grams = analysis.gram_over_time(activations.key, [4, 20])
    applied = np.asarray(activations.preconditioner.applied, np.float64)
    assert conditions.plain.shape == (2, BATCH, HEADS)
    for index, time in enumerate((4, 20)):
        expected = analysis.condition_number(grams[index], applied[:, time - 1])
        np.testing.assert_allclose(conditions.preconditioned[index], expected)
    assert analysis.conditions_over_time(make_signals(2, preconditioned=False), [4]).preconditioned is None


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"value_heads": 6},
        {"channel_erase": True},
        {"channel_decay": True},
        {"channel_decay": True, "value_heads": 6},
    ],
)
def test_write_eigenvalue_is_the_transitions_smallest(options):
    activations = make_signals(3, **options)
    eigenvalues = analysis.write_eigenvalues(activations, every=5)
    heads = activations.erase.shape[2]
    repeat = lambda x: np.repeat(np.asarray(x, np.float64), heads // x.shape[2], axis=2)[:, ::5]  # noqa: E731
    key, write_key = repeat(activations.key), repeat(activations.write_key)
    erase, decay = (
        np.asarray(activations.erase, np.float64)[:, ::5],
        np.exp(np.asarray(activations.log_decay, np.float64))[:, ::5],
    )
    erase = erase if erase.ndim == 4 else erase[..., None]
    decay = decay if decay.ndim == 4 else decay[..., None]
    transition = (np.eye(CHANNELS) - write_key[..., :, None] * (erase * key)[..., None, :]) * decay[..., None, :]
    np.testing.assert_allclose(eigenvalues, np.linalg.eigvals(transition).real.min(axis=-1), atol=1e-6)


def test_several_keys_of_a_value_head_share_its_decay():
    """Mamba-3 of rank 2: two keys a value head, of which nothing is erased."""
    activations = make_signals(3, value_heads=2, preconditioned=False)
    keys = activations.key[:, :, jnp.array([0, 1, 2, 0])]
    activations = dataclasses.replace(activations, key=keys, write_key=keys, erase=jnp.zeros_like(activations.erase))
    eigenvalues = analysis.report(activations, times=[4]).write_eigenvalue
    np.testing.assert_allclose(eigenvalues.mean, np.exp(activations.log_decay).mean(axis=(0, 1)).repeat(2), rtol=1e-5)


def test_key_products_and_decays():
    activations = make_signals(4)
    product = analysis.key_products(activations)
    assert product.min() >= 2 / 3 - 1e-5 and product.max() <= 1.5 + 1e-5
    np.testing.assert_allclose(analysis.key_products(make_signals(4, preconditioned=False)), 1.0, rtol=1e-6)
    np.testing.assert_allclose(analysis.decays(activations), np.exp(activations.log_decay), rtol=1e-6)


def test_distribution_counts_every_finite_value():
    values = np.array([[0.0, 1.0, 2.0, 9.0], [np.nan, 3.0, -np.inf, 1.0]])
    result = analysis.distribution(values, head_axis=0, bounds=(0.0, 4.0), bins=4)
    np.testing.assert_array_equal(result.counts, [[1, 1, 1, 1], [0, 1, 0, 1]])  # 9 is in the last bin
    np.testing.assert_allclose(result.mean, [3.0, 2.0])
    np.testing.assert_allclose(result.deviation, [np.std(values[0]), 1.0])
    np.testing.assert_allclose([result.minimum, result.maximum], [[0, 1], [9, 3]])
    normal = np.random.default_rng(0).normal(size=(1, 20000))
    assert abs(analysis.distribution(normal, head_axis=0).skewness[0]) < 0.05
    assert analysis.distribution(np.exp(normal), head_axis=0).skewness[0] > 2
    constant = analysis.distribution(np.ones((2, 5)), head_axis=0)
    assert constant.counts.sum() == 10 and np.all(constant.skewness == 0)


def test_saturation_of_both_squash_functions():
    gram = np.exp(np.array([0.0, 1.0, -1.0, 3.0])).reshape(1, 1, 1, 4) - 1e-6
    result = analysis.saturation(gram, np.zeros(1))
    np.testing.assert_allclose(result.rational, (0 + 1 / 2 + 1 / 2 + 3 / 4) / 4)
    np.testing.assert_allclose(result.tanh, (2 * np.tanh(1) + np.tanh(3)) / 4)
    shifted = analysis.saturation(gram * np.e, np.ones(1))
    np.testing.assert_allclose(shifted.rational, result.rational, rtol=1e-5)


def test_report_gathers_the_statistics():
    activations = make_signals(5)
    result = analysis.report(activations, times=[4, LENGTH])
    assert (result.layer, result.mixer) == (3, "pgdn")
    assert result.gain.counts.sum() == result.decay.counts.sum() == BATCH * LENGTH * HEADS
    np.testing.assert_allclose(result.key_product.mean, analysis.key_products(activations).mean(axis=(0, 1)))
    np.testing.assert_allclose(
        result.preconditioner.log_gram.mean,
        np.log(np.asarray(activations.preconditioner.gram)).mean(axis=(0, 1, 3)),
        rtol=1e-3,
    )
    assert result.preconditioner.applied.counts.sum() == BATCH * LENGTH * HEADS * CHANNELS
    np.testing.assert_array_equal(result.preconditioner.center, [-2, 0, 1])
    assert analysis.report(make_signals(5, preconditioned=False), times=[4]).preconditioner is None
    channelwise = analysis.report(make_signals(5, channel_decay=True), times=[4], every=10)
    assert channelwise.write_eigenvalue.counts.sum() == BATCH * 2 * HEADS


def test_plots_show_the_numbers():
    result = analysis.report(make_signals(6), times=[4, LENGTH])
    figure, axes = plt.subplots(2, 4)
    ax = axes.ravel()
    plots.plot_spectrum(ax[0], result.spectrum, sequence=1, head=2)
    np.testing.assert_allclose(ax[0].lines[0].get_ydata(), result.spectrum.eigenvalues[1, 2])
    plots.plot_alignment(ax[1], np.stack([result.spectrum.alignment] * 2), CHANNELS, layers=[0, 3])
    np.testing.assert_allclose(ax[1].lines[2].get_ydata(), result.spectrum.alignment.mean())
    plots.plot_distribution(ax[2], result.preconditioner.applied, label="B")
    heights, edges, _ = ax[2].patches[0].get_data()
    np.testing.assert_allclose(np.sum(heights * np.diff(edges)), 1.0)
    plots.plot_saturation(ax[3], result.preconditioner.saturation)
    assert len(ax[3].lines[0].get_ydata()) == LENGTH
    plots.plot_squash(ax[4], 1.5)
    assert 2 / 3 < ax[4].lines[0].get_ydata().min() < 0.8
    plots.plot_heads(ax[5], result.preconditioner.center[None], layers=[3], label="center")
    assert [text.get_text() for text in ax[5].texts] == ["-2.00", "0.00", "1.00"]
    plots.plot_conditions(ax[6], result.conditions, head=1)
    np.testing.assert_allclose(ax[6].lines[0].get_ydata(), np.median(result.conditions.plain[..., 1], axis=1))
    figure.canvas.draw()
    plt.close(figure)


def test_random_alignment_is_that_of_random_matrices():
    eigenvectors = np.stack([rotation(seed, 32) for seed in range(50)])
    assert abs(plots.random_alignment(32) - np.abs(eigenvectors).max(axis=-2).mean()) < 0.02


def test_arrays_of_a_device_are_taken():
    assert isinstance(analysis.key_gram(jax.random.normal(jax.random.key(0), (1, 3, 1, 2))), np.ndarray)

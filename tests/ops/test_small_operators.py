"""Gains, the short convolution and softmax attention against their formulas in NumPy."""

import functools
import sys
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads

import pallas_kernels
from rnnlib import ops
from rnnlib.ops import kernels
from rnnlib.ops.arguments import choose_implementation
from rnnlib.ops.causal_attention import attention_of_layer

RNG = np.random.default_rng(0)


def test_gains_are_their_formulas():
    k = RNG.standard_normal((2, 5, 3, 8))
    beta = RNG.uniform(0, 1, (2, 5, 3))
    square = np.sum(k**2, axis=-1)
    k32, beta32 = jnp.asarray(k, jnp.float32), jnp.asarray(beta, jnp.float32)
    np.testing.assert_allclose(ops.kaczmarz_gain(k32, beta32), beta / (square + 1e-6), rtol=1e-5)
    np.testing.assert_allclose(ops.longhorn_gain(k32, beta32), beta / (1 + beta * square), rtol=1e-5)
    np.testing.assert_allclose(ops.nlms_gain(k32, 0.1), 1 / (square + 0.1), rtol=1e-5)
    np.testing.assert_allclose(ops.efla_gain(k32, beta32), (1 - np.exp(-beta * square)) / square, rtol=1e-5)


@pytest.mark.parametrize("gain", [ops.kaczmarz_gain, ops.longhorn_gain, ops.efla_gain])
def test_gains_of_a_zero_key_are_finite(gain):
    k, beta = jnp.zeros((1, 2, 1, 4)), jnp.full((1, 2, 1), 0.5)
    value, gradients = jax.value_and_grad(lambda k, beta: jnp.sum(gain(k, beta)), argnums=(0, 1))(k, beta)
    assert np.isfinite(value) and all(np.isfinite(g).all() for g in gradients)


@pytest.mark.parametrize("square", [1e-12, 1e-6, 2e-3, 1.0, 100.0])
def test_efla_gain_is_accurate_for_short_keys(square, x64):
    """Float32 against the quotient in float64, through the switch to the series."""
    k = np.zeros((1, 1, 1, 4))
    k[..., 0] = np.sqrt(square)
    gain = ops.efla_gain(jnp.asarray(k, jnp.float32), jnp.full((1, 1, 1), 0.7, jnp.float32))
    np.testing.assert_allclose(gain, -np.expm1(-0.7 * square) / square, rtol=1e-5)


def convolve(x, kernel, bias, past, ids):
    """`short_convolution` as its docstring states it, token by token."""
    batch, length, _ = x.shape
    width = kernel.shape[0]
    y = np.tile(bias, (batch, length, 1)).astype(np.float64)
    for b in range(batch):
        for t in range(length):
            for i in range(width):
                source = t - i
                # A tap stops at the nearest change of id on its way back.
                if any(ids[b, j] != ids[b, j - 1] for j in range(max(source, 0) + 1, t + 1)):
                    continue
                value = x[b, source] if source >= 0 else past[b, source + width - 1]
                y[b, t] += kernel[width - 1 - i] * value
    return y


@settings(max_examples=12)
@given(length=st.sampled_from((1, 2, 9)), packed=st.booleans(), seed=st.integers(0, 99))
def test_short_convolution(length, packed, seed):
    rng = np.random.default_rng(seed)
    x, kernel = rng.standard_normal((2, length, 3)), rng.standard_normal((4, 3))
    bias, past = rng.standard_normal(3), rng.standard_normal((2, 3, 3))
    ids = np.cumsum(rng.uniform(size=(2, length)) < 0.3, axis=1) % 2 if packed else np.zeros((2, length), int)
    y, tail = ops.short_convolution(
        jnp.asarray(x, jnp.float32),
        jnp.asarray(kernel, jnp.float32),
        bias=jnp.asarray(bias, jnp.float32),
        initial_state=jnp.asarray(past, jnp.float32),
        segment_ids=jnp.asarray(ids, jnp.int32) if packed else None,
    )
    np.testing.assert_allclose(y, convolve(x, kernel, bias, past, ids), atol=1e-5)
    # What follows continues from the tail: one more token of the last segment.
    more = rng.standard_normal((2, 1, 3))
    next_y, _ = ops.short_convolution(
        jnp.asarray(more, jnp.float32), jnp.asarray(kernel, jnp.float32), initial_state=tail
    )
    whole = convolve(
        np.concatenate([x, more], axis=1), kernel, np.zeros(3), past, np.concatenate([ids, ids[:, -1:]], axis=1)
    )
    np.testing.assert_allclose(next_y[:, 0], whole[:, -1], atol=1e-5)


def test_short_convolution_with_silu_and_unit_norm():
    x, kernel = RNG.standard_normal((2, 6, 12)), RNG.standard_normal((4, 12))
    x[:, :, :4] = 0.0  # a head of zeros
    y, tail = ops.short_convolution(
        jnp.asarray(x, jnp.float32),
        jnp.asarray(kernel, jnp.float32),
        activation="silu",
        norm_size=4,
        norm_eps=0.01,
    )
    sums = convolve(x, kernel, np.zeros(12), np.zeros((2, 3, 12)), np.zeros((2, 6), int))
    heads = (sums / (1 + np.exp(-sums))).reshape(2, 6, 3, 4)
    expected = heads / np.sqrt(np.sum(heads**2, axis=-1, keepdims=True) + 0.01)
    np.testing.assert_allclose(y, expected.reshape(x.shape), atol=1e-6)
    np.testing.assert_allclose(tail, x[:, -3:], rtol=1e-6)


def attend(q, k, v, window, ids):
    """Softmax attention with an explicit mask."""
    batch, length, heads, size = q.shape
    group = heads // k.shape[2]
    row, column = np.arange(length)[:, None], np.arange(length)[None]
    visible = column <= row
    if window is not None:
        visible &= column > row - window
    out = np.zeros((batch, length, heads, v.shape[-1]))
    for b in range(batch):
        mask = visible if ids is None else visible & (ids[b][:, None] == ids[b][None])
        for h in range(heads):
            scores = np.where(mask, q[b, :, h] @ k[b, :, h // group].T / np.sqrt(size), -np.inf)
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            out[b, :, h] = weights / weights.sum(axis=-1, keepdims=True) @ v[b, :, h // group]
    return out


@pytest.mark.parametrize("window, value_size", [(None, 6), (1, 6), (3, 11), (7, 6), (50, 11)])
@pytest.mark.parametrize("packed", [False, True])
def test_causal_attention(window, value_size, packed):
    q, k = RNG.standard_normal((2, 23, 4, 8)), RNG.standard_normal((2, 23, 2, 8))
    v = RNG.standard_normal((2, 23, 2, value_size))
    ids = np.cumsum(RNG.uniform(size=(2, 23)) < 0.2, axis=1) if packed else None
    out = ops.causal_attention(
        *(jnp.asarray(x, jnp.float32) for x in (q, k, v)),
        window=window,
        segment_ids=None if ids is None else jnp.asarray(ids, jnp.int32),
    )
    np.testing.assert_allclose(out, attend(q, k, v, window, ids), atol=1e-5)


@pytest.mark.parametrize("window", [None, 3, 20])
@pytest.mark.parametrize("packed", [False, True])
def test_attention_of_float64_is_in_float64(window, packed, x64):
    """Softmax and gradients, too: a float32 softmax is 1e-8 off, and finite differences of it 1e-3."""
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal(shape) for shape in ((2, 23, 4, 8), (2, 23, 2, 8), (2, 23, 2, 6)))
    ids = jnp.asarray(np.cumsum(rng.uniform(size=(2, 23)) < 0.2, axis=1)) if packed else None
    run = jax.jit(functools.partial(ops.causal_attention, window=window, segment_ids=ids))
    np.testing.assert_allclose(run(q, k, v), attend(q, k, v, window, ids), atol=1e-13)
    check_grads(run, (q, k, v), order=1, modes=["rev"], eps=1e-5, rtol=1e-7)


@pytest.mark.parametrize("window", [None, 2])
def test_attention_in_float16_is_that_in_float32_rounded(window):
    x = jnp.asarray(RNG.standard_normal((1, 5, 2, 4)), jnp.float16)

    def loss(x):
        out = ops.causal_attention(x, x, x, window=window)
        return jnp.sum(out.astype(jnp.float32) ** 2), out

    gradient, out = jax.jit(jax.grad(loss, has_aux=True))(x)
    wide_gradient, wide = jax.jit(jax.grad(loss, has_aux=True))(x.astype(jnp.float32))
    assert out.dtype == gradient.dtype == jnp.float16
    np.testing.assert_allclose(out, wide, atol=2e-3)
    np.testing.assert_allclose(gradient, wide_gradient, atol=2e-2)


def test_bad_arguments_are_named(unchecked_shapes):
    x = jnp.ones((2, 5, 3))
    with pytest.raises(ValueError, match=r"kernel has shape \(4, 2\), expected \[W, D\] = \(4, 3\)"):
        ops.short_convolution(x, jnp.ones((4, 2)))
    with pytest.raises(ValueError, match=r"initial_state has shape .* expected \[B, W - 1, D\] = \(2, 3, 3\)"):
        ops.short_convolution(x, jnp.ones((4, 3)), initial_state=jnp.ones((2, 4, 3)))
    with pytest.raises(ValueError, match="norm_size is 2, expected a divisor of the 3 channels"):
        ops.short_convolution(x, jnp.ones((4, 3)), norm_size=2)
    with pytest.raises(ValueError, match=r"norm_size is 1\.5, expected a divisor"):
        ops.short_convolution(x, jnp.ones((4, 3)), norm_size=1.5)
    for eps, expected in ((0.0, "a positive number"), (1e-30, "at least 1e-25"), (np.inf, "a positive number")):
        with pytest.raises(ValueError, match=f"norm_eps is {eps}, expected {expected}"):
            ops.short_convolution(x, jnp.ones((4, 3)), norm_size=3, norm_eps=eps)
    with pytest.raises(ValueError, match="activation is 'relu', expected None or 'silu'"):
        ops.short_convolution(x, jnp.ones((4, 3)), activation="relu")
    with pytest.raises(NotImplementedError, match="no 'scan' implementation"):
        ops.short_convolution(x, jnp.ones((4, 3)), implementation="scan")
    for window in (0, True, 2.0):
        with pytest.raises(ValueError, match=f"window is {window}, expected an integer of at least 1 or None"):
            ops.causal_attention(jnp.ones((1, 4, 2, 8)), jnp.ones((1, 4, 2, 8)), jnp.ones((1, 4, 2, 8)), window=window)
    with pytest.raises(ValueError, match="HK divides H"):
        ops.causal_attention(jnp.ones((1, 4, 2, 8)), jnp.ones((1, 4, 3, 8)), jnp.ones((1, 4, 3, 8)))
    with pytest.raises(TypeError, match=r"k is .{1,80}, expected an array"):
        ops.kaczmarz_gain(jnp.ones((9, 9, 9, 9)).tolist(), jnp.ones((9, 9, 9)))
    with pytest.raises(TypeError, match=r"eta is 1\.0, expected an array"):
        ops.kaczmarz_gain(jnp.ones((1, 2, 1, 4)), 1.0)
    with pytest.raises(ValueError, match=r"eta has shape \(1, 2\), expected \[B, T, H\] = \(1, 2, 1\)"):
        ops.kaczmarz_gain(jnp.ones((1, 2, 1, 4)), jnp.ones((1, 2)))


@pytest.mark.parametrize("window", [None, 3])
def test_numbers_of_attention_calls_make_other_programs_and_no_other_digits(window):
    q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 16, 2, 8), jnp.bfloat16)

    def gradients(q, k, v, number):
        def total(*arguments):
            return attention_of_layer(*arguments, window=window, number=number).astype(jnp.float32).sum()

        return jax.grad(total, (0, 1, 2))(q, k, v)

    texts = {str(jax.make_jaxpr(lambda q: gradients(q, k, v, number))(q)) for number in range(4)}
    assert len(texts) == 4
    for found, expected in zip(gradients(q, k, v, 7), gradients(q, k, v, 0)):
        np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(expected, np.float32))


def test_a_gpu_without_the_kernels_backend_warns_and_goes_on(monkeypatch):
    monkeypatch.setitem(sys.modules, "pallas_kernels.operators", None)  # as if importing it failed
    monkeypatch.delattr(pallas_kernels, "operators", raising=False)
    q = jnp.ones((1, 4, 1, 16))
    for platform in ("cpu", "gpu"):
        monkeypatch.setattr(kernels, "platform", lambda platform=platform: platform)
        with (
            pytest.warns(RuntimeWarning, match="operators run without kernels") if platform == "gpu" else nullcontext()
        ):
            reason = kernels.unsupported_reason(lambda operators: operators.delta_rule.unsupported_reason(q, q, q))
            assert str(reason).startswith("this installation: ")


def test_none_passes_over_what_is_slower_and_its_name_does_not():
    named = {"chunked": 1, "scan": 2}

    def chosen(implementation, is_slower):
        slower = {"chunked": lambda: is_slower}
        return choose_implementation("operator", implementation, named, 3, slower=slower)

    assert [chosen(None, False), chosen(None, True), chosen("chunked", True)] == [1, 2, 1]

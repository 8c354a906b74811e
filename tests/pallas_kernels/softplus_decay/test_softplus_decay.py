"""The kernels of the softplus decay against float64, and a mixer that takes them against one that does not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pallas_kernels.softplus_decay.api import softplus_decay, unsupported_reason
from rnnlib.layers import mixer_preset
from rnnlib.ops.softplus_decay import softplus_decay as operator
from rnnlib.ops.softplus_decay import softplus_decay_supports
from tests.pallas_kernels.cases import relative_error


def make_arguments(shape, dtype=jnp.float32, spread=3.0):
    random = np.random.default_rng(0)
    p = jnp.asarray(spread * random.standard_normal(shape), dtype)
    rate, bias = random.uniform(0.01, 16, shape[-1]), random.uniform(-7, 1, shape[-1])
    return p, jnp.asarray(rate, jnp.float32), jnp.asarray(bias, jnp.float32)


def formula(p, rate, bias):
    return -rate * jax.nn.softplus(p + bias)


def value_and_gradients(function, arguments, d_g):
    g, pull_back = jax.vjp(function, *arguments)
    return [g, *pull_back(d_g.astype(g.dtype))]


def exact(arguments, d_g):
    with jax.enable_x64(True):
        wide, d_g = jax.tree.map(lambda x: x.astype(jnp.float64), (arguments, d_g))
        return value_and_gradients(formula, wide, d_g)


@pytest.mark.parametrize("shape", [(2, 7, 64), (9, 40), (1, 1, 8)])
@pytest.mark.parametrize("spread", [3.0, 40.0])
def test_kernels_are_the_definition(shape, spread):
    """Each log decay to float32's precision, relatively: of decays near 1 too, which add up over a text.

    Below e^-15 the rounded exponent shows.
    """
    arguments = make_arguments(shape, spread=spread)
    d_g = jnp.asarray(np.random.default_rng(1).standard_normal(shape), jnp.float32)
    found, expected = value_and_gradients(softplus_decay, arguments, d_g), exact(arguments, d_g)
    is_normal = np.asarray(expected[0]) < -1e-36
    np.testing.assert_allclose(
        np.asarray(found[0])[is_normal], np.asarray(expected[0])[is_normal], rtol=1.5e-6 if spread < 10 else 6e-6
    )
    assert [x.dtype for x in found] == [jnp.float32] * 4
    assert max(relative_error(x, y) for x, y in zip(found, expected, strict=True)) < 2e-6


def test_bfloat16_is_rounded_once_and_extremes_are_finite():
    arguments = make_arguments((30, 48), jnp.bfloat16, spread=10.0)
    d_g = jnp.ones((30, 48))
    found, expected = value_and_gradients(softplus_decay, arguments, d_g), exact(arguments, d_g)
    assert found[1].dtype == jnp.bfloat16
    assert relative_error(found[1].astype(jnp.float32), expected[1]) < 2**-8
    assert all(relative_error(found[i], expected[i]) < 2e-6 for i in (0, 2, 3))
    p = jnp.asarray([[-1e4, -90.0, 0.0, 90.0, 1e4]])
    rate, bias = jnp.asarray([1.0, 1.0, 0.0, 1.0, 1.0]), jnp.zeros(5)
    found = value_and_gradients(softplus_decay, (p, rate, bias), jnp.ones((1, 5)))
    assert all(np.all(np.isfinite(x)) for x in found)
    np.testing.assert_allclose(found[0][0], [0, 0, 0, -90, -1e4], atol=1e-30)
    np.testing.assert_allclose(found[1][0], [0, 0, 0, -1, -1], atol=1e-6)


def test_further_derivatives_and_rows_of_a_vmap():
    p, rate, bias = make_arguments((3, 5, 24))

    def second(function):
        gradient = jax.grad(lambda p: jnp.sum(jnp.sin(function(p, rate, bias))))
        return jax.jvp(gradient, (p,), (jnp.cos(p),))[1]

    assert relative_error(second(operator), second(formula)) < 1e-5

    def by_row(function):
        return jax.vmap(jax.grad(lambda p: jnp.sum(jnp.sin(function(p, rate, bias)))))(p)

    assert relative_error(by_row(operator), by_row(formula)) < 2e-6


def test_what_is_not_supported():
    p, rate, bias = make_arguments((4, 8))
    assert unsupported_reason(p, rate, bias) is None
    with pytest.raises(NotImplementedError, match="p of dtype float16"):
        softplus_decay(p.astype(jnp.float16), rate, bias)
    assert not softplus_decay_supports(p.astype(jnp.bfloat16), rate, bias)  # not on a CPU


@pytest.mark.parametrize("preset", ["kda", pytest.param("gated_deltanet2", marks=pytest.mark.slow)])
def test_a_mixer_is_the_same_by_kernels(preset, monkeypatch):
    graph, state = nnx.split(mixer_preset(preset).build(16, 2, rngs=nnx.Rngs(0)))
    x, asked = jnp.asarray(np.random.default_rng(0).standard_normal((2, 10, 16)), jnp.float32), []

    def run(state):
        return jax.jit(jax.value_and_grad(lambda s: jnp.sum(jnp.sin(nnx.merge(graph, s)(x)[0]))))(state)

    expected = run(state)
    serves = lambda *arguments: asked.append(arguments) or True  # noqa: E731
    monkeypatch.setattr("rnnlib.layers.decay.softplus_decay_supports", serves)
    found = run(state)
    assert asked
    assert max(jax.tree.leaves(jax.tree.map(relative_error, found, expected))) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(8, 512, 1024), (3, 777, 640), (5, 2000)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_on_a_gpu(shape, dtype):
    arguments = make_arguments(shape, dtype)
    d_g = jnp.asarray(np.random.default_rng(1).standard_normal(shape), jnp.float32)
    found, expected = value_and_gradients(jax.jit(softplus_decay), arguments, d_g), exact(arguments, d_g)
    np.testing.assert_allclose(found[0], expected[0], rtol=2e-6)
    limits = (1e-6, 1e-6 if dtype == jnp.float32 else 2**-8, 1e-5, 1e-5)
    errors = [relative_error(x.astype(jnp.float32), y) for x, y in zip(found, expected, strict=True)]
    assert all(error < limit for error, limit in zip(errors, limits)), errors

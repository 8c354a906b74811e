"""The small parts: norms, rotary positions, short convolution, gates on their own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rnnlib.layers import (
    ConvolutionConfig,
    FixedDecay,
    Initializer,
    LogSigmoidDecay,
    MixerShape,
    RMSNorm,
    Rotary,
    ShortConvolution,
    SoftplusDecay,
    l2_normalize,
)

from .reference import convolve, l2, rms, rotate
from .tiny import Alone, inputs, parameters, randomize, relative_error

SHAPE = MixerShape(width=16, key_heads=2, value_heads=4, key_size=4, value_size=6)


def test_norms():
    x = 3 * inputs(2, 5)
    norm = randomize(RMSNorm(16, eps=1e-3))
    wide = np.asarray(x, np.float64)
    assert relative_error(norm(x), rms(wide, parameters(norm)["scale"], 1e-3)) < 1e-6
    assert relative_error(l2_normalize(x), l2(wide)) < 1e-6
    assert l2_normalize(x.astype(jnp.bfloat16)).dtype == jnp.bfloat16


def test_norm_of_zero_is_zero_with_finite_gradients():
    zero = jnp.zeros((3, 16))
    assert np.all(l2_normalize(zero) == 0)
    assert np.all(RMSNorm(16)(zero) == 0)
    assert np.all(np.isfinite(jax.grad(lambda x: jnp.sum(l2_normalize(x)))(zero)))


@pytest.mark.usefixtures("unchecked_shapes")
def test_norm_errors():
    with pytest.raises(ValueError, match="features is 0"):
        RMSNorm(0)
    with pytest.raises(ValueError, match="eps is 0"):
        RMSNorm(4, eps=0.0)
    with pytest.raises(ValueError, match="3 channels to turn, expected an even number"):
        Rotary()(jnp.zeros((1, 2, 1, 3)), jnp.zeros((1, 2), jnp.int32))


def test_rotary_turns_pairs_and_products_know_only_the_distance():
    x = np.random.default_rng(0).standard_normal((1, 9, 2, 8))
    positions = jnp.arange(9)[None]
    turned = Rotary(500.0)(jnp.asarray(x, jnp.float32), positions)
    assert relative_error(turned[0], rotate(x[0], 500.0)) < 1e-6
    shifted = Rotary(500.0)(jnp.asarray(x, jnp.float32), positions + 1000)
    products = [np.einsum("bthk,bshk->bhts", y, y) for y in (turned, shifted)]
    assert relative_error(products[1], products[0]) < 1e-3


def test_short_convolution_with_bias_continues_its_state():
    config = ConvolutionConfig(size=3, use_bias=True, initializer=Initializer("fan_in_uniform", 1.0))
    module = randomize(ShortConvolution(16, config, SHAPE, rngs=nnx.Rngs(0)))
    x = inputs(1, 7)
    expected = convolve(parameters(module), np.asarray(x[0], np.float64))
    y, state = module(x[:, :1], state=module.init_state(1, jnp.float32))
    rest, state = module(x[:, 1:], state=state)
    assert relative_error(np.concatenate([y, rest], axis=1)[0], expected) < 1e-6
    np.testing.assert_array_equal(state, x[:, -2:])
    # A filter of one token has no state.
    single = ShortConvolution(16, ConvolutionConfig(size=1), SHAPE, rngs=nnx.Rngs(0))
    assert single(x)[1].shape == (1, 0, 16)


def test_fixed_decay_is_retnets_for_every_value_head():
    decay = Alone(FixedDecay().build(SHAPE, rngs=nnx.Rngs(0)), SHAPE)(inputs(2, 3))
    assert decay.log_decay.shape == (2, 3, 4)
    np.testing.assert_allclose(np.exp(decay.log_decay[1, 2]), 1 - 2.0 ** -np.arange(5, 9), rtol=1e-6)


def test_log_sigmoid_decay_per_head_is_mesanets():
    config = LogSigmoidDecay(channelwise=False, rank=None, divisor=1.0, use_bias=False)
    module = randomize(Alone(config.build(SHAPE, rngs=nnx.Rngs(0)), SHAPE))
    x = inputs(2, 3)
    logits = np.asarray(x, np.float64) @ parameters(module)["decay"]["kernel"]
    assert relative_error(module(x).log_decay, -np.log1p(np.exp(-logits))) < 1e-6
    with pytest.raises(ValueError, match="divisor is 0"):
        LogSigmoidDecay(divisor=0.0).build(SHAPE, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("channelwise", [False, True])
def test_softplus_decay_has_the_derivatives_of_its_formula(channelwise):
    """In both directions, and a derivative of the derivative, also of logits of -1000 to 1000."""
    module = randomize(Alone(SoftplusDecay(channelwise=channelwise).build(SHAPE, rngs=nnx.Rngs(0)), SHAPE))
    module.part.dt_bias[...] *= jnp.logspace(0, 3, module.part.dt_bias.size)
    graph, state = nnx.split(module)
    x = inputs(2, 30)
    weights = jax.random.normal(jax.random.key(1), module(x).log_decay.shape)

    def loss(state, x):
        return jnp.sum(weights * nnx.merge(graph, state)(x).log_decay)

    def formula(state, x):
        z = x @ state["input_projection"]["decay"]["kernel"][...] + state["part"]["dt_bias"][...]
        rate = jnp.repeat(jnp.exp(state["part"]["A_log"][...]), SHAPE.key_size if channelwise else 1)
        return jnp.sum(weights.reshape(z.shape) * -rate * jax.nn.softplus(z))

    found, expected = (jax.grad(f, argnums=(0, 1))(state, x) for f in (loss, formula))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert relative_error(a, b) < 1e-5
    directions = jax.tree.map(jnp.ones_like, (state, x))
    found, expected = (jax.jvp(f, (state, x), directions)[1] for f in (loss, formula))
    assert relative_error(found, expected) < 1e-5
    found, expected = (jax.jvp(jax.grad(f, argnums=(0, 1)), (state, x), directions)[1] for f in (loss, formula))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert relative_error(a, b) < 1e-4


@pytest.mark.usefixtures("unchecked_shapes")
def test_shapes_must_be_positive_and_heads_must_group():
    with pytest.raises(ValueError, match="value_size is 0, expected an integer of at least 1"):
        MixerShape(4, 1, 1, 4, 0)
    with pytest.raises(ValueError, match="value_heads is 3, expected a multiple of key_heads = 2"):
        MixerShape(4, 2, 3, 4, 4)

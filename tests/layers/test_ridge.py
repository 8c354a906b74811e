"""What the ridge mixers offer beyond their presets: sketches, key gain, solvers, derivatives, and what they refuse."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rnnlib.layers import (
    ChannelGain,
    FixedProjection,
    RidgeRegression,
    SigmoidGain,
    SoftplusDecay,
    mixer_preset,
)

from .ridge_reference import gated_kalmanet
from .tiny import HEADS, WIDTH, compiled, inputs, parameters, relative_error, tiny

OFFICIAL_GAIN = {"gain": SigmoidGain(use_bias=True), "solve.squared_gain": True}
SKETCH = {"solve.sketch_size": 3}


def test_sketched_solve_with_key_gain_is_the_equations():
    """Appendix H, and the gain of the authors' code; prefill, decoding and packing included."""
    module = tiny("gated_kalmanet", **OFFICIAL_GAIN, **SKETCH, **{"solve.sketch": "random"})
    x = inputs(1, 40)
    ids = np.repeat([5, 6], [17, 23])[None].astype(np.int32)
    call = compiled(module)
    y, _ = call(x, ids)
    p = parameters(module)
    p["solve"]["projection"] = np.asarray(module.solve.projection[...], np.float64)
    wide = np.asarray(x[0], np.float64)
    expected = np.concatenate([gated_kalmanet(p, part, sketch=True, key_gain=True) for part in (wide[:17], wide[17:])])
    assert relative_error(y[0], expected) < 1e-5

    cache = module.init_cache(1, 40)
    assert cache.state.gram.shape == (1, HEADS, 3, 3)
    pieces = []
    for start, stop in ((0, 38), (38, 39), (39, 40)):
        piece, cache = call(x[:, start:stop], ids[:, start:stop], cache)
        pieces.append(piece)
    assert relative_error(np.concatenate(pieces, axis=1), y) < 1e-5


def test_random_projections_are_stored_orthonormal_and_not_trained():
    module = mixer_preset("gated_kalmanet", **SKETCH, **{"solve.sketch": "random"}).build(
        WIDTH, HEADS, rngs=nnx.Rngs(0)
    )
    assert isinstance(module.solve.projection, FixedProjection)
    assert not isinstance(module.solve.projection, nnx.Param)
    assert len(jax.tree.leaves(nnx.state(module, FixedProjection))) == 1
    projection = np.asarray(module.solve.projection[...])
    np.testing.assert_allclose(np.swapaxes(projection, 1, 2) @ projection, np.tile(np.eye(3), (HEADS, 1, 1)), atol=1e-6)


def test_a_sketch_of_full_size_is_no_sketch():
    """An orthogonal change of basis changes no solution."""
    plain = tiny("gated_kalmanet")
    whole = mixer_preset("gated_kalmanet", **{"solve.sketch_size": WIDTH // HEADS}).build(
        WIDTH, HEADS, rngs=nnx.Rngs(0)
    )
    given = dict(nnx.to_flat_state(nnx.state(plain, nnx.Param)))
    for path, variable in nnx.to_flat_state(nnx.state(whole, nnx.Param)):
        if path in given:
            variable[...] = given[path][...]
    x = inputs(1, 20)
    assert relative_error(compiled(whole)(x)[0], compiled(plain)(x)[0]) < 1e-5


def test_solvers_and_derivatives_agree_where_they_have_converged():
    """One layer, three solvers: the same output, and the same gradients in all parameters."""
    x = inputs(1, 16)

    def output_and_gradients(**solve):
        module = tiny("gated_kalmanet", **{f"solve.{name}": value for name, value in solve.items()})
        graph, state = nnx.split(module)

        @jax.jit
        def run(state):
            def loss(state):
                y, _ = nnx.merge(graph, state)(x)
                return jnp.sum(jnp.sin(y)), y

            (_, y), gradients = jax.value_and_grad(loss, has_aux=True)(state)
            return y, gradients

        return jax.tree.leaves(run(state))

    expected = output_and_gradients(ridge=0.2, solver="exact")
    for solver, differentiation in (("chebyshev", "reversed"), ("conjugate_gradient", "implicit")):
        actual = output_and_gradients(ridge=0.2, solver=solver, differentiation=differentiation)
        for one, other in zip(actual, expected):
            np.testing.assert_allclose(one, other, atol=2e-4 * max(1, float(jnp.abs(other).max())))


@pytest.mark.parametrize("name", ["gated_kalmanet", "mesanet"])
def test_gradients_reach_every_parameter_and_states_are_wide(name):
    options = {"implementation": "scan"} | (OFFICIAL_GAIN | SKETCH if name == "gated_kalmanet" else {})
    module = tiny(name, **options)
    x = inputs(2, 9)

    @nnx.jit
    def gradients(module):
        return nnx.grad(lambda module: jnp.sum(jnp.square(module(x)[0])))(module)

    for path, gradient in nnx.to_flat_state(gradients(module)):
        assert np.all(np.isfinite(gradient[...])), path
        assert np.any(gradient[...] != 0), path

    half = mixer_preset(name, **options).build(
        WIDTH, HEADS, rngs=nnx.Rngs(0), dtype=jnp.bfloat16, param_dtype=jnp.bfloat16
    )
    _, cache = compiled(half)(x.astype(jnp.bfloat16), None, half.init_cache(2, 9, jnp.bfloat16))
    assert cache.state.gram.dtype == cache.state.memory.dtype == jnp.float32
    if name == "mesanet":
        assert half.solve.ridge.dtype == jnp.float32
        np.testing.assert_allclose(half.solve._learned_ridge(), 1.0, rtol=1e-6)


def test_zero_inputs_are_finite():
    """A zero input makes zero keys: an adaptive ridge has nothing to solve with, forward and backward."""
    module = tiny("gated_kalmanet")
    for stream in (module.query, module.key, module.value):
        stream.convolution.kernel[...] = jnp.abs(stream.convolution.kernel[...])
    x = inputs(1, 8).at[:, :5].set(0.0)
    graph, state = nnx.split(module)
    gradients = jax.jit(jax.grad(lambda state, x: jnp.sum(jnp.sin(nnx.merge(graph, state)(x)[0])), argnums=(0, 1)))
    for leaf in jax.tree.leaves(gradients(state, x)):
        assert np.all(np.isfinite(leaf))


def build(**options):
    return mixer_preset("gated_kalmanet", **options).build(WIDTH, HEADS, rngs=nnx.Rngs(0))


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RidgeRegression(ridge=0.0), "ridge is 0.0, expected a number above 0"),
        (
            lambda: RidgeRegression(ridge=0.2, learned=True, lower_bound=0.25),
            "lower_bound is 0.25, expected at least 0",
        ),
        (lambda: RidgeRegression(iterations=0), "iterations is 0, expected an integer of at least 1"),
        (lambda: build(**{"solve.solver": "jacobi"}), "method is 'jacobi', expected one of"),
        (lambda: RidgeRegression(sketch="fixed"), "sketch is 'fixed', expected 'trained' or 'random'"),
        (lambda: RidgeRegression(sketch_size=0), "sketch_size is 0, expected an integer of at least 1 or None"),
        (lambda: build(**{"solve.sketch_size": 9}), "sketch_size is 9, expected at most the 8 channels"),
        (lambda: build(key_heads=1), "expected as many value heads as the 1 key heads"),
        (lambda: build(decay=SoftplusDecay(channelwise=True))(inputs(1, 2)), "the decay is per channel"),
        (lambda: build(gain=ChannelGain())(inputs(1, 2)), "the gain gives erase or write gates"),
    ],
)
def test_bad_values_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()

"""`jax.jvp` and `jax.linearize` of operators in XLA and of models, and what has neither."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rnnlib import ops
from rnnlib.models import DecoderLM
from rnnlib.ops.ridge_solve import LinearSolver
from tests.ops.test_further_derivatives import LENGTH, linear, preconditioner, rule, rule_arguments
from tests.selection import mostly_slow
from tests.tiny_models import tiny_config


def dplr(arguments, implementation):
    named = {"a": arguments["k"], "b": arguments["q"]}
    return ops.dplr(**{n: arguments[n] for n in "qkv"}, **named, chunk_size=16, implementation=implementation)


def directions(arguments):
    return jax.tree.map(lambda x: jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape), arguments)


OPERATORS = mostly_slow([rule, linear, dplr, preconditioner], [rule, preconditioner])


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda f: getattr(f, "__name__", ""))
def test_tangents_of_the_chunked_form_are_the_scans(operator):
    arguments = rule_arguments()
    vector = directions(arguments)

    def tangents(implementation):
        return jax.jit(lambda x, d: jax.jvp(lambda x: operator(x, implementation), (x,), (d,)))(arguments, vector)

    found, expected = tangents("chunked"), tangents("scan")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, expected)


def test_a_linearized_rule_over_several_chunks_has_its_gradient_as_transpose():
    x = jax.tree.map(
        lambda x: jnp.tile(x, (1, 5, *[1] * (x.ndim - 2))) if x.shape[1] == LENGTH else x, rule_arguments()
    )
    ids = jnp.arange(5 * LENGTH)[None] // 30

    def run(x):
        return ops.gated_delta_rule(**x, beta=-x["log_decay"], segment_ids=ids, chunk_size=16, implementation="chunked")

    results, tangent_of = jax.linearize(run, x)
    cotangents, vector = jax.tree.map(jnp.sin, results), directions(x)
    forwards = sum(jax.tree.leaves(jax.tree.map(jnp.vdot, tangent_of(vector), cotangents)))
    gradients = jax.jit(lambda x: jax.vjp(run, x)[1](cotangents)[0])(x)
    np.testing.assert_allclose(forwards, sum(jax.tree.leaves(jax.tree.map(jnp.vdot, gradients, vector))), rtol=1e-4)


@pytest.mark.parametrize("solver", [LinearSolver(), LinearSolver("exact")], ids=lambda solver: solver.method)
def test_tangents_of_the_solve_by_scan_are_its_gradients(solver):
    """Also far from convergence: a tangent is solved for by the iterations that a gradient is."""
    x = {name: 3 * array for name, array in rule_arguments().items() if name in ("q", "k", "log_decay")}

    def run(x):
        ids = jnp.arange(LENGTH)[None] // 30
        return ops.ridge_solve(**x, segment_ids=ids, iterations=5, solver=solver, implementation="scan")

    vector = directions(x)
    results, tangents = jax.jit(lambda x: jax.jvp(run, (x,), (vector,)))(x)
    cotangents = jax.tree.map(jnp.sin, results)
    gradients = jax.jit(lambda x: jax.vjp(run, x)[1](cotangents)[0])(x)
    forwards, backwards = (
        sum(jax.tree.leaves(jax.tree.map(jnp.vdot, *pair))) for pair in ((tangents, cotangents), (gradients, vector))
    )
    np.testing.assert_allclose(forwards, backwards, rtol=1e-4)


@pytest.mark.parametrize("mixer", mostly_slow(["kda", "gated_deltanet", "pkda", "attention"], ["kda"]))
def test_a_model_has_tangents_and_hessians_times_vectors(mixer):
    """Forwards over the gradient, on a CPU; the gradient's own tangent is held to a difference quotient."""
    graphdef, state = nnx.split(DecoderLM(tiny_config(mixer), rngs=nnx.Rngs(0)))
    tokens = jnp.arange(40).reshape(2, 20) % 29
    vector = jax.tree.map(lambda x: 1e-2 * directions(x), state)

    def loss(state):
        return jnp.mean(jnp.tanh(nnx.merge(graphdef, state)(tokens)))

    @jax.jit
    def derivatives(state, vector):
        value, tangent = jax.jvp(loss, (state,), (vector,))
        gradient, hessian = jax.jvp(jax.grad(loss), (state,), (vector,))
        return value, tangent, gradient, hessian

    def inner(x, y):
        return sum(jax.tree.leaves(jax.tree.map(jnp.vdot, x, y)))

    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: x.astype(jnp.float64), (state, vector))
        _, tangent, gradient, hessian = derivatives(*wide)
        np.testing.assert_allclose(tangent, inner(gradient, wide[1]), rtol=1e-6)
        step = 1e-4
        sides = [derivatives(jax.tree.map(lambda x, d: x + s * d, *wide), wide[1])[1] for s in (step, -step)]
        np.testing.assert_allclose(inner(hessian, wide[1]), (sides[0] - sides[1]) / (2 * step), rtol=1e-2)


def test_a_kernel_has_no_forward_derivative_and_says_so():
    x = rule_arguments()
    with pytest.raises(TypeError, match="can't apply forward-mode autodiff"):
        jax.jvp(lambda x: rule(x, "triton"), (x,), (x,))

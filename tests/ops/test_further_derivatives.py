"""Kernels have one derivative: those beyond it are the XLA form's, and nothing of it shows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.delta_rule.api import gated_delta_rule
from pallas_kernels.linear_attention.api import linear_attention
from pallas_kernels.ridge.api import ridge_solve
from rnnlib import ops
from tests.selection import mostly_slow

LENGTH, SIZE = 20, 16
IDS = jnp.asarray([[0] * 9 + [1] * 11], jnp.int32)


def draw(name, *shape):
    return 0.3 * jax.random.normal(jax.random.key(sum(name.encode())), (1, LENGTH, *shape))


def rule_arguments():
    q, k, v = (draw(name, 1, SIZE) for name in ("q", "k", "v"))
    log_decay = -jax.nn.softplus(draw("log_decay", 1))
    return {"q": q, "k": k, "v": v, "log_decay": log_decay, "initial_state": draw("state", SIZE)[:, None, :SIZE]}


def rule(arguments, implementation):
    return ops.gated_delta_rule(
        **arguments, beta=-arguments["log_decay"], segment_ids=IDS, implementation=implementation
    )


def linear(arguments, implementation):
    return ops.linear_attention(**arguments, segment_ids=IDS, implementation=implementation)


def solve(arguments, implementation):
    named = {"q": arguments["q"], "k": 3 * arguments["k"], "log_decay": arguments["log_decay"]}
    return ops.ridge_solve(**named, ridge=0.3, segment_ids=IDS, implementation=implementation)


def preconditioner(arguments, implementation):
    return ops.diagonal_preconditioner(
        arguments["k"], log_decay=arguments["log_decay"], segment_ids=IDS, implementation=implementation
    )


def convolution(arguments, implementation):
    x, kernel = arguments["v"].reshape(1, LENGTH, SIZE), arguments["q"][0, :4, 0]
    name = "chunked" if implementation == "scan" else implementation
    return ops.short_convolution(x, kernel, activation="silu", norm_size=8, segment_ids=IDS, implementation=name)


def gradient(operator, implementation):
    return jax.grad(lambda x: sum(jnp.sum(jnp.sin(3 * y)) for y in operator(x, implementation)))


def forwards(operator, implementation, x, vector):
    return jax.jvp(gradient(operator, implementation), (x,), (vector,))[1]


def backwards(operator, implementation, x, vector):
    def along(x):
        return sum(jax.tree.leaves(jax.tree.map(jnp.vdot, gradient(operator, implementation)(x), vector)))

    return jax.grad(along)(x)


OPERATORS = pytest.mark.parametrize(
    ("operator", "way"),
    [(rule, forwards), (linear, backwards), (solve, forwards), (preconditioner, forwards), (convolution, backwards)],
)


def check_hessian_times_vector(operator, way):
    arguments = rule_arguments()
    vector = jax.tree.map(lambda x: jnp.sin(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape), arguments)
    wanted = jax.jit(lambda x: forwards(operator, "scan", x, vector))(arguments)
    found = jax.jit(lambda x: way(operator, "triton", x, vector))(arguments)
    for name, expected in wanted.items():
        scale = float(jnp.abs(expected).max())
        np.testing.assert_allclose(found[name], expected, rtol=1e-3, atol=1e-4 * scale + 1e-12)


@OPERATORS
def test_a_hessian_times_a_vector_is_the_scans(operator, way):
    check_hessian_times_vector(operator, way)


@pytest.mark.gpu
@OPERATORS
def test_a_hessian_times_a_vector_is_the_scans_on_a_gpu(operator, way):
    with jax.default_matmul_precision("highest"):  # of the scan's own products
        check_hessian_times_vector(operator, way)


@pytest.mark.parametrize("implementation", mostly_slow(["scan", "chunked", "triton"], ["triton"]))
@pytest.mark.parametrize(
    ("mapped", "operator"),
    [
        pytest.param("q", rule, marks=pytest.mark.slow),
        pytest.param("q", linear, marks=pytest.mark.slow),
        ("q", solve),
        ("log_decay", rule),
        pytest.param("log_decay", solve, marks=pytest.mark.slow),
        ("log_decay", preconditioner),
    ],
)
def test_what_vmap_shares_has_the_sum_of_the_gradients(mapped, operator, implementation):
    """Of all results, those too that do not depend on what `jax.vmap` maps over: a final state, say, on queries."""
    shared = rule_arguments()
    given = shared.pop(mapped)
    rows = jnp.stack([given, 0.5 * given, 1.5 * given])

    def loss(shared, by_vmap):
        def call(row):
            return operator(shared | {mapped: row}, implementation)

        results = jax.vmap(call)(rows) if by_vmap else jax.tree.map(lambda *x: jnp.stack(x), *map(call, rows))
        return sum(jnp.sum(jnp.sin(3 * x + i)) for i, x in enumerate(results))

    found, wanted = (jax.jit(jax.grad(lambda x, way=way: loss(x, way)))(shared) for way in (True, False))
    for name, expected in wanted.items():
        size = float(jnp.abs(expected).max())
        np.testing.assert_allclose(found[name], expected, rtol=1e-3, atol=1e-4 * size + 1e-12)


@pytest.mark.parametrize(
    "kernel", mostly_slow(["gated_delta_rule", "linear_attention", "ridge_solve"], ["gated_delta_rule"])
)
def test_kernels_of_their_own_share_under_vmap_too(kernel):
    arguments = rule_arguments()
    queries = jnp.stack([arguments["q"], 0.5 * arguments["q"]])

    def loss(k, by_vmap):
        def call(q):
            if kernel == "ridge_solve":
                return ridge_solve(q, 3 * k, jnp.full((1, 1), 0.3), log_decay=arguments["log_decay"])
            rules = {"gated_delta_rule": gated_delta_rule, "linear_attention": linear_attention}
            return rules[kernel](q, k, arguments["v"], log_decay=arguments["log_decay"])

        results = jax.vmap(call)(queries) if by_vmap else jax.tree.map(lambda *x: jnp.stack(x), *map(call, queries))
        return sum(jnp.sum(jnp.sin(3 * x + i)) for i, x in enumerate(results))

    found, wanted = (jax.jit(jax.grad(lambda k, way=way: loss(k, way)))(arguments["k"]) for way in (True, False))
    np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-4 * float(jnp.abs(wanted).max()))

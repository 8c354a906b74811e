"""SwiGLU: one product with both kernels, and the same function as with two."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rnnlib.layers.feed_forward import SwiGLU
from rnnlib.layers.linear import fused_matmuls
from tests.jaxprs import equations


def swiglu(dtype=jnp.float32):
    return SwiGLU(6, 10, initializer_std=0.5, dtype=dtype, param_dtype=jnp.float32, rngs=nnx.Rngs(0))


def written_out(module, x):
    gate, up, down = (f.kernel[...] for f in (module.gate, module.up, module.down))
    return (jax.nn.silu(x @ gate) * (x @ up)) @ down


def products(function, *arguments):
    """The shapes of all products of a function."""
    found = equations(jax.make_jaxpr(function)(*arguments).jaxpr)
    return [e.outvars[0].aval.shape for e in found if e.primitive.name == "dot_general"]


def test_many_rows_are_one_product_and_few_are_two():
    module = swiglu()
    assert products(module, jnp.ones((2, 4, 6))) == [(8, 20), (8, 6)]  # on a CPU rows are one axis
    assert products(module, jnp.ones((2, 1, 6))) == [(2, 10), (2, 10), (2, 6)]


def test_all_derivatives_are_those_of_separate_products():
    module = swiglu()
    graph, state = nnx.split(module)
    x, dx = jax.random.normal(jax.random.key(1), (2, 2, 4, 6))
    ds = jax.tree.map(lambda p: jax.random.normal(jax.random.key(p.size), p.shape), state)

    def joined(state, x):
        return jnp.sum(jnp.sin(nnx.merge(graph, state)(x)))

    def separate(state, x):
        return jnp.sum(jnp.sin(written_out(nnx.merge(graph, state), x)))

    def everything(f):  # gradient, forward mode, a Hessian times a vector, and under vmap
        gradient = jax.grad(f, (0, 1))
        forwards = jax.jvp(f, (state, x), (ds, dx))
        return (
            gradient(state, x),
            forwards,
            jax.jvp(gradient, (state, x), (ds, dx))[1],
            jax.vmap(f, (None, 0))(state, jnp.stack([x, dx])),
        )

    for found, wanted in zip(*(jax.tree.leaves(jax.jit(everything, static_argnums=0)(f)) for f in (joined, separate))):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def test_low_precision_rounds_once_where_separate_products_round_twice():
    module = swiglu(jnp.bfloat16)
    graph, state = nnx.split(module)
    x = jax.random.normal(jax.random.key(1), (1, 64, 6), jnp.bfloat16)

    def off(f):
        d_x = jax.grad(lambda x: jnp.sum(f(x).astype(jnp.float32) ** 2))
        exact = jax.grad(lambda x: jnp.sum(written_out(module, x) ** 2))(x.astype(jnp.float32))
        return float(jnp.linalg.norm(d_x(x).astype(jnp.float32) - exact) / jnp.linalg.norm(exact))

    low = jax.tree.map(lambda p: p.astype(jnp.bfloat16), state)
    assert off(module) < 1.1 * off(lambda x: written_out(nnx.merge(graph, low), x)) < 0.02


class Doubled(nnx.Linear):
    """A map of one's own."""

    def __call__(self, inputs, out_sharding=None):
        """Twice as much."""
        return 2 * super().__call__(inputs, out_sharding)


@pytest.mark.parametrize("kind", [Doubled, nnx.Linear])
def test_maps_that_are_not_plain_are_called(kind):
    options = {"use_bias": kind is nnx.Linear, "rngs": nnx.Rngs(0)}
    maps = (nnx.Linear(4, 3, use_bias=False, rngs=nnx.Rngs(1)), kind(4, 3, **options))
    x = jnp.arange(32.0).reshape(8, 4)
    for found, f in zip(fused_matmuls(x, maps), maps, strict=True):
        np.testing.assert_allclose(found, f(x), rtol=1e-6)

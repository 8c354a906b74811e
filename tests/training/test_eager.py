"""First states and other traces that are evaluated operation by operation have the bits of JAX's own evaluation."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rnnlib.training.adaptation import LoraConfig
from rnnlib.training.compiled_steps import CompiledSteps
from rnnlib.training.eager import Operation, evaluate
from rnnlib.training.step import init_train_state

CONSTANT = jnp.arange(3.0)


def bits(tree):
    def of(x):
        return jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x

    return [(x.dtype, x.weak_type, np.asarray(of(x)).tobytes()) for x in jax.tree.leaves(tree)]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: jax.random.normal(jax.random.key(3), (2, 3)) * 0.02 / 3 + x,
        lambda x: (x, x, x * 2, CONSTANT, jnp.zeros([]), 1.0 * x),
        lambda x: jnp.linalg.qr(jnp.outer(x, x) + jnp.eye(3)),
        lambda x: jax.lax.cond(x[0] > 1, jnp.sin, jnp.cos, x) + CONSTANT,
    ],
)
def test_a_trace_has_the_function_s_bits(function):
    x = jnp.asarray([0.1, 0.2, 0.3])
    traced, shapes = jax.make_jaxpr(function, return_shape=True)(x)
    found = jax.tree.unflatten(jax.tree.structure(shapes), map(jnp.asarray, evaluate(traced, x)))
    assert bits(found) == bits(function(x))


def test_operations_alike_are_one_program():
    traced = jax.make_jaxpr(lambda x: [x * 2, x * 3, x[:1] * 2, jax.nn.silu(x), jax.nn.silu(x + 1)])(jnp.ones(4))
    operations = list(map(Operation.of, traced.jaxpr.eqns))
    assert len(operations) == 7 and len(set(operations)) == 5


@pytest.mark.parametrize("changes", [{}, {"freeze": ("embedding",)}, {"lora": LoraConfig(rank=2)}])
@pytest.mark.parametrize("mixer", ["kda", "mamba2"])
def test_a_first_state_is_that_of_a_model_that_is_built(tiny_config, changes, mixer):
    model = dataclasses.replace(tiny_config.model, num_layers=2, mixers=(mixer, "attention"))
    steps = CompiledSteps(dataclasses.replace(tiny_config, model=model, **changes), np.ones(256, np.int32), None)
    state = init_train_state(steps._new_model(), steps._optimizer, steps.mesh, steps.adaptation)[1]
    assert bits(steps.first_state()) == bits(state)
    assert nnx.graphdef(steps.abstract_model()) == nnx.graphdef(steps._new_model())

"""`rnnlib.check_numerics`: numbers that no operator takes are errors, and nothing else is."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import rnnlib
from rnnlib import ops
from rnnlib.models import DecoderLM
from tests.selection import mostly_slow
from tests.tiny_models import tiny_config


def arguments(length: int = 20) -> dict[str, jax.Array]:
    random = np.random.default_rng(0)
    x = {name: random.standard_normal((1, length, 2, 8)) / 8**0.5 for name in "qkv"}
    x |= {"beta": random.uniform(size=(1, length, 2)), "log_decay": -random.uniform(size=(1, length, 2))}
    return {name: jnp.asarray(value, jnp.float32) for name, value in x.items()}


def gradient(implementation):
    @jax.jit
    @jax.grad
    def run(x):
        def loss(x):
            out, state = ops.gated_delta_rule(**x, implementation=implementation)
            return jnp.sum(out**2) + jnp.sum(state**2)

        return jax.checkpoint(loss)(x)

    return run


@pytest.mark.parametrize("implementation", mostly_slow(["scan", "chunked", "triton"], ["chunked"]))
def test_checks_leave_results_and_find_a_decay_above_zero(implementation):
    x, run = arguments(), gradient(implementation)
    checked = rnnlib.check_numerics(run)
    x["log_decay"] = x["log_decay"].at[0, 3].set(-jnp.inf)  # a hard reset
    jax.tree.map(np.testing.assert_array_equal, checked(x), run(x))
    wrong = x | {"log_decay": x["log_decay"].at[0, 5, 1].set(0.25)}
    run(wrong)  # nothing is checked
    message = "gated_delta_rule: log_decay is up to 0.25, expected at most 0: it is the decay's natural logarithm"
    with pytest.raises(ValueError, match=f"^{message}$"):
        checked(wrong)
    with pytest.raises(ValueError, match="log_decay is up to nan, expected at most 0"):
        checked(x | {"log_decay": x["log_decay"].at[0, 5, 1].set(jnp.nan)})
    with pytest.raises(ValueError, match=r"^gated_delta_rule: k has 1 numbers that are not finite$"):
        checked(x | {"k": x["k"].at[0, 0, 0, 0].set(jnp.inf)})


def test_results_that_are_not_finite_are_found():
    x = arguments() | {"beta": jnp.full((1, 20, 2), 1e4)}
    x["k"] = jnp.ones_like(x["k"])
    with pytest.raises(ValueError, match=r"result 0 has .* numbers that are not finite, although all arguments are"):
        rnnlib.check_numerics(ops.gated_delta_rule)(**x)


@pytest.mark.parametrize(
    "call",
    [
        lambda k, log_decay: ops.linear_attention(k, k, k, log_decay=log_decay),
        lambda k, log_decay: ops.dplr(k, k, k, a=k, b=k, log_decay=log_decay),
        lambda k, log_decay: ops.ridge_solve(k, k, log_decay=log_decay, iterations=1),
        lambda k, log_decay: ops.precondition_key(k, log_decay=log_decay),
    ],
)
def test_every_operator_with_a_decay_has_the_check(call):
    x = arguments()
    checked = rnnlib.check_numerics(call)
    checked(x["k"], x["log_decay"])
    with pytest.raises(ValueError, match=r"log_decay is up to 0.*, expected at most 0"):
        checked(x["k"], -x["log_decay"])


def test_a_models_gradient_is_checked():
    """Through the embedding, remat, convolutions and gates, all compiled; a NaN in a weight names an operator."""
    graphdef, state = nnx.split(DecoderLM(tiny_config("gated_deltanet"), rngs=nnx.Rngs(0)))
    tokens = jnp.arange(20)[None]

    @jax.jit
    @jax.grad
    def run(state):
        return jnp.mean(nnx.merge(graphdef, state)(tokens) ** 2)

    checked = rnnlib.check_numerics(run)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7), checked(state), run(state))
    with pytest.raises(ValueError, match=r"has .* numbers that are not finite"):
        checked(jax.tree.map(lambda x: x.at[(0,) * x.ndim].set(jnp.nan), state))

"""Operators and models on meshes with Explicit axes, which are JAX's default."""

import unittest

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from rnnlib import ops
from rnnlib.models.embedding import look_up
from tests.processes import result_of

from .on_devices import MODELS, OPERATORS

MESH = AbstractMesh((2, 4), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)


WHOLE = P()


def like(*shape: int, spec: P = WHOLE, dtype=jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(MESH, spec))


def test_devices_that_share_rows_and_heads_are_one():
    """Values and gradients, in a process that has four devices."""
    errors = result_of("tests.ops.on_devices")
    assert errors.keys() == {*OPERATORS, *MODELS}
    # Gradients of what cancels, a scale among them, differ by the order of sums.
    assert all(error < 2e-5 for error in errors.values()), errors


def test_results_are_sharded_as_arguments_are():
    rows = P(("data", "model"))
    tokens, state = jax.eval_shape(
        ops.gated_delta_rule,
        like(8, 16, 2, 8, spec=rows),
        like(8, 16, 2, 8),  # whole
        like(8, 16, 4, 8, spec=rows),
        initial_state=np.zeros((8, 4, 8, 8), np.float32),
    )
    assert tokens.sharding.spec[0] == state.sharding.spec[0] == ("data", "model")
    out, gram = jax.eval_shape(ops.ridge_solve, *(like(8, 16, 4, 8, spec=P("data", None, "model")),) * 2)
    assert out.sharding.spec[:3] == ("data", None, "model") and gram.sharding.spec[:2] == ("data", "model")
    embedded = jax.eval_shape(lambda *x: look_up(*x, jnp.float32), like(32, 6), like(8, 16, spec=rows, dtype=jnp.int32))
    assert embedded.sharding.spec[0] == ("data", "model")


def test_calls_outside_of_jit_are_compiled_once():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Explicit,))
    rows = jax.device_put(jnp.ones((1, 20, 1, 4)), NamedSharding(mesh, P("data")))
    with jax.log_compiles(), unittest.TestCase().assertLogs("jax", "WARNING") as first:
        ops.short_convolution(rows[..., 0, :], jnp.ones((3, 4)))
    assert any("Compiling" in line for line in first.output)
    with jax.log_compiles(), unittest.TestCase().assertNoLogs("jax", "WARNING"):
        ops.short_convolution(rows[..., 0, :], jnp.ones((3, 4)))


def test_an_option_may_be_traced(unchecked_shapes):
    """As without a mesh, though its annotation says a number."""

    def run(eps, rows):
        return ops.short_convolution(rows, jnp.ones((3, 8)), norm_size=4, norm_eps=eps)[0]

    out = jax.eval_shape(run, jnp.ones(()), like(8, 16, 8, spec=P("data")))
    assert out.sharding.spec[0] == "data"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"q": P(None, "data")},
            r"q of shape \(8, 16, 2, 8\) is .*at most B and H of its axes \[B, T, H, K\] to be",
        ),
        ({"k": P(None, None, None, "data")}, "k of shape .* at most B and H of"),
        ({"q": P("data"), "v": P("model")}, "v of shape .* has its rows sharded over 'model', expected 'data' as in"),
        ({"v": P(None, None, "model")}, "q of shape .* has 2 heads, expected a multiple of the 4 devices of mesh axis"),
    ],
)
def test_what_devices_cannot_share_is_refused(given, message):
    shapes = {"q": (8, 16, 2, 8), "k": (8, 16, 2, 8), "v": (8, 16, 4, 8)}
    arguments = {name: like(*shape, spec=given.get(name, P())) for name, shape in shapes.items()}
    with pytest.raises(ValueError, match="gated_delta_rule: " + message):
        jax.eval_shape(lambda a: ops.gated_delta_rule(**a), arguments)


def test_wrong_shapes_keep_their_own_error(unchecked_shapes):
    with pytest.raises(ValueError, match=r"q has shape \(8, 16, 8\), expected \[B, T, H, K\]"):
        jax.eval_shape(ops.gated_delta_rule, *(like(8, 16, 8, spec=P("data")),) * 3)

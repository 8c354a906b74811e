"""Rows whose tokens are split over devices."""

import unittest

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from rnnlib import ops
from tests.processes import result_of

from .on_context_shards import OPERATORS, SLOW

MESH = AbstractMesh((4,), ("context",), axis_types=(AxisType.Auto,))


@pytest.mark.parametrize(
    "names",
    [[name for name in OPERATORS if name not in SLOW], pytest.param(SLOW, marks=pytest.mark.slow)],
    ids=["always", "others"],
)
def test_devices_that_share_tokens_are_one(names):
    """Results and gradients of random packed rows, and what is exchanged; in a process that has eight devices."""
    found = result_of("tests.ops.on_context_shards", *names)
    assert found["errors"].keys() == set(names)
    # The softmax of attention is float32's.
    in_float32 = {"float32", "causal_attention", "attention, a query at a time", "window", "wide window"}
    errors = found["errors"].items()
    wrong = {name: error for name, error in errors if not error < (2e-6 if name in in_float32 else 1e-13)}
    assert not wrong, found["errors"]
    short, long = found["traffic"]
    assert short == long
    kinds = {kind for _, kind in short}
    assert kinds == {"all-gather", "reduce-scatter", "collective-permute", "all-reduce"}


def on_context_shards(function, *shapes):
    """Traces `function` on a fourth of arrays of zeros."""
    mapped = jax.shard_map(function, mesh=MESH, in_specs=P(None, "context"), out_specs=P(None, "context"))
    return jax.eval_shape(mapped, *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))


def in_context(operator):
    def call(*arrays):
        with ops.context_axis("context"):
            return operator(*arrays)

    return call


class Refusals(unittest.TestCase):
    def test_outside_of_a_map_the_axis_is_missing(self):
        with ops.context_axis("tokens"), pytest.raises(ValueError, match=r"no such axis here.*'tokens'"):
            ops.linear_attention(*(jnp.ones((1, 4, 1, 2)),) * 3)

    def test_a_shard_is_at_least_as_long_as_a_filter_reaches_back(self):
        def convolve(x):
            return ops.short_convolution(x, jnp.ones((4, 2)))[0]

        on_context_shards(in_context(convolve), (1, 12, 2))
        with pytest.raises(ValueError, match="4 devices of mesh axis 'context' has 2 tokens of a row, expected at le"):
            on_context_shards(in_context(convolve), (1, 8, 2))

    def test_a_state_that_is_no_affine_map_of_the_one_before(self):
        def precondition(k):
            return ops.exact_preconditioner(k, k)[0]

        on_context_shards(precondition, (1, 8, 1, 2))
        with pytest.raises(NotImplementedError, match="exact_preconditioner: is not for tokens split over devices"):
            on_context_shards(in_context(precondition), (1, 8, 1, 2))


def test_compiled_functions_tell_the_contexts_apart():
    """A function that was compiled for whole rows is traced anew for split ones."""
    attend = jax.jit(lambda x: ops.linear_attention(x, x, x)[0])
    x = (1, 8, 1, 2)
    assert "all_gather" not in str(jax.make_jaxpr(attend)(jnp.ones(x)))
    mapped = jax.shard_map(in_context(attend), mesh=MESH, in_specs=P(None, "context"), out_specs=P(None, "context"))
    assert "all_gather" in str(jax.make_jaxpr(mapped)(jnp.ones(x)))

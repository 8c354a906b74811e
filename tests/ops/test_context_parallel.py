"""Rows whose tokens are split over devices."""

import unittest

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from pallas_kernels.delta_rule import api as delta_rule
from pallas_kernels.linear_attention import api as linear_attention
from pallas_kernels.short_convolution.branch import ConvolutionBranch
from rnnlib import ops
from rnnlib.ops.short_convolution.fused import fused_convolutions
from tests.processes import result_of

from .kernels_on_context_shards import OPERATORS as KERNELS
from .on_context_shards import OPERATORS, SLOW

ALWAYS = ["decay", "linear attention, gates"]
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


@pytest.mark.parametrize(
    "names",
    [
        ALWAYS,
        pytest.param(
            [name for name in KERNELS if name not in ALWAYS],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["always", "others"],
)
def test_kernels_find_the_map_of_a_shard_on_their_way(names):
    """Results and gradients of packed rows whose shards have several segments, or a part of a chunk; interpreted."""
    errors = result_of("tests.ops.kernels_on_context_shards", *names)
    assert len(errors) == 2 * len(names)
    assert max(errors.values()) < 5e-6, errors


def test_second_derivatives_of_kernels_on_shards():
    """Those of the XLA form on shards: `jax.jvp` of the gradient goes through what it gathers."""

    def second(x):
        def loss(x):
            with ops.context_axis("context"):
                return jnp.sum(jnp.sin(ops.gated_delta_rule(x, x, x, implementation="triton")[0]))

        return jax.jvp(jax.grad(loss), (x,), (x,))[1]

    mapped = jax.shard_map(
        second, mesh=MESH, in_specs=P(None, "context"), out_specs=P(None, "context"), check_vma=False
    )
    traced = str(jax.make_jaxpr(mapped)(jax.ShapeDtypeStruct((1, 1024, 1, 16), jnp.float32)))
    assert traced.count("all_gather") > 2 and "delta_compose_segments" in traced


@pytest.mark.parametrize("side_by_side", [True, False])
def test_the_gradient_of_the_tokens_that_the_next_device_reads_is_added_in_its_place(side_by_side):
    """Padded to the length of a shard, as a slice's is, it would be added to all tokens."""
    kernel = jnp.ones((4, 16))

    def loss(x):
        with ops.context_axis("context"):
            if side_by_side:
                (y, _), _ = fused_convolutions(x, [ConvolutionBranch(kernel), ConvolutionBranch(kernel)])[0]
            else:
                y = ops.short_convolution(x, jnp.ones((4, 32)), implementation="triton")[0]
        return jnp.sum(jnp.sin(y))

    over = P(None, "context")
    mapped = jax.shard_map(jax.grad(loss), mesh=MESH, in_specs=over, out_specs=over, check_vma=False)
    traced = jax.make_jaxpr(mapped)(jax.ShapeDtypeStruct((1, 1024, 32), jnp.float32))
    (body,) = (e.params["jaxpr"] for e in traced.eqns if e.primitive.name == "shard_map")
    found = [e for e in body.eqns if e.outvars[0].aval.shape == (1, 256, 32)]
    assert {"dynamic_update_slice"} <= {e.primitive.name for e in found}
    assert not {"pad", "add_any"} & {e.primitive.name for e in found}


def test_what_has_no_maps_runs_once_more():
    """Heads too wide to fold, and shards of one token: three calls of the operator by kernels, as of any other form."""

    def traced(*shape):
        def run(x):
            with ops.context_axis("context"):
                return ops.gated_delta_rule(x, x, x, implementation="triton")[0]

        mapped = jax.shard_map(
            run, mesh=MESH, in_specs=P(None, "context"), out_specs=P(None, "context"), check_vma=False
        )
        return str(jax.make_jaxpr(mapped)(jax.ShapeDtypeStruct(shape, jnp.float32)))

    assert "delta_compose_segments" in traced(1, 8, 1, 128)
    for shape in ((1, 8, 1, 160), (1, 4, 1, 16)):
        assert "delta_compose_segments" not in traced(*shape)

    q = jnp.ones((1, 8, 1, 160))
    with pytest.raises(NotImplementedError, match="shards of rows with key size 160"):
        delta_rule.gated_delta_rule(q, q, q, context_axis="context")
    with pytest.raises(NotImplementedError, match="mma kernels do not support shards of rows"):
        delta_rule.gated_delta_rule(*[q[..., :16]] * 3, context_axis="context", backend="mosaic_mma")
    with pytest.raises(NotImplementedError, match="shards of rows of a single token"):
        linear_attention.linear_attention(*[q[:, :1]] * 3, context_axis="context")
    with pytest.raises(NotImplementedError, match="shards of rows with key size 160"):
        linear_attention.linear_attention(q, q, q, log_decay=-q, context_axis="context")


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

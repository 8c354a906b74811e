"""The kernels of the diagonal Gram: schedules, and model sizes on a GPU. (The mathematics: tests/ops.)"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.common.config import KernelConfig
from pallas_kernels.preconditioner import readouts as preconditioner_readouts
from pallas_kernels.preconditioner.api import GramConfig, diagonal_gram_readout, unsupported_reason
from rnnlib import ops
from tests.pallas_kernels.cases import relative_error

KEY = preconditioner_readouts.Preconditioner(1.5, 1e-6, "symmetric", "rational", times_row=True)


OPERATORS = {
    "gram": lambda k, number, **x: ops.diagonal_gram(k, **x),
    "preconditioner": lambda k, number, **x: ops.diagonal_preconditioner(k, center=-number, squash="tanh", **x),
    "key": lambda k, number, **x: ops.precondition_key(k, center=-number, **x),
    "query": lambda k, number, **x: ops.precondition_query(k[..., ::-1], k, ridge=number, **x),
    "unstable": lambda k, number, **x: ops.sherman_morrison_key(k, ridge=number, **x),
}


def make_arguments(shape, dtype=jnp.float32, per_channel=False):
    batch, _, heads, channels = shape
    random = np.random.default_rng(0)
    gates = shape if per_channel else shape[:3]
    dice = random.random(gates)
    log_decay = -np.log1p(np.exp(-(random.normal(size=gates) + 3)))
    for limit, value in ((0.03, -20.0), (0.015, -1000.0), (0.005, -np.inf)):
        log_decay = np.where(dice < limit, value, log_decay)
    keys = random.normal(size=shape)
    return {
        "k": jnp.asarray(keys / np.linalg.norm(keys, axis=-1, keepdims=True), dtype),
        "log_decay": jnp.asarray(log_decay, jnp.float32),
        "gain": jnp.asarray(random.uniform(size=gates), dtype),
        "number": jnp.asarray(random.uniform(0.2, 1.0, size=heads), jnp.float32),
        "initial_state": jnp.asarray(random.uniform(size=(batch, heads, channels)), jnp.float32),
    }


def results_and_gradients(function, arguments):
    """All results, and the gradient of a linear form of them, which adds no rounding of its own."""

    def scalar(arguments):
        results = function(**arguments)
        # Weights that no dtype rounds; summed in a dtype that does not round much either.
        weights = [((np.arange(x.size) * 5 % 7 - 3) / 4).reshape(x.shape) for x in results]
        wide = [x.astype(jnp.promote_types(x.dtype, jnp.float32)) for x in results]
        return sum(jnp.sum(x * jnp.asarray(w, x.dtype)) for x, w in zip(wide, weights)), results

    (_, results), gradients = jax.jit(jax.value_and_grad(scalar, has_aux=True))(arguments)
    return jax.tree.leaves((results, gradients))


@pytest.mark.parametrize(
    "schedule",
    [
        pytest.param(
            GramConfig(tokens=64, forward=KernelConfig(block=4), backward=KernelConfig(block=4)), marks=pytest.mark.slow
        ),
        GramConfig(tokens=8, forward=KernelConfig(block=4), backward=KernelConfig(block=2)),
        GramConfig(
            tokens=16, forward=KernelConfig(block=2, num_stages=1), backward=KernelConfig(block=4, num_stages=1)
        ),
        GramConfig(tokens=8, forward=KernelConfig(block=2), backward=KernelConfig(block=2), crowded=1),
    ],
    ids=["one part", "parts of 8", "last part short, not loaded ahead", "backward not loaded ahead"],
)
def test_every_cut_gives_the_same(schedule):
    arguments = make_arguments((2, 38, 2, 5))

    def kernels(k, number, **others):
        return diagonal_gram_readout(k, None, number, readout=KEY, with_key=True, config=schedule, **others)

    def scan(k, number, **others):
        read, write, final = ops.precondition_key(k, center=number, implementation="scan", **others)
        return write, final, read

    for found, expected in zip(results_and_gradients(kernels, arguments), results_and_gradients(scan, arguments)):
        assert relative_error(found, expected) < 1e-5


def test_reruns_are_bit_identical():
    arguments = make_arguments((1, 38, 1, 5))
    run = functools.partial(results_and_gradients, functools.partial(OPERATORS["key"], implementation="triton"))
    jax.tree.map(np.testing.assert_array_equal, run(arguments), run(arguments))


def test_unsupported_says_why():
    k = jnp.zeros((1, 4, 1, 8))
    assert unsupported_reason(k, None) is None
    assert "float16" in unsupported_reason(k, k.astype(jnp.float16))
    assert "key size 512" in unsupported_reason(jnp.zeros((1, 4, 1, 512)))
    with pytest.raises(NotImplementedError, match="key size 512"):
        diagonal_gram_readout(jnp.zeros((1, 4, 1, 512)), readout=preconditioner_readouts.Gram())


@pytest.mark.parametrize("squash", ["rational", "tanh"])
def test_gradient_where_the_gram_is_small(squash):
    """B has left its interval's end by less than a rounding of 1 there, and the gradient is divided by A."""
    gram = np.geomspace(1e-7, 10.0, 500)
    readout = preconditioner_readouts.Preconditioner(1.5, 1e-6, "symmetric", squash, times_row=False)
    found = readout.gradients(None, jnp.asarray(gram, jnp.float32), None, jnp.float32(0.5), jnp.float32(1.0)).after
    r = np.log(gram + 1e-6) - 0.5
    s, slope = (np.tanh(r), np.cosh(r) ** -2) if squash == "tanh" else (r / (1 + abs(r)), (1 + abs(r)) ** -2)
    expected = -np.log(1.5) * 1.5**-s * slope / (gram + 1e-6)
    np.testing.assert_allclose(found, expected, rtol=2e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(2, 1000, 3, 128), (1, 4096, 8, 64), (1, 500, 2, 256), (2, 333, 2, 24)], ids=str)
@pytest.mark.parametrize("name", OPERATORS)
def test_on_a_gpu(name, shape, dtype):
    """Results and gradients against the scan in float64, with resets of both kinds, gates per head and per channel."""
    per_channel = shape[3] == 24
    arguments = make_arguments(shape, dtype, per_channel)
    ids = jnp.asarray(np.cumsum(np.random.default_rng(1).random(shape[:2]) < 0.02, axis=1), jnp.int32)
    found = results_and_gradients(
        functools.partial(OPERATORS[name], segment_ids=ids, implementation="triton"), arguments
    )
    with jax.enable_x64(True):
        doubles = jax.tree.map(lambda x: x.astype(jnp.float64), arguments)
        expected = results_and_gradients(
            functools.partial(OPERATORS[name], segment_ids=ids, implementation="scan"), doubles
        )
    limit = 3e-5 if dtype == jnp.float32 else 1e-2
    names = ["d_" + name for name in sorted(arguments)]  # as a dictionary's leaves are
    names = [*(f"result {n}" for n in range(len(found) - len(names))), *names]
    errors = {key: relative_error(*pair) for key, *pair in zip(names, found, expected, strict=True)}
    assert all(error < limit for error in errors.values()), errors

"""The operators split over several GPUs by batch and heads are the operators on one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.common.platform import is_hopper
from rnnlib import ops
from tests.pallas_kernels.cases import relative_error

pytestmark = pytest.mark.gpu

SHAPE = (4, 500, 4, 64)  # B, T, H, K


@functools.cache
def arguments():
    random = np.random.default_rng(0)
    q, k, v = random.standard_normal((3, *SHAPE))
    return {
        "q": jnp.asarray(q / np.linalg.norm(q, axis=-1, keepdims=True), jnp.bfloat16),
        "k": jnp.asarray(k / np.linalg.norm(k, axis=-1, keepdims=True), jnp.bfloat16),
        "v": jnp.asarray(v, jnp.bfloat16),
        "beta": jnp.asarray(random.uniform(size=SHAPE[:3]), jnp.float32),
        "log_decay": jnp.asarray(-random.exponential(0.1, SHAPE[:3]), jnp.float32),
    }


def delta_rule(q, k, v, beta, log_decay):
    return ops.gated_delta_rule(q, k, v, beta=beta, log_decay=log_decay, implementation="triton")


def mosaic_delta_rule(q, k, v, beta, log_decay):
    """The same in Mosaic GPU, which serves 128 channels on Hopper cards; the decay is one number a channel."""
    if not is_hopper():
        pytest.skip("needs a Hopper card")
    q, k, v = (jnp.concatenate([x, x[..., ::-1]], axis=-1) for x in (q, k / 2**0.5, v))
    decay = log_decay[..., None] * jnp.linspace(0.5, 1.5, 128)
    return ops.gated_delta_rule(q, k, v, beta=beta, log_decay=decay, implementation="mosaic")


def preconditioned_key(q, k, v, beta, log_decay):
    factor, gram = ops.diagonal_preconditioner(k, log_decay=log_decay, gain=beta, implementation="triton")
    return q * factor.astype(q.dtype) * v, gram


def ridge_regression(q, k, v, beta, log_decay):
    x, gram = ops.ridge_solve(q, k, log_decay=log_decay, implementation="triton")
    return x * v * beta.astype(x.dtype)[..., None], gram


def convolution(q, k, v, beta, log_decay):
    batch, length, heads, size = q.shape
    x, kernel = (q + v).reshape(batch, length, -1), jnp.tile(jnp.linspace(-1.0, 2.0, 4)[:, None], (1, heads * size))
    y, tail = ops.short_convolution(x, kernel, activation="silu", norm_size=size, implementation="triton")
    return y.reshape(q.shape) * k, tail.reshape(batch, -1, heads, size).swapaxes(1, 2)


@pytest.mark.parametrize("how", ("explicit axes", "shard_map", "shard_map, unchecked"))
@pytest.mark.parametrize("devices", ((2, 1), (1, 2), (2, 2)), ids=lambda shape: "batch_{}-heads_{}".format(*shape))
@pytest.mark.parametrize(
    "operator",
    (delta_rule, mosaic_delta_rule, preconditioned_key, ridge_regression, convolution),
    ids=lambda f: f.__name__,
)
def test_several_devices_are_one(operator, devices, how):
    count = devices[0] * devices[1]
    if jax.device_count() < count:
        pytest.skip(f"needs {count} devices")

    def results(arguments):
        out, state = operator(**arguments)
        return out, state

    def value_and_gradients(function, arguments):
        (out, state), pullback = jax.vjp(function, arguments)
        return out, state, pullback((jnp.ones_like(out), jnp.ones_like(state)))[0]

    one = jax.jit(functools.partial(value_and_gradients, results))(arguments())
    kinds = (AxisType.Explicit if how == "explicit axes" else AxisType.Auto,) * 2
    mesh = jax.make_mesh(devices, ("batch", "heads"), axis_types=kinds, devices=jax.devices()[:count])
    tokens, states = P("batch", None, "heads"), P("batch", "heads")
    split = results
    if how != "explicit axes":  # where operators split themselves
        split = jax.shard_map(
            results,
            mesh=mesh,
            in_specs=({name: tokens for name in arguments()},),
            out_specs=(tokens, states),
            check_vma=how == "shard_map",
        )
    placed = jax.device_put(arguments(), NamedSharding(mesh, tokens))
    several = jax.jit(functools.partial(value_and_gradients, split))(placed)
    assert len(several[0].sharding.device_set) == count
    found, expected = ({"out": x[0], "state": x[1], **x[2]} for x in (several, one))
    for name in expected:  # a device's share may be cut into other segments, which rounds differently
        assert relative_error(found[name], expected[name]) < 1e-2, name

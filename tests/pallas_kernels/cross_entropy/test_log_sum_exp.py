"""`log sum exp` of rows: the kernel against float64, and its derivatives against XLA's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cross_entropy.log_sum_exp import log_sum_exp as kernel
from pallas_kernels.cross_entropy.log_sum_exp import unsupported_reason
from rnnlib.ops.log_sum_exp import log_sum_exp, log_sum_exp_kernel_supports


def exact(x):
    x = np.asarray(x.astype(jnp.float32), np.float64)
    highest = x.max(axis=-1, keepdims=True)
    return highest[..., 0] + np.log(np.sum(np.exp(x - highest), axis=-1))


@pytest.mark.parametrize("shape", [(3, 64), (2, 3, 200), (1, 1), (5, 129)])
@pytest.mark.parametrize("spread", [1.0, 60.0])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_kernel_is_the_definition(shape, spread, dtype):
    x = jnp.asarray(spread * np.random.default_rng(0).standard_normal(shape), dtype)
    found = kernel(x)
    assert found.dtype == jnp.float32 and found.shape == shape[:-1]
    np.testing.assert_allclose(found, exact(x), rtol=1e-6, atol=1e-6)


def test_extremes():
    """Numbers that are left out, that overflow alone, that differ by more than float32's range, and none at all."""
    x = np.full((5, 70), -np.inf, np.float32)
    x[0, 66] = 3.0
    x[1, :2] = 1e4
    x[2, [0, 69]] = -3e38, 3e38
    x[3, 1] = np.nan
    found = np.asarray(kernel(jnp.asarray(x)))
    np.testing.assert_allclose(found[:3], [3.0, 1e4 + np.log(2), 3e38], rtol=1e-6)
    assert np.isnan(found[3]) and found[4] == -np.inf


def test_derivatives_are_those_of_the_formula():
    x, vector = (jnp.asarray(np.random.default_rng(i).standard_normal((4, 90)), jnp.float32) for i in range(2))

    def loss(x, implementation):
        return jnp.sum(jnp.sin(log_sum_exp(x, implementation=implementation)))

    for order in (1, 2):
        found, expected = (
            jax.grad(lambda x, n=name: loss(x, n))(x)
            if order == 1
            else jax.jvp(jax.grad(lambda x, n=name: loss(x, n)), (x,), (vector,))[1]
            for name in ("triton", "xla")
        )
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)


def test_what_is_not_supported():
    assert "float16" in str(unsupported_reason(jnp.zeros((2, 3), jnp.float16)))
    assert "(2, 0)" in str(unsupported_reason(jnp.zeros((2, 0))))
    with pytest.raises(NotImplementedError, match="float16"):
        kernel(jnp.zeros((2, 3), jnp.float16))
    assert not log_sum_exp_kernel_supports(jnp.zeros((1024, 1024)))  # not on a CPU


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(512, 32000), (77, 50257), (4, 151936)])
def test_kernel_on_a_gpu(shape):
    x = jnp.asarray(20 * np.random.default_rng(0).standard_normal(shape), jnp.float32)
    assert log_sum_exp_kernel_supports(x) == (x.size >= 1 << 20)
    np.testing.assert_allclose(log_sum_exp(x, implementation="triton"), exact(x), rtol=1e-6)

"""The triangular inverse by itself, interpreted, against NumPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.delta_rule.triton.triangular_inverse import unit_lower_inverse
from tests.pallas_kernels.cases import relative_error


def lower_triangles():
    random = np.random.default_rng(0)
    keys = random.standard_normal((64, 32))
    keys /= np.linalg.norm(keys, axis=1, keepdims=True)
    alike = keys[:1] + 0.1 * keys
    return {
        "random keys": keys @ keys.T,
        "keys that hardly differ": alike @ alike.T,
        "equal keys": np.ones((64, 64)),
    }


@pytest.mark.parametrize("name", lower_triangles())
def test_inverse(name):
    lower = np.tril(lower_triangles()[name], -1)
    expected = np.linalg.inv(np.eye(64) + lower)
    exact = jax.jit(unit_lower_inverse, static_argnums=1)(jnp.asarray(lower, jnp.float32), jnp.float32)
    assert relative_error(exact, expected) < 1e-6
    if name == "equal keys":  # all its numbers are 0, 1 and -1
        np.testing.assert_array_equal(exact, expected)

"""The kernel that rounds to float8 and transposes, interpreted: XLA's bits for all numbers of bfloat16."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.float8.api import RoundingConfig, round_both_ways, unsupported_reason

DTYPES = ("float8_e4m3fn", "float8_e5m2")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("config", [None, RoundingConfig(128, 64, 8)])
def test_all_numbers_are_rounded_as_xla_rounds(dtype, config):
    bits = jnp.arange(1 << 16, dtype=jnp.uint32).astype(jnp.uint16).reshape(128, 512)
    x = jax.lax.bitcast_convert_type(bits, jnp.bfloat16)
    x = jnp.where(jnp.abs(x) > 8, jnp.where(jnp.isnan(x), x, 0), x)
    found, transposed = jax.jit(lambda x: round_both_ways(x, jnp.float32(4), jnp.dtype(dtype), config))(x)
    wanted = np.asarray((x * 4).astype(dtype), np.float32)
    np.testing.assert_array_equal(np.asarray(found, np.float32), wanted)
    np.testing.assert_array_equal(np.asarray(transposed, np.float32), wanted.T)


@pytest.mark.parametrize("shape", [(64, 320), (192, 64)])
def test_tiles_that_do_not_come_out_even_are_smaller(shape):
    x = jax.random.normal(jax.random.key(0), shape, jnp.bfloat16)
    found, transposed = round_both_ways(x, jnp.float32(0.5), jnp.float8_e5m2, RoundingConfig(128, 128))
    np.testing.assert_array_equal(
        np.asarray(found, np.float32), np.asarray((x / 2).astype(jnp.float8_e5m2), np.float32)
    )
    np.testing.assert_array_equal(np.asarray(transposed, np.float32), np.asarray(found, np.float32).T)


@pytest.mark.parametrize(
    ("shape", "dtype", "words"),
    [((64, 64), jnp.float32, "dtype"), ((64, 96), jnp.bfloat16, "multiples")],
)
def test_what_is_not_served_is_said(shape, dtype, words):
    x = jnp.zeros(shape, dtype)
    assert words in str(unsupported_reason(x))
    with pytest.raises(NotImplementedError, match=words):
        round_both_ways(x, jnp.float32(1), jnp.float8_e5m2)

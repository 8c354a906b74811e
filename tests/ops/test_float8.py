"""Products in float8: their values, their gradients, and what a model multiplies that way."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.kernel_benchmarks.offline.compiling import missing_packages
from rnnlib.layers import InputProjection
from rnnlib.models import DecoderLM, ModelConfig
from rnnlib.ops import float8
from rnnlib.ops.float8 import float8_product, float8_supports
from rnnlib.ops.skinny_gemm import linear_product
from tests.described_card import output_of
from tests.ops import float8_on_described_card

DIMENSIONS = (((2,), (0,)), ((), ()))


def rounded(x, dtype, bits):
    """`x` with so many digits of its own, as float8 has them where nothing is subnormal."""
    x = np.asarray(x, np.float64)
    mantissa, exponent = np.frexp(x)
    return np.ldexp(np.round(mantissa * 2**bits) / 2**bits, exponent)


def _draw(seed, shape, scale, dtype):
    # Magnitudes within a few powers of two, all of which are normal numbers of float8.
    key, sign = jax.random.split(jax.random.key(seed))
    magnitude = jax.random.uniform(key, shape, minval=0.2, maxval=1.0)
    return (scale * magnitude * jax.random.rademacher(sign, shape, jnp.float32)).astype(dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("scale", [1e-20, 3.0])
def test_values_and_gradients_are_those_of_rounded_arrays(dtype, scale):
    x, kernel = _draw(0, (2, 24, 512), scale, dtype), _draw(1, (512, 256), 0.02, dtype)
    d_y = _draw(2, (2, 24, 256), 1e-6, dtype)
    y, pull_back = jax.vjp(lambda x, kernel: float8_product(x, kernel, DIMENSIONS), x, kernel)
    d_x, d_kernel = pull_back(d_y)
    assert (y.dtype, d_x.dtype, d_kernel.dtype) == (jnp.dtype(dtype),) * 3

    x4, kernel4 = rounded(x, dtype, 4), rounded(kernel, dtype, 4)  # three digits behind the first
    d_y3 = rounded(d_y, dtype, 3)
    wanted = (x4 @ kernel4, d_y3 @ kernel4.T, np.einsum("btk,btn->kn", x4, d_y3))
    for found, reference in zip((y, d_x, d_kernel), wanted):
        error = np.linalg.norm(np.asarray(found, np.float64) - reference) / np.linalg.norm(reference)
        assert error < (1e-6 if dtype == "float32" else 4e-3)


def test_largest_zero_and_not_finite():
    x = _draw(0, (1, 8, 256), 1.0, jnp.float32)
    kernel = jnp.eye(256)
    largest = jnp.finfo(jnp.float32).max
    for scale in (1e-30, largest / 2):
        np.testing.assert_allclose(float8_product(scale * x, kernel, DIMENSIONS), scale * x, rtol=0.07)
    assert not np.any(float8_product(0 * x, kernel, DIMENSIONS))
    for value in (jnp.inf, -jnp.inf, jnp.nan):
        assert not np.any(np.isfinite(float8_product(x.at[0, 0, 0].set(value), kernel, DIMENSIONS)))
    _, pull_back = jax.vjp(lambda x: float8_product(x, kernel, DIMENSIONS), x)
    assert not np.any(np.isfinite(pull_back(x.at[0, 0, 0].set(jnp.inf))[0]))


@given(
    seed=st.integers(0, 99),
    rows=st.sampled_from([64, 128, 192, 65]),
    channels=st.tuples(st.integers(4, 6), st.integers(4, 6)),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    is_batched=st.booleans(),
)
@settings(deadline=None, max_examples=6)
def test_the_kernel_that_rounds_and_transposes_gives_the_same_bits(seed, rows, channels, dtype, is_batched):
    features_in, features_out = (64 * number for number in channels)
    x, kernel = (
        _draw(seed, (3, rows, features_in), 3.0, dtype),
        _draw(seed + 1, (features_in, features_out), 0.1, dtype),
    )
    d_y = _draw(seed + 2, (3, rows, features_out), 1e-3, dtype)

    def product(x, kernel):
        if is_batched:
            return jax.vmap(lambda x: float8_product(x, kernel, (((1,), (0,)), ((), ()))))(x)
        return float8_product(x, kernel, DIMENSIONS)

    def results(x, kernel, d_y):
        y, pull_back = jax.vjp(product, x, kernel)
        return y, *pull_back(d_y)

    wanted = jax.jit(results)(x, kernel, d_y)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(float8, "platform", lambda: "gpu")
        lowered = jax.jit(lambda *arrays: results(*arrays)).lower(x, kernel, d_y)
    jax.tree.map(np.testing.assert_array_equal, lowered.compile()(x, kernel, d_y), wanted)


@pytest.mark.skipif(missing_packages() is not None, reason=str(missing_packages()))
def test_a_card_rounds_and_transposes_in_one_kernel():
    written = json.loads(output_of(float8_on_described_card.__name__).splitlines()[-1])
    # A kernel each for activations and gradients, and none for weights, which are rounded before the loop.
    assert sorted(map(len, written)) == [2, 2], written
    dtypes = [{shape.partition("[")[0] for shape in shapes} for shapes in written]
    assert sorted(map(sorted, dtypes)) == [["f8e4m3fn"], ["f8e5m2"]]


@pytest.mark.parametrize(("sizes", "serves"), [((256, 256), True), ((512, 128), False), ((264, 256), False)])
def test_narrow_and_odd_maps_are_multiplied_as_they_are(sizes, serves):
    x, kernel = _draw(0, (2, 8, sizes[0]), 1.0, jnp.float32), _draw(1, sizes, 1.0, jnp.float32)
    same = jnp.array_equal(float8_product(x, kernel, DIMENSIONS), linear_product(x, kernel, DIMENSIONS))
    assert float8_supports(*sizes) is serves and bool(same) is not serves


CONFIG = ModelConfig(
    64, 256, 2, 2, ("gated_deltanet", "attention"), matmul_dtype="float8", mixer_overrides={"gated_deltanet": {}}
)


def test_a_model_multiplies_by_its_weights_in_float8():
    """Forward and backward, joined and separate columns, and not by what it is told to leave out."""
    model = DecoderLM(CONFIG, rngs=nnx.Rngs(0))
    ways = {getattr(module, "dot_general", None) for _, module in nnx.iter_modules(model)}
    assert ways == {None, float8_product}
    tokens = jnp.arange(48).reshape(2, 24) % 64

    def loss(model, tokens):
        return jnp.mean(jnp.square(model(tokens)))

    jaxpr = str(jax.make_jaxpr(nnx.grad(loss))(model, tokens))
    assert "f8_e4m3fn" in jaxpr and "f8_e5m2" in jaxpr
    plain = DecoderLM(CONFIG.replace(matmul_dtype=None), rngs=nnx.Rngs(0))
    assert "f8_e" not in str(jax.make_jaxpr(nnx.grad(loss))(plain, tokens))

    found, wanted = (nnx.jit(nnx.value_and_grad(loss))(m, tokens) for m in (model, plain))
    assert found[0] == pytest.approx(float(wanted[0]), rel=0.05)
    for (path, mine), other in zip(jax.tree.leaves_with_path(found[1]), jax.tree.leaves(wanted[1])):
        scale = float(jnp.linalg.norm(other))
        assert float(jnp.linalg.norm(mine - other)) <= 0.35 * scale + 1e-7, jax.tree_util.keystr(path)


def test_separate_columns_keep_float8():
    model = DecoderLM(CONFIG, rngs=nnx.Rngs(0))
    (projection,) = (m for _, m in nnx.iter_modules(model) if isinstance(m, InputProjection) and m.kernel is not None)
    projection.separate()
    assert projection.query.dot_general is float8_product


def test_the_option_is_off_and_kept():
    assert ModelConfig().matmul_dtype is None
    assert ModelConfig.from_dict(CONFIG.to_dict()) == CONFIG

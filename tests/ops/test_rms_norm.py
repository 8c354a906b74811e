"""The kernels of the RMS norm, interpreted: results and derivatives of the formula, and where layers take them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pallas_kernels import operators
from rnnlib.layers import normalization
from rnnlib.models import DecoderLM, ModelConfig
from rnnlib.ops import rms_norm as operator
from rnnlib.ops.rms_norm import rms_norm, rms_norm_of_sum


def arguments(shape, *, gated, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 3)
    x, z = (jax.random.normal(key, shape, dtype) for key in keys[:2])
    return x, 1 + 0.3 * jax.random.normal(keys[2], shape[-1:]), z if gated else None


def assert_close(found, wanted, **tolerance):
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        np.testing.assert_allclose(*(np.asarray(a, np.float32) for a in (one, other)), **tolerance)


@pytest.mark.parametrize(
    ("shape", "activation", "keeps"),
    [((3, 7, 16), None, True), ((5, 12), "silu", False), ((2, 40), "sigmoid", True), ((9, 128), None, False)],
)
def test_kernels_give_the_formula_and_all_its_derivatives(shape, activation, keeps):
    inputs = arguments(shape, gated=activation is not None)

    def run(implementation):
        def norm(x, scale, z):
            gate = {} if activation is None else {"z": z, "activation": activation}
            return rms_norm(x, scale, **gate, eps=1e-3, keeps=keeps, implementation=implementation)

        def loss(x, scale, z):
            return sum(jnp.sum(jnp.sin(3 * y)) for y in norm(x, scale, z) if y is not None)

        places = (0, 1) if activation is None else (0, 1, 2)
        gradient = jax.grad(loss, places)
        tangents = jax.tree.map(jnp.cos, inputs)
        again = jax.jvp(lambda *a: gradient(*a), inputs, tangents)[1] if activation else None
        rows = jax.vmap(lambda x, z: norm(x, inputs[1], z)[0])(inputs[0], inputs[2])
        return norm(*inputs), gradient(*inputs), again, rows

    assert_close(jax.jit(run, static_argnums=0)("triton"), jax.jit(run, static_argnums=0)("xla"), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(("shape", "parts"), [((3, 1, 16), 4), ((5, 40), 1)])
def test_a_sum_of_parts_is_normalised_in_its_kernel(shape, parts):
    added, scale, _ = arguments(shape, gated=False)
    inputs = jax.random.normal(jax.random.key(1), (parts, *shape)), added, scale

    def formula(parts, added, scale):
        total = jnp.sum(parts, axis=0) + added
        return rms_norm(total, scale, eps=1e-3, implementation="xla")[0], total

    def run(function):
        def loss(*inputs):
            return sum(jnp.sum(jnp.sin(3 * y)) for y in function(*inputs))

        gradient = jax.grad(loss, (0, 1, 2))
        again = jax.jvp(gradient, inputs, jax.tree.map(jnp.cos, inputs))[1]
        rows = jax.vmap(lambda parts, added: function(parts, added, scale), (1, 0))(*inputs[:2])
        return function(*inputs), gradient(*inputs), again, rows

    found = jax.jit(lambda: run(lambda *inputs: rms_norm_of_sum(*inputs, eps=1e-3)))()
    assert_close(found, jax.jit(lambda: run(formula))(), rtol=2e-5, atol=2e-5)


def test_the_sum_is_rounded_before_its_norm_is_taken():
    added, scale, _ = arguments((8, 24), gated=False, dtype=jnp.bfloat16)
    parts = jax.random.normal(jax.random.key(1), (3, 8, 24))
    y, total = rms_norm_of_sum(parts, added, scale)
    np.testing.assert_array_equal(total, ((parts[0] + parts[1] + parts[2]) + added).astype(jnp.bfloat16))
    np.testing.assert_array_equal(y, rms_norm(total, scale, implementation="triton")[0])
    assert rms_norm_of_sum(parts, added, scale, dtype=jnp.float32)[0].dtype == jnp.float32
    for wrong in (parts[:0], parts.astype(jnp.bfloat16)):
        with pytest.raises(ValueError, match=r"rms_norm_of_sum: parts are .*, expected float32 \[S, N, F\]"):
            operators.norms.rms_norm_of_sum(wrong, added, scale)
    with pytest.raises(NotImplementedError, match=r"rms_norm_of_sum: .* rows of 8193 features"):
        rms_norm_of_sum(jnp.ones((2, 1, 8193)), jnp.ones((1, 8193)), jnp.ones(8193))


def test_low_precision_is_rounded_once():
    x, scale, z = arguments((8, 64), gated=True, dtype=jnp.bfloat16)
    exact = rms_norm(x.astype(jnp.float32), scale, z=z.astype(jnp.float32))[0]
    found = rms_norm(x, scale, z=z, implementation="triton")[0]
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(found.astype(np.float32), exact, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("heads", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_gates_have_a_bias_of_each_head(heads):
    """In the norm's kernel too, whose programs have whole cycles of heads."""
    x, scale, z = arguments((2, 5, heads, 24), gated=True)
    bias = jax.random.normal(jax.random.key(1), (heads, 24))

    def run(implementation, dtype):
        def norm(*arrays):
            x, scale, z, bias = arrays
            return rms_norm(x, scale, z=z, z_bias=bias, implementation=implementation)[0]

        gradient = jax.grad(lambda *arrays: jnp.sum(jnp.sin(3 * norm(*arrays))), (0, 1, 2, 3))
        arrays = [a.astype(dtype) for a in (x, scale, z, bias)]
        results = norm(*arrays), gradient(*arrays), jax.jvp(gradient, arrays, jax.tree.map(jnp.cos, arrays))[1]
        return [np.asarray(a) for a in jax.tree.leaves(results)]

    with jax.enable_x64(True):
        exact = run("xla", jnp.float64)
    assert all(a.dtype == jnp.float64 for a in exact)
    # Second derivatives are sums of terms of up to 900: their rounding is held against the largest.
    for implementation in ("triton", "xla"):
        for found, wanted in zip(run(implementation, jnp.float32), exact, strict=True):
            assert found.dtype == jnp.float32 and found.shape == wanted.shape
            assert np.abs(found - wanted).max() < 4e-6 * np.abs(wanted).max()
    plain = rms_norm(x, scale, z=z + bias)[0]
    np.testing.assert_allclose(rms_norm(x, scale, z=z, z_bias=bias)[0], plain, rtol=1e-6)


def test_wrong_biases_are_named():
    x, scale, z = arguments((2, 3, 8), gated=True)
    with pytest.raises(ValueError, match=r"z_bias has shape \(2, 8\) .* \(3, 8\)"):
        rms_norm(x, scale, z=z, z_bias=jnp.ones((2, 8)))
    with pytest.raises(ValueError, match="where z is None"):
        rms_norm(x, scale, z_bias=jnp.ones((3, 8)))
    with pytest.raises(NotImplementedError, match="a bias of 3 heads"):
        rms_norm(x, scale, z=z, z_bias=jnp.ones((3, 8)), implementation="triton")


@pytest.mark.gpu
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("shape", [(4, 512, 8, 128), (1, 333, 16, 64), (3, 100, 1, 1024), (2, 65, 4, 96)])
def test_on_a_gpu(shape, biased):
    """Against the formula in float32, whose result bfloat16 rounds once."""
    x, scale, z = arguments(shape, gated=True, dtype=jnp.bfloat16)
    bias = jax.random.normal(jax.random.key(1), shape[-2:]) if biased else None

    def run(dtype, implementation):
        def norm(x, scale, z, bias):
            options = {"activation": "sigmoid", "dtype": dtype, "implementation": implementation}
            return rms_norm(x, scale, z=z, z_bias=bias, **options)[0]

        @jax.jit
        def both(x, scale, z, bias, d_y):
            y, pull_back = jax.vjp(norm, x, scale, z, bias)
            return y, pull_back(d_y)

        d_y = jnp.cos(z).astype(dtype)  # of bfloat16 in both
        return both(x.astype(dtype), scale, z.astype(dtype), bias, d_y)

    found, wanted = run(jnp.bfloat16, "triton"), run(jnp.float32, "xla")
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        one, other = (np.asarray(a, np.float32) for a in (one, other))
        assert np.linalg.norm(one - other) < 4e-3 * np.linalg.norm(other)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"mixers": ("kda",)}, marks=pytest.mark.slow),
        {"mixers": ("gated_deltanet",), "zero_centred_norms": True},
    ],
)
def test_a_model_is_the_same_with_kernels(options, monkeypatch):
    config = ModelConfig(vocabulary_size=17, width=16, num_layers=1, num_heads=2, mlp_width=16, **options)
    graph, state = nnx.split(DecoderLM(config, rngs=nnx.Rngs(0)))
    state = jax.tree.map(lambda p: p + 0.1 * jax.random.normal(jax.random.key(p.size), p.shape, p.dtype), state)
    tokens = jnp.arange(12).reshape(2, 6)

    def loss(graph):
        return jax.jit(jax.value_and_grad(lambda state: jnp.sum(nnx.merge(graph, state)(tokens) ** 2)))(state)

    plain, calls = loss(graph), []

    def serves(x, scale, z=None, z_bias=None, *, between_kernels=False):
        calls.append((x.shape, z_bias is not None))
        return True

    for module in ("rnnlib.layers.normalization", "rnnlib.layers.output_projection", "rnnlib.ops.rms_norm"):
        monkeypatch.setattr(f"{module}.norm_kernel_supports", serves)
    # Another configuration of the same computation: what was traced of the first is not taken again.
    start = {config.mixers[0]: {"initializer.scale": 0.3}}
    other = nnx.split(nnx.eval_shape(lambda: DecoderLM(config.replace(mixer_overrides=start), rngs=nnx.Rngs(0))))[0]
    fused = loss(other)
    of_heads = ((2, 6, 2, 8), config.mixers == ("kda",))  # whose gate has a bias
    assert set(calls) == {((2, 6, 16), False), of_heads}
    assert_close(fused, plain, rtol=1e-4, atol=1e-5)


def test_small_and_wide_arrays_are_left_to_xla():
    x, scale, _ = arguments((4, 8), gated=False)
    assert not operator.norm_kernel_supports(x, scale)
    with pytest.raises(NotImplementedError, match=r"rms_norm: .* rows of 8193 features \(at most 8192\)"):
        rms_norm(jnp.ones((1, 8193)), jnp.ones(8193), implementation="triton")
    layer_norm = nnx.LayerNorm(8, rngs=nnx.Rngs(0))
    y, kept = normalization.norm_and_stream(layer_norm, x)
    assert kept is x
    np.testing.assert_array_equal(y, layer_norm(x))

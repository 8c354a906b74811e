"""The kernels of the RMS norm, interpreted: results and derivatives of the formula, and where layers take them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import operators
from pallas_kernels.norms.api import NormConfig
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


@st.composite
def calls(draw):
    """Rows of heads with a skip, a gate before or behind the norm, zero rows and extreme gates; options beside them."""
    heads, features = draw(st.sampled_from([(1, 40), (2, 12), (4, 5), (1, 128), (8, 16)]))
    shape = (draw(st.integers(1, 3)), draw(st.sampled_from([1, 5, 8])), heads, features)
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    x, z, v = (rng.standard_normal(shape) for _ in range(3))
    if draw(st.booleans()):
        x[0, 0], v[0, 0] = 0, 0
    z[-1, -1] = rng.choice([-1e4, -90, 0, 90, 1e4], shape[2:])
    of_heads = [1 + 0.3 * rng.standard_normal(shape[2:]) for _ in range(3)]
    activation = draw(st.sampled_from([None, "silu", "sigmoid"]))
    gated, skips = activation is not None, draw(st.booleans())
    arrays = {
        "x": x,
        "scale": of_heads[0] if draw(st.booleans()) else of_heads[0][0],
        "z": z if gated else None,
        "z_bias": of_heads[1] if gated and draw(st.booleans()) else None,
        "v": v if skips else None,
        "skip": of_heads[2] if skips else None,
    }
    options = {"gate_first": draw(st.booleans()), "keeps": draw(st.booleans())}
    return arrays, options | ({"activation": activation} if gated else {})


@settings(max_examples=12)
@given(call=calls(), dtype=st.sampled_from(["float32", "bfloat16"]))
def test_kernels_have_skips_and_gates_before_the_norm(call, dtype):
    """Results and gradients beside the formula's in float64 of the same arguments."""
    arrays, options = call
    given = {key: None if a is None else jnp.asarray(a, dtype) for key, a in arrays.items()}

    @functools.partial(jax.jit, static_argnums=(2, 3))
    def run(given, weight, implementation, dtype):
        def norm(given):
            return rms_norm(**given, **options, dtype=dtype, eps=1e-3, implementation=implementation)

        results, pull_back = jax.vjp(norm, given)
        return results, pull_back(jax.tree.map(lambda y, w: w.astype(y.dtype), results, weight))[0]

    rng = np.random.default_rng(0)
    weight = [jnp.asarray(rng.standard_normal(arrays["x"].shape), dtype) for _ in range(1 + options["keeps"])]
    weight = (*weight, None)[:2]
    found = run(given, weight, "triton", dtype)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda a: jnp.asarray(np.asarray(a, np.float64)), (given, weight))
        exact = run(*wide, "xla", "float64")
    bound = 2e-6 if dtype == "float32" else 4e-3
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True):
        assert one.dtype == dtype and one.shape == other.shape
        one, other = np.asarray(one, np.float64), np.asarray(other)
        assert np.isfinite(one).all() and np.linalg.norm(one - other) <= bound * np.linalg.norm(other)


@pytest.mark.parametrize("launch", [{"ahead": True}, {"blocks": 3, "ahead": True}])
def test_launches_give_the_same_results(launch):
    rng = np.random.default_rng(0)
    x, z, v = (jnp.asarray(rng.standard_normal((7, 2, 24)), jnp.float32) for _ in range(3))
    scale, skip = (jnp.asarray(1 + 0.3 * rng.standard_normal((2, 24)), jnp.float32) for _ in range(2))

    def run(**launch):
        def norm(x, scale, z, v, skip):
            config = NormConfig(**{"elements": 64, "blocks": 2} | launch)
            return operators.norms.rms_norm(x, scale, z=z, v=v, skip=skip, gate_first=True, config=config)[0]

        y, pull_back = jax.vjp(norm, x, scale, z, v, skip)
        return y, pull_back(jnp.cos(y))

    assert_close(run(**launch), run(), rtol=1e-5, atol=1e-5)


def test_wrong_arrays_of_heads_are_named():
    x, scale, z = arguments((2, 3, 8), gated=True)
    with pytest.raises(ValueError, match=r"scale has shape \(2, 8\) .* \(3, 8\)"):
        rms_norm(x, jnp.ones((2, 8)))
    with pytest.raises(ValueError, match=r"skip has shape \(3, 8\) where v is None"):
        rms_norm(x, scale, skip=jnp.ones((3, 8)))
    for norm in (rms_norm, operators.norms.rms_norm):
        with pytest.raises(ValueError, match=r"v.* is given"):
            norm(x, scale, v=z)
    with pytest.raises(NotImplementedError, match=r"a skip of 1 heads of 4097 features \(at most 4096 together\)"):
        wide = jnp.ones((1, 4097))
        rms_norm(wide, wide[0], v=wide, skip=wide, implementation="triton")
    with pytest.raises(NotImplementedError, match="a skip of 3 heads"):
        rms_norm(x, scale, v=z, skip=jnp.ones((3, 8)), implementation="triton")
    with pytest.raises(NotImplementedError, match=r"a scale of 4 heads .*at most 8192"):
        rms_norm(jnp.ones((4, 4000)), jnp.ones((4, 4000)), implementation="triton")


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


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(2, 512, 1, 4096), (1, 333, 2, 1024), (3, 100, 1, 1536), (2, 700, 4, 100)])
def test_a_skip_and_a_gate_before_the_norm_on_a_gpu(shape):
    """Against the formula in float32, whose result bfloat16 rounds once; the gradient in `v` twice."""
    x, _, z = arguments(shape, gated=True, dtype=jnp.bfloat16)
    v = jnp.roll(x, 1, axis=1)
    scale, skip = (1 + 0.3 * jax.random.normal(jax.random.key(n), shape[2:]) for n in (1, 2))
    given = x, z, v

    def run(dtype, implementation):
        def norm(x, scale, z, v, skip):
            options = {"gate_first": True, "dtype": dtype, "implementation": implementation}
            return rms_norm(x, scale, z=z, v=v, skip=skip, **options)[0]

        @jax.jit
        def both(x, scale, z, v, skip, d_y):
            y, pull_back = jax.vjp(norm, x, scale, z, v, skip)
            return y, pull_back(d_y)

        x, z, v = (a.astype(dtype) for a in given)
        return both(x, scale, z, v, skip, jnp.cos(given[1]).astype(dtype))

    found, wanted = run(jnp.bfloat16, "triton"), run(jnp.float32, "xla")
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        one, other = (np.asarray(a, np.float32) for a in (one, other))
        assert np.linalg.norm(one - other) < 4e-3 * np.linalg.norm(other)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"mixers": ("kda",)}, marks=pytest.mark.slow),
        {"mixers": ("gated_deltanet",), "zero_centred_norms": True},
        {"mixers": ("mamba2",), "mixer_overrides": {"mamba2": {"key_heads": 2, "output_projection.norm": "group"}}},
        pytest.param({"mixers": ("mamba2",)}, marks=pytest.mark.slow),
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

    def serves(x, scale, z=None, z_bias=None, v=None, skip=None, *, between_kernels=False):
        calls.append((x.shape, *(a is not None for a in (z, z_bias, v))))
        return True

    for module in ("rnnlib.layers.normalization", "rnnlib.layers.output_projection", "rnnlib.ops.rms_norm"):
        monkeypatch.setattr(f"{module}.norm_kernel_supports", serves)
    # Another configuration of the same computation: what was traced of the first is not taken again.
    name = config.mixers[0]
    start = {name: {**options.get("mixer_overrides", {}).get(name, {}), "initializer.scale": 0.3}}
    other = nnx.split(nnx.eval_shape(lambda: DecoderLM(config.replace(mixer_overrides=start), rngs=nnx.Rngs(0))))[0]
    fused = loss(other)
    rows = {"kda": (2, 8), "gated_deltanet": (2, 8), "mamba2": (2, 16) if "mixer_overrides" in options else (1, 32)}
    own = ((2, 6, *rows[name]), True, name == "kda", name == "mamba2")  # gate, its bias, a skip
    assert own in calls and ((2, 6, 16), False, False, False) in calls
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

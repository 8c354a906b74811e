"""Streams of a mixer by one product of its input, and convolutions that read their columns of it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pallas_kernels.short_convolution.branch import ConvolutionBranch, Epilogue
from rnnlib import ops
from rnnlib.layers import InputProjection, MixerShape, mixer_preset
from rnnlib.layers.input_projection import _narrow_slices, _slices, shared_columns
from rnnlib.models.variables import values_by_column
from rnnlib.ops.short_convolution import fused
from rnnlib.ops.short_convolution.fused import fused_convolutions, fused_unsupported
from tests.pallas_kernels.cases import relative_error
from tests.selection import mostly_slow

LENGTH = 13
IDS = jnp.asarray([[0] * 6 + [1] * 7, [2] * 13], jnp.int32)


def draw(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed + sum(shape)).standard_normal(shape), jnp.float32)


def streams():
    """Of 16, 16 and 32 columns, the widest first, with and without each option."""
    return [
        ConvolutionBranch(draw(4, 32), None, None, Epilogue("silu", None, 1e-6)),
        ConvolutionBranch(draw(3, 16), draw(16), draw(2, 2, 16), Epilogue("silu", 8, 1e-6)),
        ConvolutionBranch(draw(1, 16, seed=1), draw(16, seed=1), None, Epilogue(None, 16, 1e-6)),
    ]


def one_by_one(x, given, segment_ids):
    results, first = [], 0
    for kernel, bias, state, epilogue in given:
        own = x[..., first : first + kernel.shape[1]]
        options = {"activation": epilogue.activation, "norm_size": epilogue.norm_size, "norm_eps": epilogue.norm_eps}
        arrays = {"bias": bias, "initial_state": state, "segment_ids": segment_ids}
        results.append(ops.short_convolution(own, kernel, **arrays, **options, implementation="chunked"))
        first += kernel.shape[1]
    return results, x[..., first:]


def loss(run, x, arrays, segment_ids):
    given = [ConvolutionBranch(*a, stream.epilogue) for a, stream in zip(arrays, streams())]
    results, rest = run(x, given, segment_ids)
    return sum(jnp.sum(jnp.sin(2 * y) + jnp.sum(tail)) for y, tail in results) + jnp.sum(jnp.cos(rest))


def by_kernels(x, given, segment_ids):
    return fused_convolutions(x, given, segment_ids=segment_ids)


@pytest.mark.parametrize("rest", mostly_slow([0, 5], [5]))
@pytest.mark.parametrize("segment_ids", [pytest.param(None, marks=pytest.mark.slow), IDS], ids=["whole", "packed"])
def test_fused_convolutions_are_each_stream_of_its_columns(rest, segment_ids):
    x, arrays = draw(2, LENGTH, 64 + rest), [stream[:3] for stream in streams()]
    found, expected = (
        jax.jit(jax.value_and_grad(lambda x, arrays, run=run: loss(run, x, arrays, segment_ids), (0, 1)))(x, arrays)
        for run in (by_kernels, one_by_one)
    )
    errors = jax.tree.leaves(jax.tree.map(relative_error, found, expected))
    assert max(errors) < 2e-6, errors


def test_fused_convolutions_have_second_derivatives_and_rows_of_a_vmap():
    x, arrays = draw(2, LENGTH, 70), [stream[:3] for stream in streams()]

    def of_gradient(run):
        gradient = jax.grad(lambda x: loss(run, x, arrays, IDS))
        return jax.jit(lambda x, dx: jax.jvp(gradient, (x,), (dx,))[1])(x, draw(2, LENGTH, 70, seed=3))

    assert relative_error(of_gradient(by_kernels), of_gradient(one_by_one)) < 1e-5
    many = jnp.stack([x, 2 * x, -x])

    def gradients(run):
        return jax.jit(jax.vmap(jax.grad(lambda x: loss(run, x, arrays, None))))(many)

    assert relative_error(gradients(by_kernels), gradients(one_by_one)) < 2e-6


def test_unsupported_says_why():
    x = jnp.zeros((1, 4, 64))
    narrow_first = [ConvolutionBranch(jnp.zeros((4, n)), None, None, Epilogue(None, None, 1e-6)) for n in (16, 32)]
    assert fused_unsupported(x, streams()) is None
    assert "32 channels from column 16 on" in fused_unsupported(x, narrow_first)
    assert "48 columns for streams of 64" in fused_unsupported(x[..., :48], streams())
    assert "float16" in fused_unsupported(x.astype(jnp.float16), streams())
    with pytest.raises(NotImplementedError, match="column 16"):
        fused_convolutions(x, narrow_first)
    assert not fused.fused_convolutions_support(x.astype(jnp.bfloat16), streams())  # not on a CPU


def test_narrow_columns_share_a_kernel_whose_gradient_is_not_rounded(monkeypatch):
    """Of the columns beside a stream's, one is too wide and one has a bias."""
    shape, x = MixerShape(8, 1, 1, 8, 8, dtype=jnp.bfloat16), draw(1, 16, 8).astype(jnp.bfloat16)
    sizes = {"stream": 8, "small": 3, "wide": 513, "biased": 4}
    maps = {name: shape.project(n, use_bias=name == "biased", rngs=nnx.Rngs(n)) for name, n in sizes.items()}
    projection = InputProjection(shape, maps, shared=shared_columns(["stream"], maps))
    assert projection.columns == (("stream", 0, 8), ("small", 8, 3)) and projection.kernel.shape == (8, 64)
    assert not np.any(projection.kernel[:, 11:])  # zeros fill the columns up
    monkeypatch.setattr("rnnlib.layers.input_projection.platform", lambda: "gpu")
    assert projection(x).fused.shape == (1, 16, 64)

    def of_columns():
        """The columns, and gradients by column."""
        graph, state = nnx.split(projection)

        def loss(state):
            inputs = nnx.merge(graph, state)(x)
            columns = [inputs[name] for name in sizes]
            return sum(jnp.sum(jnp.sin(y.astype(jnp.float32))) for y in columns), columns

        (_, columns), gradients = jax.value_and_grad(loss, has_aux=True)(state)
        return columns, values_by_column(gradients, nnx.Param)

    fused, found = of_columns()
    projection.separate()
    assert projection.kernel is None
    separate, expected = of_columns()
    for one, other in zip(fused, separate, strict=True):
        np.testing.assert_array_equal(one, other)
    assert found.keys() == expected.keys()
    for path in found:
        assert relative_error(found[path], expected[path]) < (
            2**-8 if path in ("stream.kernel", "small.kernel") else 1e-9
        )
    kernel = found["stream.kernel"]
    assert kernel.dtype == jnp.float32 and np.any(kernel != kernel.astype(jnp.bfloat16))


@pytest.mark.parametrize(
    "preset, grouped",
    [
        ("gated_deltanet", True),
        pytest.param("kda", False, marks=pytest.mark.slow),
        pytest.param("pgdn", False, marks=pytest.mark.slow),
    ],
)
def test_a_mixer_is_the_same_by_fused_branches(preset, grouped, monkeypatch):
    """Outputs, the next cache, and all gradients; with a cache and packed rows too. Wider values come first."""
    overrides = {"value_expansion": 2.0} if grouped else {}
    graph, state = nnx.split(mixer_preset(preset, **overrides).build(16, 2, rngs=nnx.Rngs(0)))
    x, calls = draw(2, 16, 16), []

    def run(state, x, cached):
        mixer = nnx.merge(graph, state)
        cache = mixer.init_cache(2, 32) if cached else None
        ids = None if cached else jnp.asarray([[0] * 6 + [1] * 10, [2] * 16], jnp.int32)
        if cached:
            _, cache = mixer(x[:, ::-1], cache=cache)
        y, cache = mixer(x, segment_ids=ids, cache=cache)
        return jnp.sum(jnp.sin(3 * y)), (y, cache)

    def evaluate():
        # A function of its own each time: it is traced anew, by whatever serves then.
        gradient = jax.jit(jax.value_and_grad(lambda *given: run(*given), (0, 1), has_aux=True), static_argnums=2)
        return [gradient(state, x, cached) for cached in (False, True)]

    expected = evaluate()

    def serves(x, streams):
        calls.append([stream.kernel.shape[1] for stream in streams])
        return fused_unsupported(x, streams) is None

    monkeypatch.setattr("rnnlib.layers.qkv_branch.fused_convolutions_support", serves)
    found = evaluate()
    assert calls and calls[0] == ([32, 16, 16] if grouped else [16, 16, 16])
    errors = jax.tree.leaves(jax.tree.map(relative_error, found, expected))
    assert max(errors) < 2e-5, errors


def test_recomputation_that_keeps_products_keeps_the_fused_one(monkeypatch, capsys):
    monkeypatch.setattr(
        "rnnlib.layers.qkv_branch.fused_convolutions_support", lambda x, s: fused_unsupported(x, s) is None
    )
    graph, state = nnx.split(mixer_preset("kda").build(32, 2, rngs=nnx.Rngs(0)))

    @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)
    def run(state, x):
        return nnx.merge(graph, state)(x)[0]

    jax.ad_checkpoint.print_saved_residuals(run, state, jnp.ones((1, 64, 32)))
    products = [line for line in capsys.readouterr().out.splitlines() if "output of dot_general" in line]
    # Queries, keys, values, the inner ones of decay and gate, and the gain: 130 columns of 192.
    assert sum("f32[64,192]" in line for line in products) == 1 and len(products) == 3


def test_narrow_columns_are_slices_and_so_are_their_gradients():
    """With columns at the end that nothing reads, and one that has no gradient."""
    places = (("query", 0, 6), ("gate", 6, 1), ("angle", 7, 4))

    def loss(slices):
        def run(x):
            columns = slices(x, places)
            return jnp.sum(jnp.sin(columns["query"]) * columns["gate"])

        return run

    x = draw(2, LENGTH, 16)
    assert jax.tree.all(jax.tree.map(jnp.array_equal, _narrow_slices(x, places), _slices(x, places)))
    np.testing.assert_array_equal(*(jax.jit(jax.grad(loss(slices)))(x) for slices in (_narrow_slices, _slices)))

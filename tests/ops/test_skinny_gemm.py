"""Products of few rows by a kernel, interpreted: the formula, its derivatives, and a model that decodes by kernels."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pallas_kernels.short_convolution.branch import Epilogue
from pallas_kernels.skinny_gemm import api as cuts
from pallas_kernels.skinny_gemm.api import Epilogue as KernelEpilogue
from pallas_kernels.skinny_gemm.api import SkinnyGemmConfig, num_partials, skinny_matmul_partials
from pallas_kernels.skinny_gemm.api import skinny_matmuls as kernel
from rnnlib.layers import normalization, residual
from rnnlib.layers.residual import residual_add
from rnnlib.ops import skinny_gemm as operator
from rnnlib.ops.short_convolution import one_token
from rnnlib.ops.short_convolution.inputs import ConvolutionInputs
from rnnlib.ops.short_convolution.taps import last_inputs, short_convolution_taps
from rnnlib.ops.skinny_gemm import (
    BoundedSigmoid,
    KernelColumns,
    LogDecay,
    linear_product,
    row_product,
    skinny_matmuls,
    split_k_partials,
    sum_of_partials,
)


def normal(*shapes, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return [jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes)]


def assert_close(found, wanted, **tolerance):
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        np.testing.assert_allclose(*(np.asarray(a, np.float32) for a in (one, other)), **tolerance)


# Rows, inner axis and columns that fill blocks of 16, and that do not.
@pytest.mark.parametrize(
    ("rows", "inner", "columns"),
    [
        ((1, 1), 40, (24, 8, 37)),
        pytest.param((32,), 32, (16, 32), marks=pytest.mark.slow),
        pytest.param((3, 6), 5, (1,), marks=pytest.mark.slow),
    ],
)
def test_kernels_give_the_products_and_all_derivatives(rows, inner, columns):
    x, *kernels = normal((*rows, inner), *((inner, n) for n in columns))

    def everything(products):
        def loss(x, kernels):
            return sum(jnp.sum(jnp.sin(y)) for y in products(x, kernels))

        gradient = jax.grad(loss, (0, 1))
        tangents = jax.tree.map(jnp.cos, (x, kernels))
        return products(x, kernels), gradient(x, kernels), jax.jvp(gradient, (x, kernels), tangents)[1]

    found = everything(lambda x, kernels: skinny_matmuls(x, kernels))
    assert_close(found, everything(lambda x, kernels: tuple(x @ w for w in kernels)), rtol=1e-5, atol=1e-4)
    over_rows = jax.vmap(lambda x: skinny_matmuls(x, kernels))(x)
    assert_close(over_rows, found[0], rtol=1e-5, atol=1e-5)


def test_a_gate_and_a_sum_are_part_of_the_kernel():
    x, gate, up, added = normal((2, 1, 24), (24, 40), (24, 40), (2, 1, 40))
    parts = SkinnyGemmConfig(16, 16, 16, splits=2)
    (gated,) = kernel(x[:, 0], (gate, up), is_gated=True, config=parts)
    assert_close(gated, jax.nn.silu(x[:, 0] @ gate) * (x[:, 0] @ up), rtol=1e-5, atol=1e-5)
    (total,) = kernel(x[:, 0], (up,), added=added[:, 0], config=parts)
    assert_close(total, added[:, 0] + x[:, 0] @ up, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="splits is 2, expected 1 with 2 results"):
        kernel(x[:, 0], (gate, up), config=parts)
    (gated,) = skinny_matmuls(x, (gate, up), is_gated=True)
    assert_close(gated, jax.nn.silu(x @ gate) * (x @ up), rtol=1e-5, atol=1e-5)
    (total,) = skinny_matmuls(x, (up,), residual=added)
    assert_close(total, added + x @ up, rtol=1e-5, atol=1e-5)
    derivatives = jax.grad(lambda added: jnp.sum(jnp.sin(skinny_matmuls(x, (up,), residual=added)[0])))(added)
    assert_close(derivatives, jnp.cos(added + x @ up), rtol=1e-5, atol=1e-5)


def test_bfloat16_is_rounded_once():
    x, w = normal((5, 200), (200, 48), dtype=jnp.bfloat16)
    for schedule in (
        None,
        SkinnyGemmConfig(16, 32, 64),
        SkinnyGemmConfig(32, 16, 32, splits=3),
        SkinnyGemmConfig(16, 16, 64, splits=4),
    ):
        (found,) = kernel(x, (w,), config=schedule)
        assert found.dtype == jnp.bfloat16
        exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
        np.testing.assert_allclose(np.asarray(found, np.float64), exact, rtol=2**-8, atol=1e-5)


def several(rows=5, dtype=jnp.bfloat16):
    """Products of three inputs, one of them twice, each with its own inner axis, and what becomes of them."""
    *xs, bias, by_head = normal((rows, 40), (rows, 24), (rows, 16), (37,), (6,))
    xs = [xs[n].astype(dtype) for n in (0, 1, 0, 2)]
    kernels = [w.astype(dtype) for w in normal((40, 6), (24, 37), (40, 19), (16, 6))]
    epilogues = [LogDecay(jnp.log(jnp.asarray([0.3, 7.0])), by_head), LogDecay(jnp.zeros(1), bias), None]
    return xs, kernels, [*epilogues, BoundedSigmoid(2.0)]


def of_kernel(epilogues):
    return [None if f is None else KernelEpilogue(**vars(f)) for f in epilogues]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_a_launch_of_several_inputs_finishes_its_rounded_products(dtype):
    xs, kernels, epilogues = several(dtype=dtype)
    plain = kernel(xs, kernels)
    assert_close(plain, [(x @ w).astype(dtype) for x, w in zip(xs, kernels)], rtol=2**-7, atol=1e-4)
    found = kernel(xs, kernels, epilogues=of_kernel(epilogues))
    wanted = [y if f is None else f(y.astype(jnp.float32)) for y, f in zip(plain, epilogues)]
    assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    alone = [kernel(x, [w], epilogues=[f])[0] for x, w, f in zip(xs, kernels, of_kernel(epilogues))]
    assert_close(alone, found, rtol=0, atol=0)


def test_finishes_of_products_of_any_size_are_their_formulas():
    sizes = np.asarray([0, 1e-30, 1e-3, 0.5, 1, 5, 20, 80, 90, 150, 1e4, 3e38], np.float64)
    y = jnp.asarray(np.concatenate([sizes, -sizes]), jnp.bfloat16)
    epilogues = [
        KernelEpilogue(bound=2.0),
        KernelEpilogue(log_rate=jnp.log(jnp.asarray([0.25, 9.0])), bias=jnp.zeros(24)),
    ]
    found = kernel(jnp.ones((3, 1), jnp.bfloat16), (y[None], y[None]), epilogues=epilogues)
    exact = np.asarray(y, np.float64)
    # Beyond what float32 can tell from 0, both are 0.
    with np.errstate(over="ignore"):
        sigmoid, softplus = 2 / (1 + np.exp(-exact)), np.logaddexp(exact, 0)
    for one, wanted in zip(found, (sigmoid, -np.repeat([0.25, 9.0], 12) * softplus), strict=True):
        assert one.dtype == jnp.float32 and one.shape == (3, 24)
        # A rate of 9 has the largest product exceed float32.
        wanted = np.where(np.abs(wanted) > 3.4e38, -np.inf, wanted)
        np.testing.assert_allclose(one, np.broadcast_to(wanted, (3, 24)), rtol=1e-5, atol=1e-37)


def test_finished_products_have_all_derivatives_of_the_formula():
    xs, kernels, epilogues = several(dtype=jnp.float32)
    rows, kernels = [x[:, None] for x in xs], [w / 8 for w in kernels]
    rows[2] = rows[0]

    def formula(xs, kernels, epilogues):
        products = [x @ w for x, w in zip(xs, kernels)]
        return tuple(y if f is None else f(y) for y, f in zip(products, epilogues))

    def everything(run):
        def loss(rows, kernels, epilogues):
            return sum(jnp.sum(jnp.sin(y)) for y in run([rows[0], rows[1], rows[0], rows[3]], kernels, epilogues))

        given = rows, kernels, epilogues
        gradient = jax.grad(loss, (0, 1, 2))
        tangents = jax.tree.map(jnp.cos, given)
        over_rows = jax.vmap(lambda *rows: run(rows, kernels, epilogues))(*rows)
        return run(*given), gradient(*given), jax.jvp(gradient, given, tangents)[1], over_rows

    found = everything(lambda xs, kernels, epilogues: skinny_matmuls(xs, kernels, epilogues=epilogues))
    assert_close(found, everything(formula), rtol=1e-5, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 7, 16, 33, 64, 65, 200, 256, 450, 512])
def test_on_a_gpu_a_launch_of_several_inputs_finishes_its_rounded_products(rows):
    """A mixer's input with narrow gates, and the second maps of low rank."""
    for inner, which, columns in (
        ((1024,), (0, 0, 0), (1024, 8, 8)),
        ((128, 128), (0, 1), (1024, 1024)),
        ((64, 200), (0, 1), (1024, 1000)),
    ):
        distinct = normal(*((rows, k) for k in inner), dtype=jnp.bfloat16)
        maps = normal(*((inner[n], columns[i]) for i, n in enumerate(which)))
        kernels = [(4 * w / w.shape[0] ** 0.5).astype(jnp.bfloat16) for w in maps]
        vectors = jnp.linspace(-3, 3, 8), jnp.linspace(-9, 2, columns[-1])

        def by_kernel(distinct, kernels, vectors, has_epilogue, which=which):
            epilogues = [None, BoundedSigmoid(2.0), LogDecay(*vectors)][-len(which) :]
            plain, given = [distinct[n] for n in which], of_kernel(epilogues) if has_epilogue else None
            return kernel(plain, kernels, epilogues=given), epilogues

        run = jax.jit(by_kernel, static_argnums=3)
        (plain, epilogues), (found, _) = (
            run(distinct, kernels, vectors, with_epilogue) for with_epilogue in (False, True)
        )
        for n, w, y in zip(which, kernels, plain, strict=True):
            exact = jnp.matmul(distinct[n].astype(jnp.float32), w.astype(jnp.float32), precision="highest")
            np.testing.assert_allclose(np.asarray(y, np.float32), exact, rtol=2**-8, atol=1e-4)
        wanted = [y if f is None else f(y.astype(jnp.float32)) for y, f in zip(plain, epilogues)]
        assert_close(found, wanted, rtol=2e-5, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 7, 16, 32, 33, 64, 65, 128, 200, 256, 300, 512])
@pytest.mark.parametrize(("width", "hidden"), [(1024, 2816), (2048, 5632)])
def test_on_a_gpu_the_maps_of_a_layer_are_rounded_once(rows, width, hidden):
    """Of a 340M and a 1.3B model: those of a mixer's input, gate and up, down, and output with the residual sum."""
    columns = (width, width, width, 8, 8)
    x, inner, added = normal((rows, width), (rows, hidden), (rows, width), dtype=jnp.bfloat16)
    maps = [w / width**0.5 for w in normal(*((width, n) for n in (*columns, hidden, hidden)))]
    down = normal((hidden, width))[0] / hidden**0.5
    *maps, down = (w.astype(jnp.bfloat16) for w in (*maps, down))

    @jax.jit
    def by_kernels(x, inner, added, maps, down):
        several, gated = kernel(x, maps[:5]), kernel(x, maps[5:], is_gated=True)
        return [*several, *gated, *kernel(inner, (down,)), *kernel(x, maps[:1], added=added)]

    @jax.jit
    def exact(*arguments):
        x, inner, added, maps, down = jax.tree.map(lambda a: a.astype(jnp.float32), arguments)
        products = [jnp.matmul(x, w, precision="highest") for w in maps]
        *several, gate, up = products
        lower = jnp.matmul(inner, down, precision="highest")
        return [*several, jax.nn.silu(gate) * up, lower, added + several[0]]

    found, wanted = (run(x, inner, added, maps, down) for run in (by_kernels, exact))
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.asarray(one, np.float32), other, rtol=2**-8, atol=1e-4)
    again = by_kernels(x, inner, added, maps, down)
    assert all((one == other).all() for one, other in zip(found, again, strict=True))


def test_calls_that_the_kernel_cannot_serve_are_refused():
    x, w = normal((1, 8), (8, 4))
    for call, message in (
        (lambda: kernel(jnp.ones((513, 8)), (w,)), r"513 rows \(at most 512\)"),
        (lambda: kernel(x, (w,) * 9), r"9 matrices \(at most 8\)"),
        (lambda: kernel(x, (w.astype(jnp.bfloat16),)), "matrices of another dtype"),
        (lambda: kernel(x.astype(jnp.float16), (w.astype(jnp.float16),)), "float16"),
    ):
        with pytest.raises(NotImplementedError, match=f"skinny_matmuls: .*{message}"):
            call()
    assert not operator.skinny_kernel_supports(x.astype(jnp.bfloat16), [w.astype(jnp.bfloat16)])  # not on a CPU
    decay, sigmoid = KernelEpilogue(log_rate=jnp.zeros(3), bias=jnp.zeros(4)), KernelEpilogue()
    for call, message in (
        (lambda: kernel([x], (w, w)), "1 inputs and 2 epilogues, expected 2"),
        (lambda: kernel([x, x[:, :5]], (w, w)), r"kernel 1 has shape \(1, 5\), expected \(1, 8\)"),
        (lambda: kernel(x, (w,), epilogues=[sigmoid], added=jnp.zeros((1, 4))), "with is_gated or added"),
        (lambda: kernel(x, (w,), epilogues=[decay]), r"log_rate of shape \(3,\) and bias of shape \(4,\)"),
        (
            lambda: kernel(x, (w,), epilogues=[sigmoid], config=SkinnyGemmConfig(16, 16, 16, splits=2)),
            "with an epilogue",
        ),
    ):
        with pytest.raises(ValueError, match=f"skinny_matmuls: .*{message}"):
            call()


STREAMS = [
    ((3, 1, 24), 4, True, Epilogue("silu", 12, 1e-6)),  # a head that is no power of two
    ((3, 1, 40), 3, False, Epilogue("silu", None, 1e-6)),  # channels that do not fill a program
    ((3, 1, 16), 2, True, Epilogue(None, 8, 1e-3)),
]


def streams():
    calls = []
    for shape, width, has_bias, epilogue in STREAMS:
        rows, _, channels = shape
        x, w, bias, state = normal(shape, (width, channels), (channels,), (rows, width - 1, channels))
        calls.append((ConvolutionInputs(x, w, bias if has_bias else None, state, None), epilogue))
    return calls


def test_one_launch_convolves_a_token_of_several_streams():
    calls = streams()
    wanted = [(short_convolution_taps(x, epilogue), last_inputs(x)) for x, epilogue in calls]
    assert_close(jax.jit(lambda: one_token.one_token_convolutions(calls))(), wanted, rtol=1e-5, atol=1e-6)

    def loss(convolve, inputs):
        results = convolve([(x, epilogue) for x, (_, epilogue) in zip(inputs, calls)])
        return sum(jnp.sum(jnp.sin(y)) + jnp.sum(jnp.cos(state)) for y, state in results)

    def by_taps(calls):
        return [(short_convolution_taps(x, epilogue), last_inputs(x)) for x, epilogue in calls]

    inputs = [x for x, _ in calls]
    runs = one_token.one_token_convolutions, by_taps
    found, expected = (jax.jit(jax.grad(lambda i, f=f: loss(f, i)))(inputs) for f in runs)
    assert_close(found, expected, rtol=1e-5, atol=1e-5)
    x = calls[0][0]._replace(kernel=calls[0][0].kernel[:1], initial_state=jnp.zeros((3, 0, 24)))
    with pytest.raises(NotImplementedError, match="a filter of one token"):
        one_token.one_token_convolutions([(x, calls[0][1])])
    assert not one_token.one_launch_supports(calls)  # not on a CPU


def test_columns_of_a_matrix_are_read_where_they_are():
    x, w, narrow = normal((2, 1, 8), (8, 40), (8, 3))
    places = [(0, 24), (24, 5), (29, 2)]

    def everything(products):
        loss = lambda x, w: sum(jnp.sum(jnp.sin(y)) for y in products(x, w))  # noqa: E731
        return products(x, w), jax.grad(loss, (0, 1))(x, w)

    def by_kernel(x, w):
        return skinny_matmuls(x, [*(KernelColumns(w, *place) for place in places), narrow])

    def formula(x, w):
        return (*(x @ w[:, first : first + size] for first, size in places), x @ narrow)

    assert_close(everything(by_kernel), everything(formula), rtol=1e-5, atol=1e-5)


def output_map(kernel):
    inner, columns = kernel.shape
    output = nnx.Linear(inner, columns, use_bias=False, dtype=kernel.dtype, rngs=nnx.Rngs(0))
    output.kernel[...] = kernel
    return output


def sum_in_parts(monkeypatch):
    """One product is summed in two parts, as on a GPU."""
    choose = cuts.choose_config

    def in_parts(rows, inner, columns, is_gated=False):
        one = choose(rows, inner, columns, is_gated)
        return dataclasses.replace(one, splits=2) if len(columns) == 1 and inner > one.block_inner else one

    monkeypatch.setattr(cuts, "choose_config", in_parts)


@pytest.mark.parametrize("parts", [False, True])
@pytest.mark.parametrize("has_norm", [False, True])
def test_a_product_is_added_to_the_stream_and_normed(parts, has_norm, monkeypatch):
    """By the matmul's kernel, or by the norm's from partial sums, or by XLA from these."""
    if parts:
        sum_in_parts(monkeypatch)
    x, w, stream = normal((2, 1, 40), (40, 24), (2, 1, 24))
    norm = nnx.RMSNorm(24, rngs=nnx.Rngs(0)) if has_norm else None

    def everything():
        def total(x, w, stream):
            return residual_add(stream, x, output_map(w), norm)

        gradient = jax.grad(
            lambda *inputs: sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(total(*inputs))), (0, 1, 2)
        )
        return total(x, w, stream), gradient(x, w, stream)

    plain = everything()
    assert_close(plain[0][0], stream + x @ w, rtol=1e-5, atol=1e-5)
    assert (plain[0][1] is None) == (not has_norm)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(residual, "skinny_kernel_supports", lambda x, kernels: True)
        for serves in (False, True):
            patch.setattr(residual, "norm_kernel_supports", lambda *arrays, serves=serves, **options: serves)
            assert_close(everything(), plain, rtol=1e-5, atol=1e-5)
    partials = split_k_partials(x, w)
    assert (partials is not None) == parts
    if partials is not None:
        assert partials.shape == (2, 2, 1, 24)
        assert_close(sum_of_partials(partials, stream), stream + x @ w, rtol=1e-5, atol=1e-5)
        assert num_partials(2, 40, 24) == 2
    with pytest.raises(ValueError, match=r"config\.splits is 1, expected above 1"):
        skinny_matmul_partials(x[:, 0], w, config=SkinnyGemmConfig(16, 16, 16))
    with pytest.raises(NotImplementedError, match=r"skinny_matmuls: .* matrices of another dtype"):
        skinny_matmul_partials(x[:, 0], w.astype(jnp.bfloat16))


def test_on_a_cpu_rows_are_one_axis_of_a_product(monkeypatch):
    """The kernel's gradient sums over one axis then; a GPU's program keeps the axes of its rows."""
    x, kernel = normal((2, 3, 5), (5, 4))
    dims = (((2,), (0,)), ((), ()))

    def products(x, kernel):
        return row_product(x, kernel), linear_product(x, kernel, dims, preferred_element_type=jnp.float32)

    def gradients(x, kernel):
        return jax.grad(lambda x, kernel: sum(jnp.sum(jnp.sin(y)) for y in products(x, kernel)), (0, 1))(x, kernel)

    def shapes_multiplied():
        eqns = jax.make_jaxpr(gradients)(x, kernel).eqns
        return {eqn.invars[0].aval.ndim for eqn in eqns if eqn.primitive.name == "dot_general"}

    found = products(x, kernel), gradients(x, kernel)
    assert shapes_multiplied() == {2}
    monkeypatch.setattr(operator, "platform", lambda: "gpu")
    jax.clear_caches()
    assert shapes_multiplied() == {3}
    assert_close(found, (products(x, kernel), gradients(x, kernel)), rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "inner", "columns"), [(1, 1024, 1024), (64, 2816, 1024), (256, 5632, 2048), (512, 2816, 1024), (5, 96, 40)]
)
def test_on_a_gpu_a_sum_in_the_norm_has_the_bits_of_one_before_it(rows, inner, columns):
    x, w, added, scale = normal((rows, 1, inner), (inner, columns), (rows, 1, columns), (columns,), dtype=jnp.bfloat16)
    norm = nnx.RMSNorm(columns, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    norm.scale[...] = scale
    output = nnx.Linear(inner, columns, use_bias=False, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))

    @jax.jit
    def run(x, w, added):
        output.kernel = nnx.Param(w)
        assert (split_k_partials(x, w) is not None) == (num_partials(rows, inner, columns) > 1)
        total, normed = residual_add(added, x, output, norm)
        before = skinny_matmuls(x, (w,), residual=added)[0]
        return (normed, total), normalization.norm_and_stream(norm, before)

    for found, wanted in zip(*run(x, w, added)):
        np.testing.assert_array_equal(found, wanted)

"""The kernels of the short convolution against its definition in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.common.config import KernelConfig
from pallas_kernels.short_convolution.api import (
    ConvolutionConfig,
    ConvolutionPrograms,
    fused_convolutions,
    short_convolution,
    unsupported_reason,
)
from pallas_kernels.short_convolution.branch import ConvolutionBranch, Epilogue
from rnnlib import ops
from tests.pallas_kernels.cases import relative_error

BOTH = "bias, initial_state"


def make_arguments(shape, width, optional="", packed=False, dtype=jnp.float32):
    """Differentiable arguments, the result's gradient, and segment ids or None."""
    batch, length, channels = shape
    random = np.random.default_rng(0)
    shapes = {
        "x": shape,
        "kernel": (width, channels),
        "bias": (channels,),
        "initial_state": (batch, width - 1, channels),
    }
    arrays = {
        name: random.standard_normal(s) for name, s in shapes.items() if name in ("x", "kernel") or name in optional
    }
    ids = jnp.asarray(np.cumsum(random.random((batch, length)) < 0.2, axis=1), jnp.int32) if packed else None
    d_y = jnp.asarray(random.standard_normal(shape), dtype)
    return {name: jnp.asarray(x, dtype) for name, x in arrays.items()}, d_y, ids


def value_and_gradients(function, arrays, d_y):
    @jax.jit
    def run(arrays, d_y):
        y, pullback = jax.vjp(lambda arrays: function(**arrays), arrays)
        return {"y": y, **pullback(d_y)[0]}

    return run(arrays, d_y)


def errors(function, arrays, d_y, **options):
    """Relative error of the result and of every gradient."""
    found = value_and_gradients(functools.partial(function, **options), arrays, d_y)
    assert {name: x.dtype for name, x in found.items()} == {"y": d_y.dtype} | {n: x.dtype for n, x in arrays.items()}
    options.pop("config", None)
    with jax.enable_x64(True):
        arrays, d_y = jax.tree.map(lambda x: x.astype(jnp.float64), (arrays, d_y))
        expected = value_and_gradients(functools.partial(definition, **options), arrays, d_y)
    return {name: relative_error(found[name], expected[name]) for name in expected}


def definition(**options):
    return ops.short_convolution(**options, implementation="chunked")[0]


# The interpreter's programs have 8 tokens and 32 channels: parts and blocks that are full, and that are not.
@pytest.mark.parametrize(
    "shape, width, optional, packed, activation, norm_size",
    [
        ((2, 21, 72), 4, BOTH, True, "silu", 24),
        ((1, 16, 32), 4, "", False, "silu", 16),
        ((1, 2, 40), 4, BOTH, False, "silu", None),  # fewer tokens than taps
        ((1, 11, 8), 6, "initial_state", True, None, 8),
        ((1, 9, 8), 1, "bias", True, "silu", None),
    ],
)
def test_kernels_are_the_definition(shape, width, optional, packed, activation, norm_size):
    arrays, d_y, ids = make_arguments(shape, width, optional, packed)
    found = errors(short_convolution, arrays, d_y, segment_ids=ids, activation=activation, norm_size=norm_size)
    assert all(error < 1e-6 for error in found.values()), found


def test_bfloat16_is_rounded_once():
    """Half a unit in the last place at most, and sums for float32 weights not at all. In blocks, loaded ahead."""
    arrays, d_y, ids = make_arguments((1, 20, 32), 3, BOTH, True, jnp.bfloat16)
    arrays["kernel"] = arrays["kernel"].astype(jnp.float32)
    schedule = ConvolutionConfig(
        ConvolutionPrograms(16, KernelConfig(num_stages=2, block=4)),
        ConvolutionPrograms(16, KernelConfig(num_stages=2, block=2)),
        adapts=False,
    )
    found = errors(short_convolution, arrays, d_y, segment_ids=ids, activation="silu", norm_size=32, config=schedule)
    assert found.pop("kernel") < 1e-6
    assert all(error < 2**-8 for error in found.values()), found


def test_zero_vectors_stay_zero_and_have_gradients():
    x, kernel = jnp.zeros((1, 8, 16)), jnp.ones((4, 16))
    run = functools.partial(short_convolution, activation="silu", norm_size=16)
    y, pullback = jax.vjp(run, x, kernel)
    d_x, d_kernel = pullback(jnp.ones_like(y))
    assert not np.any(y) and not np.any(d_kernel)
    expected = jax.grad(lambda x: jnp.sum(definition(x=x, kernel=kernel, activation="silu", norm_size=16)))(x)
    np.testing.assert_allclose(d_x, expected, rtol=1e-5)


def test_transformations_and_reruns():
    """Under vmap, checkpoint and scan the same; twice the same bits."""
    arrays, d_y, _ = make_arguments((2, 16, 32), 4)
    run = functools.partial(short_convolution, activation="silu", norm_size=16)

    def by_row(x, kernel):
        return jax.vmap(lambda row: jax.checkpoint(run)(row[None], kernel)[0])(x)

    def by_scan(x, kernel):
        return jax.lax.scan(lambda carry, row: (carry, run(row[None], kernel)[0]), None, x)[1]

    expected = value_and_gradients(run, arrays, d_y)
    jax.tree.map(np.testing.assert_array_equal, value_and_gradients(run, arrays, d_y), expected)
    for function in (by_row, by_scan):
        found = value_and_gradients(function, arrays, d_y)
        assert all(relative_error(found[name], expected[name]) < 1e-6 for name in expected)


def test_programs_are_shortened_to_fill_a_card():
    programs = ConvolutionPrograms(64, KernelConfig(block=8))
    assert programs.shortened(columns=64, length=4096).tokens == 64
    assert programs.shortened(columns=8, length=4096).tokens == 16
    assert programs.shortened(columns=1, length=2).tokens == 16
    assert ConvolutionPrograms(64, KernelConfig(block=32)).shortened(columns=1, length=64).tokens == 32


def test_unsupported_says_why():
    x, kernel = jnp.zeros((1, 4, 8)), jnp.zeros((4, 8))
    assert unsupported_reason(x, kernel, None, activation="silu", norm_size=8) is None
    assert "float16" in unsupported_reason(x.astype(jnp.float16), kernel)
    assert "9 tokens" in unsupported_reason(x, jnp.zeros((9, 8)))
    assert "2048 channels" in unsupported_reason(x, kernel, norm_size=2048)
    with pytest.raises(NotImplementedError, match="'relu'"):
        short_convolution(x, kernel, activation="relu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    "shape, width, optional, packed, activation, norm_size",
    [
        ((2, 1000, 1024), 4, "", False, "silu", 128),
        ((2, 1024, 1024), 4, BOTH, True, "silu", 128),
        ((1, 777, 384), 4, BOTH, True, "silu", 64),
        ((1, 500, 200), 3, BOTH, False, "silu", None),
        ((1, 129, 96), 8, BOTH, True, None, 24),
        ((1, 640, 1024), 2, "", False, "silu", 1024),
        ((2, 640, 512), 1, "", True, "silu", 256),
    ],
)
def test_on_a_gpu(shape, width, optional, packed, activation, norm_size, dtype):
    arrays, d_y, ids = make_arguments(shape, width, optional, packed, dtype)
    found = errors(short_convolution, arrays, d_y, segment_ids=ids, activation=activation, norm_size=norm_size)
    limit = 1e-6 if dtype == jnp.float32 else 3e-3
    assert all(error < limit for error in found.values()), found


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_joined_on_a_gpu(dtype):
    """Bit by bit what each stream gives by itself, and columns behind the streams go through."""
    streams = [(512, 128, ""), (256, None, BOTH), (256, 64, "bias")]
    made = [make_arguments((2, 700, size), 4, optional, True, dtype) for size, _, optional in streams]
    epilogues = [Epilogue("silu", norm_size) for _, norm_size, _ in streams]
    rest = jnp.ones((2, 700, 40), dtype)
    x = jnp.concatenate([arrays.pop("x") for arrays, _, _ in made] + [rest], axis=-1)
    filters, ids = [arrays for arrays, _, _ in made], made[0][2]

    def by_one_call(x, filters):
        given = [ConvolutionBranch(**arrays, epilogue=epilogue) for arrays, epilogue in zip(filters, epilogues)]
        return fused_convolutions(x, given, segment_ids=ids)

    def one_by_one(x, filters):
        results, first = [], 0
        for arrays, epilogue, (size, _, _) in zip(filters, epilogues, streams):
            options = {"activation": epilogue.activation, "norm_size": epilogue.norm_size, "segment_ids": ids}
            results.append(short_convolution(x[..., first : first + size], **arrays, **options))
            first += size
        return tuple(results), x[..., first:]

    found, expected = (
        jax.jit(lambda x, filters, run=run: (lambda y, back: (y, back(y)))(*jax.vjp(run, x, filters)))(x, filters)
        for run in (by_one_call, one_by_one)
    )
    jax.tree.map(np.testing.assert_array_equal, found, expected)

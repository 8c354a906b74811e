"""The kernels of turned keys against float64, and a mixer that takes them against one that does not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.rotated_keys.api import RotationConfig, rotated_keys, unsupported_reason
from rnnlib.ops.rotated_keys import rotated_keys as operator
from rnnlib.ops.rotated_keys import rotated_keys_support
from tests.pallas_kernels.cases import relative_error


def make_arguments(tokens=(2, 7), heads=(1, 4), rank=2, size=16, pairs=4, dtype=jnp.float32, seed=0):
    random = np.random.default_rng(seed)
    rows, of_heads = (*tokens, heads[0], rank, size), (heads[1], rank, size)
    arrays = [random.standard_normal(shape) for shape in (rows, rows, of_heads, of_heads)]
    turns = random.uniform(-1.5, 1.5, (*tokens, heads[1], pairs))
    return [*(jnp.asarray(x, dtype) for x in arrays[:2]), *(jnp.asarray(x, jnp.float32) for x in (*arrays[2:], turns))]


def formula(query, key, query_bias, key_bias, turns):
    """Complex numbers: each pair is one, and turns by a phase."""
    heads, half, pairs = turns.shape[-2], query.shape[-1] // 2, turns.shape[-1]
    padding = [(0, 0)] * (turns.ndim - 1) + [(0, half - pairs)]
    phase = jnp.exp(2j * jnp.pi * jnp.pad(turns, padding))[..., None, :, :]

    def turned(x, bias):
        x = jnp.swapaxes(jnp.repeat(x, heads // x.shape[-3], axis=-3) + bias, -2, -3)
        pair = jax.lax.complex(x[..., :half], x[..., half:]) * phase
        return jnp.concatenate([pair.real, pair.imag], axis=-1)

    return turned(query, query_bias), turned(key, key_bias)


def value_and_gradients(function, arguments, cotangents):
    results, pull_back = jax.vjp(function, *arguments)
    return [*results, *pull_back(tuple(d.astype(y.dtype) for d, y in zip(cotangents, results)))]


def cotangents_of(arguments, dtype=jnp.float32):
    random, (query, *_, turns) = np.random.default_rng(1), arguments
    shape = (*query.shape[:-3], query.shape[-2], turns.shape[-2], query.shape[-1])
    return [jnp.asarray(random.standard_normal(shape), dtype) for _ in range(2)]


def exact(arguments, cotangents):
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: x.astype(jnp.float64), (arguments, cotangents))
        return value_and_gradients(formula, *wide)


@settings(deadline=None, max_examples=12)
@given(
    tokens=st.sampled_from([(1,), (2, 7), (1, 12)]),
    heads=st.sampled_from([(1, 1), (1, 4), (2, 4), (4, 4)]),
    rank=st.sampled_from([1, 2, 3, 4]),
    sizes=st.sampled_from([(16, 4), (16, 8), (8, 1)]),
    seed=st.integers(0, 1000),
)
def test_kernels_are_the_definition(tokens, heads, rank, sizes, seed):
    arguments = make_arguments(tokens, heads, rank, *sizes, seed=seed)
    cotangents = cotangents_of(arguments)
    found = value_and_gradients(rotated_keys, arguments, cotangents)
    expected = exact(arguments, cotangents)
    assert [x.shape for x in found] == [x.shape for x in expected]
    assert max(relative_error(x, y) for x, y in zip(found, expected, strict=True)) < 3e-6


def test_bfloat16_is_rounded_once():
    arguments = make_arguments((3, 5), dtype=jnp.bfloat16)
    cotangents = cotangents_of(arguments, jnp.bfloat16)
    found, expected = value_and_gradients(rotated_keys, arguments, cotangents), exact(arguments, cotangents)
    assert [x.dtype for x in found] == [jnp.bfloat16] * 4 + [jnp.float32] * 3
    for x, y in zip(found[:4], expected[:4]):
        np.testing.assert_allclose(np.asarray(x, np.float64), y, rtol=2.0**-8, atol=1e-5)
    assert max(relative_error(x, y) for x, y in zip(found[4:6], expected[4:6])) < 3e-6


def test_the_turns_gradient_is_that_of_the_rounded_results():
    arguments = make_arguments((3, 5), dtype=jnp.bfloat16)
    cotangents = cotangents_of(arguments, jnp.bfloat16)
    *turned, _, _, _, _, d_turns = value_and_gradients(rotated_keys, arguments, cotangents)
    half, pairs = arguments[0].shape[-1] // 2, arguments[-1].shape[-1]
    expected = np.zeros(d_turns.shape)
    for y, d_y in zip(turned, cotangents):
        y, d_y = np.asarray(y, np.float64), np.asarray(d_y, np.float64)
        both = d_y[..., half:] * y[..., :half] - d_y[..., :half] * y[..., half:]
        expected += 2 * np.pi * both[..., :pairs].sum(axis=-3)
    assert relative_error(d_turns, expected) < 3e-6


def test_results_do_not_depend_on_how_a_call_is_cut():
    arguments = make_arguments((37,))
    cotangents = cotangents_of(arguments)
    for config in (RotationConfig(1, 1, 64), RotationConfig(100, 3, 3)):
        found = value_and_gradients(lambda *x: rotated_keys(*x, config=config), arguments, cotangents)
        expected = value_and_gradients(rotated_keys, arguments, cotangents)
        assert max(relative_error(x, y) for x, y in zip(found, expected, strict=True)) < 1e-6


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"heads": (1, 6)}, "6 value heads of 1 key heads"),
        ({"size": 24}, "keys of 24 channels"),
        ({"pairs": 9}, "9 pairs"),
        ({"dtype": jnp.float16}, "float16"),
    ],
)
def test_refusals_are_reasons(change, words):
    arguments = make_arguments(**change)
    reason = unsupported_reason(*arguments)
    assert reason is not None and words in reason
    with pytest.raises(NotImplementedError, match=words):
        rotated_keys(*arguments)
    assert not rotated_keys_support(*arguments)


def test_the_operator_has_both_forms_and_second_derivatives():
    arguments = make_arguments()

    def loss(implementation):
        def run(*arguments):
            query, key = operator(*arguments, implementation=implementation)
            return jnp.sum(jnp.sin(query) * key**2)

        return run

    every = tuple(range(5))
    by_kernel, by_xla = (jax.grad(loss(name), every)(*arguments) for name in ("triton", "xla"))
    assert max(relative_error(x, y) for x, y in zip(by_kernel, by_xla, strict=True)) < 1e-5
    tangents = [jnp.ones_like(x) for x in arguments]
    second = [jax.jvp(jax.grad(loss(name), every), tuple(arguments), tuple(tangents))[1] for name in ("triton", "xla")]
    assert max(relative_error(x, y) for x, y in zip(*second, strict=True)) < 1e-5

"""Gates of exactly 0, and gates that are equal without being tied."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import operators
from rnnlib import ops
from tests.compiling import loop_jit
from tests.pallas_kernels import mosaic_interpreter
from tests.pallas_kernels.cases import CHANNEL, NO, SCALAR, SHARED, Case, call_operator, make_inputs
from tests.pallas_kernels.delta_rule.test_mosaic_gpu import SIZES, eagerly, schedule_of
from tests.selection import mostly_slow

SMALL = (1, 70, 1, 2, 16, 16)
CASES = {
    "two_gates": Case(SMALL),
    "tied": Case(SMALL, write=SHARED),
    "tied_without_decay": Case(SMALL, NO, write=SHARED),
    "write_key": Case(SMALL, write_key=True),
    "tied_write_key_channel_decay": Case(SMALL, CHANNEL, write=SHARED, write_key=True),
    "channel_erase": Case(SMALL, CHANNEL, CHANNEL, SCALAR),
    "write_alone": Case(SMALL, CHANNEL, NO, SCALAR),
    "linear_attention": Case(SMALL, CHANNEL, online=False),
}


def with_closed_gates(case: Case) -> dict[str, jax.Array]:
    """Inputs whose gates of one number a token are 0 at every third token, in all heads at every sixth."""
    arrays, _ = make_inputs(case)
    tokens = np.arange(case.shape[1])[:, None]
    is_closed = (tokens % 6 == 0) | ((tokens % 3 == 0) & (np.arange(case.shape[3]) == 0))
    for name in ("erase", "write"):
        if name in arrays and arrays[name].ndim == 3:
            arrays[name] = jnp.where(is_closed[None], 0, arrays[name]).astype(arrays[name].dtype)
    return arrays


def gradients(case: Case, arrays: dict[str, jax.Array], module, jit=jax.jit, **options) -> dict[str, np.ndarray]:
    random = np.random.default_rng(3)
    batch, length, _, heads, key_size, value_size = case.shape
    of_out = random.standard_normal((batch, length, heads, value_size))
    of_state = random.standard_normal((batch, heads, key_size, value_size))

    def loss(arrays):
        out, state = call_operator(module, case, arrays, **options)
        return jnp.vdot(out.astype(state.dtype), of_out.astype(state.dtype)) + jnp.vdot(
            state, of_state.astype(state.dtype)
        )

    return jax.tree.map(lambda x: np.asarray(x, np.float64), jit(jax.grad(loss))(arrays))


def assert_zero_where_the_definition_is(case: Case, found: dict[str, np.ndarray], arrays) -> None:
    with jax.enable_x64(True):
        doubles = {name: x.astype(jnp.float64) for name, x in arrays.items()}
        expected = gradients(case, doubles, ops, jit=loop_jit, implementation="scan")
    zeros = sum(int((expected[name] == 0).sum()) for name in ("k", "v", "write_key") if name in expected)
    assert zeros > 0
    for name, reference in expected.items():
        assert np.all(found[name][reference == 0] == 0), name
        assert np.any(found[name] != 0), name


@pytest.mark.parametrize("name", mostly_slow(CASES, ["two_gates", "tied_write_key_channel_decay", "write_alone"]))
def test_gradients_are_exactly_zero_where_the_definitions_are(name):
    case = CASES[name]
    arrays = with_closed_gates(case)
    assert_zero_where_the_definition_is(case, gradients(case, arrays, operators), arrays)
    for implementation in ("chunked", "scan"):
        found = gradients(case, arrays, ops, implementation=implementation)
        assert_zero_where_the_definition_is(case, found, arrays)


@pytest.mark.parametrize("write_key", mostly_slow([False, True], [False]))
def test_gradients_of_mosaic_gpu_are_exactly_zero_too(write_key):
    """There a tied gate of 0 counts as 2^-32 in between."""
    mosaic_interpreter.install()
    case = Case((1, 66, 1, 1, *SIZES), write=SHARED, write_key=write_key, dtype=jnp.bfloat16)
    arrays = with_closed_gates(case)
    found = gradients(case, arrays, operators, jit=eagerly, config=schedule_of(case, 1))
    assert_zero_where_the_definition_is(case, found, arrays)


@pytest.mark.parametrize("implementation", ["scan", "chunked", "triton"])
def test_equal_gates_are_not_tied(implementation):
    """One array in both places is what two equal arrays are, whatever objects they are; `beta` alone is tied."""
    case = CASES["tied"]
    arrays, _ = make_inputs(case)
    gate = arrays.pop("erase")

    def run(arrays, erase, write):
        return ops.gated_delta_rule(**arrays, erase=erase, write=write, implementation=implementation)

    once, twice = jax.jit(lambda x, g: run(x, g, g)), jax.jit(run)
    copy = jnp.array(gate, copy=True)
    jax.tree.map(np.testing.assert_array_equal, once(arrays, gate), twice(arrays, gate, copy))
    both = jax.jit(lambda x, g: ops.gated_delta_rule(**x, beta=g, implementation=implementation))(arrays, gate)
    for found, expected in zip(both, once(arrays, gate)):
        np.testing.assert_allclose(
            np.asarray(found, np.float32), np.asarray(expected, np.float32), rtol=1e-2, atol=1e-2
        )


def test_beta_comes_alone():
    x, gate = jnp.ones((1, 4, 1, 16)), jnp.ones((1, 4, 1))
    for name in ("erase", "write"):
        with pytest.raises(ValueError, match=f"beta is short for .*, so it can't be given with {name}"):
            ops.gated_delta_rule(x, x, x, beta=gate, **{name: gate})

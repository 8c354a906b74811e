"""A token whose write waits beside the state is the same token, and the state comes out the same."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import operators
from pallas_kernels.delta_rule.delayed_state import PERIOD, without_pending
from pallas_kernels.delta_rule.delayed_update import delayed_token, flush
from tests.pallas_kernels.cases import CHANNEL, NO, SCALAR, SHARED, Case, kernel_of, make_inputs

HALF = {"dtype": jnp.bfloat16, "gate_dtype": jnp.float32}
CASES = {
    "delta_rule": Case((2, 11, 2, 2, 32, 16), decay=NO, erase=SHARED, write=SHARED, **HALF),
    "scalar_decay_groups_of_heads": Case((2, 11, 2, 4, 16, 32), decay=SCALAR, erase=SHARED, write=SHARED, **HALF),
    "channel_decay": Case((2, 11, 2, 2, 32, 32), decay=CHANNEL, erase=SHARED, write=SHARED, extreme=True, **HALF),
    "channel_gates_write_key": Case((1, 9, 1, 2, 16, 16), decay=CHANNEL, erase=CHANNEL, write=CHANNEL, write_key=True),
    "no_gates_from_zero": Case((1, 9, 1, 1, 16, 16), decay=NO, erase=NO, write=NO, initial_state=False),
    "linear_attention": Case((2, 9, 1, 2, 16, 32), decay=SCALAR, erase=NO, write=SCALAR, online=False, **HALF),
}
LARGE = {
    "scalar_decay": Case((64, 10, 8, 8, 128, 128), decay=SCALAR, erase=SHARED, write=SHARED, **HALF),
    "channel_decay": Case((64, 10, 8, 8, 128, 128), decay=CHANNEL, erase=SHARED, write=SHARED, extreme=True, **HALF),
    "write_key": Case((64, 10, 4, 8, 64, 128), decay=SCALAR, erase=SCALAR, write=SCALAR, write_key=True, **HALF),
    "linear_attention": Case((64, 10, 8, 8, 128, 128), decay=CHANNEL, erase=NO, write=NO, online=False, **HALF),
}


def tokens_and_state(case: Case):
    """The arguments of each token, and the first state."""
    arguments, _ = make_inputs(case)
    batch, length, _, heads, key_size, value_size = case.shape
    state = arguments.pop("initial_state", None)
    state = jnp.zeros((batch, heads, key_size, value_size), jnp.float32) if state is None else state
    if case.write == SHARED:
        arguments["write"] = arguments["erase"]
    if "log_decay" in arguments:  # a hard reset of every state
        arguments["log_decay"] = arguments["log_decay"].at[:, 5].set(-jnp.inf)
    return [{name: x[:, t : t + 1] for name, x in arguments.items()} for t in range(length)], state


def first_delayed(case: Case, token, state):
    return without_pending(state, token.get("write_key", token["k"]).astype(case.dtype), token.get("log_decay"))


def by_kernels(case: Case, tolerance: float) -> None:
    tokens, state = tokens_and_state(case)
    delayed = first_delayed(case, tokens[0], state)
    step = jax.jit(functools.partial(delayed_token, online=case.online))
    plain = jax.jit(kernel_of(case))
    for t, token in enumerate(tokens):
        out, state = plain(**token, initial_state=state)
        found, delayed = step(**token, delayed=delayed)
        assert found.dtype == out.dtype and int(delayed.num_pending) == (t + 1) % PERIOD
        flushed = flush(delayed)
        np.testing.assert_array_equal(flushed, state)
        out, found = out.astype(jnp.float32), found.astype(jnp.float32)
        assert float(jnp.abs(found - out).max()) <= tolerance * max(1.0, float(jnp.abs(out).max()))
    assert (np.asarray(delayed.state) != np.asarray(state)).any() == bool(delayed.num_pending), "seldom stored"


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_outputs_and_states_are_those_of_the_plain_step(case):
    # Interpreted, XLA adds the output's products in an order of its own.
    by_kernels(case, 2**-8 if case.dtype == jnp.bfloat16 else 1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("case", LARGE.values(), ids=LARGE)
def test_on_a_gpu_outputs_and_states_have_the_same_bits(case):
    by_kernels(case, 0.0)


def test_a_settled_state_is_the_same_and_stays():
    case = CASES["channel_decay"]
    tokens, state = tokens_and_state(case)
    delayed = first_delayed(case, tokens[0], state)
    np.testing.assert_array_equal(flush(delayed), state)
    # What rows say that no longer wait has no effect.
    stale = delayed._replace(keys=delayed.keys + jnp.nan, values=delayed.values + jnp.nan)
    np.testing.assert_array_equal(flush(stale), state)
    out, _ = delayed_token(**tokens[0], delayed=stale)
    assert jnp.isfinite(out.astype(jnp.float32)).all()


def test_what_does_not_serve_is_named(unchecked_shapes):
    tokens, state = tokens_and_state(CASES["delta_rule"])
    delayed = first_delayed(CASES["delta_rule"], tokens[0], state)
    two = {name: jnp.repeat(x, 2, axis=1) for name, x in tokens[0].items()}
    with pytest.raises(NotImplementedError, match=r"delayed_token: .* do not support 2 tokens \(a single one\)"):
        delayed_token(**two, delayed=delayed)
    q, k, v = (jnp.zeros((1, 1, 1, 24)),) * 3
    assert "key size 24 with value size 24" in str(operators.delayed_update.unsupported_reason(q, k, v))

"""One token whose write waits in a Mosaic GPU kernel: interpreted, with races looked for, and beside the plain step."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from pallas_kernels import operators
from pallas_kernels.delta_rule.delayed_state import PERIOD, without_pending
from pallas_kernels.delta_rule.delayed_update import delayed_token, flush
from pallas_kernels.delta_rule.mosaic_gpu import decode_delayed as kernel
from rnnlib import ops
from rnnlib.layers import mixer_preset
from rnnlib.ops import delayed_update
from rnnlib.ops.gated_delta_rule.reference import DeltaRuleInputs
from rnnlib.ops.gates import ResolvedGates
from tests.pallas_kernels import mosaic_interpreter
from tests.pallas_kernels.cases import CHANNEL, NO, SCALAR, SHARED, Case, kernel_of, relative_error
from tests.pallas_kernels.delta_rule.test_decode_delayed import HALF, LARGE, first_delayed, tokens_and_state
from tests.pallas_kernels.test_lowering import H200, distinct_kernels, lowered_text
from tests.selection import mostly_slow

# Twice through all counts of pending writes: the second time they are those of the tokens before.
CASES = {
    "scalar_decay": Case((3, 9, 2, 2, 128, 128), decay=SCALAR, erase=SHARED, write=SHARED, **HALF),
    "channel_decay": Case((3, 9, 1, 1, 128, 128), decay=CHANNEL, erase=SHARED, write=SHARED, extreme=True, **HALF),
    "no_decay_two_blocks": Case((2, 5, 1, 2, 128, 256), decay=NO, erase=SCALAR, write=NO, **HALF),
    "channel_gates_write_key": Case(
        (1, 5, 2, 4, 128, 128), decay=CHANNEL, erase=CHANNEL, write=CHANNEL, write_key=True
    ),
    "linear_attention": Case((2, 5, 1, 2, 128, 128), decay=SCALAR, erase=NO, write=SCALAR, online=False, **HALF),
    "linear_attention_no_decay": Case((2, 5, 2, 2, 128, 128), decay=NO, erase=NO, write=NO, online=False),
}


def by_kernels(case: Case) -> None:
    """Each token beside the kernel that stores the state each time."""
    tokens, state = tokens_and_state(case)
    delayed = first_delayed(case, tokens[0], state)
    step = jax.jit(functools.partial(delayed_token, online=case.online, backend="mosaic"))
    plain = jax.jit(kernel_of(case))
    for t, token in enumerate(tokens):
        out, state = plain(**token, initial_state=state)
        found, delayed = step(**token, delayed=delayed)
        assert found.dtype == out.dtype and int(delayed.num_pending) == (t + 1) % PERIOD
        # Both are float32 sums that are rounded once.
        tolerance = 2**-8 if out.dtype == jnp.bfloat16 else 1e-5
        assert relative_error(np.asarray(found, np.float64), np.asarray(out, np.float64)) < tolerance
        assert relative_error(np.asarray(flush(delayed)), np.asarray(state)) < 1e-5
    assert (np.asarray(delayed.state) != np.asarray(state)).any() == bool(delayed.num_pending), "seldom stored"


@pytest.fixture
def one_program(monkeypatch):
    """One program goes over all states, which are more than there is memory for.

    Several would store the same keys in a row that their heads share, which is a race to the interpreter.
    """
    mosaic_interpreter.install()
    monkeypatch.setattr(kernel, "NUM_SMS", 1)
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.mark.parametrize("name", mostly_slow(CASES, ("scalar_decay", "channel_gates_write_key")))
def test_outputs_and_states_are_those_of_the_plain_step(name, one_program, capsys):
    by_kernels(CASES[name])
    assert "RACE" not in "".join(capsys.readouterr())


@pytest.mark.parametrize("backend", ["triton", "mosaic"])
@pytest.mark.parametrize("name", mostly_slow(CASES, ("channel_gates_write_key", "linear_attention_no_decay")))
def test_outputs_and_the_last_state_are_those_of_the_scan_in_float64(name, backend, request):
    case = dataclasses.replace(CASES[name], dtype=jnp.float32)
    _, _, heads, value_heads, _, value_size = case.shape
    if value_heads * value_size > heads * kernel.CHANNELS:  # else a program for each state
        request.getfixturevalue("one_program")
    mosaic_interpreter.install()
    tokens, state = tokens_and_state(case)
    with jax.enable_x64(True):
        joined = {key: jnp.concatenate([x[key].astype(jnp.float64) for x in tokens], axis=1) for key in tokens[0]}
        definition = functools.partial(getattr(ops, case.operator), implementation="scan")
        expected = definition(**joined, initial_state=state.astype(jnp.float64))
        expected_out, expected_state = map(np.asarray, expected)
    delayed, outputs = first_delayed(case, tokens[0], state), []
    for token in tokens:
        out, delayed = delayed_token(**token, delayed=delayed, online=case.online, backend=backend)
        outputs.append(out)
    assert relative_error(jnp.concatenate(outputs, axis=1), expected_out) < 1e-5
    assert relative_error(flush(delayed), expected_state) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name, case in LARGE.items() if case.shape[4] == kernel.CHANNELS])
def test_on_a_gpu_outputs_and_states_are_those_of_the_plain_step(name):
    by_kernels(LARGE[name])


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu_few_states_are_served(name):
    by_kernels(CASES[name])


def test_rows_that_no_longer_wait_have_no_effect():
    mosaic_interpreter.install()
    case = CASES["scalar_decay"]
    tokens, state = tokens_and_state(case)
    stale = first_delayed(case, tokens[0], state)
    stale = stale._replace(keys=stale.keys + jnp.nan, values=stale.values + jnp.nan, decays=stale.decays + jnp.nan)
    out, _ = delayed_token(**tokens[0], delayed=stale, backend="mosaic")
    assert jnp.isfinite(out.astype(jnp.float32)).all()


def test_calls_may_be_mapped_over(one_program):
    case = CASES["linear_attention"]
    tokens, state = tokens_and_state(case)
    run = functools.partial(delayed_token, online=False, backend="mosaic")
    calls = [(token, first_delayed(case, token, state * n)) for n, token in enumerate(tokens[:2])]
    token, delayed = jax.tree.map(lambda *x: jnp.stack(x), *calls)
    found = jax.vmap(lambda token, delayed: run(**token, delayed=delayed))(token, delayed)
    for n, (token, delayed) in enumerate(calls):
        expected = run(**token, delayed=delayed)
        jax.tree.map(lambda x, y: np.testing.assert_array_equal(x[n], y), found, expected)


@pytest.mark.parametrize("implementation, channels, kernels", [(None, 128, 1), ("triton", 128, 0), (None, 64, 0)])
def test_layers_on_a_hopper_card_take_it_and_share_it(implementation, channels, kernels):
    config, heads = mixer_preset("gated_deltanet", implementation=implementation), 256 // channels
    build = lambda: config.build(256, heads, rngs=nnx.Rngs(0), dtype=jnp.bfloat16)  # noqa: E731
    graph, state = nnx.split(nnx.eval_shape(build))

    def tokens(state, x):
        layer = nnx.merge(graph, state)
        for _ in range(2):
            x, cache = layer(x, cache=layer.delay_updates(layer.init_cache(256, 128)))
        return x, cache.state

    text = lowered_text(tokens, state, jax.ShapeDtypeStruct((256, 1, 256), jnp.bfloat16))
    assert len(distinct_kernels(text)) == kernels
    assert text.count('name = "delta_decode_delayed"') == (0 if kernels else 2)


@pytest.mark.parametrize("check_vma, kernels", [(True, 0), (False, 1)])
def test_inside_shard_map_that_checks_what_varies_the_other_kernel_serves(check_vma, kernels):
    def tokens(state, q, gate):
        token = DeltaRuleInputs(q, q, q, ResolvedGates(gate, gate), None, -gate)
        delayed = without_pending(state, q, gate)
        out, delayed = delayed_update.delayed_token(token, delayed, scale=None)
        return out, delayed_update.flush(delayed)

    run = jax.shard_map(tokens, mesh=H200, in_specs=P("x"), out_specs=P("x"), check_vma=check_vma)
    shapes = {"state": (8, 2, 128, 128), "q": (8, 1, 2, 128), "gate": (8, 1, 2)}
    text = lowered_text(run, *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes.values()))
    assert len(distinct_kernels(text)) == kernels
    assert text.count('name = "delta_decode_delayed"') == 1 - kernels


def test_what_does_not_serve_is_named(unchecked_shapes):
    q = k = v = jnp.zeros((1, 1, 1, 128))
    two, wide = (jnp.zeros(shape) for shape in ((1, 2, 1, 128), (1, 1, 1, 256)))
    assert (
        operators.delayed_update.unsupported_reason(q, k, v, backend="mosaic")
        == "this device (it runs on Hopper cards)"
    )
    with jax.sharding.use_abstract_mesh(H200):
        assert operators.delayed_update.unsupported_reason(q, k, wide, backend="mosaic") is None
        assert "2 tokens" in str(operators.delayed_update.unsupported_reason(two, two, two, backend="mosaic"))
        reason = "key size 256 with value size 128 (128 and a multiple of it)"
        assert operators.delayed_update.unsupported_reason(wide, wide, v, backend="mosaic") == reason
    with pytest.raises(NotImplementedError, match=re.escape(f"the Mosaic GPU kernels do not support {reason}")):
        delayed_token(wide, wide, v, delayed=without_pending(jnp.zeros((1, 1, 256, 128)), wide, None), backend="mosaic")
    with pytest.raises(ValueError, match=re.escape("backend is 'cuda', expected 'triton' or 'mosaic'")):
        delayed_token(q, k, v, delayed=None, backend="cuda")

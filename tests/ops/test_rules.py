"""Every implementation of the recurrent rules against their definition: the scan in float64."""

import dataclasses
import unittest
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings

from rnnlib import ops
from rnnlib.ops import chunk, chunk_blocks
from rnnlib.ops.triangular import unit_lower_inverse
from tests.ops.rules import (
    Case,
    assert_matches_reference,
    cases,
    outputs_and_gradients,
    reference,
    relative_error,
    weighted_loss,
)
from tests.selection import mostly_slow

PLAIN = Case(
    shape=(1, 150, 2, 4, 20, 16),
    decay="head",
    erase="head",
    write="head",
    write_key=None,
    segments="one",
    values="random",
    seed=0,
)
CHANNELS = dataclasses.replace(PLAIN, decay="channel", erase="channel", write="head", write_key="value")
RULE = jax.jit(ops.gated_delta_rule, static_argnames=("implementation", "chunk_size"))
HARDEST = (
    dataclasses.replace(CHANNELS, values="extreme", segments="random"),
    dataclasses.replace(CHANNELS, values="repeated keys"),
    dataclasses.replace(CHANNELS, values="zero keys", segments="every"),
)


@settings(max_examples=40)
@given(case=cases())
@example(case=HARDEST[0])
@example(case=HARDEST[1])
@example(case=HARDEST[2])
def test_chunked_delta_rule_is_the_scan(case):
    assert_matches_reference(ops.gated_delta_rule, case, "chunked", 2e-5)


@settings(max_examples=20)
@given(case=cases())
@example(case=HARDEST[0])
def test_chunked_linear_attention_is_the_scan(case):
    assert_matches_reference(ops.linear_attention, case, "chunked", 1e-5)


def test_float32_scan_is_the_float64_scan():
    case = HARDEST[0]
    assert_matches_reference(ops.gated_delta_rule, case, "scan", 1e-5)


@pytest.mark.parametrize("implementation", mostly_slow(["scan", "chunked"], ["chunked"]))
def test_bfloat16(implementation):
    """Inputs and output are bfloat16, states and accumulation float32: the error is that of rounding the results."""
    case = dataclasses.replace(PLAIN, segments="random")
    assert_matches_reference(ops.gated_delta_rule, case, implementation, 1e-2, dtype=jnp.bfloat16)
    assert_matches_reference(ops.linear_attention, case, implementation, 1e-2, dtype=jnp.bfloat16)


@pytest.mark.parametrize("rule", mostly_slow([ops.gated_delta_rule, ops.linear_attention], [ops.gated_delta_rule]))
def test_float64_chunks_are_exact(x64, rule):
    case = dataclasses.replace(CHANNELS, segments="random")
    arguments = case.arguments(jnp.float64, delta=rule is ops.gated_delta_rule)
    expected = reference(rule, arguments, case.segment_ids())
    for chunk_size in (16, 64):
        actual = outputs_and_gradients(rule, arguments, case.segment_ids(), "chunked", chunk_size)
        assert actual["out"].dtype == actual["state"].dtype == jnp.float64
        assert max(relative_error(actual[name], expected[name]) for name in expected) < 1e-12


@pytest.mark.parametrize("matrices", mostly_slow([1, 8], [8]))
@pytest.mark.parametrize("case", [HARDEST[0], PLAIN], ids=["channels", "heads"])
def test_blocks_of_a_tpu_are_the_scan(monkeypatch, case, matrices):
    """The loop over blocks of chunks, rows and heads that a TPU runs: one chunk in a block, and all sizes above 1."""
    monkeypatch.setattr(chunk, "platform", lambda: "tpu")  # whose chunks have 128 tokens
    monkeypatch.setattr(chunk_blocks, "platform", lambda: "tpu")
    monkeypatch.setattr(chunk_blocks, "_MATRICES", matrices)
    jax.clear_caches()
    case = dataclasses.replace(case, shape=(2, 150, 2, 4, 20, 16), segments="random")
    assert_matches_reference(ops.gated_delta_rule, case, "chunked", 2e-5)
    jax.clear_caches()


def test_scan_is_the_recurrence_of_the_papers():
    """The scan against the recurrence in loops over heads and tokens, as it is printed."""
    case = dataclasses.replace(CHANNELS, shape=(2, 37, 2, 4, 8, 12), write="channel", segments="random")
    arguments = case.arguments(jnp.float32, delta=True)
    out, final = ops.gated_delta_rule(**arguments, segment_ids=case.segment_ids(), implementation="scan", scale=0.7)
    a = {name: np.asarray(x, np.float64) for name, x in arguments.items()}
    ids = np.asarray(case.segment_ids())
    batch, length, value_heads, _ = a["v"].shape
    for b in range(batch):
        for j in range(value_heads):
            h = j // (value_heads // a["q"].shape[2])
            state = a["initial_state"][b, j]
            for t in range(length):
                if t > 0 and ids[b, t] != ids[b, t - 1]:
                    state = np.zeros_like(state)
                decayed = np.diag(np.exp(a["log_decay"][b, t, j])) @ state
                erased = a["erase"][b, t, j] * a["k"][b, t, h]
                written = a["write"][b, t, j] * a["v"][b, t, j]
                state = decayed + np.outer(a["write_key"][b, t, j], written - decayed.T @ erased)
                np.testing.assert_allclose(out[b, t, j], 0.7 * state.T @ a["q"][b, t, h], rtol=2e-4, atol=2e-6)
            np.testing.assert_allclose(final[b, j], state, rtol=2e-4, atol=2e-6)


@pytest.mark.parametrize("implementation", ["scan", "chunked"])
def test_segments_are_separate_documents(implementation):
    """A packed row gives what its documents give alone; the final state is that of the last."""
    arguments = PLAIN.arguments(jnp.float32, delta=True)
    del arguments["initial_state"]
    lengths = (1, 63, 64, 22)
    ids = jnp.asarray(np.repeat(np.arange(4), lengths), jnp.int32)[None]
    out, final = RULE(**arguments, segment_ids=ids, implementation=implementation)
    start = 0
    for length in lengths:
        part = {name: x[:, start : start + length] for name, x in arguments.items()}
        alone, state = RULE(**part, implementation=implementation)
        np.testing.assert_allclose(out[:, start : start + length], alone, atol=1e-5)
        start += length
    np.testing.assert_allclose(final, state, atol=1e-5)


@pytest.mark.parametrize("implementation", ["scan", "chunked"])
def test_state_carries_a_sequence_over_a_cut(implementation):
    arguments = PLAIN.arguments(jnp.float32, delta=True)
    whole, final = RULE(**arguments, implementation=implementation)
    state = arguments.pop("initial_state")
    outs = []
    for part in (slice(0, 1), slice(1, 70), slice(70, 150)):
        piece = {name: x[:, part] for name, x in arguments.items()}
        out, state = RULE(**piece, initial_state=state, implementation=implementation)
        outs.append(out)
    np.testing.assert_allclose(jnp.concatenate(outs, axis=1), whole, atol=1e-5)
    np.testing.assert_allclose(state, final, atol=1e-5)


def test_gates_reduce_to_each_other():
    """GDN-2 with tied gates is KDA, KDA with equal channels is GDN, GDN without decay is DeltaNet."""
    arguments = dataclasses.replace(CHANNELS, write_key=None).arguments(jnp.float32, delta=True)
    q, k, v = arguments["q"], arguments["k"], arguments["v"]
    beta, head_decay = arguments["erase"][..., 0], arguments["log_decay"][..., 0]
    channel_decay = arguments["log_decay"]
    tied = {"erase": beta[..., None].repeat(20, -1), "write": beta}
    kda = RULE(q, k, v, beta=beta, log_decay=channel_decay)[0]
    np.testing.assert_allclose(RULE(q, k, v, **tied, log_decay=channel_decay)[0], kda, atol=1e-6)
    gdn = RULE(q, k, v, beta=beta, log_decay=head_decay)[0]
    np.testing.assert_allclose(
        RULE(q, k, v, beta=beta, log_decay=head_decay[..., None].repeat(20, -1))[0], gdn, atol=2e-6
    )
    deltanet = RULE(q, k, v, beta=beta)[0]
    np.testing.assert_allclose(RULE(q, k, v, beta=beta, log_decay=jnp.zeros_like(head_decay))[0], deltanet, atol=1e-6)
    assert relative_error(kda, gdn) > 1e-2 and relative_error(gdn, deltanet) > 1e-2


@pytest.mark.parametrize("values", ["near one", "random"])
def test_unit_lower_inverse(values, x64):
    """Exact for equal keys, where the powers of L grow to thousands; its derivatives are the inverse's."""
    lower = np.ones((3, 64, 64)) if values == "near one" else np.random.default_rng(0).standard_normal((3, 64, 64)) / 8
    lower = np.tril(lower, -1)
    expected = np.linalg.inv(np.eye(64) + lower)
    tolerance = 1e-6 if values == "near one" else 1e-5
    assert relative_error(unit_lower_inverse(jnp.asarray(lower, jnp.float32)), expected) < tolerance
    weight = np.random.default_rng(1).standard_normal((3, 64, 64))
    _, pullback = jax.vjp(unit_lower_inverse, jnp.asarray(lower))
    (gradient,) = pullback(weight)
    assert relative_error(gradient, np.tril(-expected.mT @ weight @ expected.mT, -1)) < 1e-9
    _, tangent = jax.jvp(unit_lower_inverse, (jnp.asarray(lower),), (jnp.asarray(weight),))
    assert relative_error(tangent, -expected @ np.tril(weight, -1) @ expected) < 1e-9


def test_backward_keeps_boundary_states_only():
    """Beside its arguments the chunked backward keeps one state a chunk, and nothing of a size of tokens."""
    arguments = dataclasses.replace(PLAIN, shape=(1, 256, 2, 4, 20, 16)).arguments(jnp.float32, delta=True)
    del arguments["initial_state"]
    _, backward = jax.vjp(lambda a: ops.gated_delta_rule(**a, implementation="chunked")[0], arguments)
    kept = sorted(x.shape for x in jax.tree.leaves(backward) if hasattr(x, "shape") and x.size > 1)
    given = [x.shape for x in arguments.values()]
    for shape in given:
        kept.remove(shape)
    assert kept == [(4, 1, 2, 2, 20, 16)], kept


def test_transformations():
    """jit, vmap, grad and checkpoint compose with the chunked form."""
    arguments = PLAIN.arguments(jnp.float32, delta=True)
    two = jax.tree.map(lambda x: jnp.stack([x, x[:, ::1] * 0.5]), arguments)

    def loss(arguments):
        return jnp.sum(ops.gated_delta_rule(**arguments, implementation="chunked")[0] ** 2)

    mapped = jax.jit(jax.vmap(jax.grad(jax.checkpoint(loss))))(two)
    for i in range(2):
        alone = jax.jit(jax.grad(loss))(jax.tree.map(lambda x: x[i], two))
        assert max(relative_error(mapped[name][i], alone[name]) for name in alone) < 1e-5


def test_shard_map_over_batch_and_heads():
    """Each shard computes its own batch entries and heads, forward and backward; what varies over them is tracked."""
    mesh = jax.make_mesh((1, 1), ("batch", "heads"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    arguments = dataclasses.replace(PLAIN, shape=(1, 20, 2, 4, 8, 8)).arguments(jnp.float32, delta=True)
    spec = jax.sharding.PartitionSpec("batch", None, "heads")
    state_spec = jax.sharding.PartitionSpec("batch", "heads")
    in_specs = {name: spec for name in arguments} | {"initial_state": jax.sharding.PartitionSpec()}  # one for all

    def rule(arguments):
        return ops.gated_delta_rule(**arguments, implementation="chunked")

    sharded = jax.shard_map(rule, mesh=mesh, in_specs=(in_specs,), out_specs=(spec, state_spec))
    found, alone = (jax.jit(jax.grad(lambda a: weighted_loss(*f(a))))(arguments) for f in (sharded, rule))
    assert max(relative_error(found[name], alone[name]) for name in alone) < 1e-6


@pytest.mark.parametrize("operator", ["gated_delta_rule", "ridge_solve", "diagonal_preconditioner", "exact", "dplr"])
@pytest.mark.parametrize("implementation", ["scan", "chunked"])
def test_states_vary_as_tokens_do(operator, implementation):
    """Each operator can be traced in `jax.shard_map` as it is by default, from no state at all."""
    mesh = jax.make_mesh((1,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jax.ShapeDtypeStruct((1, 20, 1, 4), jnp.float32)
    options = {"implementation": implementation}
    run = {
        "gated_delta_rule": lambda x: ops.gated_delta_rule(x, x, x, **options),
        "ridge_solve": lambda x: ops.ridge_solve(x, x, iterations=2, **options),
        "diagonal_preconditioner": lambda x: ops.diagonal_preconditioner(x, **options),
        "exact": lambda x: ops.exact_preconditioner(x, x),
        "dplr": lambda x: ops.dplr(x, x, x, a=x, b=x, **options),
    }[operator]
    everywhere = jax.sharding.PartitionSpec("batch")
    sharded = jax.shard_map(run, mesh=mesh, in_specs=everywhere, out_specs=everywhere)
    jax.eval_shape(jax.grad(lambda x: sum(jnp.sum(y) for y in sharded(x))), x)


def test_calls_outside_of_jit_are_compiled_once():
    """A loop that is written in Python does not compile at each step."""
    arguments = dataclasses.replace(PLAIN, shape=(1, 20, 1, 1, 4, 4)).arguments(jnp.float32, delta=True)
    with jax.log_compiles(), unittest.TestCase().assertLogs("jax", "WARNING") as first:
        ops.gated_delta_rule(**arguments, implementation="chunked")
    assert any("Compiling" in line for line in first.output)
    with jax.log_compiles(), unittest.TestCase().assertNoLogs("jax", "WARNING"):
        ops.gated_delta_rule(**arguments, implementation="chunked")


def test_a_traced_scale_is_a_number():
    """One that is learned, or an argument of jit, gives what a constant gives."""
    arguments = dataclasses.replace(PLAIN, shape=(1, 3, 1, 1, 16, 16), decay=None).arguments(jnp.float32, delta=True)

    def total(scale, implementation):
        return jnp.sum(ops.gated_delta_rule(**arguments, scale=scale, implementation=implementation)[0])

    gradient = jax.jit(jax.grad(total), static_argnums=1)
    np.testing.assert_allclose(total(0.7, "scan"), 0.7 * gradient(0.7, "chunked"), rtol=1e-5)  # it is linear


def test_numpy_arrays_are_arrays(unchecked_shapes):
    """As `jnp.asarray` takes them: NumPy's default, float64, is float32 here."""
    arguments = PLAIN.arguments(jnp.float32, delta=True)
    expected = RULE(**arguments)
    with warnings.catch_warnings(action="error"):
        actual = ops.gated_delta_rule(**{name: np.asarray(x, np.float64) for name, x in arguments.items()})
    assert [x.dtype for x in actual] == [np.float32, np.float32]
    np.testing.assert_allclose(actual[0], expected[0], atol=1e-6)


def test_a_state_in_float64_beside_inputs_in_float32(x64):
    """`jnp.zeros` is float64 here: all is computed in it, and each gradient has its argument's dtype."""
    arguments = dataclasses.replace(PLAIN, shape=(1, 3, 1, 1, 4, 4)).arguments(jnp.float32, delta=True)
    arguments["initial_state"] = arguments["initial_state"].astype(jnp.float64)
    results = jax.eval_shape(lambda a: outputs_and_gradients(ops.gated_delta_rule, a, None, "chunked", 64), arguments)
    assert results["out"].dtype == jnp.float32 and results["state"].dtype == jnp.float64
    assert all(results[f"d_{name}"].dtype == x.dtype for name, x in arguments.items())


def test_gradients_are_differentiable_forwards():
    """As a Hessian times a vector is formed; `test_unit_lower_inverse` has the numbers of what is not jax's own."""
    arguments = PLAIN.arguments(jnp.float32, delta=True)
    gradient = jax.grad(lambda a: weighted_loss(*ops.gated_delta_rule(**a, implementation="chunked")))
    _, product = jax.eval_shape(lambda a: jax.jvp(gradient, (a,), (a,)), arguments)
    assert {name: x.shape for name, x in product.items()} == {name: x.shape for name, x in arguments.items()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": (1, 150, 2, 21)}, r"k has shape \(1, 150, 2, 21\), expected the shape of q"),
        ({"v": (1, 150, 3, 16)}, "v has 3 heads .* expected a multiple of the 2 key heads"),
        ({"v": (1, 149, 4, 16)}, r"v has shape .* expected batch and length \[B, T\] = \(1, 150\)"),
        ({"log_decay": (1, 150, 2)}, r"log_decay has shape \(1, 150, 2\), expected \[B, T, HV\] or \[B, T, HV, K\]"),
        ({"erase": (1, 150, 4, 16)}, r"erase has shape .* = \(1, 150, 4\) or \(1, 150, 4, 20\)"),
        ({"write": (1, 150, 4, 20)}, "write has shape"),
        ({"write_key": (1, 150, 3, 20)}, "write_key has shape"),
        ({"initial_state": (1, 2, 20, 16)}, r"initial_state has shape .* expected \[B, HV, K, V\] = \(1, 4, 20, 16\)"),
        ({"beta": (1, 150, 4)}, "beta is short for erase = write = beta, so it can't be given with erase"),
    ],
)
def test_bad_shapes_are_named(change, message, unchecked_shapes):
    arguments = PLAIN.arguments(jnp.float32, delta=True)
    arguments |= {name: jnp.ones(shape) for name, shape in change.items()}
    with pytest.raises(ValueError, match=message):
        ops.gated_delta_rule(**arguments)


@pytest.mark.parametrize("scale", mostly_slow([0.0, 1e-38, -1e-20], [0.0]))
def test_a_scale_of_nothing_leaves_the_final_state_s_gradient(scale):
    arguments = PLAIN.arguments(jnp.float32, delta=False)

    def gradient(implementation):
        def loss(k):
            out, state = ops.linear_attention(**arguments | {"k": k}, scale=scale, implementation=implementation)
            return 10 * jnp.sum(state) + jnp.sum(out)

        return jax.grad(loss)(arguments["k"])

    np.testing.assert_allclose(gradient("triton"), gradient("scan"), rtol=1e-4, atol=1e-4)


def test_bad_values_are_named(unchecked_shapes):
    arguments = PLAIN.arguments(jnp.float32, delta=True)
    with pytest.raises(ValueError, match="chunk_size is 48, expected 16, 32, 64, 128 or 256"):
        ops.gated_delta_rule(**arguments, chunk_size=48)
    with pytest.raises(ValueError, match="implementation is 'cuda', expected None or one of"):
        ops.gated_delta_rule(**arguments, implementation="cuda")
    with pytest.raises(TypeError, match="q has dtype int32, expected a floating dtype"):
        ops.gated_delta_rule(**{**arguments, "q": jnp.ones(arguments["q"].shape, jnp.int32)})
    with pytest.raises(TypeError, match="v has dtype float8_e4m3fn, expected a floating dtype of at least 16 bits"):
        ops.gated_delta_rule(**{**arguments, "v": arguments["v"].astype(jnp.float8_e4m3fn)})
    with pytest.raises(ValueError, match="chunk_size is '64', expected 16"):
        ops.gated_delta_rule(**arguments, chunk_size="64")
    with pytest.raises(TypeError, match="segment_ids has dtype float32, expected an integer dtype"):
        ops.gated_delta_rule(**arguments, segment_ids=jnp.zeros((1, 150)))
    ids = np.array([[0] * 75 + [2**32] * 75])  # which jax cuts to 0
    with pytest.raises(ValueError, match="segment_ids has numbers from 0 to 4294967296, expected those of int32"):
        ops.gated_delta_rule(**arguments, segment_ids=ids)
    with pytest.raises(TypeError, match=r"segment_ids is \[0, 0\], expected an array"):
        ops.gated_delta_rule(**arguments, segment_ids=[0, 0])
    with pytest.raises(TypeError, match=r"linear_attention: write is 0\.5, expected an array"):
        ops.linear_attention(arguments["q"], arguments["k"], arguments["v"], write=0.5)
    with pytest.raises(TypeError, match="scale is 'large', expected a number"):
        ops.gated_delta_rule(**arguments, scale="large")
    with pytest.raises(ValueError, match="scale is nan, expected a finite number"):
        ops.gated_delta_rule(**arguments, scale=np.nan)
    with pytest.raises(ValueError, match=r"chunk_size is .*Tracer.*, expected 16"):
        jax.jit(ops.gated_delta_rule)(**arguments, chunk_size=64)
    with pytest.raises(ValueError, match=r"segment_ids has shape \(1, 3\), expected \[B, T\] = \(1, 150\)"):
        ops.linear_attention(arguments["q"], arguments["k"], arguments["v"], segment_ids=jnp.zeros((1, 3), jnp.int32))
    with pytest.raises(ValueError, match="no empty axis"):
        empty = jnp.zeros((1, 0, 2, 4))
        ops.gated_delta_rule(empty, empty, empty)

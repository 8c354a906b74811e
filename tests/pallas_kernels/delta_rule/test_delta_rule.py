"""The kernels, interpreted on a CPU, against the scan in float64: outputs, final states and every gradient."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import operators
from pallas_kernels.delta_rule.api import gated_delta_rule
from pallas_kernels.delta_rule.config import DeltaRuleConfig
from pallas_kernels.linear_attention.api import linear_attention
from rnnlib import ops
from tests.compiling import loop_jit
from tests.pallas_kernels.cases import (
    CHANNEL,
    NO,
    SCALAR,
    Case,
    assert_transformations_agree,
    errors,
    kernel_of,
    make_inputs,
    relative_error,
)
from tests.selection import mostly_slow

CASES = {
    "delta_rule": Case((1, 128, 1, 1, 16, 32), decay=NO),
    "bare": Case((1, 100, 1, 2, 16, 16), decay=NO, erase=NO, write=NO, initial_state=False),
    "gated": Case((2, 150, 1, 2, 32, 16)),
    "extreme_scalar_decay_packed": Case((1, 200, 1, 1, 32, 16), write_key=True, packed=True, extreme=True),
    "write_key_three_segments": Case((1, 250, 1, 2, 16, 16), write_key=True, segments=3),
    "eight_segments_that_forget": Case((1, 576, 1, 1, 16, 16), segments=8),
    "eight_segments_that_remember": Case((1, 576, 1, 1, 16, 16), segments=8, shift=4.0),
    "channel_decay": Case((1, 130, 1, 2, 16, 16), decay=CHANNEL, segments=2),
    # Three nats a token in each channel: no chunk has one reference row, and no token's decay is clamped.
    "strong_channel_decay": Case((1, 130, 1, 1, 16, 16), decay=CHANNEL, erase=CHANNEL, write_key=True, shift=-3.0),
    "extreme_channel_decay_packed": Case(
        (1, 130, 1, 1, 16, 16), decay=CHANNEL, write_key=True, packed=True, extreme=True
    ),
    "channel_everything": Case((1, 140, 1, 1, 16, 16), CHANNEL, CHANNEL, CHANNEL, packed=True, segments=2),
    "channel_gates_scalar_decay_padded": Case((1, 130, 1, 1, 24, 20), SCALAR, CHANNEL, SCALAR, segments=2),
    "channel_gates_no_decay_packed": Case((1, 80, 1, 1, 16, 16), NO, CHANNEL, CHANNEL, packed=True),
    "linear_attention": Case((1, 100, 1, 2, 16, 32), NO, online=False),
    "linear_attention_channel_decay": Case((1, 130, 1, 1, 16, 16), CHANNEL, online=False, extreme=True, segments=2),
    "linear_attention_packed": Case((1, 130, 1, 1, 16, 16), SCALAR, write=NO, online=False, packed=True),
    "linear_attention_segments": Case((2, 250, 1, 2, 16, 32), SCALAR, online=False, segments=3),
    "linear_attention_extreme_packed": Case(
        (1, 250, 1, 1, 32, 16), SCALAR, online=False, packed=True, extreme=True, segments=2
    ),
    "linear_attention_diagonal": Case(
        (1, 132, 1, 2, 16, 32), SCALAR, online=False, diagonal=4, packed=True, segments=2
    ),
    "linear_attention_channel_write": Case((1, 250, 1, 1, 16, 16), NO, write=CHANNEL, online=False, segments=2),
    "two_key_blocks": Case((1, 64, 1, 1, 128, 128), SCALAR, SCALAR, SCALAR),
    "one_token": Case((2, 1, 1, 2, 16, 32), CHANNEL, CHANNEL, CHANNEL, write_key=True),
    "one_token_linear_padded": Case((3, 1, 1, 2, 24, 20), SCALAR, online=False),
}
# A decay of -1000 is clamped to -100, and later sums in its chunk have the digits of numbers near 100.
LOOSE = {"linear_attention_extreme_packed"}


# Their segments, documents and gates are those of other cases.
SLOW = {"linear_attention_segments", "linear_attention_packed", "linear_attention_channel_write", "bare"}
SLOW |= {"linear_attention_extreme_packed", "channel_decay", "channel_gates_no_decay_packed", "two_key_blocks", "gated"}
SLOW |= {"eight_segments_that_forget"}


@pytest.mark.parametrize("name", mostly_slow(CASES, CASES.keys() - SLOW))
def test_float32_equals_the_scan(name):
    case = CASES[name]
    found = errors(case, config=DeltaRuleConfig(num_splits=case.segments))
    limit = 5e-5 if name in LOOSE else 5e-6
    assert all(error < limit for error in found.values()), found


@pytest.mark.parametrize("decay", mostly_slow([SCALAR, CHANNEL], [CHANNEL]))
def test_bfloat16_stays_within_rounding(decay):
    found = errors(Case((1, 192, 1, 1, 32, 32), decay, dtype=jnp.bfloat16), config=DeltaRuleConfig(num_splits=3))
    assert all(error < 1e-2 for error in found.values()), found
    # What goes through the inverse is not rounded before; if it were, all these would be above their limits.
    limits = {"out": 2.9e-3, "state": 2.35e-3, "d_v": 2.7e-3, "d_write": 1.8e-3, "d_log_decay": 2.3e-3}
    assert all(found[name] < limit for name, limit in limits.items()), found
    # A channel's decay is multiplied into both sides of a pair; to round these would give 4.2e-3.
    assert decay != CHANNEL or found["d_q"] < 3.5e-3, found


@pytest.mark.parametrize("decay", mostly_slow([NO, SCALAR], [NO]))
def test_linear_attention_in_bfloat16_stays_within_rounding(decay):
    found = errors(
        Case((1, 192, 1, 2, 32, 32), decay, online=False, dtype=jnp.bfloat16), config=DeltaRuleConfig(num_splits=3)
    )
    assert all(error < 1e-2 for error in found.values()), found


def test_the_decays_gradient_where_equal_keys_add_up():
    """Nearly all of it is a product of states, a sum that cancels: with these in bfloat16 the error would be 1.6e-3."""
    arrays, _ = make_inputs(Case((1, 1024, 1, 1, 32, 32), SCALAR, online=False, initial_state=False))
    k = jnp.broadcast_to(arrays["k"][:, :1], arrays["k"].shape)
    tokens = {"q": arrays["q"], "k": k, "v": arrays["v"]}
    exact = {name: x.astype(jnp.bfloat16).astype(jnp.float32) for name, x in tokens.items()}

    def gradient(function, tokens):
        def total(log_decay):
            out = function(**tokens, log_decay=log_decay)[0].astype(jnp.float32)
            return jnp.vdot(out, exact["v"][:, ::-1])

        return jax.jit(jax.grad(total))(jnp.zeros(k.shape[:3]))

    found = gradient(linear_attention, {name: x.astype(jnp.bfloat16) for name, x in tokens.items()})
    expected = gradient(functools.partial(ops.linear_attention, implementation="chunked"), exact)
    assert relative_error(found, expected) < 1e-3


def test_small_cotangents_keep_their_digits():
    """Factors relative to a chunk's middle must leave them in float32's range."""
    arrays, _ = make_inputs(Case((1, 64, 1, 1, 16, 16), CHANNEL, write=NO, initial_state=False))
    ones = jnp.ones_like(arrays.pop("log_decay"))
    cotangent = jnp.asarray(np.random.default_rng(1).standard_normal(arrays["v"].shape), jnp.float32)

    @jax.jit
    def gradients(log_decay, size):
        def run(arrays, log_decay):
            return gated_delta_rule(**arrays, log_decay=log_decay)[0]

        return jax.vjp(run, arrays, log_decay)[1](size * cotangent)

    # Lost in half a chunk: to either side of the limit on such factors, and far above.
    for nats in (49.0, 69.0, 200.0, 576.0):
        expected, found = (gradients(-nats / 32 * ones, size) for size in (1.0, 2.0**-40))
        for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            assert relative_error(x * 2.0**40, y) < 1e-5, nats


def error_of_strong_decays(dtype, size: int) -> float:
    """Relative error of the log decay's gradient where each token keeps 2e-3 of what came before it."""
    arrays, _ = make_inputs(Case((1, 128, 1, 1, size, size), CHANNEL, write=NO, initial_state=False, dtype=dtype))
    arrays["log_decay"] = jnp.full_like(arrays["log_decay"], -6.25)
    cotangent = jnp.asarray(np.random.default_rng(1).standard_normal(arrays["v"].shape), dtype)

    def gradient(function, arrays, cotangent):
        log_decay = arrays.pop("log_decay")
        return jax.jit(jax.vjp(lambda x: function(**arrays, log_decay=x)[0], log_decay)[1])(cotangent)[0]

    with jax.enable_x64(True):
        doubles, double = jax.tree.map(lambda x: x.astype(jnp.float64), (dict(arrays), cotangent))
        expected = gradient(functools.partial(ops.gated_delta_rule, implementation="scan"), doubles, double)
        expected = np.asarray(expected)
    return relative_error(gradient(gated_delta_rule, arrays, cotangent), expected)


def test_the_gradient_of_strong_decays():
    """A token's score with itself has no decay, and is all but 2e-3 of what is read: its rounding must not show."""
    assert error_of_strong_decays(jnp.float32, 16) < 1e-5


def errors_of_decays(case: Case, log_decays) -> dict[str, float]:
    """Relative errors of the log decay's gradient, for several values of all tokens' log decay."""
    arrays, ids = make_inputs(case)
    if case.online:
        arrays["erase"] = jnp.ones_like(arrays["erase"])
    random = np.random.default_rng(1)
    of_out = random.standard_normal(arrays["v"].shape)
    of_state = random.standard_normal(arrays["initial_state"].shape)

    def gradient(function):
        @jax.jit
        def run(arrays, log_decay):
            def total(log_decay):
                out, state = function(**{**arrays, "log_decay": log_decay}, segment_ids=ids)
                return jnp.vdot(out.astype(state.dtype), of_out.astype(state.dtype)) + jnp.vdot(
                    state, of_state.astype(state.dtype)
                )

            return jax.grad(total)(log_decay)

        return run

    kernels = gradient(kernel_of(case))
    scan = gradient(functools.partial(getattr(ops, case.operator), implementation="scan"))
    found = {}
    for name, values in log_decays.items():
        log_decay = jnp.broadcast_to(jnp.asarray(values, jnp.float32), arrays["log_decay"].shape)
        with jax.enable_x64(True):
            doubles = {key: x.astype(jnp.float64) for key, x in arrays.items()}
            expected = np.asarray(scan(doubles, log_decay.astype(jnp.float64)))
        found[name] = relative_error(kernels(arrays, log_decay), expected)
    return found


@pytest.mark.parametrize("online", mostly_slow([True, False], [True]))
def test_the_gradient_of_strong_decays_of_one_number_a_token(online):
    """Where a token forgets nearly all, its score with itself and what it leaves itself are far larger than the rest.

    Neither depends on its decay. Added and taken away, they would leave errors of 1e-5 at -3 nats and 5e10 at -40.
    """
    case = Case((1, 65, 1, 1, 24, 64), SCALAR, CHANNEL, NO, online=online)
    mixed = -np.random.default_rng(5).uniform(3, 40, (1, 65, 1))
    found = errors_of_decays(case, {"-3": -3.0, "-5": -5.0, "-10": -10.0, "-40": -40.0, "mixed": mixed})
    assert all(error < 5e-6 for error in found.values()), str(found)


@pytest.mark.parametrize("online", mostly_slow([True, False], [True]))
def test_the_gradient_of_strong_decays_by_channel(online):
    """The chunk's last token is among padding in one chunk, and what it leaves at the end has no decay.

    Added and taken away, it would leave errors of 1e-4 at -5 nats and of 1 at -20. At -1.2 nats a chunk has just one
    reference row, and the exponents relative to it are sums of up to 40 nats.
    """
    case = Case((1, 100, 1, 1, 4, 8), CHANNEL, write=NO, packed=True, online=online)
    sizes = 10.0 ** np.random.default_rng(5).uniform(np.log10(5), 9, (1, 100, 1, 4))
    found = errors_of_decays(case, {"-1.2": -1.2, "-5": -5.0, "-10": -10.0, "-20": -20.0, "to -1e9": -sizes})
    assert all(error < 5e-6 for error in found.values()), str(found)


def test_one_chunk_in_bfloat16():
    """XLA for CPUs has no product of two bfloat16 matrices with a float32 result, and one chunk is no loop."""
    found = errors(Case((1, 16, 1, 1, 16, 16), dtype=jnp.bfloat16))
    assert all(error < 1e-2 for error in found.values()), found


@pytest.mark.parametrize("tied", mostly_slow([False, True], [True]))
def test_gates_of_zero_and_next_to_zero(tied):
    """Gradients are divided by the write gate, which must not show where it is zero."""
    arrays, _ = make_inputs(Case((1, 64, 1, 1, 16, 16)))
    tokens = jnp.arange(64)
    gate = jnp.where(tokens % 5 == 0, 0.0, jnp.where(tokens % 5 == 1, 1e-35, arrays["write"][0, :, 0]))[None, :, None]
    del arrays["write"], arrays["erase"]
    weights = jnp.asarray(np.random.default_rng(3).standard_normal((1, 64, 1, 16)), jnp.float32)

    def gradients(implementation):
        def loss(arrays, erase, write):
            gates = {"beta": write} if tied else {"erase": erase, "write": write}
            return jnp.sum(ops.gated_delta_rule(**arrays, **gates, implementation=implementation)[0] * weights)

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(arrays, gate, gate)

    for found, expected in zip(jax.tree.leaves(gradients("triton")), jax.tree.leaves(gradients("scan")), strict=True):
        assert relative_error(found, expected) < 1e-5


def test_a_shared_gate_has_one_rounding():
    """`beta` is both gates: its gradient in bfloat16 is the rounded sum, not the sum of rounded ones."""
    arrays, _ = make_inputs(Case((1, 128, 1, 1, 16, 16)))
    del arrays["write"]
    beta = arrays.pop("erase").astype(jnp.bfloat16)
    arrays = {name: x.astype(jnp.bfloat16) if name in "qkv" else x for name, x in arrays.items()}

    def loss(beta):
        out, _ = gated_delta_rule(**arrays, erase=beta, tied_gates=True)
        return jnp.sum(out.astype(jnp.float32) ** 2)

    once, wide = (jax.jit(jax.grad(loss))(x) for x in (beta, beta.astype(jnp.float32)))
    np.testing.assert_array_equal(once, wide.astype(jnp.bfloat16))


@pytest.mark.parametrize("decay", mostly_slow([SCALAR, CHANNEL], [CHANNEL]))
def test_a_write_key_in_float32_has_an_unrounded_gradient(decay):
    """The kernels compute the same; only that gradient is stored as it is."""
    arrays, _ = make_inputs(Case((1, 70, 1, 2, 24, 16), decay, write_key=True, dtype=jnp.bfloat16))
    wide = {**arrays, "write_key": arrays["write_key"].astype(jnp.float32)}

    @loop_jit
    def run(arrays):
        def loss(arrays):
            out, state = gated_delta_rule(**arrays)
            return jnp.sum(out.astype(jnp.float32) ** 2) + jnp.sum(state), (out, state)

        return jax.grad(loss, has_aux=True)(arrays)

    (rounded, results), (unrounded, same) = run(arrays), run(wide)
    gradient = unrounded["write_key"]
    assert gradient.dtype == jnp.float32
    assert jnp.any(gradient.astype(jnp.bfloat16) != gradient)
    narrow = {**unrounded, "write_key": gradient.astype(jnp.bfloat16)}
    jax.tree.map(np.testing.assert_array_equal, (rounded, results), (narrow, same))
    tokens = [{n: x if n == "initial_state" else x[:, :1] for n, x in each.items()} for each in (arrays, wide)]
    jax.tree.map(np.testing.assert_array_equal, *(gated_delta_rule(**x) for x in tokens))


def test_repeated_keys_with_gate_one_and_no_decay():
    """A run of equal tokens: the inverse of a triangle full of ones, in which powers of the matrix would blow up."""
    arrays, _ = make_inputs(Case((1, 128, 1, 1, 16, 16), NO, initial_state=False))
    arrays["k"] = jnp.broadcast_to(arrays["k"][:, :1], arrays["k"].shape)
    arrays["erase"], arrays["write"] = jnp.ones_like(arrays["erase"]), jnp.ones_like(arrays["write"])
    out, _ = jax.jit(gated_delta_rule)(**arrays)
    # Each write replaces what the key held, so a query reads the last value.
    expected = 16**-0.5 * jnp.sum(arrays["q"] * arrays["k"], axis=-1, keepdims=True) * arrays["v"]
    assert relative_error(out, expected) < 1e-5


def test_writes_that_enlarge_the_state_are_not_forgotten():
    """Equal keys with `erase * k . k = 3`: each write doubles what the decay leaves half of."""
    arrays, _ = make_inputs(Case((1, 512, 1, 1, 16, 16)))
    arrays["k"] = jnp.broadcast_to(3**0.5 * arrays["k"][:, :1], arrays["k"].shape)
    arrays["erase"] = jnp.ones_like(arrays["erase"])
    arrays["log_decay"] = jnp.full_like(arrays["log_decay"], np.log(0.5))
    once, _ = jax.jit(lambda x: gated_delta_rule(**x, config=DeltaRuleConfig()))(arrays)
    split, _ = jax.jit(lambda x: gated_delta_rule(**x, config=DeltaRuleConfig(num_splits=4)))(arrays)
    assert relative_error(split, once) < 1e-3  # rounding that nothing damps


@pytest.mark.parametrize("decay", mostly_slow([SCALAR, CHANNEL], [SCALAR]))
def test_long_segments_equal_one(decay):
    """More chunks in a segment than are looked at in one go to see what it forgets."""
    arrays, _ = make_inputs(Case((1, 64 * 70, 1, 1, 16, 16), decay, shift=8.0))
    results = [
        jax.jit(functools.partial(gated_delta_rule, config=DeltaRuleConfig(num_splits=segments)))(**arrays)
        for segments in (1, 2)
    ]
    for once, split in zip(*results):
        assert relative_error(split, once) < 1e-5


def test_reset_forgets_exactly_whatever_came_before():
    arrays, _ = make_inputs(Case((1, 128, 1, 1, 16, 16)))
    arrays["log_decay"] = arrays["log_decay"].at[:, 70].set(-jnp.inf)
    run = jax.jit(gated_delta_rule)
    out, state = run(**arrays)
    changed = {**arrays, "v": arrays["v"].at[:, :70].multiply(-3.0), "initial_state": 1e6 * arrays["initial_state"]}
    other_out, other_state = run(**changed)
    np.testing.assert_array_equal(out[:, 70:], other_out[:, 70:])
    np.testing.assert_array_equal(state, other_state)


def test_reruns_are_bit_identical():
    arrays, _ = make_inputs(Case((1, 100, 1, 1, 16, 16)))
    run = jax.jit(jax.grad(lambda x: sum(jnp.sum(y) for y in gated_delta_rule(**x))))
    jax.tree.map(np.testing.assert_array_equal, run(arrays), run(arrays))


def test_vmap_remat_and_shard_map():
    arrays, _ = make_inputs(Case((2, 80, 1, 1, 16, 16), initial_state=False))

    def loss(arrays):
        out, state = jax.checkpoint(lambda x: gated_delta_rule(**x))(arrays)
        return jnp.sum(out**2) + jnp.sum(state)

    assert_transformations_agree(loss, arrays)


def test_memory_kept_for_the_backward_is_linear_and_small():
    """Besides the arguments: keys and queries scaled by a channel-wise decay, which are three matrices as large as the
    queries, two matrices of 64 numbers a token, a few numbers a token, and the segments' states.
    """
    size, length = 128, 1024
    like = jax.ShapeDtypeStruct((1, length, 1, size), jnp.bfloat16)
    gate = jax.ShapeDtypeStruct((1, length, 1), jnp.bfloat16)
    schedule = DeltaRuleConfig(num_splits=4)

    def residuals(q, k, v, beta, log_decay):
        def function(*x):
            return gated_delta_rule(*x[:3], erase=x[3], write=x[3], log_decay=x[4], config=schedule)

        return jax.tree.leaves(jax.vjp(function, q, k, v, beta, log_decay)[1])

    decay = jax.ShapeDtypeStruct((1, length, 1, size), jnp.float32)
    kept = jax.eval_shape(residuals, like, like, like, gate, decay)
    arguments = sum(x.size * x.dtype.itemsize for x in (like, like, like, gate, gate, decay))
    states = schedule.num_splits * size * size * (4 + 4 + 2 + 2)
    total = sum(x.size * x.dtype.itemsize for x in kept)
    scaled = 3 * length * size * 2
    assert total <= arguments + states + scaled + length * (2 * 64 * 2 + 4 * 4) + (length // 64) * size * 4


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"chunk_size": 32}, "chunk_size 32"),
        ({"dtype": jnp.float16}, "float16"),
        ({"size": 512}, "key size 512"),
    ],
)
def test_unsupported_says_why(change, reason):
    x = jnp.zeros((1, 64, 1, change.get("size", 16)), change.get("dtype", jnp.float32))
    chunk_size = change.get("chunk_size", 64)
    assert reason in operators.delta_rule.unsupported_reason(x, x, x, chunk_size=chunk_size)
    with pytest.raises(NotImplementedError, match=reason):
        gated_delta_rule(x, x, x, chunk_size=chunk_size)
    assert operators.delta_rule.unsupported_reason(*(jnp.zeros((1, 64, 1, 16)),) * 3) is None


def test_a_loop_of_single_tokens_equals_the_sequence():
    """The state is updated in its own memory; what was given stays as it was."""
    arrays, _ = make_inputs(Case((1, 5, 1, 2, 16, 16), CHANNEL))
    initial = arrays.pop("initial_state")
    before = np.array(initial)

    @jax.jit
    def step(state, token):
        out, state = gated_delta_rule(**{name: x[:, None] for name, x in token.items()}, initial_state=state)
        return state, out[:, 0]

    state, out = jax.lax.scan(step, initial, {name: jnp.moveaxis(x, 1, 0) for name, x in arrays.items()})
    expected, expected_state = jax.jit(gated_delta_rule)(**arrays, initial_state=initial)
    assert relative_error(jnp.moveaxis(out, 0, 1), expected) < 1e-5
    assert relative_error(state, expected_state) < 1e-5
    np.testing.assert_array_equal(initial, before)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("size", [(64, 256), (128, 256), (256, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("online", [False, True], ids=["linear_attention", "delta_rule"])
def test_wide_heads_on_a_gpu(online, size, dtype):
    """What the schedules ask for fits in shared memory."""
    found = errors(Case((1, 512, 1, 2, *size), online=online, dtype=dtype))
    # In bfloat16 a gate's gradient, a sum over channels that mostly cancels, is up to 1.4e-2 off for some seeds.
    assert all(error < (2e-5 if dtype == jnp.float32 else 2e-2) for error in found.values()), found


@pytest.mark.gpu
@pytest.mark.parametrize("gates", [SCALAR, CHANNEL])
@pytest.mark.parametrize("write_key", [False, True], ids=["key", "write_key"])
@pytest.mark.parametrize("shape", [(1, 1024, 8), (8, 1024, 8), (16, 4096, 3), (16, 1024, 8)], ids=str)
@pytest.mark.parametrize("decay", [NO, SCALAR, CHANNEL])
def test_tuned_schedules_fit_on_a_gpu(decay, shape, write_key, gates):
    """The table tells neither gates nor strides apart; what underfills the card has launches of its own."""
    x = jax.ShapeDtypeStruct((*shape, 128), jnp.bfloat16)
    wide, narrow = (jax.ShapeDtypeStruct(size, jnp.float32) for size in (x.shape, shape))
    gate = wide if gates == CHANNEL else narrow
    arrays = {"q": x, "k": x, "v": x, "erase": gate, "write": gate}
    arrays |= {"write_key": x} if write_key else {}
    arrays |= {"log_decay": wide if decay == CHANNEL else narrow} if decay else {}

    def run(arrays, ids):
        return sum(jnp.sum(y.astype(jnp.float32)) for y in gated_delta_rule(**arrays, segment_ids=ids))

    ids = jax.ShapeDtypeStruct(shape[:2], jnp.int32)
    # With the value: what makes the output is no part of the gradient of a sum.
    jax.jit(jax.value_and_grad(run)).lower(arrays, ids).compile()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu(name, dtype):
    """The same cases at sizes that models have."""
    batch, length, heads, value_heads, _, _ = CASES[name].shape
    shape = (batch, 5 * length, 2 * heads, 2 * value_heads, 128, 128) if length > 1 else CASES[name].shape
    found = errors(dataclasses.replace(CASES[name], dtype=dtype, shape=shape))
    limit = {jnp.float32: 2e-4 if name in LOOSE else 2e-5, jnp.bfloat16: 1e-2}[dtype]
    assert all(error < limit for error in found.values()), found


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_the_gradient_of_strong_decays_on_a_gpu(dtype):
    """Pairs are products of tf32 there."""
    assert error_of_strong_decays(dtype, 128) < {jnp.float32: 1e-5, jnp.bfloat16: 1e-2}[dtype]


@pytest.mark.gpu
def test_offsets_beyond_two_to_the_31_elements():
    """The last head of an array that large equals the same head alone."""
    length, heads, size = 131072, 136, 128
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (jax.random.normal(key, (1, length, heads, size), jnp.bfloat16) * size**-0.5 for key in keys)
    assert q.size > 2**31
    schedule = DeltaRuleConfig()
    out, state = jax.jit(lambda *x: gated_delta_rule(*x, config=schedule))(q, k, v)
    alone, alone_state = jax.jit(lambda *x: gated_delta_rule(*x, config=schedule))(*(x[:, :, -1:] for x in (q, k, v)))
    np.testing.assert_array_equal(out[:, :, -1:], alone)
    np.testing.assert_array_equal(state[:, -1:], alone_state)


@pytest.mark.gpu
def test_a_donated_state_is_updated_in_place():
    """A step of decoding allocates nothing of the state's size and copies nothing."""
    batch, heads, size = 8, 4, 128
    like = jax.ShapeDtypeStruct((batch, 1, heads, size), jnp.bfloat16)
    state = jax.ShapeDtypeStruct((batch, heads, size, size), jnp.float32)

    def step(state, q, k, v):
        return gated_delta_rule(q, k, v, initial_state=state)

    compiled = jax.jit(step, donate_argnums=0).lower(state, like, like, like).compile()
    assert " copy(" not in compiled.as_text()
    assert compiled.memory_analysis().temp_size_in_bytes < state.size

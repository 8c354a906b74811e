import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rnnlib import ops
from rnnlib.ops import chunk, chunk_blocks
from rnnlib.ops.diagonal_preconditioner import evaluate as evaluate_module
from rnnlib.ops.diagonal_preconditioner import read_gram
from tests.selection import mostly_slow

IMPLEMENTATIONS = ("scan", "chunked", "triton")
BATCH, HEADS, CHANNELS = 2, 2, 5
LENGTHS = (1, 70)
LOG_DECAYS = np.array([0.0, -1e-3, -0.3, -20.0, -1000.0, -np.inf])


def draw_arguments(seed, length, per_channel, scale=1.0):
    """Float64 arguments with repeated and zero keys, hard resets and segments of any length."""
    rng = np.random.default_rng(seed)
    k = scale * rng.normal(size=(BATCH, length, HEADS, CHANNELS))
    k[:, rng.random(length) < 0.2] = 0.0
    gates = (BATCH, length, HEADS, CHANNELS) if per_channel else (BATCH, length, HEADS)
    weights = rng.dirichlet(np.ones(len(LOG_DECAYS)))
    return {
        "k": k,
        "log_decay": rng.choice(LOG_DECAYS, size=gates, p=weights),
        "gain": rng.uniform(size=gates),
        "center": rng.normal(size=HEADS),
        "initial_state": rng.uniform(size=(BATCH, HEADS, CHANNELS)),
        "segment_ids": np.cumsum(rng.random((BATCH, length)) < 0.1, axis=1),
    }


def reference_gram(k, log_decay=None, gain=None, initial_state=None, segment_ids=None):
    """A_t = exp(log_decay_t) A_(t-1) + gain_t k_t^2 in a loop, float64."""
    decay, gain = kept(k, log_decay, segment_ids), per_channel(k, gain)
    state = np.zeros_like(k[:, 0]) if initial_state is None else initial_state
    states = []
    for t in range(k.shape[1]):
        state = decay[:, t] * state + gain[:, t] * k[:, t] ** 2
        states.append(state)
    return np.stack(states, axis=1)


def per_channel(k, gate):
    if gate is None:
        return np.ones_like(k)
    return np.broadcast_to(gate if gate.ndim == 4 else gate[..., None], k.shape)


def kept(k, log_decay, segment_ids):
    """What each token keeps of A, resets at segments included."""
    decay = np.exp(per_channel(np.zeros_like(k), log_decay)) if log_decay is not None else np.ones_like(k)
    if segment_ids is not None:
        starts = np.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)))
        decay = np.where(starts[:, :, None, None], 0.0, decay)
    return decay


def reference_preconditioner(gram, center, bound=1.5, eps=1e-6):
    """Equation 9 of Preconditioned DeltaNet."""
    r = np.log(gram + eps) - np.asarray(center).reshape(-1, 1)
    return np.exp(-np.log(bound) * r / (1 + np.abs(r)))


def reference_loss(k, log_decay, gain, center, initial_state, segment_ids):
    """The scalar of `loss`, float64."""
    grams = reference_gram(k, log_decay, gain, initial_state, segment_ids)
    return np.sum(loss_weights(k) * reference_preconditioner(grams, center)) + np.sum(np.sin(grams[:, -1]))


def reference_gradients(k, log_decay, gain, center, initial_state, segment_ids, term=lambda x: x):
    """The gradient of `reference_loss`, by hand: a recurrence that runs from the last token to the first.

    With `np.abs` as `term` no sum over tokens or channels cancels: what float32's rounding is to be compared with.
    """
    grams = reference_gram(k, log_decay, gain, initial_state, segment_ids)
    decay = kept(k, log_decay, segment_ids)
    r = np.log(grams + 1e-6) - center[:, None]
    d_r = term(-loss_weights(k) * reference_preconditioner(grams, center) * np.log(1.5) / (1 + np.abs(r)) ** 2)
    d_gram = d_r / (grams + 1e-6)
    d_gram[:, -1] += term(np.cos(grams[:, -1]))
    for t in range(k.shape[1] - 2, -1, -1):
        d_gram[:, t] += decay[:, t + 1] * d_gram[:, t + 1]
    before = np.concatenate([initial_state[:, None], grams[:, :-1]], axis=1)
    grads = {
        "k": 2 * per_channel(k, gain) * k * d_gram,
        "log_decay": decay * before * d_gram,
        "gain": k**2 * d_gram,
        "center": -np.sum(d_r, axis=(0, 1, 3)),
        "initial_state": decay[:, 0] * d_gram[:, 0],
    }
    if gain.ndim == 3:
        grads |= {name: grads[name].sum(-1) for name in ("log_decay", "gain")}
    return grads


def loss_weights(k):
    return np.cos(np.arange(k.size)).reshape(k.shape)


def to_arrays(arguments, dtype):
    return {name: jnp.asarray(x, jnp.int32 if name == "segment_ids" else dtype) for name, x in arguments.items()}


def loss(floats, segment_ids, weights, implementation):
    """A scalar that every output enters."""
    out, final = ops.diagonal_preconditioner(**floats, segment_ids=segment_ids, implementation=implementation)
    return jnp.sum(out * weights) + jnp.sum(jnp.sin(final)), (out, final)


@functools.partial(jax.jit, static_argnames="implementation")
def value_and_grad(floats, segment_ids, weights, implementation):
    (_, out), grads = jax.value_and_grad(loss, has_aux=True)(floats, segment_ids, weights, implementation)
    return out, grads


def evaluate(arguments, implementation):
    arrays = to_arrays(arguments, jnp.float32)
    segment_ids = arrays.pop("segment_ids")
    weights = jnp.asarray(loss_weights(arguments["k"]), jnp.float32)
    return jax.tree.map(np.asarray, value_and_grad(arrays, segment_ids, weights, implementation))


def relative_error(x, reference):
    return np.linalg.norm(x - reference) / max(np.linalg.norm(reference), 1e-30)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@given(
    seed=st.integers(0, 2**31),
    length=st.sampled_from(LENGTHS),
    per_channel=st.booleans(),
    scale=st.sampled_from([0.1, 1.0]),
)
@settings(max_examples=15)
def test_outputs_and_gradients_match_the_recurrence_in_float64(implementation, seed, length, per_channel, scale):
    arguments = draw_arguments(seed, length, per_channel, scale)
    (out, final), grads = evaluate(arguments, implementation)
    assert out.dtype == final.dtype == np.float32

    grams = reference_gram(**{name: x for name, x in arguments.items() if name != "center"})
    assert relative_error(out, reference_preconditioner(grams, arguments["center"])) < 1e-5
    assert relative_error(final, grams[:, -1]) < 1e-5
    exact, sizes = reference_gradients(**arguments), reference_gradients(**arguments, term=np.abs)
    for name, grad in grads.items():
        assert np.all(np.isfinite(grad)), name
        assert np.linalg.norm(grad - exact[name]) <= 1e-5 * np.linalg.norm(sizes[name]), name


def test_reference_gradients_match_finite_differences():
    arguments = draw_arguments(3, 6, True)
    arguments["log_decay"] = np.clip(arguments["log_decay"], -1.0, -0.1)
    grads = reference_gradients(**arguments)
    rng = np.random.default_rng(0)
    direction = {name: rng.normal(size=grad.shape) for name, grad in grads.items()}

    def shifted(step):
        return reference_loss(**(arguments | {name: arguments[name] + step * d for name, d in direction.items()}))

    slope = (shifted(1e-6) - shifted(-1e-6)) / 2e-6
    np.testing.assert_allclose(sum(np.sum(grads[name] * direction[name]) for name in grads), slope, rtol=1e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_arguments_left_out_have_their_neutral_values(implementation):
    k = draw_arguments(1, 33, False)["k"]
    out, final = ops.diagonal_preconditioner(jnp.asarray(k, jnp.float32), implementation=implementation)
    grams = reference_gram(k)
    assert relative_error(out, reference_preconditioner(grams, np.zeros(HEADS))) < 1e-5
    assert relative_error(final, grams[:, -1]) < 1e-5


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_any_pieces_give_the_whole(implementation):
    arguments = draw_arguments(5, 33, False)
    del arguments["segment_ids"]
    whole = to_arrays(arguments, jnp.float32)
    run = jax.jit(functools.partial(ops.diagonal_preconditioner, implementation=implementation))
    out, final = run(**whole)
    pieces, state = [], whole["initial_state"]
    for start, stop in itertools.pairwise((0, 1, 17, 33)):
        piece = {name: np.asarray(whole[name])[:, start:stop] for name in ("k", "log_decay", "gain")}
        part, state = run(**piece, center=whole["center"], initial_state=state)
        pieces.append(np.asarray(part))
    np.testing.assert_allclose(np.concatenate(pieces, axis=1), out, rtol=1e-5)
    np.testing.assert_allclose(state, final, rtol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_half_precision_keys_are_accumulated_in_float32(implementation):
    k = jnp.asarray(draw_arguments(6, 130, False)["k"], jnp.bfloat16)
    out, final = ops.diagonal_preconditioner(k, implementation=implementation)
    grams = reference_gram(np.asarray(k, np.float64))
    assert out.dtype == final.dtype == jnp.float32
    assert relative_error(final, grams[:, -1]) < 1e-6
    assert relative_error(out, reference_preconditioner(grams, np.zeros(HEADS))) < 1e-5


@pytest.mark.parametrize("squash", ["rational", "tanh"])
@pytest.mark.parametrize(
    "interval, low, high", [("symmetric", 1 / 1.6, 1.6), ("amplify", 1, 1.6), ("dampen", 1 / 1.6, 1)]
)
def test_intervals_are_filled_and_decrease_with_the_gram(interval, low, high, squash):
    gram = jnp.logspace(-30, 30, 200)[:, None, None]
    out = ops.squash_to_interval(gram, bound=1.6, eps=1e-30, interval=interval, squash=squash)[:, 0, 0]
    assert jnp.all(out >= low * (1 - 1e-6)) and jnp.all(out <= high * (1 + 1e-6))
    # r runs to 69, so that the rational squash reaches 69 / 70 of the exponent.
    np.testing.assert_allclose([out[-1], out[0]], [low, high], rtol=0.01)
    assert jnp.all(jnp.diff(out) <= 1e-6)
    middle = ops.squash_to_interval(jnp.ones((1, 1)), center=0.0, bound=1.6, interval=interval, squash=squash)
    np.testing.assert_allclose(middle, np.sqrt(low * high), rtol=1e-5)


def test_bound_of_one_is_no_preconditioning():
    k = jnp.asarray(draw_arguments(2, 33, False)["k"], jnp.float32)
    out, _ = ops.diagonal_preconditioner(k, bound=1.0)
    np.testing.assert_array_equal(out, 1.0)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_query_is_divided_by_the_gram(implementation):
    arguments = draw_arguments(7, 33, False)
    del arguments["center"]
    grams = reference_gram(**arguments)
    q = np.random.default_rng(1).normal(size=grams.shape)
    out, final = ops.precondition_query(
        jnp.asarray(q, jnp.float32),
        **to_arrays(arguments, jnp.float32),
        ridge=jnp.array([0.1, 2.0]),
        implementation=implementation,
    )
    assert relative_error(out, q / (grams + np.array([[0.1], [2.0]]))) < 1e-5
    assert relative_error(final, grams[:, -1]) < 1e-5


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_sherman_morrison_key_uses_the_previous_gram(implementation):
    arguments = draw_arguments(8, 33, False)
    del arguments["center"]
    grams = reference_gram(**arguments)
    k, ids = arguments["k"], arguments["segment_ids"]
    out, _ = ops.sherman_morrison_key(**to_arrays(arguments, jnp.float32), ridge=0.5, implementation=implementation)
    expected = np.empty_like(k)
    for b, t in itertools.product(range(BATCH), range(k.shape[1])):
        is_start = t > 0 and ids[b, t] != ids[b, t - 1]
        before = 0.0 if is_start else arguments["initial_state"][b] if t == 0 else grams[b, t - 1]
        preconditioned = k[b, t] / (before + 0.5)
        expected[b, t] = preconditioned / (1 + np.sum(k[b, t] * preconditioned, axis=-1, keepdims=True))
    assert relative_error(out, expected) < 1e-5
    product = jnp.sum(out * k, axis=-1)
    assert jnp.all((product >= 0) & (product < 1))  # appendix C.3


def test_diagonal_approximations_disagree():
    """Theorem C.2: with one token, ridge 1 and k = v = (1, 1), ATQ gives 1/2 and ATK 1/3 of the outer product."""
    ones = jnp.ones((1, 1, 1, 2))
    query, _ = ops.precondition_query(ones, ones)
    write_key, _ = ops.sherman_morrison_key(ones)
    np.testing.assert_allclose(query, 1 / 2, rtol=1e-6)
    np.testing.assert_allclose(write_key, 1 / 3, rtol=1e-6)
    _, offline = ops.linear_attention(ones, ones, ones)
    _, online = ops.gated_delta_rule(ones, ones, ones, write_key=write_key)
    # The offline state is read with the preconditioned query: S P = 1 1^T / 2.
    np.testing.assert_allclose(offline * query[0, 0, 0][:, None], jnp.full((1, 1, 2, 2), 1 / 2), rtol=1e-6)
    np.testing.assert_allclose(online, jnp.full((1, 1, 2, 2), 1 / 3), rtol=1e-6)


def test_write_key_normalizations():
    rng = np.random.default_rng(0)
    k, write_key = rng.uniform(size=(2, 1, 3, 2, 4))
    gain, decay = rng.uniform(size=(2, 1, 3, 2))
    m = np.sum(k * write_key, axis=-1)
    expected = {
        "projection": 1 / m,
        "implicit": 1 / (1 + m),
        "decayed_implicit": 1 / (decay + gain * m),
    }
    for kind, factor in expected.items():
        out = ops.write_key_normalization(
            jnp.asarray(k, jnp.float32),
            jnp.asarray(write_key, jnp.float32),
            kind,
            gain=jnp.asarray(gain, jnp.float32),
            log_decay=jnp.asarray(np.log(decay), jnp.float32),
        )
        np.testing.assert_allclose(out, factor, rtol=1e-4)


@pytest.mark.parametrize(
    "implementation, dtype, tolerance", [("chunked", "float64", 1e-9), ("triton", "float32", 1e-4)]
)
def test_transforms_of_jax(implementation, dtype, tolerance):
    with jax.enable_x64(dtype == "float64"):
        arguments = to_arrays(draw_arguments(9, 20, False), dtype)
        arguments["log_decay"] = jnp.maximum(arguments["log_decay"], -1.0)
        segment_ids = arguments.pop("segment_ids")
        rows = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), arguments)
        results = []
        for name in ("scan", implementation):
            out = functools.partial(evaluate_out, segment_ids=segment_ids, implementation=name)
            gradient = jax.grad(lambda x, out=out: jnp.sum(jax.checkpoint(out)(x) ** 2))
            results.append(jax.tree.leaves((jax.jit(jax.vmap(out))(rows), jax.jit(gradient)(arguments))))
        for scan, found in zip(*results):
            np.testing.assert_allclose(found, scan, rtol=tolerance, atol=1e-2 * tolerance)


def evaluate_out(arguments, **options):
    return ops.diagonal_preconditioner(**arguments, **options)[0]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("with_gram_key", [False, True])
def test_preconditioned_key_is_the_product(implementation, with_gram_key):
    """Written out by hand: keys, gradients of both keys together, and the dtype of the keys."""
    arguments = draw_arguments(11, 70, False)
    arrays = to_arrays(arguments, jnp.float32)
    segment_ids = arrays.pop("segment_ids")
    if with_gram_key:
        arrays["gram_key"] = jnp.flip(arrays["k"], axis=-1)
    read_weights, write_weights = (jnp.asarray(loss_weights(arguments["k"] + n), jnp.float32) for n in (0, 1))

    def by_hand(k, gram_key=None, **options):
        preconditioner, final = ops.diagonal_preconditioner(
            k if gram_key is None else gram_key, **options, segment_ids=segment_ids, implementation="scan"
        )
        return k, preconditioner * k, final

    def fused(k, **options):
        return ops.precondition_key(k, **options, segment_ids=segment_ids, implementation=implementation)

    def run(function):
        def scalar(arrays):
            read, write, final = function(**arrays)
            return jnp.sum(read * read_weights) + jnp.sum(jnp.sin(write) * write_weights) + jnp.sum(final), (
                write,
                final,
            )

        return jax.jit(jax.grad(scalar, has_aux=True))(arrays)

    for found, expected in zip(jax.tree.leaves(run(fused)), jax.tree.leaves(run(by_hand)), strict=True):
        assert relative_error(found, expected) < 1e-5
    half = ops.precondition_key(arrays["k"].astype(jnp.bfloat16), implementation=implementation)
    assert [x.dtype for x in half] == [jnp.bfloat16, jnp.bfloat16, jnp.float32]


VARIANTS = {
    "gram": (ops.diagonal_gram, {}),
    "dampen_tanh": (ops.diagonal_preconditioner, {"interval": "dampen", "squash": "tanh", "bound": 2.0}),
    "amplify": (ops.precondition_key, {"interval": "amplify", "center": -0.2}),
    "query": (ops.precondition_query, {"ridge": 0.5}),
    "unstable": (ops.sherman_morrison_key, {"ridge": 0.5}),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_kernels_of_every_variant_equal_the_scan(name):
    """Results and every gradient, of packed tokens with hard resets; the other tests go through the recurrence."""
    function, options = VARIANTS[name]
    arrays = to_arrays(draw_arguments(12, 70, name == "query"), jnp.float32)
    segment_ids = arrays.pop("segment_ids")
    del arrays["center"]
    if name == "query":
        arrays["q"] = jnp.flip(arrays["k"], axis=1) + 0.1

    def run(implementation):
        def scalar(arrays):
            given = dict(arrays)
            first = (given.pop("q"),) if "q" in given else ()
            results = function(
                *first, given.pop("k"), **given, **options, segment_ids=segment_ids, implementation=implementation
            )
            return sum(jnp.sum(jnp.sin(x + 0.3)) for x in results), results

        return jax.jit(jax.grad(scalar, has_aux=True))(arrays)

    for found, expected in zip(jax.tree.leaves(run("triton")), jax.tree.leaves(run("scan")), strict=True):
        assert relative_error(found, expected) < 5e-5


@pytest.mark.parametrize(("per_channel", "chunks"), [(False, 8), (True, 2)])
def test_blocks_of_a_tpu_are_the_scan(monkeypatch, per_channel, chunks):
    """The loop over blocks of tokens, rows and heads that a TPU runs; some blocks begin with a document."""
    arrays = to_arrays(draw_arguments(12, 70, per_channel), jnp.float32)
    del arrays["segment_ids"], arrays["center"]
    segment_ids = jnp.searchsorted(jnp.array([3, 16, 48, 49]), jnp.arange(70), side="right") * jnp.ones((2, 1), int)

    def run(implementation, readout, **options):
        def scalar(arrays):
            results = readout(**arrays, **options, segment_ids=segment_ids, implementation=implementation)
            return sum(jnp.sum(jnp.sin(x + 0.3)) for x in results), results

        return jax.tree.leaves(jax.grad(scalar, has_aux=True)(arrays))

    readouts = [(ops.sherman_morrison_key, {"ridge": jnp.array([0.5, 2.0])}), (ops.diagonal_gram, {})]
    expected = [run("scan", readout, **options) for readout, options in readouts]
    for module in (evaluate_module, chunk, chunk_blocks):
        monkeypatch.setattr(module, "platform", lambda: "tpu")
    monkeypatch.setattr(read_gram, "_CHUNK_SIZE", 16)
    monkeypatch.setattr(read_gram, "_CHUNKS", chunks)  # over two heads, and over one row or both
    jax.clear_caches()
    for wanted, (readout, options) in zip(expected, readouts):
        for found, each in zip(run("chunked", readout, **options), wanted, strict=True):
            assert relative_error(found, each) < 1e-5
    jax.clear_caches()


def test_sharded_over_batch_and_heads():
    arguments = to_arrays(draw_arguments(10, 20, False), jnp.float32)
    expected = jax.jit(ops.diagonal_preconditioner)(**arguments)
    mesh = jax.make_mesh((1, 1), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    batch, heads = jax.sharding.PartitionSpec("data"), jax.sharding.PartitionSpec("data", None, "model")
    specs = {"k": heads, "log_decay": heads, "gain": heads, "segment_ids": batch}
    specs |= {
        "center": jax.sharding.PartitionSpec("model"),
        "initial_state": jax.sharding.PartitionSpec("data", "model"),
    }
    sharded = jax.shard_map(
        lambda arguments: ops.diagonal_preconditioner(**arguments),
        mesh=mesh,
        in_specs=(specs,),
        out_specs=(heads, jax.sharding.PartitionSpec("data", "model")),
    )
    for out, right in zip(jax.jit(sharded)(arguments), expected):
        np.testing.assert_allclose(out, right, rtol=1e-6)


@pytest.mark.parametrize("implementation", mostly_slow(IMPLEMENTATIONS, ["triton"]))
def test_a_wide_write_key_brings_an_unrounded_gradient(implementation):
    """From the delta rule to the preconditioner, where sums over tokens cancel, with keys that repeat."""
    length, heads, size = 128, 2, 16
    random = np.random.default_rng(3)
    key = random.normal(size=(1, 1, heads, size))
    rows = (1, length, heads)
    arrays = {
        "k": jnp.asarray(
            np.broadcast_to(key / np.linalg.norm(key, axis=-1, keepdims=True), (*rows, size)), jnp.float32
        ),
        "gain": jnp.asarray(random.uniform(size=rows), jnp.float32),
    }
    q, v, weights = (jnp.asarray(random.normal(size=(*rows, size)), jnp.bfloat16) for _ in range(3))
    beta = jnp.asarray(random.uniform(size=rows), jnp.bfloat16)
    log_decay = jnp.asarray(-random.uniform(size=rows) / 16, jnp.float32)
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), arrays)

    def delta_rule(k, write_key):
        out, _ = ops.gated_delta_rule(q, k, v, beta=beta, write_key=write_key, implementation=implementation)
        return jnp.sum((out * weights).astype(jnp.float32)), out

    def preconditioned(k, gain, dtype, implementation=implementation):
        options = {"log_decay": log_decay, "implementation": implementation}
        return ops.precondition_key(k, gain=gain, write_key_dtype=dtype, **options)[:2]

    @functools.partial(jax.jit, static_argnums=1)
    def run(x, dtype):
        return jax.grad(lambda x: delta_rule(*preconditioned(**x, dtype=dtype)), has_aux=True)(x)

    @jax.jit
    def keys_gradients(x):
        keys = preconditioned(**x, dtype=jnp.float32)
        return jax.grad(delta_rule, argnums=(0, 1), has_aux=True)(*keys)[0]

    (narrow, narrow_out), (wide, wide_out) = run(half, None), run(half, jnp.float32)
    assert wide_out.dtype == jnp.bfloat16
    if implementation == "triton":  # in XLA the write key itself is not rounded either
        np.testing.assert_array_equal(narrow_out, wide_out)
    cotangents = keys_gradients(half)
    assert [x.dtype for x in cotangents] == [jnp.bfloat16, jnp.float32]
    # What the preconditioner's gain gets from that gradient in exact arithmetic.
    with jax.enable_x64(True):
        exact = jax.tree.map(lambda x: jnp.asarray(np.asarray(x, np.float64)), (half, cotangents))
        decay64 = jnp.asarray(np.asarray(log_decay, np.float64))
        _, transpose = jax.vjp(
            lambda gain: ops.precondition_key(exact[0]["k"], gain=gain, log_decay=decay64, implementation="scan")[:2],
            exact[0]["gain"],
        )
        expected = transpose(exact[1])[0]
    assert relative_error(wide["gain"], expected) < 3e-3  # rounded once, at the end
    assert relative_error(narrow["gain"], expected) > 2 * relative_error(wide["gain"], expected)

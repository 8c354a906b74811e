import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rnnlib import ops

BATCH, HEADS, KEY, VALUE = 2, 2, 5, 3
LOG_DECAYS = np.array([0.0, -0.01, -0.5, -20.0, -1000.0, -np.inf])
VECTORS = ("q", "k", "a", "b")


def draw(seed, length, value_heads, per_channel, shared=False):
    """Float64 arguments: stable transitions, repeated keys, hard resets, segments; vectors per key or value head."""
    rng = np.random.default_rng(seed)
    heads = {name: HEADS if shared or name == "q" else value_heads for name in VECTORS}
    arguments = {name: _unit(rng.normal(size=(BATCH, length, n, KEY))) for name, n in heads.items()}
    # 0 <= a . b <= 1 along one direction, and repeated tokens: the hardest case for the triangular inverse.
    mix = rng.uniform()
    arguments["b"] = _unit(arguments["a"] + mix * arguments["b"])
    repeated = rng.random(length) < 0.3
    for name in ("k", "a", "b"):
        arguments[name][:, repeated] = arguments[name][:, :1]
    gates = (BATCH, length, value_heads, KEY) if per_channel else (BATCH, length, value_heads)
    return arguments | {
        "v": rng.normal(size=(BATCH, length, value_heads, VALUE)),
        "log_decay": rng.choice(LOG_DECAYS, size=gates, p=rng.dirichlet([1.0] * len(LOG_DECAYS))),
        "initial_state": rng.normal(size=(BATCH, value_heads, KEY, VALUE)),
        "segment_ids": np.cumsum(rng.random((BATCH, length)) < 0.1, axis=1),
    }


def _unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def reference(q, k, v, a, b, log_decay, initial_state, segment_ids, scale=1.0):
    """S_t = S_(t-1) (D_t - a_t b_t^T) + v_t k_t^T with the paper's transposed state `[V, K]`, in a loop."""
    value_heads = v.shape[2]
    q, k, a, b = (np.repeat(x, value_heads // x.shape[2], axis=2) for x in (q, k, a, b))
    decay = np.exp(log_decay if log_decay.ndim == 4 else log_decay[..., None]) * np.ones(KEY)
    out, final = np.zeros(v.shape), np.zeros_like(initial_state)
    for n, h in np.ndindex(BATCH, value_heads):
        state = initial_state[n, h].T
        for t in range(v.shape[1]):
            if t > 0 and segment_ids[n, t] != segment_ids[n, t - 1]:
                state = np.zeros_like(state)
            transition = np.diag(decay[n, t, h]) - np.outer(a[n, t, h], b[n, t, h])
            state = state @ transition + np.outer(v[n, t, h], k[n, t, h])
            out[n, t, h] = scale * state @ q[n, t, h]
        final[n, h] = state.T
    return out, final


def to_arrays(arguments, dtype=jnp.float32):
    return {name: jnp.asarray(x, jnp.int32 if name == "segment_ids" else dtype) for name, x in arguments.items()}


@functools.partial(jax.jit, static_argnames=("implementation", "least"))
def value_and_grad(floats, segment_ids, implementation, least=None):
    # The kernels have one size of chunks, and take decays with a lower bound.
    options = {"chunk_size": 64, "least_log_decay": least} if implementation == "triton" else {"chunk_size": 16}

    def loss(floats):
        out, final = ops.dplr(**floats, **options, segment_ids=segment_ids, scale=1.0, implementation=implementation)
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(final)), (out, final)

    (_, outputs), grads = jax.value_and_grad(loss, has_aux=True)(floats)
    return outputs, grads


def evaluate(arguments, dtype, implementation, least=None):
    arrays = to_arrays(arguments, dtype)
    return jax.tree.map(np.asarray, value_and_grad(arrays, arrays.pop("segment_ids"), implementation, least))


def relative_error(x, expected):
    return np.linalg.norm(x - expected) / max(np.linalg.norm(expected), 1e-30)


@given(seed=st.integers(0, 2**31), case=st.sampled_from([(37, 4, False), (37, 2, True)]))
@settings(max_examples=12)
def test_chunks_match_the_recurrence_in_float64(seed, case):
    arguments = draw(seed, *case)
    expected = reference(**arguments)
    with jax.enable_x64(True):
        outputs, exact = evaluate(arguments, jnp.float64, "scan")
    for out, right in zip(outputs, expected):
        assert relative_error(out, right) < 1e-12
    outputs, grads = evaluate(arguments, jnp.float32, "chunked")
    for out, right in zip(outputs, expected):
        assert relative_error(out, right) < 1e-5
    for name, grad in grads.items():
        assert np.all(np.isfinite(grad)), name
        assert relative_error(grad, exact[name]) < 1e-5, name


@pytest.mark.parametrize(
    ("case", "least"),
    [
        ((150, 4, False, True), -1.5),
        ((150, 2, True, False), -1.5),
        ((5, 2, True, True), -1.5),
        ((37, 4, False, True), -5.0),  # decays as strong as these take the delta rule's kernels, over two steps a token
        ((37, 2, True, False), -5.0),
    ],
)
def test_kernels_match_the_recurrence(case, least):
    *case, shared = case
    arguments = draw(3, *case, shared=shared)
    arguments["log_decay"] = np.maximum(arguments["log_decay"], max(least, -2.0))
    with jax.enable_x64(True):
        expected, exact = evaluate(arguments, jnp.float64, "scan")
    outputs, grads = evaluate(arguments, jnp.float32, "triton", least)
    for out, right in zip(outputs, expected):
        assert relative_error(out, right) < 1e-5
    for name, grad in grads.items():
        assert relative_error(grad, exact[name]) < 1e-5, name


def test_kernels_want_a_bound_of_the_decay():
    arrays = to_arrays(draw(0, 4, 2, True))
    for least, message in ((None, "a least_log_decay of None"), (-6.0, "a least_log_decay of -6.0")):
        with pytest.raises(NotImplementedError, match=f"'triton' does not support {message}"):
            ops.dplr(**arrays, least_log_decay=least, implementation="triton")


def test_vectors_shared_by_a_group_of_value_heads():
    arguments = draw(0, 37, 4, False, shared=True)
    floats = to_arrays(arguments)
    for implementation in ("scan", "chunked"):
        outputs = jax.jit(functools.partial(ops.dplr, scale=1.0, implementation=implementation))(**floats)
        for out, right in zip(outputs, reference(**arguments)):
            assert relative_error(out, right) < 1e-5


def test_left_out_arguments():
    length = 1  # a single token is also the shortest chunk
    arguments = draw(1, length, 2, False)
    arguments |= {"log_decay": np.zeros((BATCH, length, 2)), "segment_ids": np.zeros((BATCH, length), int)}
    arguments["initial_state"] = np.zeros_like(arguments["initial_state"])
    expected = reference(**arguments, scale=KEY**-0.5)
    floats = to_arrays({name: arguments[name] for name in (*VECTORS, "v")})
    for implementation in ("scan", "chunked"):
        outputs = jax.jit(functools.partial(ops.dplr, implementation=implementation))(**floats)
        for out, right in zip(outputs, expected):
            assert relative_error(out, right) < 1e-5


jitted_dplr = jax.jit(functools.partial(ops.dplr, implementation="chunked"))
jitted_delta_rule = jax.jit(functools.partial(ops.gated_delta_rule, implementation="scan"))


class TestTable3:
    """Preconditioned DeltaNet, table 3: what ties a, b and k have in each of the models."""

    def delta_rule(self, model):
        """Arguments of the gated delta rule. `alpha` decays the read key, as `a` reads the state before it decays."""
        per_channel = model in ("kda", "pkda")
        arguments = draw(2, 37, 2, per_channel)
        if model in ("dn", "pdn"):
            arguments["log_decay"] = np.zeros_like(arguments["log_decay"])
        decay = np.exp(np.maximum(arguments["log_decay"], -30.0))
        beta = np.random.default_rng(0).uniform(size=(BATCH, 37, 2))
        arrays = to_arrays(arguments | {"log_decay": np.log(decay)})
        alpha = jnp.asarray(decay if per_channel else decay[..., None], jnp.float32)
        return arrays, alpha, jnp.asarray(beta, jnp.float32)

    def check(self, arrays, a, b, k, v, **delta_rule):
        shared = {name: arrays[name] for name in ("log_decay", "initial_state", "segment_ids")}
        expected = jitted_delta_rule(arrays["q"], arrays["k"], arrays["v"], **shared, **delta_rule)
        outputs = jitted_dplr(arrays["q"], k, v, a=a, b=b, **shared)
        for out, right in zip(outputs, expected):
            assert relative_error(out, right) < 1e-5

    @pytest.mark.parametrize("model", ["dn", "gdn", "kda"])
    def test_one_key(self, model):
        arrays, alpha, beta = self.delta_rule(model)
        k = arrays["k"]
        self.check(arrays, alpha * k, beta[..., None] * k, k, beta[..., None] * arrays["v"], beta=beta)

    def test_comba(self):
        arrays, alpha, beta = self.delta_rule("comba")
        k, feedback = arrays["k"], 0.7
        erase = feedback * beta / alpha[..., 0]
        # Comba's feedback reads the state before it decays: a is the key itself.
        self.check(arrays, k, feedback * beta[..., None] * k, k, beta[..., None] * arrays["v"], erase=erase, write=beta)

    @pytest.mark.parametrize("model", ["pdn", "pgdn", "pkda"])
    def test_preconditioned_rules_have_a_free(self, model):
        arrays, alpha, beta = self.delta_rule(model)
        k = arrays["k"]
        preconditioner, _ = ops.diagonal_preconditioner(k, segment_ids=arrays["segment_ids"])
        write_key = beta[..., None] * preconditioner * k
        v, b = arrays["v"], write_key
        self.check(arrays, alpha * k, b, write_key, v, beta=beta, write_key=preconditioner * k)

    def test_rwkv7_has_the_written_key_free(self):
        """RWKV-7: S_t = S_(t-1) (Diag(w) - r^T (c * r)) + v^T k, one normalised removal key r and its rates c."""
        arguments = draw(3, 37, 2, True)
        rate = np.random.default_rng(1).uniform(size=arguments["a"].shape)
        arguments["b"] = rate * arguments["a"]
        outputs = jitted_dplr(**to_arrays(arguments))
        for out, right in zip(outputs, reference(**arguments, scale=KEY**-0.5)):
            assert relative_error(out, right) < 1e-5


@pytest.mark.parametrize(
    "changes, error, message",
    [
        (
            {"v": jnp.ones((1, 3, 3, 4))},
            ValueError,
            r"v has 3 heads \(shape \(1, 3, 3, 4\)\), expected a multiple of the 2",
        ),
        ({"a": jnp.ones((1, 3, 2, 4))}, ValueError, r"a has shape \(1, 3, 2, 4\), expected \[B, T, H, K\] or"),
        ({"b": jnp.ones((1, 3, 2, 5), int)}, TypeError, "b has dtype int32"),
        ({"log_decay": jnp.ones((1, 3, 2))}, ValueError, r"log_decay has shape \(1, 3, 2\)"),
        ({"initial_state": jnp.ones((1, 4, 4, 5))}, ValueError, "initial_state has shape"),
        ({"chunk_size": 20}, ValueError, "chunk_size is 20"),
        ({"implementation": "triton", "chunk_size": 32}, NotImplementedError, "does not support chunk_size 32"),
    ],
)
def test_bad_arguments_are_named(unchecked_shapes, changes, error, message):
    ones = jnp.ones((1, 3, 2, 5))
    arguments = {"q": ones, "k": ones, "a": ones, "b": ones, "v": jnp.ones((1, 3, 4, 4))}
    with pytest.raises(error, match=message):
        ops.dplr(**(arguments | changes))

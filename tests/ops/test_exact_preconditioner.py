"""The theory of Preconditioned DeltaNet (arXiv 2604.21100): exact least squares, and the lemmas on eigenvalues."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rnnlib import ops

BATCH, LENGTH, HEADS, KEY, VALUE = 2, 24, 2, 4, 3
RIDGE = np.array([0.05, 2.0])


def draw(seed, scale=1.0):
    rng = np.random.default_rng(seed)
    shape = (BATCH, LENGTH, HEADS)
    return {
        "q": rng.normal(size=(*shape, KEY)),
        "k": scale * rng.normal(size=(*shape, KEY)),
        "v": rng.normal(size=(*shape, VALUE)),
        "gain": rng.uniform(size=shape),
        "segment_ids": np.cumsum(rng.random((BATCH, LENGTH)) < 0.1, axis=1),
    }


def least_squares(q, k, v, gain, segment_ids):
    """Ridge regression from keys to values over each prefix of a segment, read with q; also the maps, [.., K, V]."""
    maps = np.zeros((BATCH, LENGTH, HEADS, KEY, VALUE))
    for b, t, h in np.ndindex(BATCH, LENGTH, HEADS):
        start = np.flatnonzero(segment_ids[b] == segment_ids[b, t])[0]
        keys, values = k[b, start : t + 1, h], v[b, start : t + 1, h]
        root = np.sqrt(gain[b, start : t + 1, h])[:, None]
        rows = np.concatenate([root * keys, np.sqrt(RIDGE[h]) * np.eye(KEY)])
        targets = np.concatenate([root * values, np.zeros((KEY, VALUE))])
        maps[b, t, h] = np.linalg.lstsq(rows, targets, rcond=None)[0]
    return np.einsum("bthkv,bthk->bthv", maps, q), maps


@jax.jit
def exact_outputs(q, k, v, gain, segment_ids):
    """Outputs of preconditioned linear attention and preconditioned DeltaNet."""
    query, write_key, inverse = ops.exact_preconditioner(
        q, k, gain=gain, ridge=jnp.asarray(RIDGE, q.dtype), segment_ids=segment_ids
    )
    shared = {"segment_ids": segment_ids, "scale": 1.0, "implementation": "scan"}
    offline, _ = ops.linear_attention(query, k, v, write=gain, **shared)
    online, state = ops.gated_delta_rule(q, k, v, write_key=write_key, **shared)
    return offline, online, state, inverse


@given(seed=st.integers(0, 2**31), scale=st.sampled_from([1e-3, 1.0, 10.0]))
@settings(max_examples=8)
def test_theorem_3_1_linear_attention_deltanet_and_least_squares_agree(seed, scale):
    arguments = draw(seed, scale)
    with jax.enable_x64(True):
        offline, online, state, inverse = jax.tree.map(np.asarray, exact_outputs(**arguments))
    expected, maps = least_squares(**arguments)
    size = np.abs(expected).max()
    np.testing.assert_allclose(offline, expected, rtol=1e-9, atol=1e-9 * size)
    np.testing.assert_allclose(online, expected, rtol=1e-9, atol=1e-9 * size)
    np.testing.assert_allclose(state, maps[:, -1], rtol=1e-9, atol=1e-9 * np.abs(maps).max())
    np.testing.assert_array_equal(inverse, np.swapaxes(inverse, -1, -2))


def test_float32_is_as_close_as_the_condition_number_allows():
    arguments = draw(0)
    offline, online, _, _ = exact_outputs(
        **{name: jnp.asarray(x, jnp.int32 if name == "segment_ids" else jnp.float32) for name, x in arguments.items()}
    )
    expected, _ = least_squares(**arguments)
    for out in (offline, online):
        assert np.linalg.norm(out - expected) / np.linalg.norm(expected) < 1e-4


def test_state_continues(x64):
    arguments = {name: jnp.asarray(x) for name, x in draw(1).items() if name in ("q", "k", "gain")}
    whole = ops.exact_preconditioner(**arguments)
    first = ops.exact_preconditioner(**{name: x[:, :7] for name, x in arguments.items()})
    second = ops.exact_preconditioner(**{name: x[:, 7:] for name, x in arguments.items()}, initial_inverse=first[2])
    for piece in (0, 1):
        np.testing.assert_allclose(jnp.concatenate([first[piece], second[piece]], axis=1), whole[piece], rtol=1e-12)
    np.testing.assert_allclose(second[2], whole[2], rtol=1e-12)


def test_gradient_is_that_of_the_closed_form(x64):
    k = jnp.asarray(draw(2)["k"][:1, :6, :1])
    q = jnp.asarray(draw(3)["q"][:1, :6, :1])

    def recursive(k):
        query, write_key, inverse = ops.exact_preconditioner(q, k, ridge=0.5)
        return jnp.sum(jnp.sin(query)) + jnp.sum(write_key**2) + jnp.sum(jnp.cos(inverse))

    def closed(k):
        keys = k[0, :, 0]
        grams = 0.5 * jnp.eye(KEY) + jnp.cumsum(keys[:, :, None] * keys[:, None, :], axis=0)
        query = jnp.linalg.solve(grams, q[0, :, 0, :, None])
        write_key = jnp.linalg.solve(grams, keys[:, :, None])
        return jnp.sum(jnp.sin(query)) + jnp.sum(write_key**2) + jnp.sum(jnp.cos(jnp.linalg.inv(grams[-1])))

    np.testing.assert_allclose(jax.jit(jax.grad(recursive))(k), jax.jit(jax.grad(closed))(k), rtol=1e-8, atol=1e-10)


def test_theorem_3_2_deltanet_ends_up_closer_to_least_squares():
    """Monte Carlo of the proof's two bounds (C.5.2, C.5.3), keys and queries uniform on the sphere, v = S* k."""
    dimension, length, runs, value = 8, 40, 4000, 3
    keys = jax.random.split(jax.random.key(0), 3)
    k, q = (_unit(jax.random.normal(key, (runs, length, 1, dimension))) for key in keys[:2])
    true_map = jax.random.normal(keys[2], (value, dimension))
    v = k @ true_map.T
    exact = q @ true_map.T
    square = jnp.sum(true_map**2)

    @jax.jit
    def errors(q, k, v):
        offline, _ = ops.linear_attention(q, k, v, scale=1.0)
        online, _ = ops.gated_delta_rule(q, k, v, beta=jnp.full(k.shape[:3], 0.7), scale=1.0)
        squares = [jnp.sum((out - exact) ** 2, axis=(-2, -1)) for out in (offline, online)]
        return [(jnp.mean(x, axis=0), jnp.std(x, axis=0) / runs**0.5) for x in squares]

    (offline, offline_error), (online, online_error) = jax.tree.map(np.asarray, errors(q, k, v))
    t = np.arange(1, length + 1)
    predicted = square / dimension * (1 - t / dimension + t * (t - 1) / dimension**2)
    assert np.all(np.abs(offline - predicted) < 5 * offline_error)  # C.5.2
    assert np.all(online < square / dimension + 5 * online_error)  # C.5.3
    after = t >= dimension + 1  # the proof's t_0
    assert np.all(online[after] <= offline[after])
    assert online[-1] < 0.02 * offline[-1]


def _unit(x):
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


@jax.jit
def transition(k, write_key, decay, beta):
    """The matrix that multiplies the state `[K, V]` from the left, read off the operator itself."""
    size = k.shape[-1]
    k, write_key, decay, beta = (jnp.asarray(x)[None, None, None] for x in (k, write_key, decay, beta))
    values, identity = jnp.zeros((1, 1, 1, size), k.dtype), jnp.eye(size, dtype=k.dtype)[None, None]
    _, state = ops.gated_delta_rule(
        k, k, values, write_key=write_key, beta=beta, log_decay=jnp.log(decay), initial_state=identity
    )
    return state[0, 0]


unit_vectors = st.integers(0, 2**31).map(
    lambda seed: (lambda x: x / np.linalg.norm(x))(np.random.default_rng(seed).normal(size=6))
)


@given(k=unit_vectors, write_key=unit_vectors, decay=st.floats(0.01, 1), beta=st.floats(0, 2))
@settings(max_examples=20)
def test_lemma_e_1_eigenvalues_of_the_transition(k, write_key, decay, beta):
    with jax.enable_x64(True):
        matrix = np.asarray(transition(k, write_key, decay, beta))
    nontrivial = decay * (1 - beta * write_key @ k)
    np.testing.assert_allclose(matrix @ write_key, nontrivial * write_key, atol=1e-12)
    trivial = np.linalg.svd(k[None])[2][1:]  # the complement of k
    np.testing.assert_allclose(matrix @ trivial.T, decay * trivial.T, atol=1e-12)
    np.testing.assert_allclose(np.linalg.det(matrix), decay**5 * nontrivial, atol=1e-12)


@given(
    k=unit_vectors,
    seed=st.integers(0, 2**31),
    decay=st.floats(0.01, 1),
    bound=st.sampled_from([1.0, 1.5, 2.0]),
    fraction=st.floats(0, 1),
)
@settings(max_examples=20)
def test_lemma_e_2_unit_disk(k, seed, decay, bound, fraction):
    """With gain * bound <= 2 every eigenvalue lies in the unit disk, for any preconditioner in [1 / bound, bound]."""
    beta = 2 * fraction / bound
    with jax.enable_x64(True):
        gram = np.exp(10 * np.random.default_rng(seed).normal(size=(1, 6)))
        preconditioner = np.asarray(ops.squash_to_interval(jnp.asarray(gram), bound=bound)[0])
        matrix = np.asarray(transition(k, preconditioner * k, decay, beta))
    product = np.sum(preconditioner * k * k)
    assert 1 / bound - 1e-12 <= product <= bound + 1e-12
    assert np.max(np.abs(np.linalg.eigvals(matrix))) <= 1 + 1e-9


@pytest.mark.parametrize("beta, bound, has_negative", [(0.8, 1.2, False), (0.8, 1.3, True), (1.0, 2.0, True)])
def test_lemma_e_3_negative_eigenvalue(x64, beta, bound, has_negative):
    """B = bound I gives a negative eigenvalue exactly where beta * bound > 1."""
    k = np.array([0.6, 0.0, 0.8])
    eigenvalues = np.linalg.eigvals(np.asarray(transition(k, bound * k, 0.9, beta)))
    assert (np.min(eigenvalues.real) < 0) == has_negative
    np.testing.assert_allclose(np.min(eigenvalues.real), 0.9 * min(1, 1 - beta * bound), atol=1e-12)


@pytest.mark.parametrize(
    "changes, error, message",
    [
        ({"q": jnp.ones((1, 3, 2, 5))}, ValueError, r"q has shape \(1, 3, 2, 5\)"),
        ({"gain": jnp.ones((1, 3))}, ValueError, r"gain has shape \(1, 3\), expected \[B, T, H\]"),
        ({"ridge": 0.0}, ValueError, "ridge is 0.0, expected a positive number"),
        ({"ridge": jnp.ones(3)}, ValueError, r"ridge has shape \(3,\)"),
        ({"initial_inverse": jnp.ones((1, 2, 4, 3))}, ValueError, "initial_inverse has shape"),
        ({"implementation": "chunked"}, NotImplementedError, "there is no 'chunked' implementation"),
    ],
)
def test_bad_arguments_are_named(unchecked_shapes, changes, error, message):
    ones = jnp.ones((1, 3, 2, 4))
    with pytest.raises(error, match=message):
        ops.exact_preconditioner(**({"q": ones, "k": ones} | changes))


def test_a_packed_segment_is_as_if_alone(x64):
    q, k = (jnp.asarray(draw(4)[name]) for name in ("q", "k"))
    run = functools.partial(ops.exact_preconditioner, ridge=0.3)
    packed = run(q, k, segment_ids=jnp.asarray([[0] * 9 + [5] * 15] * BATCH))
    alone = run(q[:, 9:], k[:, 9:])
    np.testing.assert_allclose(packed[0][:, 9:], alone[0], rtol=1e-12)
    np.testing.assert_allclose(packed[1][:, 9:], alone[1], rtol=1e-12)
    np.testing.assert_allclose(packed[2], alone[2], rtol=1e-12)

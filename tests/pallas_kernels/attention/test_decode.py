"""One token's attention to a ring in a Mosaic GPU kernel: interpreted, with races looked for; the definition."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pallas_kernels import operators
from pallas_kernels.attention.api import token_attention
from pallas_kernels.attention.mosaic_gpu.decode import ring_attention
from rnnlib.layers import AttentionConfig
from rnnlib.ops.causal_attention import Ring, token_attention_formula
from rnnlib.ops.heads import rotate_pairs
from tests.pallas_kernels import mosaic_interpreter
from tests.pallas_kernels.cases import relative_error
from tests.pallas_kernels.test_lowering import H200, distinct_kernels, lowered_text

# Shape [B, S, H, K], the newest token of each row, how many tokens it sees.
CASES = {
    "a_full_ring": ((2, 32, 16, 64), (31, 200), (32, 32)),
    "a_first_token_and_few": ((3, 32, 16, 64), (0, 4, 17), (1, 5, 18)),
    "a_ring_gone_round_and_a_segment": ((2, 64, 8, 64), (77, 150), (3, 64)),
    "many_heads": ((1, 4, 64, 64), (5,), (2,)),
}
SCALE = 0.2


def make_arrays(shape, key=0):
    shapes = (shape[0], *shape[2:]), shape, shape
    keys = jax.random.split(jax.random.key(key), 3)
    return [jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes)]


def attention(q, key, value, last, seen, scale=SCALE):
    """The definition, row by row, in float64."""
    rows = []
    for row, (newest, count) in enumerate(zip(last, seen, strict=True)):
        slots = [token % key.shape[1] for token in range(newest - count + 1, newest + 1)]
        scores = scale * np.einsum("hk,shk->hs", q[row], key[row, slots])
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        rows.append(np.einsum("hs,shk->hk", weights / weights.sum(axis=1, keepdims=True), value[row, slots]))
    return np.stack(rows)


def outcome(arrays, last, seen):
    q, key, value = arrays
    numbers = {"last": jnp.array(last, jnp.int32), "seen": jnp.array(seen, jnp.int32)}
    return ring_attention(q, key=key, value=value, scale=SCALE, **numbers)


@pytest.mark.parametrize("name", CASES)
def test_output_is_that_of_the_definition(name, capsys):
    mosaic_interpreter.install()
    shape, last, seen = CASES[name]
    arrays = make_arrays(shape)
    found = outcome(arrays, last, seen)
    expected = attention(*(np.asarray(x, np.float64) for x in arrays), last, seen)
    assert found.dtype == jnp.bfloat16
    assert relative_error(np.asarray(found, np.float64), expected) < 3e-3  # bfloat16's last digit is 4e-3
    assert "RACE" not in "".join(capsys.readouterr())


def token_and_ring(lengths, begun, *, capacity=32, heads=16, channels=64):
    """A token of each row and a ring whose latest tokens, `begun` of them, are of the token's segment."""
    rng, batch = np.random.default_rng(0), len(lengths)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)

    segment = rng.integers(2, 5, (batch, capacity))  # of slots without a token, this token's own segment among them
    for row, (length, count) in enumerate(zip(lengths, begun, strict=True)):
        for token in range(max(0, length - capacity), length):
            segment[row, token % capacity] = 2 - (token < length - count)
    token = [normal(batch, heads, channels) for _ in range(3)]
    ring = Ring(*(normal(batch, capacity, heads, channels) for _ in range(2)), jnp.asarray(segment, jnp.int32))
    counts = {"length": jnp.asarray(lengths, jnp.int32), "current": jnp.full((batch,), 2, jnp.int32)}
    return token, ring, counts, jnp.asarray(rng.standard_normal((batch, channels // 2)), jnp.float32)


def test_calls_may_be_mapped_over():
    mosaic_interpreter.install()
    calls = [make_arrays((2, 32, 16, 64), key) for key in (0, 1)]
    numbers = [((3, 40), (2, 32)), ((31, 7), (32, 8))]
    last, seen = (jnp.array(x, jnp.int32) for x in zip(*numbers))
    q, key, value = (jnp.stack(x) for x in zip(*calls))
    run = lambda q, key, value, last, seen: ring_attention(  # noqa: E731
        q, key=key, value=value, last=last, seen=seen, scale=SCALE
    )
    found = jax.vmap(run)(q, key, value, last, seen)
    for x, arrays, counts in zip(found, calls, numbers, strict=True):
        np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(outcome(arrays, *counts), np.float32))


@pytest.mark.parametrize("turns", [False, True])
def test_a_token_joins_the_ring_and_attends_to_its_segment(turns, capsys):
    mosaic_interpreter.install()
    (q, k, v), ring, counts, angle = token_and_ring([0, 5, 31, 77, 64], [0, 3, 31, 4, 60])
    if not turns:
        angle = None
    out, *found = token_attention(q, k, v, **ring._asdict(), **counts, angle=angle, backend="mosaic")
    if turns:
        q, k = (rotate_pairs(x, angle[:, None]) for x in (q, k))
    expected, expected_ring = token_attention_formula(*(x[:, None] for x in (q, k, v)), ring, **counts)
    assert relative_error(np.asarray(out, np.float64), np.asarray(expected[:, 0], np.float64)) < 1e-2  # both rounded
    for x, y in zip(found, expected_ring, strict=True):
        np.testing.assert_array_equal(np.asarray(x, np.float64), np.asarray(y, np.float64))
    assert "RACE" not in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (dict(rows=95), "95 rows (at least 96)"),
        (dict(dtype=jnp.float32), "q of dtype float32 (only bfloat16)"),
        (dict(channels=128), "q of 128 channels (only 64)"),
        (dict(heads=12), "12 heads (8, 16, 32 or 64)"),
        (dict(key_heads=8), "16 query heads with 8 key heads (as many)"),
        (dict(capacity=40), "a ring of 40 slots (multiples of 16)"),
    ],
)
def test_calls_that_the_kernel_does_not_serve_are_named(changed, reason):
    sizes = dict(rows=96, dtype=jnp.bfloat16, channels=64, heads=16, capacity=48) | changed
    key_heads = sizes.get("key_heads", sizes["heads"])
    q, k = (jnp.zeros((sizes["rows"], n, sizes["channels"]), sizes["dtype"]) for n in (sizes["heads"], key_heads))
    ring = jnp.zeros((sizes["rows"], sizes["capacity"], *k.shape[1:]), k.dtype)
    with jax.sharding.use_abstract_mesh(H200):
        assert operators.attention.unsupported_reason(q, k, k, ring, ring, backend="mosaic") == reason
        wide = jnp.zeros(ring.shape, jnp.float16)
        assert "another dtype" in operators.attention.unsupported_reason(q, k, k, ring, wide, backend="mosaic")
    assert operators.attention.unsupported_reason(q, k, k, ring, ring, backend="mosaic") is not None
    if sizes["rows"] == 96 and key_heads == sizes["heads"]:  # shapes alone say what else is refused
        counts = jnp.zeros((96,), jnp.int32)
        with pytest.raises(NotImplementedError, match=re.escape(reason)):
            ring_attention(q, key=ring, value=ring, last=counts, seen=counts + 1, scale=1.0)


@pytest.mark.parametrize("base, channels", [(1e4, None), (None, None), (1e4, 32)], ids=["turned", "plain", "part"])
def test_a_layer_of_many_rows_takes_it_and_all_layers_share_one_kernel(base, channels):
    config = AttentionConfig(num_heads=16, rope_base=base, rope_channels=channels)
    graph, state = nnx.split(nnx.eval_shape(lambda: config.build(1024, 16, rngs=nnx.Rngs(0), dtype=jnp.bfloat16)))

    def token(rows, calls):
        def run(state, x):
            layer, cache = nnx.merge(graph, state), None
            for _ in range(calls):
                x, cache = layer(x, cache=layer.init_cache(rows, 128))
            return x, cache.key

        return lowered_text(run, state, jax.ShapeDtypeStruct((rows, 1, 1024), jnp.bfloat16))

    text = token(128, 2)
    assert len(distinct_kernels(text)) == 1
    assert text.count('name = "token_attention"') == 0 and text.count('name = "store_token"') == 2
    text = token(64, 1)
    assert not distinct_kernels(text) and text.count('name = "token_attention"') == 1


@pytest.mark.gpu
@pytest.mark.parametrize("heads, capacity", [(8, 96), (16, 640), (32, 64), (64, 4)])
def test_on_a_gpu_outputs_and_rings_are_those_of_the_definition(heads, capacity):
    lengths = np.arange(128) * capacity // 60
    begun = np.minimum(lengths, np.arange(128) * 5 % (capacity + 3))
    (q, k, v), ring, counts, angle = token_and_ring(lengths, begun, capacity=capacity, heads=heads)
    assert operators.attention.unsupported_reason(q, k, v, ring.key, ring.value, backend="mosaic") is None
    run = jax.jit(
        lambda *x: token_attention(*x[:3], **x[3]._asdict(), **counts, angle=x[4], scale=0.3, backend="mosaic")
    )
    out, *found = run(q, k, v, ring, angle)
    rows, slots = np.arange(128), lengths % capacity
    stored = rotate_pairs(k, angle[:, None]), v, counts["current"]
    for x, before, own in zip(found, ring, stored, strict=True):
        x, expected = (np.asarray(y, np.float32) for y in (x, before.at[rows, slots].set(own)))
        np.testing.assert_allclose(x, expected, rtol=1e-2, atol=1e-2)  # keys' last digit is 8e-3 of them at most
        x[rows, slots] = expected[rows, slots]
        np.testing.assert_array_equal(x, expected)  # all but the token's own are as they were
    turned = np.asarray(rotate_pairs(q, angle[:, None]), np.float64)
    seen = np.minimum(begun + 1, capacity)
    expected = attention(turned, *(np.asarray(x, np.float64) for x in found[:2]), lengths, seen, scale=0.3)
    assert relative_error(np.asarray(out, np.float64), expected) < 5e-3

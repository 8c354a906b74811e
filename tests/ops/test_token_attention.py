"""One token's attention to a ring, by the kernel: the definition in float64, over rings of every filling."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pallas_kernels import operators
from pallas_kernels.attention.triton.decode import TokenAttentionConfig
from rnnlib.layers import AttentionConfig, attention
from rnnlib.ops.causal_attention import Ring, token_attention, token_attention_formula
from tests.selection import mostly_slow


@dataclasses.dataclass(frozen=True)
class Case:
    """Sizes of a call; `lengths` are tokens of each row before."""

    lengths: tuple[int, ...]
    capacity: int = 40
    heads: int = 2
    key_heads: int = 2
    key_size: int = 16
    value_size: int = 16
    segments: bool = False
    scale: float | None = None
    dtype: type = jnp.float32


CASES = {
    "empty_part_full_and_wrapped": Case((0, 1, 17, 39, 40, 41, 133)),
    "grouped_queries_of_odd_sizes": Case((5, 40), heads=6, key_heads=2, key_size=24, value_size=40, segments=True),
    "one_slot": Case((0, 3), capacity=1),
    "more_queries_than_a_tile": Case((20,), heads=20, key_heads=1, scale=0.3),
    "segments": Case((30, 75, 0), segments=True, dtype=jnp.bfloat16),
    "fewer_blocks_than_parts": Case((3,), capacity=100, dtype=jnp.bfloat16),
}


def arguments(case: Case, seed: int = 0):
    rng, batch = np.random.default_rng(seed), len(case.lengths)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), case.dtype)

    q = 3 * normal(batch, 1, case.heads, case.key_size)
    k, v = (normal(batch, 1, case.key_heads, size) for size in (case.key_size, case.value_size))
    ring = (normal(batch, case.capacity, case.key_heads, size) for size in (case.key_size, case.value_size))
    length = np.array(case.lengths)
    # Slots that hold no token have numbers all the same, of the token's own segment too.
    current = np.full(batch, 2)
    segment = rng.integers(1, 3, (batch, case.capacity)) if case.segments else np.full((batch, case.capacity), 2)
    ints = functools.partial(jnp.asarray, dtype=jnp.int32)
    return q, k, v, Ring(*ring, ints(segment)), ints(length), ints(current)


def defined(case: Case, q, k, v, ring, length, current):
    """Output and ring, token by token, in float64."""
    q, k, v, *kept = (np.asarray(x, np.float64) for x in (q, k, v, *ring))
    out = np.zeros((len(q), 1, case.heads, case.value_size))
    scale = case.key_size**-0.5 if case.scale is None else case.scale
    for b, count in enumerate(np.asarray(length)):
        for array, own in zip(kept, (k[b, 0], v[b, 0], current[b])):
            array[b, count % case.capacity] = own
        seen = [n % case.capacity for n in range(max(0, count - case.capacity + 1), count + 1)]
        seen = [slot for slot in seen if kept[2][b, slot] == current[b]]
        for head in range(case.heads):
            of_key = head // (case.heads // case.key_heads)
            weights = np.exp(scale * kept[0][b, seen, of_key] @ q[b, 0, head])
            out[b, 0, head] = weights @ kept[1][b, seen, of_key] / weights.sum()
    return out, Ring(*kept)


def check(case: Case, tolerance: float, *functions) -> None:
    given = arguments(case)
    expected, ring = defined(case, *given)
    for function in functions:
        out, found = jax.jit(functools.partial(function, scale=case.scale))(*given)
        assert out.dtype == case.dtype
        assert np.abs(np.asarray(out, np.float64) - expected).max() <= tolerance * max(1, np.abs(expected).max())
        for x, y in zip(found, ring):
            np.testing.assert_array_equal(np.asarray(x, np.float64), y)


@pytest.mark.parametrize("name", CASES)
def test_outputs_and_rings_are_those_of_the_definition(name):
    case = CASES[name]
    check(case, 2e-2 if case.dtype == jnp.bfloat16 else 1e-5, token_attention, token_attention_formula)


def kernel_of(schedule):
    """`token_attention` by a schedule of one's own."""

    def function(q, k, v, ring, length, current, *, scale):
        token = (x[:, 0] for x in (q, k, v))
        options = {"length": length, "current": current, "scale": scale, "schedule": schedule}
        out, *found = operators.attention.token_attention(*token, **ring._asdict(), **options)
        return out[:, None], Ring(*found)

    return function


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [1, 3, 12])
@pytest.mark.parametrize("sizes", [(64, 64, 16, 16), (128, 128, 32, 8), (96, 64, 4, 1), (256, 256, 8, 1)])
def test_on_a_gpu_outputs_are_those_of_the_definition(sizes, splits):
    key_size, value_size, heads, key_heads = sizes
    case = Case((0, 1, 63, 64, 300, 700, 701, 5000), 700, heads, key_heads, key_size, value_size, segments=splits == 3)
    schedule = TokenAttentionConfig(32 if key_size == 256 else 64, splits=splits)
    case = dataclasses.replace(case, dtype=jnp.bfloat16)
    check(case, 1e-2, kernel_of(schedule), token_attention)


def test_derivatives_are_those_of_the_formula():
    q, k, v, ring, length, current = arguments(CASES["grouped_queries_of_odd_sizes"])
    weights = jnp.asarray(np.random.default_rng(1).standard_normal((2, 1, 6, 40)), jnp.float32)

    def loss(function, q, k, v, key, value):
        out, after = function(q, k, v, Ring(key, value, ring.segment), length, current)
        return jnp.sum(weights * out) + jnp.sum(after.key[:, 3] ** 2) + jnp.sum(after.value**3)

    found, expected = (
        jax.grad(functools.partial(loss, function), argnums=range(5))(q, k, v, ring.key, ring.value)
        for function in (token_attention, token_attention_formula)
    )
    for x, y in zip(found, expected):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


def test_calls_that_the_kernel_does_not_support_are_named():
    q, k, v, ring, length, current = arguments(CASES["one_slot"])
    with pytest.raises(NotImplementedError, match=r"key size 8 with value size 16 \(at least 16\)"):
        token_attention(q[..., :8], k[..., :8], v, ring._replace(key=ring.key[..., :8]), length, current)
    with pytest.raises(NotImplementedError, match="a ring of another dtype than the token"):
        token_attention(q, k, v, ring._replace(key=ring.key.astype(jnp.bfloat16)), length, current)
    many = jnp.repeat(q[:, :, :1], 65, axis=2)
    with pytest.raises(NotImplementedError, match=r"65 query heads of a key head \(at most 64\)"):
        token_attention(
            many,
            k[:, :, :1],
            v[:, :, :1],
            Ring(ring.key[:, :, :1], ring.value[:, :, :1], ring.segment),
            length,
            current,
        )


@pytest.mark.parametrize("window", mostly_slow([None, 5, 32], [5]))
def test_a_layer_by_the_kernel_gives_the_parallel_pass(window, monkeypatch):
    """A prompt, then single tokens round the ring, with documents that end within the prompt."""
    used = []
    monkeypatch.setattr(
        attention, "token_attention_supports", lambda *given: used.append(given) or len(given[0][0]) == 1
    )
    layer = AttentionConfig(window=window, key_heads=1).build(32, 2, rngs=nnx.Rngs(0))
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 20, 32)), jnp.float32)
    ids = jnp.asarray([[0] * 4 + [1] * 16, [0] * 9 + [2] * 11])
    expected, _ = layer(x, segment_ids=ids)
    first, cache = layer(x[:, :9], segment_ids=ids[:, :9], cache=layer.init_cache(2, 20))
    pieces = [first]
    call = nnx.jit(lambda layer, x, cache: layer(x, cache=cache))
    for t in range(9, 20):
        # The second row's next document begins with the first single token, which a cache takes for the same one.
        y, cache = call(layer, x[:, t : t + 1], cache)
        pieces.append(y)
    found = jnp.concatenate(pieces, axis=1)
    np.testing.assert_allclose(found[0], expected[0], atol=1e-5)
    alone, _ = layer(x[1:])
    np.testing.assert_allclose(found[1], alone[0], atol=1e-5)
    assert used
    np.testing.assert_array_equal(cache.length, [20, 20])

"""Softmax attention: grouped heads, norms, windows, and the cache that is a ring."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rnnlib import ops
from rnnlib.layers import AttentionConfig, ConvolutionConfig, LatentAttentionConfig, attention_cache
from rnnlib.ops import forgetting_attention
from tests.selection import mostly_slow

from .reference import linear, rms, rotate
from .tiny import HEADS, WIDTH, compiled, inputs, parameters, randomize, relative_error, tiny


def build(**options):
    heads = options.pop("num_heads", HEADS)
    return randomize(AttentionConfig(**options).build(WIDTH, heads, rngs=nnx.Rngs(0)))


def test_grouped_queries_and_norms():
    """4 query heads, 2 key heads, RMS norm of queries and keys before the rotation, no window."""
    module = build(num_heads=4, key_heads=2, qk_norm=True)
    p, x = parameters(module), np.asarray(inputs(1, 11))
    q, k, v = (linear(p[n], x[0].astype(np.float64)).reshape(11, -1, 4) for n in ("query", "key", "value"))
    q, k = rotate(rms(q, p["query_norm"]["scale"])), rotate(rms(k, p["key_norm"]["scale"]))
    out = np.zeros_like(q)
    for h in range(4):
        for t in range(11):
            weights = np.exp(k[: t + 1, h // 2] @ q[t, h] / 2)
            out[t, h] = weights @ v[: t + 1, h // 2] / weights.sum()
    expected = linear(p["output"], out.reshape(11, -1))
    assert relative_error(compiled(module)(x)[0][0], expected) < 1e-5
    assert p["key"]["kernel"].shape == p["value"]["kernel"].shape == (WIDTH, 8)


@pytest.mark.parametrize("window", mostly_slow([None, 1, 4, 32], [None, 4]))
def test_any_cut_into_calls_gives_the_parallel_pass(window):
    """Calls shorter than, as long as and longer than the ring, wrapping round it, for a window and without one."""
    module = build(window=window, num_heads=2, key_heads=1)
    call, x = compiled(module), inputs(2, 13)
    expected, _ = call(x)
    for lengths in ((3, 1, 1, 4, 4), (9, 3, 1), (1, 1, 1, 1, 9)):
        cache, start, pieces = module.init_cache(2, 13), 0, []
        for length in lengths:
            y, cache = call(x[:, start : start + length], None, cache)
            pieces.append(y)
            start += length
        assert cache.key.shape[1] == (13 if window is None else min(window, 13))
        assert relative_error(np.concatenate(pieces, axis=1), expected) < 1e-5


@pytest.mark.parametrize("config", [AttentionConfig(key_heads=1), AttentionConfig(window=4), LatentAttentionConfig()])
def test_a_float64_cache_gives_float64(config, x64):
    module = config.build(WIDTH, 2, dtype=jnp.float64, param_dtype=jnp.float64, rngs=nnx.Rngs(0))
    call, x = compiled(module), inputs(2, 13).astype(jnp.float64)
    expected, _ = call(x)
    cache, pieces = module.init_cache(2, 13), []
    for start, end in ((0, 5), (5, 6), (6, 13)):
        y, cache = call(x[:, start:end], None, cache)
        pieces.append(y)
    assert relative_error(np.concatenate(pieces, axis=1), expected) < 1e-14


@pytest.mark.parametrize("window", mostly_slow([None, 4, 9], [None, 4]))
def test_beyond_max_length_any_cut_sees_the_last_tokens(window):
    """Each token sees as many as the cache holds, however calls end on, run past or begin beyond its `max_length`."""
    capacity, x = 6, inputs(2, 13)
    expected, _ = compiled(build(window=min(window or capacity, capacity)))(x)
    module = build(window=window)
    call = compiled(module)
    for lengths in ((1,) * 13, (6, 6, 1), (4, 5, 4), (5, 1, 2, 5)):
        cache, start, pieces = module.init_cache(2, capacity), 0, []
        for length in lengths:
            y, cache = call(x[:, start : start + length], None, cache)
            pieces.append(y)
            start += length
        assert relative_error(np.concatenate(pieces, axis=1), expected) < 1e-5, lengths


@pytest.mark.parametrize("window", mostly_slow([None, 3], [3]))
def test_long_calls_are_read_in_blocks(window, monkeypatch):
    """Documents restart wherever the blocks are cut; the last block is a part of one."""
    module = build(window=window)
    x, ids = inputs(2, 14), jnp.asarray([[0] * 5 + [1] * 9, [3] * 2 + [2] * 6 + [3] * 6])
    expected, _ = compiled(module)(x, ids)
    monkeypatch.setattr(attention_cache, "BLOCK", 4)
    first, cache = compiled(module)(x[:, :13], ids[:, :13], module.init_cache(2, 14))
    last, _ = compiled(module)(x[:, 13:], None, cache)
    assert relative_error(np.concatenate([first, last], axis=1), expected) < 1e-5


@pytest.mark.parametrize("window", mostly_slow([None, 3], [3]))
def test_short_convolutions_go_on_over_calls_and_stop_at_documents(window):
    module = build(window=window, convolution=ConvolutionConfig(size=3, activation="silu", value=False))
    assert module.value_convolution is None
    x, ids = inputs(2, 9), jnp.asarray([[0] * 4 + [1] * 5] * 2)
    expected, _ = compiled(module)(x, ids)
    cache, pieces = module.init_cache(2, 9, jnp.bfloat16), []
    assert {name: (tail.shape, tail.dtype) for name, tail in cache.tails.items()} == dict.fromkeys(
        ("query", "key"), ((2, 2, WIDTH), jnp.bfloat16)
    )
    for start, end in ((0, 5), (5, 6), (6, 9)):
        y, cache = compiled(module)(x[:, start:end], ids[:, start:end], cache)
        pieces.append(y)
    assert relative_error(np.concatenate(pieces, axis=1), expected) < 2e-2 and cache.tails["key"].dtype == jnp.bfloat16
    for part in (slice(0, 4), slice(4, 9)):  # each document alone
        alone, _ = compiled(module)(x[:, part])
        assert relative_error(alone, expected[:, part]) < 1e-5
    # A filter that passes its own token alone is none.
    plain, same = build(window=window), build(window=window, convolution=ConvolutionConfig(size=3))
    assert same.query_convolution is not None
    for convolution in (same.query_convolution, same.key_convolution, same.value_convolution):
        convolution.kernel[...] = jnp.zeros_like(convolution.kernel[...]).at[-1].set(1)
    nnx.update(same, nnx.state(plain))
    assert relative_error(compiled(same)(x)[0], compiled(plain)(x)[0]) < 1e-6


@pytest.mark.parametrize("window", [None, 3])
def test_forget_gates_in_blocks_of_queries_with_documents(window, monkeypatch):
    """Decays of one, of nothing and in between; blocks that end with the row and within it; values and gradients."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(2, 11, heads, 5)), jnp.float32) for heads in (4, 2, 2))
    log_decay = jnp.asarray(rng.choice([0.0, -0.1, -3.0, -np.inf], size=(2, 11, 4)), jnp.float32)
    ids = jnp.asarray([[0] * 5 + [1] * 6, [3] * 2 + [2] * 6 + [3] * 3])

    def loss(q, k, v, log_decay):
        out = ops.causal_attention(q, k, v, log_decay=log_decay, window=window, segment_ids=ids)
        return jnp.sum(jnp.sin(out)), out

    def definition(q, k, v, log_decay):
        k, v = jnp.repeat(k, 2, axis=2), jnp.repeat(v, 2, axis=2)
        scores = jnp.einsum("bthk,bshk->bhts", q, k) / np.sqrt(5)
        token = np.arange(11)
        distance = token[:, None] - token
        document = np.cumsum(np.diff(np.asarray(ids), axis=1, prepend=np.asarray(ids)[:, :1]) != 0, axis=1)
        seen = (distance >= 0) & (distance < (window or 11)) & (document[:, :, None] == document[:, None])
        between = (token > token[:, None]) & (token <= token[:, None, None])  # of query, key and what lies between
        kept = jnp.prod(jnp.where(between[None, ..., None], jnp.exp(log_decay)[:, None, None], 1), axis=3)
        weights = jnp.where(seen[:, None], jnp.exp(scores) * jnp.moveaxis(kept, 3, 1), 0)
        out = jnp.einsum("bhts,bshv->bthv", weights / weights.sum(-1, keepdims=True), v)
        return jnp.sum(jnp.sin(out)), out

    (_, expected), exact = jax.value_and_grad(definition, (0, 1, 2), has_aux=True)(q, k, v, log_decay)
    for size in (512, 4, 11):
        monkeypatch.setattr(forgetting_attention, "_QUERIES", size)
        function = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)
        (_, out), found = jax.jit(lambda *x, function=function: function(*x))(q, k, v, log_decay)
        for one, right in zip((out, *found), (expected, *exact)):
            assert relative_error(one, right) < 1e-5


def test_memory_of_a_long_prompt_is_linear_in_its_length():
    module = build(window=8)
    graph, state = nnx.split(module)

    def extend(state, x):
        return nnx.merge(graph, state)(x, cache=nnx.merge(graph, state).init_cache(1, x.shape[1]))

    lengths = (attention_cache.BLOCK, 16 * attention_cache.BLOCK)
    shapes = [jax.ShapeDtypeStruct((1, length, WIDTH), jnp.float32) for length in lengths]
    sizes = [jax.jit(extend).lower(state, x).compile().memory_analysis().temp_size_in_bytes for x in shapes]
    assert sizes[1] < 16 * sizes[0]


def test_left_padding_does_not_show():
    """A prompt padded on the left by another id, then decoded without ids, is the prompt alone."""
    for window in (None, 4):
        module = build(window=window)
        call, x = compiled(module), inputs(1, 9)
        padding = 5 * jnp.ones((1, 3, WIDTH))
        alone, _ = call(x)
        ids = jnp.asarray([[0] * 3 + [1] * 7])
        cache = module.init_cache(1, 16)
        prefix, cache = call(jnp.concatenate([padding, x[:, :7]], axis=1), ids, cache)
        pieces = [prefix[:, 3:]]
        for t in (7, 8):
            y, cache = call(x[:, t : t + 1], None, cache)
            pieces.append(y)
        assert relative_error(np.concatenate(pieces, axis=1), alone) < 1e-5


def test_positions_are_kept_by_the_cache():
    """Positions given in one call are counted on from in the next, row by row; only distances matter."""
    module = build()
    x = inputs(2, 6)
    expected, _ = module(x)
    positions = jnp.asarray([[5], [100]]) + jnp.arange(5)
    y, cache = module(x[:, :5], positions=positions, cache=module.init_cache(2, 6))
    np.testing.assert_array_equal(cache.position, [10, 105])
    last, _ = module(x[:, 5:], cache=cache)
    assert relative_error(np.concatenate([y, last], axis=1), expected) < 1e-4
    # Other distances give another result: positions are not ignored.
    stretched, _ = module(x, positions=3 * jnp.broadcast_to(jnp.arange(6), (2, 6)))
    assert relative_error(stretched, expected) > 1e-2


def test_without_rotary_positions_order_in_the_past_does_not_matter():
    module = build(rope_base=None)
    x = inputs(1, 6)
    swapped = x[:, jnp.asarray([1, 0, 2, 3, 4, 5])]
    np.testing.assert_allclose(module(x)[0][:, 2:], module(swapped)[0][:, 2:], atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_cache_keeps_its_dtype_and_size(dtype):
    module = AttentionConfig(window=4).build(WIDTH, HEADS, rngs=nnx.Rngs(0), dtype=dtype)
    cache = module.init_cache(3, 64)
    assert cache.key.dtype == dtype, "what the layer computes in"
    assert module.init_cache(3, 64, jnp.float32).value.dtype == jnp.float32
    assert cache.key.shape == (3, 4, HEADS, WIDTH // HEADS)
    y, after = compiled(module)(inputs(3, 2).astype(dtype), None, cache)
    assert y.dtype == dtype
    assert jax.tree.map(lambda a: (a.shape, a.dtype), after) == jax.tree.map(lambda a: (a.shape, a.dtype), cache)
    assert after.length.tolist() == [2] * 3


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: build(window=0), "window is 0, expected an integer of at least 1 or None"),
        (lambda: build(num_heads=0), "num_heads is 0, expected at least 1"),
        (lambda: build(num_heads=4, key_heads=3), "key_heads is 3, expected a divisor of num_heads = 4"),
        (lambda: build(num_heads=3), "16 does not divide into 3 heads"),
        (lambda: build(head_dim=3), "head_dim is 3, expected an even one"),
        (lambda: build(rope_base=1.0), "rope_base is 1.0, expected a number above 1 and finite or None"),
        (lambda: build().init_cache(1, 0), "Attention.init_cache: max_length is 0, expected an integer of at least 1"),
        (lambda: build().init_cache(1, 4.5), "max_length is 4.5, expected an integer"),
        (lambda: build().init_cache(True, 4), "batch_size is True, expected an integer"),
        (lambda: build()(jnp.zeros((1, 2, 3))), r"x has shape \(1, 2, 3\), expected \[B, T, D\] with D = 16"),
        (lambda: build()(inputs(2, 2), cache=build().init_cache(1, 2)), "cache is of a batch of 1, expected 2 as in x"),
        (
            lambda: build(window=4)(inputs(1, 2), cache=build().init_cache(1, 8)),
            r"cache.key has shape \(1, 8, 2, 8\), expected \(1, 4, 2, 8\) as init_cache gives",
        ),
        (
            lambda: build()(inputs(1, 2), cache=tiny("retnet").init_cache(1, 8)),
            r"Attention: cache is MixerCache\(.state, .position\), expected what init_cache gives, AttentionCache",
        ),
        (lambda: build()(inputs(1, 2), segment_ids=jnp.zeros((1, 3), int)), "Attention: segment_ids has shape"),
        (lambda: _too_long(), "5 tokens in a call, expected at most the cache's max_length = 4"),
    ],
)
def test_bad_values_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def _too_long():
    module = build()
    return module(inputs(1, 5), cache=module.init_cache(1, 4))


@pytest.mark.parametrize("qk_norm", [True, "all"])
def test_gate_biases_part_of_the_channels_turned_and_both_kinds_of_norm(qk_norm):
    """What Qwen3.5 (zero-centred norms of heads) and OLMo Hybrid (norm of all heads) ask of attention, in one layer."""
    options = {"zero_centred": qk_norm is True, "output_gate": True, "use_bias": True, "output_bias": True, "eps": 1e-3}
    module = build(num_heads=4, key_heads=2, head_dim=6, rope_channels=4, qk_norm=qk_norm, **options)
    p, x = parameters(module), np.asarray(inputs(1, 9))

    def project(name):
        return linear(p[name], x[0].astype(np.float64))

    def normalise(y, scale):
        y = y.reshape(9, -1, 6) if qk_norm is True else y
        factor = 1 + scale if qk_norm is True else scale
        return (y / np.sqrt(np.mean(y**2, axis=-1, keepdims=True) + 1e-3) * factor).reshape(9, -1, 6)

    def turn(y):
        return np.concatenate([rotate(y[..., :4]), y[..., 4:]], axis=-1)

    q = turn(normalise(project("query"), p["query_norm"]["scale"]))
    k = turn(normalise(project("key"), p["key_norm"]["scale"]))
    v = project("value").reshape(9, 2, 6)
    out = np.zeros_like(q)
    for h in range(4):
        for t in range(9):
            weights = np.exp(k[: t + 1, h // 2] @ q[t, h] / np.sqrt(6))
            out[t, h] = weights @ v[: t + 1, h // 2] / weights.sum()
    gated = out.reshape(9, -1) / (1 + np.exp(-project("output_gate")))
    expected = linear(p["output"], gated)
    call = compiled(module)
    assert relative_error(call(x)[0][0], expected) < 1e-5
    cache, pieces = module.init_cache(1, 9), []
    for start, end in ((0, 5), (5, 6), (6, 9)):
        y, cache = call(x[:, start:end], None, cache)
        pieces.append(y)
    assert relative_error(np.concatenate(pieces, axis=1)[0], expected) < 1e-5


def test_channels_to_turn_are_even_and_of_the_head():
    for channels in (3, 8):
        with pytest.raises(ValueError, match=rf"rope_channels is {channels}, expected an even one of at most"):
            AttentionConfig(head_dim=6, rope_channels=channels).build(WIDTH, HEADS, rngs=nnx.Rngs(0))

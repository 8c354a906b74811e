"""Latent attention: a naive reference with keys and values written out, the cache of latents, options and errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rnnlib.layers import AttentionConfig, LatentAttentionConfig, mixer_preset

from .reference import linear, rms, rotate
from .tiny import HEADS, WIDTH, compiled, inputs, parameters, randomize, relative_error

# Sizes all different, as Kimi Linear's are; `test_presets.py` has the default ones.
SIZES = {"num_heads": 3, "head_dim": 6, "shared_key_dim": 4, "value_head_dim": 5, "latent_size": 7}


def build(**options):
    return randomize(LatentAttentionConfig(**SIZES | options).build(WIDTH, HEADS, rngs=nnx.Rngs(0)))


def naive(p, x, *, turns, eps=1e-6, shared=4):
    """Keys and values of every head and token, in float64."""
    length, heads, own = len(x), 3, 6
    q = p["query"]
    low_rank = "down" in q
    q = linear(q["up"], rms(linear(q["down"], x), q["norm"]["scale"], eps)) if low_rank else linear(q, x)
    q = q.reshape(length, heads, own + shared)
    down = linear(p["latent"], x)
    latent, part = rms(down[:, :7], p["latent_norm"]["scale"], eps), down[:, None, 7:]
    k = linear(p["key"], latent).reshape(length, heads, own)
    v = linear(p["value"], latent).reshape(length, heads, 5)
    if turns:
        q, part = np.concatenate([q[..., :own], rotate(q[..., own:])], axis=-1), rotate(part)
    k = np.concatenate([k, np.repeat(part, heads, axis=1)], axis=-1)
    out = np.zeros_like(v)
    for h in range(heads):
        for t in range(length):
            weights = np.exp(k[: t + 1, h] @ q[t, h] / np.sqrt(own + shared))
            out[t, h] = weights @ v[: t + 1, h] / weights.sum()
    return linear(p["output"], out.reshape(length, -1))


OPTIONS = {
    "DeepSeek-V2's": {"query_latent_size": 9},
    "Kimi Linear's": {"rope_base": None},
    "biases": {"query_latent_size": 9, "use_bias": True, "output_bias": True, "eps": 1e-2},
    "no shared part": {"shared_key_dim": 0},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_whole_packed_and_from_a_cache_of_latents(name):
    options = OPTIONS[name]
    module, shared = build(**options), options.get("shared_key_dim", 4)
    p, x, ids = parameters(module), inputs(2, 12), jnp.asarray([[4] * 12, [7] * 7 + [2] * 5])
    wide = np.asarray(x, np.float64)
    turns = options.get("rope_base", 1) is not None and shared > 0
    how = {"turns": turns, "shared": shared, "eps": options.get("eps", 1e-6)}
    expected = np.stack(
        [naive(p, wide[0], **how), np.concatenate([naive(p, wide[1, :7], **how), naive(p, wide[1, 7:], **how)])]
    )
    call = compiled(module)
    assert relative_error(call(x, ids)[0], expected) < 1e-5
    cache = module.init_cache(2, 12)
    assert cache.latent.shape == (2, 12, 7 + shared), "nothing that grows with the number of heads"
    pieces = []
    for start, end in ((0, 5), (5, 10), (10, 11), (11, 12)):
        y, cache = call(x[:, start:end], ids[:, start:end], cache)
        pieces.append(y)
    assert relative_error(np.concatenate(pieces, axis=1), expected) < 1e-5


def test_beyond_max_length_tokens_see_the_last_of_the_cache():
    """As full attention does: the same ring, whose rows go on alone."""
    module = build()
    call, x = compiled(module), inputs(1, 9)
    cache, outs = module.init_cache(1, 4), []
    for t in range(9):
        y, cache = call(x[:, t : t + 1], None, cache)
        outs.append(y)
    window, _ = call(x[:, 5:9])
    assert relative_error(outs[-1][:, 0], window[:, -1]) < 1e-5, "only distances matter, and four tokens are seen"


def test_gradients_reach_every_parameter_and_agree_with_finite_differences():
    module = build(query_latent_size=9, use_bias=True, output_bias=True)
    graph, state = nnx.split(module)
    x, ids = inputs(1, 6), jnp.asarray([[0, 0, 0, 1, 1, 1]])

    @jax.jit
    def loss(state):
        return jnp.sum(jnp.sin(nnx.merge(graph, state)(x, segment_ids=ids)[0]))

    gradient = jax.jit(jax.grad(loss))(state)
    rng = np.random.default_rng(0)
    direction = jax.tree.map(lambda a: jnp.asarray(rng.standard_normal(a.shape), a.dtype), state)
    slope = sum(jax.tree.leaves(jax.tree.map(lambda g, d: jnp.vdot(g, d), gradient, direction)))
    step = 1e-2
    ahead, behind = (loss(jax.tree.map(lambda a, d, s=s: a + s * d, state, direction)) for s in (step, -step))
    assert abs((ahead - behind) / (2 * step) - slope) < 2e-2 * abs(slope)
    assert all(float(jnp.max(jnp.abs(leaf))) > 0 for leaf in jax.tree.leaves(gradient))


def test_half_precision_keeps_the_caches_dtype():
    module = LatentAttentionConfig().build(WIDTH, HEADS, rngs=nnx.Rngs(0), dtype=jnp.bfloat16)
    cache = module.init_cache(2, 8)
    assert cache.latent.dtype == jnp.bfloat16 and module.init_cache(2, 8, jnp.float32).latent.dtype == jnp.float32
    y, after = compiled(module)(inputs(2, 3).astype(jnp.bfloat16), None, cache)
    assert y.dtype == jnp.bfloat16
    assert jax.tree.map(lambda a: (a.shape, a.dtype), after) == jax.tree.map(lambda a: (a.shape, a.dtype), cache)


def test_sizes_left_out_have_the_papers_proportions():
    sized = mixer_preset("latent_attention").sized(5120, 40)
    assert (sized.head_dim, sized.shared_key_dim, sized.value_head_dim, sized.latent_size) == (128, 64, 128, 512)


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: build(shared_key_dim=3), "shared_key_dim is 3, expected an even one for rotary positions"),
        (lambda: build(latent_size=0), "latent_size is 0, expected an integer of at least 1 or None"),
        (lambda: _heads(3), "16 does not divide into 3 heads"),
        (lambda: _heads(0), "num_heads is 0, expected at least 1"),
        (lambda: build()(jnp.zeros((1, 2, 3))), r"LatentAttention: x has shape \(1, 2, 3\), expected \[B, T, D\]"),
        (
            lambda: build()(inputs(1, 5), cache=build().init_cache(1, 4)),
            "5 tokens in a call, expected at most",
        ),
        (lambda: build()(inputs(2, 2), cache=build().init_cache(1, 2)), "cache is of a batch of 1, expected 2 as in x"),
        (
            lambda: build()(inputs(1, 2), cache=AttentionConfig().build(16, 2, rngs=nnx.Rngs(0)).init_cache(1, 4)),
            r"cache is AttentionCache\(.key, .*\), expected what init_cache gives, LatentCache\(.latent, .segment",
        ),
        (lambda: build().init_cache(1, 0), "LatentAttention.init_cache: max_length is 0"),
    ],
)
def test_bad_values_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def _heads(number):
    return LatentAttentionConfig().build(WIDTH, number, rngs=nnx.Rngs(0))

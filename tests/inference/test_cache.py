"""Prefill and decoding through a cache give the logits of the parallel pass."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rnnlib.inference import gather_rows, insert_rows
from rnnlib.layers import MLPConfig
from rnnlib.layers.presets import mixer_names
from rnnlib.models import (
    DecoderLM,
    ModelConfig,
    every_other_sliding_window,
    gated_deltanet2_cell,
    two_global_attention_layers,
)
from tests.selection import mostly_slow

# Compilation takes nearly all of these tests' time, and half of it is optimisation.
quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
# Larger weights than a fresh model's, the mixers' too, so that an error in the state is an error in the logits.
STD = {"initializer.scale": 0.3}
SMALL = ModelConfig(
    vocabulary_size=29,
    width=32,
    num_layers=1,
    num_heads=2,
    window=5,
    mlp_width=32,
    initializer_std=0.3,
    mixer_overrides={"*": STD, "attention": STD, "sliding_window_attention": STD},
)
LENGTH, PREFIX = 14, 9
TOKENS = jax.random.randint(jax.random.key(11), (2, LENGTH), 0, 29)
# The second row's prompt has 4 tokens and is padded on the left.
SEGMENTS = jnp.stack([jnp.ones(LENGTH, jnp.int32), (jnp.arange(LENGTH) >= PREFIX - 4).astype(jnp.int32)])

HYBRIDS = {
    "every other layer sliding": SMALL.replace(num_layers=2, mixers=every_other_sliding_window("gated_deltanet")),
    "two global": SMALL.replace(num_layers=4, mixers=two_global_attention_layers("deltanet", 4)),
    "gated_deltanet2 cell": SMALL.replace(num_layers=2, mixers=gated_deltanet2_cell(), attention_heads=4),
    "side by side": SMALL.replace(
        mixers=("gated_deltanet+attention",),
        mixer_overrides={
            "*": STD,
            "attention": STD,
            "gated_deltanet+attention": {"input_scales": (1.0, 0.7), "output_scales": (1.3, 0.5)},
        },
    ),
    "rwkv7": SMALL.replace(
        num_layers=4,
        mixers=("rwkv7", "rwkv7_channel_mix", "rwkv7/later", "rwkv7_channel_mix"),
        head_dim=16,
        mixer_overrides={"*": STD | {"chunk_size": 16}, "rwkv7/later": {"value_rank": 3}, "rwkv7_channel_mix": STD},
        mlp_width=None,
        mlp_ratio=0,
        norm="layer",
        norm_bias=True,
        embedding_norm=True,
    ),
    "shared transformers": SMALL.replace(
        num_layers=4,
        mixers=("mamba2", "zamba2", "zamba2/second", "zamba2"),
        mixer_overrides={
            "*": STD | {"key_head_dim": 8},
            "zamba2": {
                "transformer.hidden_width": 32,
                "transformer.initializer_std": 0.3,
                "transformer.adapter_rank": 3,
            },
            "zamba2/second": {"transformer.group": 1, "transformer.rope_base": 100.0},
        },
        mlp_width=None,
        mlp_ratio=0,
    ),
    "one part a layer": SMALL.replace(
        num_layers=3, mixers=("none", "deltanet", "none"), feed_forwards=(MLPConfig(), "none", "dense")
    ),
    "tied": SMALL.replace(num_layers=2, mixers=("kla", "attention"), tie_embeddings=True),
}

# A mixer of each kind of cache that no hybrid has.
KINDS = ("linear_attention", "mamba3", "pgdn", "gated_kalmanet", "mesanet", "latent_attention")


def build(config):
    return nnx.split(DecoderLM(config, rngs=nnx.Rngs(5)))


@functools.partial(quick_jit, static_argnums=0)
def parallel(graphdef, state, tokens, segment_ids):
    return nnx.merge(graphdef, state)(tokens, segment_ids=segment_ids)


def unmixed(graphdef, state, tokens):
    """Logits of each token read alone."""
    return parallel(graphdef, state, tokens, jnp.broadcast_to(jnp.arange(LENGTH), tokens.shape))


def extender(graphdef, state):
    run = quick_jit(
        lambda state, tokens, cache, segment_ids: nnx.merge(graphdef, state).extend(
            tokens, cache, segment_ids=segment_ids
        )
    )
    return lambda *arguments: run(state, *arguments)


def shapes(cache):
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype.name), cache)


@pytest.mark.parametrize("name", mostly_slow([*mixer_names(), *HYBRIDS], [*KINDS, *HYBRIDS]))
def test_prefill_and_decode_equal_the_parallel_pass(name):
    config = HYBRIDS.get(name) or SMALL.replace(mixers=(name,))
    graphdef, state = build(config)
    expected = parallel(graphdef, state, TOKENS, SEGMENTS)
    extend = extender(graphdef, state)
    cache = nnx.merge(graphdef, state).init_cache(2, LENGTH)
    empty = shapes(cache)
    logits, cache = extend(TOKENS[:, :PREFIX], cache, SEGMENTS[:, :PREFIX])
    parts = [logits]
    assert shapes(cache) == empty
    for t in range(PREFIX, LENGTH):
        logits, cache = extend(TOKENS[:, t : t + 1], cache, None)
        parts.append(logits)
    assert shapes(cache) == empty
    logits = jnp.concatenate(parts, axis=1)
    # What stands before a token matters to it, far above the tolerance.
    assert float(jnp.abs(unmixed(graphdef, state, TOKENS) - expected).max()) > 0.1
    np.testing.assert_allclose(logits[0], expected[0], atol=1e-4)
    np.testing.assert_allclose(logits[1, PREFIX - 4 :], expected[1, PREFIX - 4 :], atol=1e-4)


@pytest.mark.parametrize("name", mostly_slow([*mixer_names(), *HYBRIDS], ["mamba3", "gated_kalmanet", *HYBRIDS]))
def test_a_row_joins_while_another_goes_on(name):
    """Row 1 is read while row 0 has three tokens more; each row's logits are those of its text alone."""
    config = HYBRIDS.get(name) or SMALL.replace(mixers=(name,))
    graphdef, state = build(config)
    expected = parallel(graphdef, state, TOKENS, SEGMENTS)
    extend, late = extender(graphdef, state), 3
    prompt, segments = TOKENS[:, :PREFIX], SEGMENTS[:, :PREFIX]
    empty = nnx.merge(graphdef, state).init_cache(2, LENGTH)
    # Before, another text is in the second row.
    _, cache = extend(jnp.stack([prompt[0], prompt[0]]), empty, jnp.stack([segments[0], segments[0]]))
    for t in range(PREFIX, PREFIX + late):
        _, cache = extend(TOKENS[jnp.asarray([0, 0]), t : t + 1], cache, None)
    _, joining = extend(prompt, empty, segments)
    cache = insert_rows(cache, [1], gather_rows(joining, [1]))
    for t in range(PREFIX, LENGTH - late):
        logits, cache = extend(jnp.stack([TOKENS[0, t + late : t + late + 1], TOKENS[1, t : t + 1]]), cache, None)
        np.testing.assert_allclose(logits[0, 0], expected[0, t + late], atol=1e-4)
        np.testing.assert_allclose(logits[1, 0], expected[1, t], atol=1e-4)


def test_any_pieces_equal_the_parallel_pass():
    graphdef, state = build(HYBRIDS["every other layer sliding"])
    expected = parallel(graphdef, state, TOKENS, None)
    extend = extender(graphdef, state)
    cache = nnx.merge(graphdef, state).init_cache(2, LENGTH)
    parts = []
    # One of the pieces is longer than the window.
    for start, stop in ((0, 6), (6, 7), (7, 8), (8, 14)):
        logits, cache = extend(TOKENS[:, start:stop], cache, None)
        parts.append(logits)
    np.testing.assert_allclose(jnp.concatenate(parts, axis=1), expected, atol=1e-4)


def test_a_segment_that_starts_within_a_later_piece_restarts_the_cache():
    graphdef, state = build(HYBRIDS["every other layer sliding"])
    segments = jnp.broadcast_to(jnp.where(jnp.arange(LENGTH) < 11, 1, 2), (2, LENGTH))
    expected = parallel(graphdef, state, TOKENS, segments)
    extend = extender(graphdef, state)
    cache = nnx.merge(graphdef, state).init_cache(2, LENGTH)
    _, cache = extend(TOKENS[:, :7], cache, segments[:, :7])
    logits, cache = extend(TOKENS[:, 7:], cache, segments[:, 7:])
    np.testing.assert_allclose(logits, expected[:, 7:], atol=1e-4)


def test_rows_of_a_cache_go_on_as_others():
    graphdef, state = build(HYBRIDS["every other layer sliding"].replace(mixers=("gated_deltanet", "attention")))
    model = nnx.merge(graphdef, state)
    _, cache = model.extend(TOKENS[:, :PREFIX], model.init_cache(2, LENGTH))
    rows, last = jnp.asarray([1, 1, 0]), jnp.asarray([[3], [4], [5]])
    logits, _ = model.extend(last, gather_rows(cache, rows))
    for form in (np.asarray(rows, np.int64), rows.tolist()):
        jax.tree.map(np.testing.assert_array_equal, gather_rows(cache, form), gather_rows(cache, rows))
    whole = parallel(graphdef, state, jnp.concatenate([TOKENS[rows, :PREFIX], last], axis=1), None)
    np.testing.assert_allclose(logits[:, 0], whole[:, -1], atol=1e-4)
    assert not np.allclose(logits[0], logits[1], atol=1e-2)


def test_a_row_that_a_cache_does_not_have_shows(unchecked_shapes):
    graphdef, state = build(SMALL.replace(num_layers=2, mixers=("gated_deltanet", "attention")))
    model = nnx.merge(graphdef, state)
    _, cache = model.extend(TOKENS[:, :2], model.init_cache(2, LENGTH))
    for outside in (2, -1):
        with pytest.raises(ValueError, match=r"gather_rows: rows are .* to .*, expected them in \[0, 2\)"):
            gather_rows(cache, [0, outside])

        @jax.jit
        def go_on(rows):
            return model.extend(jnp.asarray([[1], [1]]), gather_rows(cache, rows))[0]

        logits = go_on(jnp.asarray([1, outside]))
        assert jnp.isfinite(logits[0]).all() and jnp.isnan(logits[1]).all()
    for rows, error, message in (
        (jnp.asarray(1), ValueError, r"rows has shape \(\), expected \[N\]"),
        (jnp.asarray([], int), ValueError, r"rows has shape \(0,\), expected \[N\], at least one"),
        ([[0]], ValueError, r"rows has shape \(1, 1\), expected \[N\]"),
        ([0.0], TypeError, "rows has dtype float64, expected an integer dtype"),
        ([True], TypeError, "rows has dtype bool, expected an integer dtype"),
    ):
        with pytest.raises(error, match=message):
            gather_rows(cache, rows)


@pytest.mark.usefixtures("unchecked_shapes")
def test_rows_that_cannot_be_put_are_named():
    model = DecoderLM(SMALL.replace(num_layers=2, mixers=("gated_deltanet", "attention")), rngs=nnx.Rngs(5))
    cache, one = model.init_cache(2, LENGTH), model.init_cache(1, LENGTH)
    for rows, others, message in (
        ([2], one, r"insert_rows: rows are 2 to 2, expected them in \[0, 2\)"),
        ([0, 0], cache, r"insert_rows: rows are \[0, 0\], expected each once"),
        ([0, 1], one, r"insert_rows: others has an array of shape \(1, .*\), expected \(2, "),
        ([0], model.init_cache(1, 9), "one row for each of rows, of the same model and max_length"),
        ([0], one[:1], "insert_rows: others is not of the model that cache is of"),
    ):
        with pytest.raises(ValueError, match=message):
            insert_rows(cache, rows, others)

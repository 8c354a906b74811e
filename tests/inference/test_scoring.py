"""Scores are the model's own logits, whatever is padded, batched, shared or cut into pieces."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rnnlib.inference import NaNLogitsError, score, scoring
from rnnlib.models import DecoderLM
from tests.selection import mostly_slow
from tests.tiny_models import tiny_config

VOCABULARY = 31


@functools.cache
def model(*mixers: str) -> DecoderLM:
    config = tiny_config(*mixers, vocabulary_size=VOCABULARY, width=16, window=6, initializer_std=0.3)
    return DecoderLM(config, rngs=nnx.Rngs(len(mixers)))


def requests():
    """Choices of one context, examples that many share, long and short ones, and one of no tokens."""
    draw = np.random.default_rng(0)

    def text(size):
        return draw.integers(0, VOCABULARY, size).tolist()

    shared, context = text(40), text(23)
    return [
        *[(context, text(n)) for n in (3, 1, 5)],
        *[(shared + text(n), text(4)) for n in (2, 9, 5)],
        (text(1), text(1)),
        (text(1), text(90)),
        (text(150), text(2)),
        (context, []),
        (context, [7]),
    ]


def own_scores(model, context, continuation):
    """From one pass of the model over the request alone, in float64 at the end."""
    tokens = [*context, *continuation]
    padded = jnp.asarray([tokens + [0] * (192 - len(tokens))])
    logits = np.asarray(jax.jit(DecoderLM.__call__)(model, padded)[0], np.float64)
    before = slice(len(context) - 1, len(tokens) - 1)
    normal = np.log(np.exp(logits[before] - logits[before].max(-1, keepdims=True)).sum(-1)) + logits[before].max(-1)
    chosen = np.take_along_axis(logits[before], np.asarray(continuation, int)[:, None], axis=-1)[:, 0]
    return chosen - normal, logits[before].argmax(-1) == np.asarray(continuation, int)


@pytest.mark.parametrize(
    "mixers",
    mostly_slow(
        [("gated_deltanet",), ("kda", "attention"), ("mamba2", "sliding_window_attention")],
        [("mamba2", "sliding_window_attention")],
    ),
    ids="-".join,
)
def test_scores_are_of_the_models_logits(mixers):
    found = score(model(*mixers), requests(), batch_size=4, piece_size=64)
    for (context, continuation), scores in zip(requests(), found, strict=True):
        expected, greedy = own_scores(model(*mixers), context, continuation)
        np.testing.assert_allclose(scores.log_probabilities, expected, atol=5e-5)
        assert (scores.greedy == greedy).all() and scores.greedy.shape == (len(continuation),)


def test_what_contexts_share_is_read_once(monkeypatch):
    read, scored, calls = scoring._read, scoring._score_piece, []

    def counting(function, place):
        def run(*arguments):
            calls.append((place, arguments[2].shape))
            return function(*arguments)

        return run

    monkeypatch.setattr(scoring, "_read", counting(read, "prefix"))
    monkeypatch.setattr(scoring, "_score_piece", counting(scored, "ending"))
    context = np.random.default_rng(1).integers(0, VOCABULARY, 200).tolist()
    choices = [(context, [i, 2]) for i in range(4)]
    progress = []
    found = score(model("gated_deltanet"), choices, progress=progress.append)
    assert calls == [("prefix", (1, 256)), ("ending", (4, 16))] and progress == [4]
    for request, scores in zip(choices, found):
        expected, _ = own_scores(model("gated_deltanet"), *request)
        np.testing.assert_allclose(scores.log_probabilities, expected, atol=5e-5)


def test_blocks_of_logits_change_nothing(monkeypatch):
    whole = score(model("gated_deltanet"), requests())
    monkeypatch.setattr(scoring, "_BLOCK_LOGITS", 4 * VOCABULARY)
    scoring._score_piece.clear_cache()
    blocks = score(model("gated_deltanet"), requests())
    scoring._score_piece.clear_cache()
    for one, other in zip(whole, blocks, strict=True):
        np.testing.assert_allclose(one.log_probabilities, other.log_probabilities, atol=1e-5)


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    ("request_", "options", "message"),
    [
        (([], [1]), {}, "request 0 has an empty context"),
        (([1], [31]), {}, r"request 0 has tokens from 1 to 31, expected them in \[0, 31\)"),
        (([1], [2]), {"batch_size": 0}, "batch_size is 0"),
        (([1], [2]), {"piece_size": 1.5}, "piece_size is 1.5"),
    ],
)
def test_bad_requests_are_named(request_, options, message):
    with pytest.raises(ValueError, match=message):
        score(model("gated_deltanet"), [request_], **options)


def test_nan_is_named():
    broken = nnx.clone(model("gated_deltanet"))
    broken.embedding[...] = broken.embedding[...].at[3].set(jnp.nan)
    with pytest.raises(NaNLogitsError, match="NaN for request 1"):
        score(broken, [([1], [2]), ([3], [2])])

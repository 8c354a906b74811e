"""Texts that join and leave a engine's slots get what they would get alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rnnlib.inference import Engine, NaNLogitsError, generate, stream
from rnnlib.models import DecoderLM
from tests.tiny_models import tiny_config

PROMPTS = [[3, 1, 4, 1, 5, 9, 2], [6, 5, 3], [2], [7, 7, 1, 2, 3]]
OPTIONS = (
    {"max_new_tokens": 9, "temperature": 0},
    {"max_new_tokens": 14, "temperature": 0.7, "seed": 3},
    {"max_new_tokens": 5, "seed": 2**40 + 3, "top_k": 7, "top_p": 0.9},
    {"max_new_tokens": 11, "temperature": 1.3, "seed": 8},
)


@functools.cache
def model() -> DecoderLM:
    mixers = ("gated_deltanet", "attention", "sliding_window_attention")
    config = tiny_config(
        *mixers,
        window=6,
        initializer_std=0.3,
        mixer_overrides={name: {"initializer.scale": 0.3} for name in ("*", "attention", "sliding_window_attention")},
    )
    return DecoderLM(config, rngs=nnx.Rngs(5))


@functools.cache
def alone() -> list[list[int]]:
    return [generate(model(), [p], **options)[0].tolist() for p, options in zip(PROMPTS, OPTIONS, strict=True)]


def test_texts_that_join_and_leave_get_what_they_would_get_alone():
    engine = Engine(model(), slots=2, max_length=40)
    waiting = list(zip(PROMPTS, OPTIONS, strict=True))
    texts, steps = [], 0
    while waiting or engine.active:
        while waiting and engine.free:
            prompt, options = waiting.pop(0)
            texts.append(engine.add(prompt, **options))
        engine.step(4)
        steps += 1
    assert [text.tokens for text in texts] == alone()
    assert [text.finish_reason for text in texts] == ["length"] * 4
    assert engine.free == 2 and engine.step() == []
    run = jax.jit(model().__call__)
    for text in texts:
        whole = jnp.asarray([[*text.prompt, *text.tokens]])
        padded = jnp.pad(whole, ((0, 0), (0, 24 - whole.shape[1])))
        scores = jax.nn.log_softmax(run(padded)[0], axis=-1)
        before = len(text.prompt) - 1
        expected = [float(scores[before + i, token]) for i, token in enumerate(text.tokens)]
        np.testing.assert_allclose(text.log_probabilities, expected, atol=1e-4)


def test_states_are_not_there_twice_while_texts_join_or_go_on():
    model()
    others = jax.live_arrays()
    engine = Engine(model(), slots=2, max_length=40)
    for go_on in (lambda: engine.add([3, 1, 4], max_new_tokens=9, temperature=0), lambda: engine.step(4)):
        states = [x for x in jax.live_arrays() if x.ndim >= 3 and all(x is not other for other in others)]
        go_on()
        assert states and all(x.is_deleted() for x in states)


@pytest.mark.gpu
@pytest.mark.parametrize("slots", [1, 16, 40, 200])
def test_on_a_gpu_texts_have_the_scores_of_one_pass_in_bfloat16(slots):
    """Kernels for few rows decode; the pass over whole texts has none of them. States are given to each block.

    Those of 200 texts are large enough for pending writes.
    """
    mixers = ("gated_deltanet", "kda", "attention")
    config = tiny_config(*mixers, width=256, mlp_width=512, dtype="bfloat16", initializer_std=0.1)
    model, draw = DecoderLM(config, rngs=nnx.Rngs(5)), np.random.default_rng(slots)
    prompts = draw.integers(0, 29, (slots, 9)).tolist()
    engine = Engine(model, slots=slots, max_length=64)
    texts = [engine.add(prompt, max_new_tokens=40, temperature=0) for prompt in prompts]
    while engine.active:
        engine.step(7)
    streamed = np.concatenate([np.asarray(b) for b in stream(model, prompts, max_new_tokens=40, temperature=0)], axis=1)
    exact = DecoderLM(config.replace(dtype="float32"), rngs=nnx.Rngs(5))

    @jax.jit
    def scores(tokens):
        with jax.default_matmul_precision("highest"):
            return jax.nn.log_softmax(exact(tokens), axis=-1)

    def scores_of_greedy(tokens):
        expected = np.asarray(scores(np.concatenate([prompts, tokens], axis=1)))[:, 8:-1]
        chosen = np.take_along_axis(expected, np.asarray(tokens)[..., None], axis=-1)[..., 0]
        assert (expected.max(-1) - chosen).max() < 0.1, "greedy, but for what bfloat16 rounds"
        return chosen

    scores_of_greedy(streamed)
    chosen = scores_of_greedy([text.tokens for text in texts])
    np.testing.assert_allclose([text.log_probabilities for text in texts], chosen, atol=0.1)


def test_stop_tokens_and_removal_free_slots():
    engine = Engine(model(), slots=2, max_length=40)
    end = alone()[0][4]
    kept = alone()[0].index(end) + 1
    text = engine.add(PROMPTS[0], stop_tokens=(end, 0), **OPTIONS[0])
    other = engine.add(PROMPTS[1], **OPTIONS[1])
    finished = engine.step(14)
    assert finished == [text] and text.finish_reason == "stop" and text.tokens[-1] in (end, 0)
    assert text.tokens == alone()[0][: len(text.tokens)] and len(text.tokens) <= kept
    engine.remove(other)
    assert other.finish_reason == "removed" and other.tokens == alone()[1][: len(text.tokens)]
    assert engine.free == 2
    with pytest.raises(ValueError, match="text has ended or is of another engine"):
        engine.remove(other)


def test_a_text_whose_logits_are_nan_leaves_and_others_go_on():
    token = next(t for t in range(1, 29) if t not in alone()[0] and t not in PROMPTS[0])
    broken = nnx.clone(model())
    broken.embedding[...] = broken.embedding[...].at[token].set(jnp.nan)
    engine = Engine(broken, slots=2, max_length=40)
    text, bad = engine.add(PROMPTS[0], **OPTIONS[0]), engine.add([token], **OPTIONS[0])
    with pytest.raises(NaNLogitsError, match=r"NaN for the text\(s\) in slot\(s\) \[1\]"):
        engine.step()
    assert bad.finish_reason == "nan"
    while engine.active:
        engine.step()
    assert text.tokens == alone()[0]


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, r"prompt_tokens\[0\] has shape \(0,\)"),
        ([29], {}, "tokens from 29 to 29"),
        ([1] * 35, {}, r"35 tokens and 9 new ones, expected at most max_length = 40"),
        ([1], {"max_new_tokens": 0}, "max_new_tokens is 0, expected an integer of at least 1"),
        ([1], {"seed": -1}, "seed is -1"),
        ([1], {"stop_tokens": (29,)}, "stop_tokens is 29"),
        ([1], {"stop_tokens": range(9)}, "9 stop_tokens, expected at most 8"),
    ],
)
def test_bad_texts_are_named(prompt, options, message):
    engine = Engine(model(), slots=1, max_length=40)
    with pytest.raises(ValueError, match=message):
        engine.add(prompt, **(OPTIONS[0] | options))
    assert engine.free == 1

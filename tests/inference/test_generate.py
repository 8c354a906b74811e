import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rnnlib.inference import NaNLogitsError, Sampling, generate, sample, stream
from rnnlib.inference.prompts import pad_prompts
from rnnlib.models import DecoderLM
from tests.tiny_models import tiny_config

PROMPTS = [[3, 1, 4, 1, 5, 9, 2], [6, 5, 3], [2]]
NEW = 12


@functools.cache
def model() -> DecoderLM:
    config = tiny_config(
        "gated_deltanet",
        "sliding_window_attention",
        window=6,
        initializer_std=0.3,
        # Mixers that matter: what was read before, and padding if it were read, decide the tokens.
        mixer_overrides={name: {"initializer.scale": 0.3} for name in ("*", "sliding_window_attention")},
    )
    return DecoderLM(config, rngs=nnx.Rngs(5))


@functools.cache
def greedy() -> np.ndarray:
    return np.asarray(generate(model(), PROMPTS, max_new_tokens=NEW, temperature=0))


def test_greedy_equals_the_parallel_pass_token_by_token_for_prompts_of_all_lengths():
    run = jax.jit(model().__call__)
    for row, prompt in enumerate(PROMPTS):
        tokens = list(prompt)
        for _ in range(NEW):
            # Causal: what stands after the last token does not matter, and one length compiles once.
            padded = np.zeros([1, 24], np.int32)
            padded[0, : len(tokens)] = tokens
            tokens.append(int(run(padded)[0, len(tokens) - 1].argmax()))
        assert greedy()[row].tolist() == tokens[len(prompt) :]


def test_stream_makes_the_same_tokens_in_blocks():
    options = {"max_new_tokens": NEW, "temperature": 0.8, "top_k": 20, "seed": 4}
    blocks = list(stream(model(), PROMPTS, block_size=5, **options))
    assert [block.shape for block in blocks] == [(3, 5), (3, 5), (3, 2)]
    np.testing.assert_array_equal(jnp.concatenate(blocks, axis=1), generate(model(), PROMPTS, **options))


def test_states_are_not_there_twice_while_a_block_is_made():
    model()
    others = jax.live_arrays()
    blocks = stream(model(), PROMPTS, max_new_tokens=NEW, block_size=4, temperature=0)
    states = [x for x in jax.live_arrays() if x.ndim >= 3 and all(x is not other for other in others)]
    next(blocks)
    assert states and all(x.is_deleted() for x in states)


def test_seed_decides_and_rows_do_not_depend_on_other_rows():
    draw = functools.partial(generate, model(), max_new_tokens=NEW, temperature=1.0)
    one = draw(PROMPTS, seed=1)
    np.testing.assert_array_equal(one, draw(PROMPTS, seed=1))
    assert (one != draw(PROMPTS, seed=2)).any()
    assert (one != greedy()).any()
    other = draw([PROMPTS[0], [7, 7], [8]], seed=1)
    np.testing.assert_array_equal(one[0], other[0])
    equal_prompts = draw([PROMPTS[0]] * 3, seed=1)
    assert (equal_prompts[0] != equal_prompts[1]).any()


def test_seeds_of_more_than_32_bits_are_told_apart():
    draw = functools.partial(generate, model(), PROMPTS, max_new_tokens=NEW)
    seeds = (1, 2**32 + 1, 2**33 + 1, 2**32 + 2, 2**63 - 1)
    texts = [np.asarray(draw(seed=seed)) for seed in seeds]
    assert len({text.tobytes() for text in texts}) == len(seeds)
    with jax.enable_x64(True):
        for text, seed in zip(texts[:2], seeds):
            np.testing.assert_array_equal(draw(seed=seed), text)


def test_end_token_stops_rows_and_then_the_loop():
    end = int(greedy()[0, 4])
    stopped = np.asarray(generate(model(), PROMPTS, max_new_tokens=NEW, temperature=0, end_token=end))
    for row, free in zip(stopped, greedy(), strict=True):
        kept = free.tolist().index(end) + 1 if end in free else NEW
        assert row[:kept].tolist() == free[:kept].tolist()
        assert (row[kept:] == end).all()
    first = greedy()[0].tolist().index(end) + 1
    # Rows of one batch, so that what is compiled above serves here.
    options = {"max_new_tokens": NEW, "block_size": NEW, "temperature": 0, "end_token": end}
    assert [block.shape for block in stream(model(), [PROMPTS[0]] * 3, **options)] == [(3, first)]


def first_token_of_none(tokens: np.ndarray) -> tuple[int, int]:
    """The first new token that is in no prompt, nor padding, and how many tokens are new when it is there."""
    read = {0, *itertools.chain(*PROMPTS)}
    return next((int(token), made) for made, column in enumerate(tokens.T, 1) for token in column if token not in read)


def model_that_breaks_on(token: int) -> DecoderLM:
    """Its logits are NaN after this token."""
    broken = nnx.clone(model())
    broken.embedding[...] = broken.embedding[...].at[token].set(jnp.nan)
    return broken


@pytest.mark.parametrize("options", [{"temperature": 0}, {"seed": 3}, {"seed": 3, "top_k": 9, "top_p": 0.9}])
def test_nan_logits_are_an_error_and_not_token_0(options):
    options = {"max_new_tokens": NEW} | options
    free = np.asarray(generate(model(), PROMPTS, **options))
    token, made = first_token_of_none(free)
    broken = model_that_breaks_on(token)
    rows = np.flatnonzero(free[:, made - 1] == token).tolist()
    message = re.escape(f"generate: the model's logits are NaN for row(s) {rows} after {made} new tokens, expected")
    with pytest.raises(ValueError, match=message):
        generate(broken, PROMPTS, **options)
    blocks = stream(broken, PROMPTS, block_size=made, **options)
    np.testing.assert_array_equal(next(blocks), free[:, :made])
    with pytest.raises(NaNLogitsError, match=message):
        next(blocks)
    with pytest.raises(NaNLogitsError, match=r"for row\(s\) \[1\] after 0 new tokens"):
        generate(broken, [PROMPTS[0], [token], PROMPTS[0]], **options)


def test_nan_logits_of_rows_that_have_ended_do_not_matter():
    token, _ = first_token_of_none(greedy())
    options = {"max_new_tokens": NEW, "temperature": 0, "end_token": token}
    ended = generate(model_that_breaks_on(token), PROMPTS, **options)
    np.testing.assert_array_equal(ended, generate(model(), PROMPTS, **options))


def test_an_array_of_prompts_is_taken_too():
    prompts = np.asarray([PROMPTS[0]] * 3)
    out = generate(model(), prompts, max_new_tokens=NEW, temperature=0)
    assert out.shape == (3, NEW)
    np.testing.assert_array_equal(out[0], greedy()[0])


LOGITS = jnp.log(jnp.array([[0.4, 0.3, 0.15, 0.1, 0.05]]))


def draws(sampling, number=4000):
    keys = jax.random.split(jax.random.key(0), number)
    return np.asarray(sample(jnp.broadcast_to(LOGITS, (number, 5)), keys, sampling))


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(), [0.4, 0.3, 0.15, 0.1, 0.05]),
        (Sampling(temperature=0.5), np.array([16, 9, 2.25, 1, 0.25]) / 28.5),
        (Sampling(top_k=2), [4 / 7, 3 / 7, 0, 0, 0]),
        (Sampling(top_k=99), [0.4, 0.3, 0.15, 0.1, 0.05]),
        # 0.4 + 0.3 < 0.8 <= 0.4 + 0.3 + 0.15
        (Sampling(top_p=0.8), [0.4 / 0.85, 0.3 / 0.85, 0.15 / 0.85, 0, 0]),
        (Sampling(top_p=1.0), [0.4, 0.3, 0.15, 0.1, 0.05]),
        (Sampling(top_p=0.01), [1, 0, 0, 0, 0]),
        # Of the two likeliest, 4/7 alone reaches a half.
        (Sampling(top_k=2, top_p=0.5), [1, 0, 0, 0, 0]),
        (Sampling(temperature=0), [1, 0, 0, 0, 0]),
        (Sampling(temperature=1e-45), [1, 0, 0, 0, 0]),
    ],
)
def test_frequencies_are_those_of_the_filtered_distribution(sampling, expected):
    frequencies = np.bincount(draws(sampling), minlength=5) / 4000
    np.testing.assert_allclose(frequencies, expected, atol=0.03)
    assert (frequencies[np.asarray(expected) == 0] == 0).all()


def test_ties_do_not_widen_top_k():
    keys = jax.random.split(jax.random.key(0), 64)
    drawn = sample(jnp.zeros([64, 5]), keys, Sampling(top_k=2))
    assert set(np.asarray(drawn).tolist()) == {0, 1}


def test_padding_is_left_and_its_own_segment():
    tokens, segment_ids = pad_prompts([[1, 2], [3]], 10, multiple=4)
    assert tokens.tolist() == [[0, 0, 1, 2], [0, 0, 0, 3]]
    assert segment_ids.tolist() == [[0, 0, 1, 1], [0, 0, 0, 1]]


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt_tokens": []}, "prompt_tokens is empty"),
        ({"prompt_tokens": [[1], []]}, r"prompt_tokens\[1\] has shape \(0,\)"),
        ({"prompt_tokens": [[1, 29]]}, r"tokens from 1 to 29: expected them in \[0, 29\)"),
        ({"prompt_tokens": [[-1]]}, r"tokens from -1"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"max_new_tokens": 2.5}, "max_new_tokens is 2.5, expected an integer of at least 1"),
        ({"temperature": -1.0}, "temperature is -1.0, expected a number of at least 0 and finite"),
        ({"temperature": float("nan")}, "temperature is nan, expected"),
        ({"top_k": 0}, "top_k is 0, expected an integer of at least 1 or None"),
        ({"top_k": 1.5}, "top_k is 1.5, expected an integer"),
        ({"top_p": 0.0}, "top_p is 0.0, expected a number above 0 and at most 1 or None"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        (
            {"seed": 2**63},
            "seed is 9223372036854775808, expected an integer of at least 0 and below 9223372036854775808",
        ),
        ({"end_token": 29}, "end_token is 29, expected an integer of at least 0 and below 29 or None"),
        ({"end_token": -1}, "end_token is -1, expected an integer"),
        ({"end_token": 3.0}, "end_token is 3.0, expected an integer"),
        ({"end_token": True}, "end_token is True, expected an integer"),
        ({"end_token": [3]}, r"end_token is \[3\], expected an integer"),
    ],
)
def test_bad_options_are_named(options, message):
    arguments = {"prompt_tokens": [[1]], "max_new_tokens": 2} | options
    with pytest.raises(ValueError, match=message):
        generate(model(), **arguments)


def test_other_values_of_options_compile_nothing(caplog):
    prompt = [[1, 2, 3]]
    generate(model(), prompt, max_new_tokens=4, temperature=0.5, top_k=7, top_p=0.9, end_token=1)
    with jax.log_compiles(), caplog.at_level("WARNING"):
        generate(model(), prompt, max_new_tokens=5, temperature=0.7, top_k=2**40, top_p=0.8, end_token=2)
        generate(model(), prompt, max_new_tokens=6, temperature=0.9, top_p=0.7, end_token=3)
    assert not [record for record in caplog.records if "_decode" in record.message or "_prefill" in record.message]


@pytest.mark.usefixtures("unchecked_shapes")
def test_generation_inside_of_transformed_functions_is_refused():
    def of_weights(state):
        return generate(nnx.merge(graphdef, state), [[1, 2]], max_new_tokens=2)

    graphdef, state = nnx.split(model())
    prompts = jnp.asarray([[1, 2]])
    for call in (
        lambda: jax.jit(lambda: generate(model(), [[1, 2]], max_new_tokens=2))(),
        lambda: jax.vmap(lambda prompt: generate(model(), prompt[None], max_new_tokens=2))(prompts),
        lambda: jax.vmap(lambda prompt: generate(model(), [prompt], max_new_tokens=2))(prompts),
        lambda: jax.vmap(of_weights)(jax.tree.map(lambda x: x[None], state)),
    ):
        with pytest.raises(TypeError, match="generate: called while jax traces a function, expected no jit or vmap"):
            call()

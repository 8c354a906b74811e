"""Prompts of different lengths in one batch: each row gets what it would get alone, for every mixer and hybrid."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rnnlib.inference import Generated, NaNLogitsError, generate
from rnnlib.layers.presets import mixer_names
from rnnlib.models import DecoderLM
from tests.inference.test_cache import HYBRIDS, SMALL
from tests.selection import mostly_slow

NEW = 4
quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def build(name: str) -> DecoderLM:
    return DecoderLM(HYBRIDS.get(name) or SMALL.replace(mixers=(name,)), rngs=nnx.Rngs(5))


@functools.cache
def hybrid() -> DecoderLM:
    return build("every other layer sliding")


# States, rotary positions, a solve, a window, latents; and hybrids.
ALWAYS = (
    "mamba3",
    "gated_kalmanet",
    "latent_attention",
    "every other layer sliding",
)


@pytest.mark.parametrize("name", mostly_slow([*mixer_names(), *HYBRIDS], ALWAYS))
def test_no_padding_changes_a_logit(name):
    """Log-probabilities are those of one pass over each row's own text, whose prompts have drawn lengths."""
    model = build(name)
    graphdef, state = nnx.split(model)
    run = quick_jit(lambda state, tokens: nnx.merge(graphdef, state)(tokens))
    draw = np.random.default_rng(sum(map(ord, name)))
    for _ in range(2):
        lengths = [1, *draw.integers(2, 20, 2).tolist()]
        prompts = [draw.integers(0, 29, length).tolist() for length in lengths]
        found = generate(
            model, prompts, max_new_tokens=NEW, temperature=[0, 0.8, 1.5], seed=[1, 2, 3], log_probabilities=True
        )
        assert found.lengths.tolist() == [NEW] * 3
        texts = [[*prompt, *tokens] for prompt, tokens in zip(prompts, np.asarray(found.tokens).tolist())]
        # Causal: what stands behind a text does not matter to it.
        padded = jnp.asarray([text + [0] * (24 - len(text)) for text in texts])
        scores = jax.nn.log_softmax(run(state, padded), axis=-1)
        for row, (text, length) in enumerate(zip(texts, lengths)):
            expected = [float(scores[row, length - 1 + i, text[length + i]]) for i in range(NEW)]
            np.testing.assert_allclose(found.log_probabilities[row], expected, atol=2e-4)
            if row == 0:
                assert text[length:] == scores[row, length - 1 : length - 1 + NEW].argmax(-1).tolist()


PROMPTS = [[3, 1, 4, 1, 5, 9, 2], [6, 5, 3], [2]]


def test_a_row_with_its_own_seed_gets_what_it_gets_alone():
    options = {"temperature": [0.9, 0, 1.4], "top_k": [None, None, 9], "top_p": [0.8, None, None], "seed": [3, 1, 7]}
    together = np.asarray(generate(hybrid(), PROMPTS, max_new_tokens=12, **options))
    for row, prompt in enumerate(PROMPTS):
        own = {name: values[row] for name, values in options.items()}
        alone = generate(hybrid(), [prompt], max_new_tokens=12, **own)
        assert together[row].tolist() == alone[0].tolist()


def test_options_of_rows_do_not_change_what_one_seed_draws():
    plain = np.asarray(generate(hybrid(), PROMPTS, max_new_tokens=12, seed=4, temperature=1.1, top_k=20))
    rows = generate(
        hybrid(),
        PROMPTS,
        max_new_tokens=12,
        seed=4,
        temperature=np.full(3, 1.1),
        top_k=[20] * 3,
        log_probabilities=True,
    )
    assert isinstance(rows, Generated)
    np.testing.assert_array_equal(rows.tokens, plain)


def test_stop_tokens_of_all_rows_and_of_each():
    free = np.asarray(generate(hybrid(), PROMPTS, max_new_tokens=12, temperature=0))
    stops = [int(free[0, 4]), int(free[1, 2])]
    for given, of_row in ((stops, [stops] * 3), ([[stops[0]], [stops[1]], []], [[stops[0]], [stops[1]], []])):
        found = generate(hybrid(), PROMPTS, max_new_tokens=12, temperature=0, stop_tokens=given, log_probabilities=True)
        for row, own in enumerate(of_row):
            ends = [i for i, token in enumerate(free[row].tolist()) if token in own]
            length = ends[0] + 1 if ends else 12
            assert int(found.lengths[row]) == length
            assert found.tokens[row, :length].tolist() == free[row, :length].tolist()
            assert (found.tokens[row, length:] == free[row, length - 1]).all()
            assert (found.log_probabilities[row, :length] < 0).all()
            assert (found.log_probabilities[row, length:] == 0).all()


def test_nan_logits_name_the_row():
    token = next(t for t in range(1, 29) if t not in {*PROMPTS[0], *PROMPTS[1], *PROMPTS[2]})
    broken = nnx.clone(hybrid())
    broken.embedding[...] = broken.embedding[...].at[token].set(jnp.nan)
    with pytest.raises(NaNLogitsError, match=r"generate: the model's logits are NaN for row\(s\) \[1\] after 0 new"):
        generate(broken, [PROMPTS[0], [token]], max_new_tokens=4, seed=[1, 2])


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": [1, 2]}, "seed has 2 entries, expected one, or one for each of 3 rows"),
        ({"temperature": [1, 1, -1]}, "temperature is -1, expected"),
        ({"stop_tokens": (29,)}, "generate: stop_tokens is 29, expected an integer of at least 0 and below 29"),
        ({"stop_tokens": [[1], [2]]}, "stop_tokens has 2 entries"),
        ({"stop_tokens": 3}, "generate: stop_tokens is 3, expected token ids, or those of each row"),
        ({"stop_tokens": range(9)}, "9 stop_tokens, expected at most 8"),
        ({"seed": [1, 2, 2**63]}, "generate: seed is 9223372036854775808"),
        ({"log_probabilities": True, "end_token": 30}, "end_token is 30"),
        ({"log_probabilities": True, "max_new_tokens": 0}, "max_new_tokens is 0"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        generate(hybrid(), PROMPTS, **({"max_new_tokens": 2} | options))


@pytest.mark.usefixtures("unchecked_shapes")
def test_rows_inside_of_transformed_functions_are_refused():
    with pytest.raises(TypeError, match="expected no jit or vmap around it"):
        jax.jit(lambda: generate(hybrid(), [[1, 2]], max_new_tokens=2, seed=[1]))()

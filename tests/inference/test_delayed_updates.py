"""Tokens are the same where writes to the states wait during a block."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rnnlib.inference import Engine, stream
from rnnlib.inference.delayed_updates import after_tokens, delay_updates, flushed
from rnnlib.models import DecoderLM
from rnnlib.ops import delayed_update
from rnnlib.ops.delayed_update import DelayedState
from tests.tiny_models import tiny_config

PROMPTS = [[3, 1, 4, 1, 5, 9, 2], [6, 5, 3], [2]]
MIXERS = ("gated_deltanet", "kda", "gated_deltanet2", "pgdn", "gla", "sliding_window_attention")


def model(implementation: str | None = "triton", mixers: tuple[str, ...] = MIXERS) -> DecoderLM:
    """Heads of 32 channels; interpreted kernels where there is no GPU."""
    overrides = {} if implementation is None else {name: {"implementation": implementation} for name in mixers[:-1]}
    config = tiny_config(*mixers, width=64, window=6, initializer_std=0.3, mixer_overrides=overrides)
    return DecoderLM(config, rngs=nnx.Rngs(5))


def delayed_layers(cache) -> list[bool]:
    return [isinstance(entry.state, DelayedState) if hasattr(entry, "state") else False for entry in cache]


@pytest.fixture
def any_size(monkeypatch):
    """Writes wait however small the states are."""
    monkeypatch.setattr(delayed_update, "LEAST_BYTES", 0)
    jax.clear_caches()
    yield
    jax.clear_caches()


def tokens_of_blocks(language_model, block_size: int) -> np.ndarray:
    blocks = stream(language_model, PROMPTS, max_new_tokens=13, block_size=block_size, temperature=0.8, seed=4)
    return np.concatenate([np.asarray(block) for block in blocks], axis=1)


def test_blocks_of_any_size_have_the_tokens_of_plain_states(monkeypatch):
    """Of these mixers, as below: all are in `test_a_cache_is_the_same_after_a_loop`."""
    language_model = model(mixers=("gated_deltanet2", "gla", "sliding_window_attention"))
    plain = tokens_of_blocks(language_model, 13)
    monkeypatch.setattr(delayed_update, "LEAST_BYTES", 0)
    jax.clear_caches()
    for block_size in (13, 6):
        np.testing.assert_array_equal(tokens_of_blocks(language_model, block_size), plain)
    jax.clear_caches()


@pytest.mark.gpu
def test_on_a_gpu_many_texts_in_bfloat16_have_the_tokens_of_plain_states(monkeypatch):
    mixers = "gated_deltanet", "kda", "attention"
    overrides = {name: {"implementation": "triton"} for name in mixers[:2]}  # whose bits are those of plain states
    config = tiny_config(*mixers, width=256, dtype="bfloat16", initializer_std=0.1, mixer_overrides=overrides)
    language_model = DecoderLM(config, rngs=nnx.Rngs(5))
    prompts = np.random.default_rng(0).integers(0, 29, (200, 9))

    def tokens():
        blocks = stream(language_model, prompts, max_new_tokens=40, block_size=7, temperature=0)
        return np.concatenate([np.asarray(block) for block in blocks], axis=1)

    assert delayed_layers(delay_updates(language_model, language_model.init_cache(200, 64))) == [True, True, False]
    found = tokens()
    monkeypatch.setattr(delayed_update, "LEAST_BYTES", 2**60)
    jax.clear_caches()
    np.testing.assert_array_equal(tokens(), found)
    jax.clear_caches()


def test_texts_that_join_and_leave_have_the_tokens_of_plain_states(monkeypatch):
    language_model = model(mixers=("gated_deltanet", "kda", "sliding_window_attention"))

    def texts():
        engine = Engine(language_model, slots=2, max_length=40)
        found = [engine.add(PROMPTS[0], max_new_tokens=9, temperature=0)]
        engine.step(3)
        found.append(engine.add(PROMPTS[1], max_new_tokens=3, temperature=0))
        while engine.active:
            engine.step(5)
        return [text.tokens for text in found]

    plain = texts()
    monkeypatch.setattr(delayed_update, "LEAST_BYTES", 0)
    jax.clear_caches()
    assert texts() == plain
    jax.clear_caches()


def test_a_cache_is_the_same_after_a_loop(any_size):
    language_model = model()
    tokens = jnp.asarray([[3, 1, 4, 1, 5, 9], [2, 6, 5, 3, 5, 8]])
    cache = language_model.init_cache(2, 16)
    _, cache = language_model.extend(tokens[:, :2], cache)
    waiting = delay_updates(language_model, cache)
    assert delayed_layers(waiting) == [True] * 5 + [False]
    extend = jax.jit(language_model.extend)
    for t in range(4):
        plain_logits, cache = extend(tokens[:, t + 2 : t + 3], cache)
        logits, waiting = extend(tokens[:, t + 2 : t + 3], after_tokens(language_model, waiting, jnp.int32(t)))
        np.testing.assert_allclose(logits, plain_logits, rtol=1e-4, atol=1e-4)
    found = flushed(language_model, waiting, jnp.int32(4))
    assert jax.tree.structure(found) == jax.tree.structure(cache)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(cache)):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)


def test_layers_share_one_count_of_their_tokens():
    """Within the loop and after it; before it each has its own, of the same numbers."""
    config = tiny_config("attention", "gated_deltanet", "sliding_window_attention", "latent_attention", "retnet")
    language_model = DecoderLM(config, rngs=nnx.Rngs(5))
    tokens, ids = jnp.asarray([[3, 1, 4, 1, 5], [2, 6, 5, 3, 5]]), jnp.asarray([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    cache = language_model.init_cache(2, 16)
    _, cache = language_model.extend(tokens, cache, segment_ids=ids, positions=jnp.cumsum(ids, axis=1) - 1)
    for change in (after_tokens, flushed):
        changed = change(language_model, cache, jnp.int32(0))
        for name, layers in {"length": (0, 2, 3), "current": (0, 2, 3), "position": (0, 2, 3, 4)}.items():
            counts = [getattr(changed[layer], name) for layer in layers]
            assert all(count is counts[0] for count in counts)
        for x, y in zip(jax.tree.leaves(changed), jax.tree.leaves(cache), strict=True):
            np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("implementation", [None, "scan", "chunked"])
def test_states_stay_plain_where_no_kernel_serves(implementation, any_size):
    language_model = model(implementation)
    with jax.default_device(jax.devices("cpu")[0]):
        cache = language_model.init_cache(2, 16)
        assert not any(delayed_layers(delay_updates(language_model, cache)))


def test_small_states_and_states_of_other_dtypes_stay_plain(monkeypatch):
    language_model = model()
    cache = language_model.init_cache(2, 16)
    assert not any(delayed_layers(delay_updates(language_model, cache)))
    monkeypatch.setattr(delayed_update, "LEAST_BYTES", cache[0].state.nbytes)
    jax.clear_caches()
    assert delayed_layers(delay_updates(language_model, cache))[0]
    wide = tuple(x._replace(state=x.state.astype(jnp.bfloat16)) if hasattr(x, "state") else x for x in cache)
    assert not any(delayed_layers(delay_updates(language_model, wide)))
    jax.clear_caches()

"""Flash attention by cuDNN against XLA's own products, on a GPU: `pytest -m gpu`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rnnlib.ops import causal_attention
from rnnlib.ops.causal_attention import attention_of_layer


def _module():
    import importlib

    return importlib.import_module("rnnlib.ops.causal_attention")


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("length", "window", "size"), [(512, None, 128), (1024, 128, 64), (1024, 768, 64), (8192, 512, 64)]
)
def test_flash_attention_is_attention(packed, length, window, size, monkeypatch):
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, g = (jax.random.normal(key, (4, length, 3, size), jnp.bfloat16) for key in keys)
    segment_ids = None
    if packed:
        rng = np.random.default_rng(0)
        starts = np.sort(rng.integers(1, length, size=(4, 9)), axis=1)
        segment_ids = jnp.asarray((np.arange(length)[None, :, None] >= starts[:, None, :]).sum(-1) + 1, jnp.int32)

    def run(q, k, v):
        return causal_attention(q, k, v, window=window, segment_ids=segment_ids)

    def outcome():
        out, pull = jax.jit(lambda *a: jax.vjp(run, *a))(q, k, v)
        return [np.asarray(x, np.float64) for x in (out, *pull(g))]

    flash = outcome()
    assert _module()._backend(q, jnp.dtype(jnp.bfloat16)) == "cudnn"
    monkeypatch.setattr(_module(), "_backend", lambda *_: None)
    jax.clear_caches()
    for name, got, expected in zip(("out", "dq", "dk", "dv"), flash, outcome()):
        error = np.linalg.norm(got - expected) / np.linalg.norm(expected)
        print(f"{name} packed={packed} T={length} window={window} K={size}: {error:.2e}")
        assert error < 2e-2, name


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("window", [None, 128])
def test_deterministic_programs_may_attend_more_than_once(window, packed):
    """XLA fails on equal calls of cuDNN's gradients; numbers make them different, and change no digit."""
    x = jax.random.normal(jax.random.key(0), (4, 512, 3, 64), jnp.bfloat16)
    segment_ids = jnp.broadcast_to(jnp.arange(512) // 200, (4, 512)) if packed else None

    def loss(x, numbers):
        for number in numbers:
            x = attention_of_layer(x, x, x, window=window, segment_ids=segment_ids, number=number)
        return jnp.sum(x.astype(jnp.float32) ** 2)

    def gradient(numbers):
        compiled = jax.jit(lambda x: jax.grad(loss)(x, numbers)).lower(x).compile({"xla_gpu_deterministic_ops": True})
        return np.asarray(compiled(x), np.float32)

    np.testing.assert_array_equal(gradient((0, 1, 2)), gradient((5, 3, 4)))


@pytest.mark.gpu
@pytest.mark.parametrize("mixer", ["attention", "sliding_window_attention"])
def test_deterministic_training_of_unrolled_layers(mixer):
    import optax
    from flax import nnx

    from rnnlib.models import DecoderLM, ModelConfig

    config = ModelConfig(257, 128, 4, 2, ("gated_deltanet", mixer), tie_embeddings=True, dtype="bfloat16")
    graphdef, state = nnx.split(DecoderLM(config, rngs=nnx.Rngs(0)))
    tokens = jax.random.randint(jax.random.key(1), (4, 512), 0, 257)
    segment_ids = jnp.broadcast_to(1 + jnp.arange(512) // 200, (4, 512))

    def loss(state):
        logits = nnx.merge(graphdef, state)(tokens, segment_ids=segment_ids)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()

    value, gradients = (
        jax.jit(jax.value_and_grad(loss)).lower(state).compile({"xla_gpu_deterministic_ops": True})(state)
    )
    assert np.isfinite(value) and all(bool(jnp.isfinite(g).all()) for g in jax.tree.leaves(gradients))

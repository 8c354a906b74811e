"""Flash attention by cuDNN against XLA's own products, on a GPU: `pytest -m gpu`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rnnlib.ops import causal_attention


def _module():
    import importlib

    return importlib.import_module("rnnlib.ops.causal_attention")


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("length", "window", "size"), [(512, None, 128), (1024, 128, 64), (1024, 768, 64)])
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

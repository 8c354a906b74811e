"""A tiny language model and batches, for tests of the steps without the library's layers."""

import jax.numpy as jnp
import numpy as np
from flax import nnx

VOCABULARY = 11


class TinyModel(nnx.Module):
    """Embedding, running mean over the prefix, one hidden layer."""

    def __init__(self, *, rngs: nnx.Rngs, width: int = 8, dropout: float = 0.0):
        self.embedding = nnx.Param(0.5 * rngs.params.normal((VOCABULARY, width)))
        self.norm = nnx.RMSNorm(width, rngs=rngs)
        self.hidden = nnx.Linear(width, width, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, tokens, *, segment_ids=None, positions=None):
        x = self.embedding[...][tokens]
        x = x + jnp.cumsum(x, axis=1) / (1 + positions[..., None])
        x = self.dropout(nnx.silu(self.hidden(self.norm(x))))
        return jnp.einsum("btd,vd->btv", x, self.embedding[...]).astype(jnp.float32)


def random_batch(rng: np.random.Generator, batch: int = 4, length: int = 6, *, poison: bool = False):
    """A batch with random loss weights, a part of them 0."""
    tokens = rng.integers(0, VOCABULARY, (batch, length + 1)).astype(np.int32)
    weights = rng.integers(0, 2, (batch, length)).astype(np.float32) * rng.uniform(0.5, 2, (batch, length)).astype(
        np.float32
    )
    weights[0, 0] = np.nan if poison else 1.0
    return {
        "inputs": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "segment_ids": np.ones((batch, length), np.int32),
        "positions": np.broadcast_to(np.arange(length, dtype=np.int32), (batch, length)).copy(),
        "loss_weights": weights,
    }

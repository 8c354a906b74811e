"""MAD's auto-encoder, for the task that wants no language model: compression (Poli et al. 2024, arXiv 2403.17844)."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float, Int

from rnnlib.models import DecoderLM, ModelConfig


def sinusoids(length: int, width: int) -> Float[Array, "T D"]:
    """Fixed embeddings of positions: sines, then cosines, of frequencies 1 to 1e-4."""
    frequencies = 1e4 ** -(jnp.arange(width // 2) / max(1, width // 2 - 1))
    angles = jnp.arange(length)[:, None] * frequencies
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=1)


class AutoEncoder(nnx.Module):
    """Recovers every token from the output at the last position alone.

    That output, plus a fixed embedding of a position, goes through an MLP that does not expand, position by position.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        """Builds encoder and decoder with fresh weights; `config` is the encoder's."""
        if config.width % 2:
            raise ValueError(f"AutoEncoder: width is {config.width}, expected an even number")
        dtypes: dict[str, Any] = {"dtype": config.compute_dtype, "param_dtype": config.storage_dtype}
        width = config.width
        self.encoder = DecoderLM(config, rngs=rngs)
        self.norms = nnx.List([nnx.RMSNorm(width, epsilon=config.norm_eps, rngs=rngs, **dtypes) for _ in range(2)])
        init = nnx.initializers.normal(config.initializer_std)
        self.layers = nnx.List([nnx.Linear(width, width, kernel_init=init, rngs=rngs, **dtypes) for _ in range(2)])
        self.last_norm = nnx.RMSNorm(width, epsilon=config.norm_eps, rngs=rngs, **dtypes)
        self.head = nnx.Linear(width, config.vocabulary_size, kernel_init=init, rngs=rngs, **dtypes)

    def hidden(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """What the head reads at each position."""
        encoding = self.encoder.hidden(tokens)[:, -1:]
        x = encoding + sinusoids(tokens.shape[1], encoding.shape[-1]).astype(encoding.dtype)
        for norm, layer in zip(self.norms, self.layers):
            x = jax.nn.gelu(layer(norm(x)))
        return self.last_norm(x)

    def logits(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T vocabulary"]:
        """Logits, float32, of each position's own token."""
        return self.head(hidden).astype(jnp.float32)

"""The language-model loss and its units."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class LossSums(NamedTuple):
    """Sums over tokens, from which every mean follows; sums of parts add up to the sums of the whole.

    Attributes:
        nats: Weighted sum of the cross entropy, natural log.
        tokens: Sum of the loss weights.
        bytes: Weighted sum of the bytes that the target tokens stand for.
    """

    nats: Float[Array, ""]
    tokens: Float[Array, ""]
    bytes: Float[Array, ""]


def loss_sums(
    logits: Float[Array, "B T vocabulary"],
    targets: Int[Array, "B T"],
    weights: Float[Array, "B T"],
    token_bytes: Int[Array, " tokens"],
) -> LossSums:
    """Cross entropy of next-token predictions, in float32, over the tokens whose weight is not 0.

    Logits and targets at tokens of weight 0 have no influence, not even when they are not finite or out of range.

    Args:
        logits: Unnormalised log probabilities.
        targets: The tokens to predict.
        weights: Loss weights, 0 for tokens that are not to be predicted.
        token_bytes: Bytes that each token of the vocabulary stands for.

    Returns:
        Float32 sums of nats, tokens and bytes.
    """
    counted = weights != 0
    targets = jnp.where(counted, targets, 0)
    logits = jnp.where(counted[..., None], logits.astype(jnp.float32), 0.0)
    # The target's logit is picked by a comparison and not by its index: the gradient of indexing is a scatter, which on
    # a GPU is either not deterministic or not fast.
    is_target = jnp.arange(logits.shape[-1]) == targets[..., None]
    nats = jax.nn.logsumexp(logits, axis=-1) - jnp.sum(jnp.where(is_target, logits, 0.0), axis=-1)
    return LossSums(
        nats=jnp.sum(nats * weights),
        tokens=jnp.sum(weights),
        bytes=jnp.sum(token_bytes[targets].astype(jnp.float32) * weights),
    )


def bits_per_byte(nats: float | int, num_bytes: float | int) -> float:
    """Bits per byte of text, `nats / ln 2 / bytes`, comparable between tokenizers; NaN where there is no byte."""
    return nats / math.log(2) / num_bytes if num_bytes > 0 else math.nan

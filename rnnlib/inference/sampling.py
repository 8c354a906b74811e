"""How the next token is drawn from a model's logits."""

import dataclasses
import math
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from rnnlib.fields import PositiveInteger, Range, check_fields

# Of the draws, see `seed_key`.
Seed = Annotated[int, Range(at_least=0, below=2**63)]

# Temperatures are raised to this, at which sampling is greedy but for exact ties. Float32 cannot hold the reciprocal of
# much lower ones.
_LOWEST_TEMPERATURE = 1e-30


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the next token is drawn from the logits.

    Attributes:
        temperature: divides the logits; 0 takes the largest (greedy), and ignores the rest.
        top_k: draw among the `top_k` likeliest tokens only; None for all.
        top_p: draw among the fewest likeliest tokens whose probabilities, after `temperature` and `top_k`, sum to at
            least `top_p` (nucleus sampling); None for all.
    """

    temperature: Annotated[float | int, Range(at_least=0, below=math.inf)] = 1.0
    top_k: PositiveInteger | None = None
    top_p: Annotated[float | int, Range(above=0, at_most=1)] | None = None

    def __post_init__(self):
        check_fields(self)

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken, with no draw."""
        return self.temperature == 0

    @property
    def divisor(self) -> float | None:
        """What divides the logits; None where the likeliest token is taken."""
        return None if self.greedy else max(self.temperature, _LOWEST_TEMPERATURE)


class NaNLogitsError(ValueError):
    """There is no token to draw: a model's logits are NaN, for which its weights or its arithmetic are the reason."""

    @classmethod
    def of(cls, owner: str, where: str) -> "NaNLogitsError":
        """Of the function (`owner`) that found them, for something such as `"request 3"`."""
        return cls(f"{owner}: the model's logits are NaN for {where}, expected numbers: are its weights finite?")


def sample(logits: Float[Array, "B vocabulary"], keys: Any, sampling: Sampling) -> Int[Array, " B"]:
    """Draws one token a row.

    Args:
        logits: `[B, vocabulary]`.
        keys: one random key a row, as from `jax.random.split(key, B)`; not used when greedy.
        sampling: how to draw.

    Returns:
        Token numbers `[B]`, int32.
    """
    return draw(logits, keys, sampling.divisor, sampling.top_k, sampling.top_p)


def draw(
    logits: Array, keys: Any, divisor: Array | float | None, top_k: Array | int | None, top_p: Array | float | None
) -> Array:
    """`sample` with the options as numbers or arrays: calls that differ only in arrays' values share a compilation."""
    if divisor is None:
        return likeliest_token(logits)
    # The largest logit becomes 0, so that division by a small temperature does not make it infinite.
    logits = (logits - jnp.max(logits, axis=-1, keepdims=True)) / divisor
    if top_k is None and top_p is None:
        return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)
    return draw_filtered(keys, logits, top_k, top_p)


def likeliest_token(logits: Float[Array, "B vocabulary"]) -> Int[Array, " B"]:
    """The likeliest token of each row, `[B]` int32; the first whose logit is NaN, if there is one."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def have_nan(logits: Float[Array, "B vocabulary"], likeliest: Int[Array, " B"]) -> Bool[Array, " B"]:
    """Rows with a NaN among their logits, which is then their `likeliest_token`'s: nothing else is read."""
    return jnp.isnan(jnp.take_along_axis(logits, likeliest[:, None], axis=-1)[:, 0])


def draw_filtered(keys: Any, logits: Array, top_k: Array | int | None, top_p: Array | float | None) -> Array:
    """Draws one token a row among the `top_k` likeliest, and of those the fewest that reach `top_p`.

    Args:
        keys: one random key a row.
        logits: `[B, vocabulary]`, divided by the temperature.
        top_k: one number, or `[B, 1]`; None for all.
        top_p: one number, or `[B, 1]`; None for all, as is any above 1.

    Returns:
        Token numbers `[B]`, int32.
    """
    # Draws by rank and not by a threshold on the logits, which would let ties through.
    by_rank = jnp.argsort(logits, axis=-1, descending=True, stable=True)
    ranked = jnp.take_along_axis(logits, by_rank, axis=-1)
    if top_k is not None:
        ranked = jnp.where(jnp.arange(ranked.shape[-1]) < top_k, ranked, -jnp.inf)
    if top_p is not None:
        probabilities = jax.nn.softmax(ranked, axis=-1)
        likelier = jnp.cumsum(probabilities, axis=-1) - probabilities
        # The likeliest token stays whatever rounding does.
        ranked = jnp.where((likelier < top_p).at[:, 0].set(True), ranked, -jnp.inf)
    ranks = jax.vmap(jax.random.categorical)(keys, ranked)
    return jnp.take_along_axis(by_rank, ranks[:, None], axis=-1)[:, 0].astype(jnp.int32)


def seed_key(seed: int) -> Array:
    """The key of a seed, which `jax.random.key` cuts to 32 bits unless 64-bit types are enabled."""
    key = jax.random.key(seed % 2**32)
    return jax.random.fold_in(key, seed >> 32) if seed >> 32 else key

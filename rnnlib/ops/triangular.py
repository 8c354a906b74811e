"""The inverse of a unit lower triangular matrix, which the delta rule's chunk form needs."""

import jax
import jax.numpy as jnp
from jax import Array
from jax.lax.linalg import triangular_solve
from jaxtyping import Float

_BASE = 16


@jax.custom_jvp
def unit_lower_inverse(strict_lower: Float[Array, "*batch C C"]) -> Float[Array, "*batch C C"]:
    """`(I + L)^-1` for strictly lower triangular L, by forward substitution in blocks of 16 and then by halves.

    The method is stable even if L's entries are near 1 (a run of equal tokens with a gate of 1): every intermediate
    result is a part of the inverse, unlike the powers of L in a Neumann series.

    Args:
        strict_lower: L; entries on and above its diagonal must be zero. C is a power of two.
    """
    return _inverse(strict_lower)


def _inverse(lower: Array) -> Array:
    size = lower.shape[-1]
    if size <= _BASE:
        identity = jnp.broadcast_to(jnp.eye(size, dtype=lower.dtype), lower.shape)
        return triangular_solve(lower, identity, left_side=True, lower=True, unit_diagonal=True)
    half = size // 2
    # [[A, 0], [B, D]]^-1 = [[A^-1, 0], [-D^-1 B A^-1, D^-1]]; both diagonal halves are inverted in one batch.
    diagonal = jnp.stack([lower[..., :half, :half], lower[..., half:, half:]])
    first, second = _inverse(diagonal)
    below = -second @ lower[..., half:, :half] @ first
    top = jnp.concatenate([first, jnp.zeros_like(below)], axis=-1)
    return jnp.concatenate([top, jnp.concatenate([below, second], axis=-1)], axis=-2)


@unit_lower_inverse.defjvp
def _inverse_tangent(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    inverse = unit_lower_inverse(*primals)
    return inverse, -inverse @ jnp.tril(tangents[0], -1) @ inverse

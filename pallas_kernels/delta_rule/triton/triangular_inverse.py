"""Inverse of a unit lower triangular matrix inside a kernel, by halves.

The inverse of a block of `2 h` rows has the inverses of its two halves on its diagonal, and below them

    -X_22 L_21 X_11

so the inverses of all blocks of 2, 4, 8 .. rows follow from each other with two products a level. Nothing grows beyond
the inverse itself: a run of equal keys with gate 1 and no decay costs no accuracy, which powers of the matrix (Neumann
doubling) do not survive.
"""

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.common.triton.backend import dot, iota


def unit_lower_inverse(lower: Array, dtype) -> Array:
    """`(I + L)^-1` for a strictly lower triangular matrix.

    Args:
        lower: `[C, C]` float32, zero on and above the diagonal; C is a power of two.
        dtype: of the products' operands; they add up in float32.

    Returns:
        `[C, C]` float32.
    """
    size = lower.shape[0]
    i, j = iota((size, size), 0), iota((size, size), 1)
    apart = i ^ j  # its highest bit gives the size of the blocks in which rows i and j are in different halves
    negative = -lower
    inverse = jnp.where(i == j, 1.0, jnp.where(apart == 1, negative, 0.0))
    negative = negative.astype(dtype)
    for level in range(1, size.bit_length() - 1):
        halves = inverse.astype(dtype)
        # One product for all blocks of the matrix; `where` picks the blocks below the diagonal at this level.
        corners = dot(dot(halves, negative).astype(dtype), halves)
        inverse = jnp.where(lax.shift_right_logical(apart, level) == 1, corners, inverse)
    return inverse

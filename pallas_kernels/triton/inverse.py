"""Inverse of a unit lower triangular matrix inside a kernel.

Forward substitution in the 16 by 16 blocks on the diagonal, then two levels of halves, `X <- X - X L X`. Nothing grows
beyond the inverse itself, so a run of equal keys with gate 1 and no decay costs no accuracy, which powers of the matrix
(Neumann doubling) do not survive.
"""

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.triton.backend import dot, iota


def unit_lower_inverse(lower: Array, precise: bool, block: int = 16) -> Array:
    """`(I + L)^-1` for a strictly lower triangular matrix.

    Args:
        lower: `[C, C]` float32, zero on and above the diagonal; C is 16, 32, 64 or 128.
        block: side of the blocks on the diagonal that are solved by substitution.
        precise: whether products keep float32 accuracy (three tf32 products) or tf32's.

    Returns:
        `[C, C]` float32.
    """
    size = lower.shape[0]
    count = size // block
    shape = (count, block, count, block)
    on_diagonal = iota(shape, 0) == iota(shape, 2)
    blocks = jnp.sum(jnp.where(on_diagonal, lower.reshape(shape), 0.0), axis=2)  # [n, 16, 16]
    row, column = iota(blocks.shape, 1), iota(blocks.shape, 2)

    def substitute(n, inverse):
        coefficients = jnp.sum(jnp.where(row == n, blocks, 0.0), axis=1)  # row n of each block
        solved = -jnp.sum(coefficients[:, :, None] * inverse, axis=1)
        return jnp.where(row == n, inverse + solved[:, None, :], inverse)

    inverse = lax.fori_loop(1, block, substitute, (row == column).astype(jnp.float32))
    inverse = jnp.broadcast_to(inverse[:, :, None, :], shape)
    inverse = jnp.where(on_diagonal, inverse, 0.0).reshape(size, size)

    i, j = iota((size, size), 0), iota((size, size), 1)
    half = block
    while half < size:
        off_diagonal = (i // (2 * half) == j // (2 * half)) & (i // half != j // half)
        left = dot(inverse, jnp.where(off_diagonal, lower, 0.0), precise)
        inverse = inverse - dot(left, inverse, precise)
        half *= 2
    return inverse

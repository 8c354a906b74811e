"""Inverse of a unit lower triangular matrix inside a kernel, by halves.

`pallas_kernels.triton.delta_rule.triangular_inverse` has the equation. Of a level's two products the left operands are
in registers, and the inverses of its blocks go through shared memory.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.mosaic.backend import (
    added,
    column_numbers,
    multiply,
    publish,
    spread_columns,
    spread_rows,
    zeros,
)
from pallas_kernels.problem import CHUNK

_LEVELS = range(1, CHUNK.bit_length() - 1)


def unit_lower_inverse(
    lower: Array, rows: Array, fixed: Any, halves: tuple[Any, Any], before_second: Callable[[], None]
) -> Array:
    """`(I + L)^-1` for a strictly lower triangular matrix.

    Args:
        lower: `[C, C]` float32, zero on and above the diagonal.
        rows: the rows' numbers, `[C]`.
        fixed: shared memory for a bfloat16 matrix `[C, C]`, which no product reads any more.
        halves: two more of them, used by turns. No product reads the second when this returns.
        before_second: is called before the second is written to.

    Returns:
        `[C, C]` float32.
    """
    columns = column_numbers()

    def blocks(level):
        """Numbers of the blocks of `2^level` rows that rows and columns are in, differing in bits."""
        row, column = (lax.shift_right_logical(x, jnp.int32(level)) for x in (rows, columns))
        return spread_rows(row) ^ spread_columns(column)

    fixed[...] = (-lower).astype(jnp.bfloat16)
    apart = blocks(0)
    inverse = jnp.where(apart == 0, 1.0, jnp.where(apart == 1, -lower, 0.0))
    for level in _LEVELS:
        known, own = inverse.astype(jnp.bfloat16), halves[(level - 1) % 2]
        if level == 2:
            before_second()
        own[...] = known
        publish()
        (right,) = added(lambda total, known=known: multiply(total, known, fixed), zeros(CHUNK, CHUNK))
        right = right.astype(jnp.bfloat16)
        (corners,) = added(lambda total, right=right, own=own: multiply(total, right, own), zeros(CHUNK, CHUNK))
        inverse = jnp.where(blocks(level) == 1, corners, inverse)
    return inverse

"""The kernel that rounds a matrix to float8: a program rounds one tile and stores it twice, once transposed."""

import jax.numpy as jnp


def round_both_ways_kernel(r, *, transposes_first: bool):
    """The tile times a power of two in float8, by rows and by columns.

    Args:
        r: references: `x`, `scale`, `by_rows`, `by_columns`.
        transposes_first: whether numbers are transposed before they are rounded, of two bytes each, or after.
    """
    x, scale = r.x[...], r.scale[0]

    def rounded(x):
        return (x.astype(jnp.float32) * scale).astype(r.by_rows.dtype)

    by_rows = rounded(x)
    r.by_rows[...] = by_rows
    r.by_columns[...] = rounded(x.T) if transposes_first else by_rows.T

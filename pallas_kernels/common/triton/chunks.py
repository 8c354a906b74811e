"""Loops over the chunks of a sequence: what each kernel that goes from chunk to chunk needs."""

from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.common.triton.kernel_shape import KernelShape


def sequence_grid(kernel_shape: KernelShape, columns: int, block: int) -> tuple[tuple[int, int, int], Any]:
    """A program for each block of columns, value head, and split of each sequence; and where each finds its part."""
    grid = (columns // block, kernel_shape.value_heads, kernel_shape.batch * kernel_shape.num_splits)

    def at(c, h, z):
        return lax.div(z, kernel_shape.num_splits) if kernel_shape.num_splits > 1 else z, 0, h, c

    return grid, at


def loop(count, body, init):
    """`fori_loop` from 0 to `count`."""
    return lax.fori_loop(0, count, body, init)


def load_row(ref, rows) -> Array | None:
    """One number for each of a chunk's tokens, `[C]` float32, from `[T]`; None for None."""
    return None if ref is None else ref[rows].astype(jnp.float32)


def keep_factor(ref, n) -> Any:
    """What chunk `n` keeps of the state `[V, K]`, from `[N]` or `[N, K]`; 1 for None."""
    if ref is None:
        return 1.0
    return ref[n] if len(ref.shape) == 1 else ref[n, :][None, :]


def product(*factors: Array | None) -> Any:
    """Product of the factors that are not None, `[C]` factors along the rows of `[C, K]` ones; None if all are."""
    result: Any = None
    for factor in factors:
        if factor is None:
            continue
        if result is None:
            result = factor
        elif result.ndim < factor.ndim:
            result = result[:, None] * factor
        elif result.ndim > factor.ndim:
            result = result * factor[:, None]
        else:
            result = result * factor
    return result

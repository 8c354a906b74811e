"""A matrix in float8, by rows and by columns."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from pallas_kernels.common.config import KernelConfig
from pallas_kernels.common.platform import is_hopper
from pallas_kernels.common.refusal import refuse
from pallas_kernels.common.triton.backend import Operand, call, interpreted, unsupported_arrays, whole
from pallas_kernels.float8.triton import round_both_ways_kernel


@dataclasses.dataclass(frozen=True)
class RoundingConfig:
    """How a call is cut into programs.

    Attributes:
        rows: of a tile, at most; a power of two.
        columns: of a tile, at most; a power of two.
        num_warps: of a program.
    """

    rows: int = 64
    columns: int = 128
    num_warps: int = 4


_LEAST = 64
"""Rows and columns of the smallest tile."""


def unsupported_reason(x: Array | jax.ShapeDtypeStruct) -> str | None:
    """Why no kernel here can serve a call on this matrix, as a noun phrase, or None."""
    if x.dtype != jnp.bfloat16:
        return f"x of dtype {x.dtype} (only bfloat16)"
    if reason := unsupported_arrays(x=x):
        return reason
    if x.ndim != 2 or any(size == 0 or size % _LEAST for size in x.shape):
        return f"x of shape {x.shape} (only multiples of {_LEAST} rows and columns)"
    if not (interpreted() or is_hopper()):
        return "a card that is not Hopper's"
    return None


def _tile(most: int, size: int) -> int:
    """The largest power of two up to `most` that divides `size`."""
    return min(most, size & -size)


def round_both_ways(
    x: Float[Array, "N F"], scale: Float[Array, ""], dtype: Any, config: RoundingConfig | None = None
) -> tuple[Float[Array, "N F"], Float[Array, "F N"]]:
    """`(x * scale)` in a dtype of float8, and its transpose, by one kernel that reads `x` once.

    Args:
        x: the matrix, bfloat16.
        scale: a power of two, by which no number gets larger than the dtype's largest.
        dtype: `float8_e4m3fn` or `float8_e5m2`. Numbers are rounded to the nearest, and to even.
        config: how the call is cut into programs.

    Returns:
        The matrix `[N, F]` and its transpose `[F, N]`.

    Raises:
        NotImplementedError: the kernel does not support the call.
    """
    refuse("round_both_ways", unsupported_reason(x))
    config = config or RoundingConfig()
    rows, columns = _tile(config.rows, x.shape[0]), _tile(config.columns, x.shape[1])
    transposed = jax.ShapeDtypeStruct(x.shape[::-1], dtype)
    results = call(
        round_both_ways_kernel,
        "round_both_ways",
        (x.shape[1] // columns, x.shape[0] // rows),
        {
            "x": Operand(x, (rows, columns), lambda c, n: (n, c)),
            "scale": whole(scale.astype(jnp.float32).reshape(1)),
        },
        {
            "by_rows": Operand(jax.ShapeDtypeStruct(x.shape, dtype), (rows, columns), lambda c, n: (n, c)),
            "by_columns": Operand(transposed, (columns, rows), lambda c, n: (c, n)),
        },
        KernelConfig(num_warps=config.num_warps, num_stages=1),
    )
    return results["by_rows"], results["by_columns"]  # type: ignore[return-value]

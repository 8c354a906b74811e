"""Products of rows with a matrix in float8, forward and backward, for training.

Each array is multiplied by a power of two that brings its largest magnitude just under the largest float8 number, and
rounded to float8; the product is divided by both powers. Activations and weights are `float8_e4m3fn`, gradients
`float8_e5m2`, which has fewer digits and a wider range (Micikevicius et al., 2022, arXiv 2209.05433). The power is that
of the array itself, not of earlier steps, so that nothing is kept beside the parameters; it rounds nothing.

XLA multiplies float8 arrays on the matrix units of cards that have them (NVIDIA Hopper and later), and converts them
first elsewhere. It is given float8 arrays and not such converted back, as `flax.linen.fp8_ops` writes it: of those it
makes a bfloat16 product on an H100 (jax 0.11.2).
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.layout import Layout, with_layout_constraint
from jax.typing import DTypeLike

from pallas_kernels.common.platform import platform
from pallas_kernels.common.vma import pvary_together
from rnnlib.ops.sharding import is_split
from rnnlib.ops.skinny_gemm import linear_product, skinny_kernel_supports

_FORWARD, _BACKWARD = jnp.float8_e4m3fn, jnp.float8_e5m2
_MULTIPLE, _LEAST = 16, 256
_EXPONENT = 120
"""Of a power of two, at most: float32 and bfloat16 hold it and its inverse."""

Rounded = tuple[Array, Array]
"""An array in float8, and by what to multiply it."""


def float8_supports(features_in: int, features_out: int) -> bool:
    """Whether a map of these sizes is multiplied in float8.

    Matrix units take multiples of 16. Rounding a narrow map's arrays costs more than its product saves: of 8192 rows'
    gradient for a map from 128 to 2048 channels it took 52 us on an H200, and the three products of bfloat16 about 50.
    """
    return min(features_in, features_out) >= _LEAST and features_in % _MULTIPLE == features_out % _MULTIPLE == 0


def float8_product(lhs: Array, rhs: Array, dimension_numbers: Any, *args: Any, **options: Any) -> Array:
    """`jax.lax.dot_general` for linear maps, in float8 where `float8_supports` the map.

    What it does not serve is multiplied by `linear_product`: few rows on a GPU, as in decoding one token, arrays that
    are sharded over Explicit mesh axes, and other products than rows by a matrix.

    Args:
        lhs: rows `[..., K]`.
        rhs: the matrix `[K, N]`, in the same dtype.
        dimension_numbers: of `jax.lax.dot_general`.
        *args: of `jax.lax.dot_general`, for what is not multiplied in float8.
        **options: of `jax.lax.dot_general`, likewise.

    Returns:
        The products `[..., N]` in `lhs`'s dtype, not a number where an argument has a number that is not finite.
    """
    is_map = dimension_numbers == (((lhs.ndim - 1,), (0,)), ((), ())) and rhs.ndim == 2
    if (
        not (is_map and lhs.size and lhs.dtype == rhs.dtype and float8_supports(*rhs.shape))
        or skinny_kernel_supports(lhs, (rhs,))
        or is_split(lhs)
        or is_split(rhs)
    ):
        return linear_product(lhs, rhs, dimension_numbers, *args, **options)
    rows, kernel = pvary_together((lhs.reshape(-1, lhs.shape[-1]), rhs))
    return _product(rows, kernel).reshape(*lhs.shape[:-1], rhs.shape[-1])


@jax.custom_vjp
def _product(x: Array, kernel: Array) -> Array:
    return _multiply(_round(x, _FORWARD), _round(kernel, _FORWARD), (1, 0), x.dtype)


def _product_forward(x: Array, kernel: Array) -> tuple[Array, tuple[Rounded, Rounded]]:
    rounded, by_columns = _round_both_ways(x, _FORWARD)
    kernel_rounded, kernel_by_columns = _round_both_ways(kernel, _FORWARD)
    y = _multiply(rounded, kernel_by_columns, (1, 0), x.dtype)
    # What the backward pass reads are rounded arrays, of a byte a number.
    return y, (by_columns, kernel_rounded)


def _product_backward(read: tuple[Rounded, Rounded], d_y: Array) -> tuple[Array, Array]:
    x, kernel = read
    rounded, by_columns = _round_both_ways(d_y, _BACKWARD)
    return _multiply(rounded, kernel, (1, 1), d_y.dtype), _multiply(x, by_columns, (0, 0), d_y.dtype)


_product.defvjp(_product_forward, _product_backward)


def _round_both_ways(x: Array, dtype: Any) -> tuple[Rounded, Rounded]:
    """A matrix in float8, once with its rows side by side in memory and once with its columns.

    cuBLAS reads side by side what a product sums over, and XLA gives it a transposed copy by a kernel of its own. Of
    two arrays whose layouts are said, the kernel that rounds writes both. The barrier keeps the second one from being
    made where the product reads it.
    """
    rounded, factor = _round(x, dtype)
    if platform() != "gpu":
        return (rounded, factor), (rounded, factor)
    by_rows = with_layout_constraint(rounded, Layout((0, 1)))
    by_columns = with_layout_constraint(by_rows, Layout((1, 0)))
    by_rows, by_columns = jax.lax.optimization_barrier((by_rows, by_columns))
    return (by_rows, factor), (by_columns, factor)


def _round(x: Array, dtype: Any) -> Rounded:
    largest = jnp.max(jnp.abs(x)).astype(jnp.float32)
    exponent = jnp.frexp(largest)[1] - jnp.frexp(jnp.finfo(dtype).max.astype(jnp.float32))[1] + 1
    exponent = jnp.clip(jnp.where(largest > 0, exponent, 0), -_EXPONENT, _EXPONENT)
    # float8 would turn what is not finite into its largest number, and a training step would not be skipped.
    one = jnp.where(jnp.isfinite(largest), 1.0, jnp.nan)
    inverse, factor = jnp.ldexp(one, -exponent), jnp.ldexp(one, exponent)
    return (x * inverse.astype(x.dtype)).astype(dtype), factor.astype(x.dtype)


def _multiply(lhs: Rounded, rhs: Rounded, contracted: tuple[int, int], dtype: DTypeLike) -> Array:
    dimensions = (((contracted[0],), (contracted[1],)), ((), ()))
    y = jax.lax.dot_general(lhs[0], rhs[0], dimensions, preferred_element_type=dtype)
    return y * (lhs[1] * rhs[1])  # powers of two: y times the larger one alone could overflow

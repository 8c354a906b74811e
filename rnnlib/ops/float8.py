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
from jax.typing import DTypeLike

from pallas_kernels.common.platform import platform
from pallas_kernels.common.vma import pvary_together
from rnnlib.ops.kernels import kernel_operators, unsupported_reason
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
    rounded, transposed = _round_both_ways(x, _FORWARD)
    kernel_rounded, kernel_transposed = _round_both_ways(kernel, _FORWARD)
    y = _multiply(rounded, kernel_transposed, (1, 1), x.dtype)
    # What the backward pass reads are rounded arrays, of a byte a number.
    return y, (transposed, kernel_rounded)


def _product_backward(read: tuple[Rounded, Rounded], d_y: Array) -> tuple[Array, Array]:
    x_transposed, kernel = read
    rounded, transposed = _round_both_ways(d_y, _BACKWARD)
    d_x = _multiply(rounded, kernel, (1, 1), d_y.dtype)
    return d_x, _multiply(x_transposed, transposed, (1, 1), d_y.dtype)


_product.defvjp(_product_forward, _product_backward)


def _round_both_ways(x: Array, dtype: Any) -> tuple[Rounded, Rounded]:
    """A matrix in float8, and its transpose.

    cuBLAS wants side by side in memory what a product of float8 sums over. A kernel of its own rounds and writes both.
    XLA would write the transpose after the rounding, or both in a fusion that takes as long.
    """
    inverse, factor = _scale(x, dtype)
    if platform() == "gpu" and unsupported_reason(lambda kernels: kernels.float8.unsupported_reason(x)) is None:
        rounded, transposed = kernel_operators().float8.round_both_ways(x, inverse, dtype)
    else:
        rounded = (x * inverse.astype(x.dtype)).astype(dtype)
        transposed = rounded.T
    return (rounded, factor.astype(x.dtype)), (transposed, factor.astype(x.dtype))


def _round(x: Array, dtype: Any) -> Rounded:
    inverse, factor = _scale(x, dtype)
    return (x * inverse.astype(x.dtype)).astype(dtype), factor.astype(x.dtype)


def _scale(x: Array, dtype: Any) -> tuple[Array, Array]:
    """The power of two that brings an array just under the largest number of `dtype`, float32, and its inverse."""
    largest = jnp.max(jnp.abs(x)).astype(jnp.float32)
    exponent = jnp.frexp(largest)[1] - jnp.frexp(jnp.finfo(dtype).max.astype(jnp.float32))[1] + 1
    exponent = jnp.clip(jnp.where(largest > 0, exponent, 0), -_EXPONENT, _EXPONENT)
    # float8 would turn what is not finite into its largest number, and a training step would not be skipped.
    one = jnp.where(jnp.isfinite(largest), 1.0, jnp.nan)
    return jnp.ldexp(one, -exponent), jnp.ldexp(one, exponent)


def _multiply(lhs: Rounded, rhs: Rounded, contracted: tuple[int, int], dtype: DTypeLike) -> Array:
    dimensions = (((contracted[0],), (contracted[1],)), ((), ()))
    y = jax.lax.dot_general(lhs[0], rhs[0], dimensions, preferred_element_type=dtype)
    return y * (lhs[1] * rhs[1])  # powers of two: y times the larger one alone could overflow

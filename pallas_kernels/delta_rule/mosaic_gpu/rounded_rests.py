"""What rounding to bfloat16 leaves of a matrix, in four bits a number: a quarter more bytes, a sixteenth of the error.

The gradient of a decay is, but for what a chunk's own tokens read, the product of the state before the chunk and the
gradient after it. Where little decays all else is small beside that product, and what rounds its factors is its error.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.common.kernel_shape import KernelShape
from pallas_kernels.common.mosaic_gpu import SIDE

WIDTH = 8
"""Columns of the rests of 64. Of a matrix, a thread holds the same ones of each eight columns."""
_PARTS = SIDE // WIDTH
_BITS = 4
_BELOW = 16 - _BITS  # bits that are left out


def rests_struct(kernel_shape: KernelShape) -> jax.ShapeDtypeStruct:
    """Of all chunks' states, `[B, HV, N, V, K / 8]`."""
    p = kernel_shape
    return p.per_head(p.chunks, p.value_size, p.key_size // WIDTH, dtype=jnp.int32)


def rounded_and_rests(x: Array) -> tuple[Array, list[Array]]:
    """A matrix `[64, n * 64]` rounded to bfloat16, and n matrices `[64, 8]` int32 of the rests of 64 columns each.

    Column j of the rests has those of columns j, j + 8, ..., j + 56. `refined` is off by at most a sixteenth of half of
    bfloat16's last digit.

    Args:
        x: float32.
    """
    bits = lax.bitcast_convert_type(x, jnp.int32)
    # Halves are rounded up, so that a rest is a number of four bits with a sign.
    high = (bits + jnp.int32(1 << 15)) & jnp.int32(-(1 << 16))
    rest = lax.shift_right_arithmetic(bits - high, jnp.int32(_BELOW)) & jnp.int32((1 << _BITS) - 1)
    rests = []
    for start in range(0, x.shape[1], SIDE):
        packed = rest[:, start : start + WIDTH]
        for part in range(1, _PARTS):
            own = rest[:, start + part * WIDTH : start + (part + 1) * WIDTH]
            packed = packed | lax.shift_left(own, jnp.int32(_BITS * part))
        rests.append(packed)
    rounded = lax.bitcast_convert_type(high, jnp.float32)
    # A card's NaN has all bits set, and the sum above turns it to 0.
    return jnp.where(x == x, rounded, x).astype(jnp.bfloat16), rests


def refined(rounded: Array, rests: Array) -> Array:
    """The matrix `[64, 64]` in float32, from what `rounded_and_rests` makes of it."""
    bits = lax.bitcast_convert_type(rounded.astype(jnp.float32), jnp.int32)
    parts = []
    for part in range(_PARTS):  # to the top, for its sign, and to its place; then the middle of what it stands for
        top = lax.shift_left(rests, jnp.int32(32 - _BITS * (part + 1)))
        parts.append(lax.shift_right_arithmetic(top, jnp.int32(32 - _BITS - _BELOW)) & jnp.int32(-(1 << _BELOW)))
    return lax.bitcast_convert_type(bits + jnp.concatenate(parts, axis=1) + jnp.int32(1 << (_BELOW - 1)), jnp.float32)

"""Two binary digits of each number beyond bfloat16's, for an eighth of the bytes of a second bfloat16 part.

The residuals R are rounded for the products that take them. The gradient of a gate that both erases and writes is a sum
over their channels, which has no other error as large as theirs. With two more digits that error is a quarter of it.
"""

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.mosaic.backend import SIDE

COLUMNS = 8
"""Columns of the digits. Of a matrix, a thread holds the same ones of each eight columns."""
_PARTS = SIDE // COLUMNS
_BEYOND = 14  # the place of the two digits among the bits of a float32 number


def rounded_and_digits(x: Array) -> tuple[Array, Array]:
    """A matrix `[64, 64]` rounded to bfloat16, and the digits, `[64, 8]` int16.

    Column j of the digits has those of columns j, j + 8, ..., j + 56. `refined` is off by at most an eighth of
    bfloat16's last digit.

    Args:
        x: float32.
    """
    bits = lax.bitcast_convert_type(x, jnp.int32)
    # Halves are rounded up, always: so the digits alone tell which way a number was rounded.
    high = (bits + jnp.int32(1 << 15)) & jnp.int32(-(1 << 16))
    digits = jnp.zeros((SIDE, COLUMNS), jnp.int32)
    for part in range(_PARTS):
        own = bits[:, part * COLUMNS : (part + 1) * COLUMNS]
        digits = digits | (lax.shift_right_logical(own, jnp.int32(_BEYOND - 2 * part)) & jnp.int32(3 << 2 * part))
    return lax.bitcast_convert_type(high, jnp.float32).astype(jnp.bfloat16), digits.astype(jnp.int16)


def refined(rounded: Array, digits: Array) -> Array:
    """The matrix `[64, 64]` in float32, from what `rounded_and_digits` makes of it."""
    bits = lax.bitcast_convert_type(rounded.astype(jnp.float32), jnp.int32)
    # Digits 00 and 01 are half a quarter and three halves of one above the rounded number; 10 and 11 were rounded up,
    # and are as much below it. So the first digit is turned, and two quarters are taken away, but for the half.
    turned = digits.astype(jnp.int32) ^ jnp.int32(0b10_10_10_10_10_10_10_10)
    quarters = [
        lax.shift_left(turned, jnp.int32(_BEYOND - 2 * part)) & jnp.int32(3 << _BEYOND) for part in range(_PARTS)
    ]
    below = jnp.int32((3 << _BEYOND) // 2)
    return lax.bitcast_convert_type(bits + (jnp.concatenate(quarters, axis=1) - below), jnp.float32)

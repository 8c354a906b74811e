"""Products inside the ridge solve's kernels, at the precision that a solve asks for.

A matrix is held as `Parts`: itself, or its leading and its remaining bfloat16 part. `"bfloat16"` takes one product of
leading parts; `"split"` takes three, or two where one side is exact in bfloat16, and so keeps 16 bits of both sides;
`"tf32"` takes one product of float32 matrices that the tensor cores round to 10 bits; `"float32"` takes three of those.
`"float16"` takes one product of float16 matrices.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from pallas_kernels.common.triton.backend import split


class Parts(NamedTuple):
    """A matrix as the sum of a leading part and, unless None, a rest."""

    high: Array
    low: Array | None = None

    @property
    def value(self) -> Array:
        """The matrix in float32."""
        high = self.high.astype(jnp.float32)
        return high if self.low is None else high + self.low.astype(jnp.float32)


def parts(x: Array, precision: str) -> Parts:
    """`x` as the factor of a product; what is bfloat16 already has no rest."""
    if precision in ("tf32", "float32"):
        return Parts(x.astype(jnp.float32))
    if precision == "float16":
        return Parts(x.astype(jnp.float16))
    if x.dtype == jnp.bfloat16 or precision == "bfloat16":
        return Parts(x.astype(jnp.bfloat16))
    return Parts(*split(x))


def load_parts(high, low=None) -> Parts:
    """The parts in two references, the second of which may be None."""
    return Parts(high[...], None if low is None else low[...])


def multiply(product: Callable, a: Parts, b: Parts, precision: str, onto: Any = None) -> Any:
    """`onto + product(a, b)`, float32, for `product` one of the backend's `dot`, `dot_nt` and `dot_tn`."""
    precise = precision == "float32"
    for x, y in ((a.high, b.high), (a.low, b.high), (a.high, b.low)):
        if x is not None and y is not None:
            term = product(x, y, precise)
            onto = term if onto is None else onto + term
    return onto

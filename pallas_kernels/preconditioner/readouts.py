"""What becomes of the diagonal Gram, row by row inside a kernel: values, and gradients by hand.

A row is `[K]` float32. `before` and `after` are A before a token (zero where a document starts) and after it, `x` the
token's row besides, `parameter` a number a head as a row. What works on each channel alone takes rows of several tokens
at once, too, `[..., K]`. `special` are the functions that a backend has an instruction for.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp

from pallas_kernels.common.triton.backend import exp2, log2, reciprocal


class SpecialFunctions(NamedTuple):
    """Functions of float32 that a kernel finds by the card's special function unit, each by one of its instructions.

    Attributes:
        exp2: `2 ** x`.
        log: the natural logarithm of normal positive numbers.
        reciprocal: `1 / x`, here of positive numbers.
    """

    exp2: Callable[[Any], Any]
    log: Callable[[Any], Any]
    reciprocal: Callable[[Any], Any]


TRITON = SpecialFunctions(exp2, lambda x: math.log(2) * log2(x), reciprocal)


class RowGradients(NamedTuple):
    """Gradients of one row's readout in its arguments; None is zero.

    Attributes:
        before: in A before the token.
        after: in A after the token.
        x: in the token's row.
        parameter: in the parameter.
    """

    before: Any = None
    after: Any = None
    x: Any = None
    parameter: Any = None


@dataclass(frozen=True)
class Gram:
    """A after the token."""

    def __call__(self, before, after, x, parameter, special=TRITON):
        """A."""
        return after

    def gradients(self, before, after, x, parameter, d_out, special=TRITON) -> RowGradients:
        """For the gradient `d_out` in the result."""
        return RowGradients(after=d_out)


def _tanh(r: Any, special: SpecialFunctions) -> tuple[Any, Any]:
    """`tanh(r)` and its derivative, which is not computed as `1 - tanh(r)^2`: for small A that has no exact digit."""
    decay = special.exp2((-2 * math.log2(math.e)) * jnp.abs(r))
    part = special.reciprocal(1 + decay)
    size = (1 - decay) * part
    return jnp.where(r < 0, -size, size), 4 * decay * part * part


@dataclass(frozen=True)
class Preconditioner:
    """B of Preconditioned DeltaNet's equation 9, or `B * x`; the parameter is the center.

    Attributes:
        bound: x, the end of the interval.
        eps: added to A under the logarithm.
        interval: `"symmetric"` is [1/x, x], `"amplify"` [1, x], `"dampen"` [1/x, 1].
        squash: `"rational"` is `r / (1 + |r|)`, or `"tanh"`.
        times_row: whether the result is `B * x`.
    """

    bound: float
    eps: float
    interval: str
    squash: str
    times_row: bool

    def _preconditioner(self, s, special):
        """B, and what the exponent's slope in s is."""
        offset, factor = {"symmetric": (0.0, -1.0), "amplify": (0.5, -0.5), "dampen": (-0.5, -0.5)}[self.interval]
        bits = math.log2(self.bound)
        exponent = bits * factor * s
        return special.exp2(exponent + bits * offset if offset else exponent), math.log(self.bound) * factor

    def __call__(self, before, after, x, parameter, special=TRITON):
        """B, times x if so asked."""
        r = special.log(after + self.eps) - parameter
        s = _tanh(r, special)[0] if self.squash == "tanh" else r * special.reciprocal(1 + jnp.abs(r))
        out, _ = self._preconditioner(s, special)
        return out * x if self.times_row else out

    def gradients(self, before, after, x, parameter, d_out, special=TRITON) -> RowGradients:
        """For the gradient `d_out` in the result."""
        shifted = after + self.eps
        r = special.log(shifted) - parameter
        if self.squash == "tanh":
            s, slope = _tanh(r, special)
            over_shifted, part = special.reciprocal(shifted), None
        else:
            # Special functions take most of the time, so one reciprocal serves both divisors. The slope is part^2, and
            # part^2 / shifted = part / (divisor * shifted).
            divisor = 1 + jnp.abs(r)
            both = special.reciprocal(divisor * shifted)
            part = both * shifted
            s, slope, over_shifted = r * part, part, both
        out, factor = self._preconditioner(s, special)
        d_x = d_out * out if self.times_row else None
        d = (factor * slope) * (d_x * x if self.times_row else d_out * out)
        return RowGradients(after=d * over_shifted, x=d_x, parameter=-d if part is None else -d * part)


@dataclass(frozen=True)
class PreconditionedQuery:
    """`x / (A + ridge)`, A after the token; the parameter is the ridge."""

    def __call__(self, before, after, x, parameter, special=TRITON):
        """The query."""
        return x * special.reciprocal(after + parameter)

    def gradients(self, before, after, x, parameter, d_out, special=TRITON) -> RowGradients:
        """For the gradient `d_out` in the result."""
        inverse = special.reciprocal(after + parameter)
        d_x = d_out * inverse
        d_sum = -d_x * x * inverse
        return RowGradients(after=d_sum, x=d_x, parameter=d_sum)


@dataclass(frozen=True)
class ShermanMorrisonKey:
    """`P x / (1 + x^T P x)`, `P = Diag(A + ridge)^-1` with A before the token; the parameter is the ridge."""

    def __call__(self, before, after, x, parameter, special=TRITON):
        """The write key."""
        key = x * special.reciprocal(before + parameter)
        return key / (1 + jnp.sum(x * key))

    def gradients(self, before, after, x, parameter, d_out, special=TRITON) -> RowGradients:
        """For the gradient `d_out` in the result."""
        inverse = special.reciprocal(before + parameter)
        key = x * inverse
        scale = 1 / (1 + jnp.sum(x * key))
        # out = scale * P x, d scale = -scale^2 d(x^T P x), and the product's gradient is 2 P x in x and x^2 in P.
        d_product = -scale * scale * jnp.sum(d_out * key)
        d_inverse = (scale * d_out + d_product * x) * x
        d_sum = -d_inverse * inverse * inverse
        return RowGradients(before=d_sum, x=(scale * d_out + 2 * d_product * x) * inverse, parameter=d_sum)

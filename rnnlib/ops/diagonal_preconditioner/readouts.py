"""Readouts: functions of the diagonal Gram, token by token. The Triton kernels have readouts of the same names.

A readout takes A before each token (zero where a segment starts), A after the token, one more array of the same shape,
and a number per head. All of them broadcast against each other, with channels last.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array

from rnnlib.ops.diagonal_preconditioner.squash import preconditioner_of


@dataclass(frozen=True)
class Gram:
    """A itself, after the token."""

    def __call__(self, before: Array, after: Array, x: Array, parameter: Array | None) -> Array:
        """A."""
        return after


@dataclass(frozen=True)
class Preconditioner:
    """B, the stable preconditioner, or `B * x`; the parameter is the center.

    Attributes:
        bound: as in `rnnlib.ops.diagonal_preconditioner`.
        eps: likewise.
        interval: likewise.
        squash: likewise.
        times_row: whether the result is `B * x`.
    """

    bound: float
    eps: float
    interval: str
    squash: str
    times_row: bool

    def __call__(self, before: Array, after: Array, x: Array, parameter: Array) -> Array:
        """B, or B times x if `times_row`."""
        out = preconditioner_of(after, parameter, self.bound, self.eps, self.interval, self.squash)
        return out * x if self.times_row else out


@dataclass(frozen=True)
class PreconditionedQuery:
    """`x / (A + ridge)`; the parameter is the ridge."""

    def __call__(self, before: Array, after: Array, x: Array, parameter: Array) -> Array:
        """The query."""
        return x / (after + parameter)


@dataclass(frozen=True)
class ShermanMorrisonKey:
    """`P x / (1 + x^T P x)`, `P = Diag(A + ridge)^-1` with A before the token; the parameter is the ridge."""

    def __call__(self, before: Array, after: Array, x: Array, parameter: Array) -> Array:
        """The write key."""
        preconditioned = x / (before + parameter)
        return preconditioned / (1 + jnp.sum(x * preconditioned, axis=-1, keepdims=True))

"""The arguments of the ridge solve, kept together, and its ridge."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from rnnlib.ops.ridge_solve.solvers import LinearSolver

# A Gram matrix with a Frobenius norm up to this floor counts as zero, and its solution is zero. Gradients grow like the
# inverse cube of the norm. The floor keeps them finite in float32.
NORM_FLOOR = 1e-10


class RidgeInputs(NamedTuple):
    """The arguments of `rnnlib.ops.ridge_solve`.

    Attributes:
        q: `[B, T, H, K]`.
        k: `[B, T, H, K]`.
        ridge: `[H, 1 or K]` or `[1, 1]`.
        log_decay: None or `[B, T, H]`.
    """

    q: Array
    k: Array
    ridge: Array
    log_decay: Array | None


class SolveOptions(NamedTuple):
    """The options of a solve, besides its arrays.

    Attributes:
        adaptive: whether the ridge is relative to `||H_t||_F`.
        iterations: of an iterative method.
        solver: method, derivative and precision.
    """

    adaptive: bool
    iterations: int
    solver: LinearSolver


def norm_from_square(square: Array) -> Array:
    """The Frobenius norm from its square: 0, with gradient 0, up to `NORM_FLOOR`."""
    is_positive = square > NORM_FLOOR**2
    return jnp.where(is_positive, jnp.sqrt(jnp.where(is_positive, square, 1)), 0)


def effective_ridge(ridge: Array, norm: Array, adaptive: bool) -> Array:
    """The number added to the diagonal: `ridge * norm` (Gated KalmaNet, section 4.1) or `ridge`; 1 where `H` is zero.

    Args:
        ridge: broadcasts against `norm`.
        norm: `[..., 1]`.
        adaptive: whether the ridge is relative to the norm.
    """
    return (
        jnp.where(norm > 0, ridge * norm, 1)
        if adaptive
        else jnp.broadcast_to(ridge, (*norm.shape[:-1], ridge.shape[-1]))
    )


def solvable(b: Array, norm: Array, adaptive: bool) -> Array:
    """The right-hand side, set to zero where the system is singular: `H = 0` and the ridge is adaptive."""
    return jnp.where(norm > 0, b, 0) if adaptive else b


def symmetric(gram: Array) -> Array:
    """The symmetric part of `gram` `[..., K, K]`, so that its gradient is symmetric too."""
    return (gram + jnp.swapaxes(gram, -1, -2)) / 2

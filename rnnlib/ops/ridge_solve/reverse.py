"""Chebyshev's iterations run backwards: an exact gradient from two stored iterates (Gated KalmaNet, appendix C.1)."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from rnnlib.ops.ridge_solve.solvers import Product, chebyshev_coefficients, next_weight


def weight_schedule(contraction: Array, iterations: int) -> Array:
    """Chebyshev's weights `omega_0 = 2, ..., omega_r`, `[r + 1, ..., 1]`.

    Args:
        contraction: `rho^2`, `[..., 1]`.
        iterations: r.
    """
    start = jnp.full_like(contraction, 2)

    def step(weight: Array, _: None) -> tuple[Array, Array]:
        following = next_weight(weight, contraction)
        return following, following

    return jnp.concatenate([start[None], jax.lax.scan(step, start, None, length=iterations)[1]])


class UndoneStep(NamedTuple):
    """The quantities recovered by undoing `xi_i = omega_i (xi_(i-1) - step r_(i-1)) - (omega_i - 1) xi_(i-2)`.

    Attributes:
        earlier: `xi_(i-2)`.
        descended: `xi_(i-1) - step r_(i-1)`.
        residual: `r_(i-1) = A xi_(i-1) - b`.
    """

    earlier: Array
    descended: Array
    residual: Array


def undo_step(matrix_product: Product, b: Array, step: Array, weight: Array, x: Array, before: Array) -> UndoneStep:
    """Recovers `xi_(i-2)` from the two iterates that follow it (equation 59, with `c_i q` subtracted).

    Args:
        matrix_product: `x -> A x`.
        b: right-hand sides `[..., K]`.
        step: `2 / (L + mu)`, `[..., 1]`.
        weight: `omega_i`, `[..., 1]`.
        x: `xi_i`.
        before: `xi_(i-1)`.
    """
    residual = matrix_product(before) - b
    descended = before - step * residual
    # The divisor is 0 only where H = 0, and there the first iterate is the solution.
    momentum = weight - 1
    earlier = jnp.where(momentum > 0, (weight * descended - x) / jnp.where(momentum > 0, momentum, 1), x)
    return UndoneStep(earlier, descended, residual)


def reverse_chebyshev(
    product: Product,
    outer_gradients: Callable[[Array, Array], Any],
    b: Array,
    ridge: Array,
    norm: Array,
    last_iterates: tuple[Array, Array],
    d_x: Array,
    iterations: int,
) -> tuple[Array, Any, Array, Array]:
    """The gradient of `iterate("chebyshev", ...)` with respect to all of its inputs.

    Algorithm 2 of Gated KalmaNet, with three changes. The term `c_i q` of equations 59 and 60 is subtracted, as
    equation 54 demands. The weights are computed forwards again, because the reversed schedule (equation 57) converges
    to the other fixed point and multiplies rounding errors by thousands in 30 iterations. The eigenvalue bounds, which
    depend on `ridge` and `norm`, are differentiated too.

    Args:
        product: `x -> H x`, symmetric.
        outer_gradients: from `left, right` to the gradients (a pytree) for `dL/dH = left right^T`; linear.
        b: right-hand sides `[..., K]`.
        ridge: `[..., 1 or K]`.
        norm: `[..., 1]`.
        last_iterates: `xi_r` and `xi_(r-1)`.
        d_x: gradient of `xi_r`.
        iterations: r, at least 1.

    Returns:
        Gradients of `b`, of `H` (as `outer_gradients` gives them), of the ridge, and of the norm.
    """
    coefficients, coefficients_vjp = jax.vjp(chebyshev_coefficients, ridge, norm)
    step, contraction = coefficients
    weights = weight_schedule(contraction, iterations)

    def matrix_product(x: Array) -> Array:
        return product(x) + ridge * x

    def inner(x: Array, y: Array) -> Array:
        return jnp.sum(x * y, axis=-1, keepdims=True)

    def reverse(carry: Any, pair: tuple[Array, Array]) -> tuple[Any, None]:
        """Undoes one iteration and passes its gradients on."""
        x, before, d_x, d_before, d_weight, totals = carry
        weight, previous_weight = pair
        d_b, d_gram, d_ridge, d_step, d_contraction = totals
        earlier, descended, residual = undo_step(matrix_product, b, step, weight, x, before)
        d_residual = -step * weight * d_x
        d_weight = d_weight + inner(d_x, descended - earlier)
        d_contraction = d_contraction + d_weight * weight**2 * previous_weight / 4
        d_gram = jax.tree.map(jnp.add, d_gram, outer_gradients(d_residual, before))
        totals = (
            d_b - d_residual,
            d_gram,
            d_ridge + d_residual * before,
            d_step - weight * inner(d_x, residual),
            d_contraction,
        )
        d_before, d_earlier = d_before + weight * d_x + matrix_product(d_residual), -(weight - 1) * d_x
        return (before, earlier, d_before, d_earlier, d_weight * weight**2 * contraction / 4, totals), None

    zeros = jnp.zeros_like(b)
    zero = jnp.zeros_like(norm)
    d_gram = jax.tree.map(jnp.zeros_like, jax.eval_shape(outer_gradients, zeros, zeros))
    x, before = last_iterates
    carry = (x, before, d_x, zeros, zero, (zeros, d_gram, zeros, zero, zero))
    carry, _ = jax.lax.scan(reverse, carry, (weights[1:], weights[:-1]), reverse=True)
    _, _, d_start, _, _, (d_b, d_gram, d_ridge, d_step, d_contraction) = carry
    # xi_0 = step b
    d_b = d_b + step * d_start
    d_step = d_step + inner(d_start, b)
    d_bounds_ridge, d_norm = coefficients_vjp(type(coefficients)(d_step, d_contraction))
    if ridge.shape[-1] == 1:
        d_ridge = jnp.sum(d_ridge, axis=-1, keepdims=True)
    return d_b, d_gram, d_ridge + d_bounds_ridge, d_norm

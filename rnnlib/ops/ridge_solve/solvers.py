"""Iterative solvers of `(H + Diag(ridge)) x = b` that use `H` only in products with vectors.

All work on arrays `[..., K]`: one system for each leading index. Bounds on the eigenvalues of `H + Diag(ridge)` are
`lower = min ridge` and `upper = ||H||_F + max ridge`, as Gated KalmaNet takes them (section 4.1).
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

METHODS = ("chebyshev", "conjugate_gradient", "gradient_descent", "nesterov", "exact")
DIFFERENTIATIONS = ("implicit", "unrolled", "reversed")

Product = Callable[[Array], Array]


@dataclasses.dataclass(frozen=True)
class LinearSolver:
    """How `rnnlib.ops.ridge_solve` solves and how it is differentiated.

    Attributes:
        method: `"chebyshev"`, `"conjugate_gradient"`, `"gradient_descent"`, `"nesterov"`, or `"exact"` (Cholesky).
        differentiation: `"implicit"` solves once more with the same method (Gated KalmaNet, table 1); `"unrolled"` is
            automatic differentiation through the iterations, which stores them all; `"reversed"` runs Chebyshev's
            iterations backwards and so stores two iterates (appendix C.1). `"unrolled"` and `"reversed"` give exact
            derivatives of the computed iterate, for comparison.
        product_dtype: the factors of every product `H x` are rounded to this dtype and the products accumulated in
            float32, as matrix units do. None leaves the factors in float32 (float64 for float64 inputs). Only the
            Triton kernels differ for None and bfloat16 inputs: with an adaptive ridge, which bounds the condition
            number, they multiply in bfloat16. With a constant ridge they split each factor into two bfloat16 parts;
            conjugate gradients take float16 in each chunk of 64 tokens whose condition numbers are at most 256, and end
            there before `iterations` where residuals bound the errors by 2^-12.
        epsilon: added to both divisors of conjugate gradients. Flash-linear-attention's MesaNet adds 1e-5. The
            iteration then stops at a residual of about the root of epsilon, 0.003.
    """

    method: str = "chebyshev"
    differentiation: str = "implicit"
    product_dtype: DTypeLike | None = None
    epsilon: float = 0.0

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"LinearSolver: method is {self.method!r}, expected one of {METHODS}")
        if self.differentiation not in DIFFERENTIATIONS:
            raise ValueError(
                f"LinearSolver: differentiation is {self.differentiation!r}, expected one of {DIFFERENTIATIONS}"
            )
        if self.differentiation == "reversed" and self.method != "chebyshev":
            raise ValueError(f"LinearSolver: only 'chebyshev' runs reversed, method is {self.method!r}")
        if self.epsilon < 0 or (self.epsilon > 0 and self.method != "conjugate_gradient"):
            raise ValueError(
                f"LinearSolver: epsilon is {self.epsilon}, expected 0, or above it for 'conjugate_gradient'"
            )

    def product(self, *factors: Array) -> Array:
        """The matrix product of `factors`, from left to right, each rounded as this solver says."""
        left = factors[0]
        for right in factors[1:]:
            if self.product_dtype is None:
                left = left @ right
            else:
                rounded = (x.astype(self.product_dtype) for x in (left, right))
                left = jnp.matmul(*rounded, preferred_element_type=left.dtype)
        return left


class Coefficients(NamedTuple):
    """Chebyshev's step and weights, which depend on the eigenvalue bounds alone.

    Attributes:
        step: `2 / (upper + lower)`, `[..., 1]`.
        contraction: `rho^2`, `rho = (upper - lower) / (upper + lower)`, `[..., 1]`.
    """

    step: Array
    contraction: Array


def eigenvalue_bounds(ridge: Array, norm: Array) -> tuple[Array, Array]:
    """Bounds on the eigenvalues of `H + Diag(ridge)`.

    Args:
        ridge: `[..., 1 or K]`, positive.
        norm: Frobenius norm of `H`, `[..., 1]`.

    Returns:
        Lower and upper bound, `[..., 1]`.
    """
    return jnp.min(ridge, axis=-1, keepdims=True), norm + jnp.max(ridge, axis=-1, keepdims=True)


def chebyshev_coefficients(ridge: Array, norm: Array) -> Coefficients:
    """Step and contraction from the eigenvalue bounds; arguments as `eigenvalue_bounds`."""
    lower, upper = eigenvalue_bounds(ridge, norm)
    return Coefficients(2 / (upper + lower), jnp.square((upper - lower) / (upper + lower)))


def next_weight(weight: Array, contraction: Array) -> Array:
    """Chebyshev's weight schedule, `omega_i = 4 / (4 - rho^2 omega_(i-1))` with `omega_0 = 2`.

    Gated KalmaNet, algorithm 1 (which prints `omega_0 = 0`; lemma 3 and the iteration's optimality need 2).
    """
    return 1 / (1 - contraction * weight / 4)


def limit_weight(contraction: Array) -> Array:
    """The fixed point that the weights fall to, `2 (1 - sqrt(1 - rho^2)) / rho^2` (Gated KalmaNet, lemma 3)."""
    return 2 / (1 + jnp.sqrt(1 - contraction))


class ChebyshevState(NamedTuple):
    """The carry of Chebyshev's iteration.

    Attributes:
        x: the iterate `xi_i`.
        increment: `xi_i - xi_(i-1)`.
        residual: `b - A xi_(i-1)`.
        weight: `omega_i`.
    """

    x: Array
    increment: Array
    residual: Array
    weight: Array

    @property
    def previous(self) -> Array:
        """The previous iterate, `xi_(i-1)`."""
        return self.x - self.increment


def _chebyshev(
    product: Product, b: Array, ridge: Array, norm: Array
) -> tuple[ChebyshevState, Callable[[ChebyshevState], ChebyshevState]]:
    """Gated KalmaNet's algorithm 1, by increments.

    The iterates are the paper's. The paper multiplies `H` with the iterate; here `H` multiplies the increment, and the
    carry has the residual. If products are rounded to bfloat16, their error is then relative to the increment, which
    shrinks, instead of the iterate. The worst residual is eight times smaller (experiments/solver_convergence).
    """
    coefficients = chebyshev_coefficients(ridge, norm)

    def iterate(state: ChebyshevState) -> ChebyshevState:
        residual = state.residual - (product(state.increment) + ridge * state.increment)
        weight = next_weight(state.weight, coefficients.contraction)
        increment = (weight - 1) * state.increment + coefficients.step * weight * residual
        return ChebyshevState(state.x + increment, increment, residual, weight)

    start = coefficients.step * b  # a gradient step from zero
    return ChebyshevState(start, start, b, jnp.full_like(coefficients.step, 2)), iterate


def _gradient_descent(product: Product, b: Array, ridge: Array, norm: Array) -> tuple[Any, Callable[[Any], Any]]:
    """Steps of `2 / (upper + lower)`, the best constant step, from the same start as Chebyshev's."""
    step = chebyshev_coefficients(ridge, norm).step
    return (step * b,), lambda carry: (carry[0] - step * (product(carry[0]) + ridge * carry[0] - b),)


def _nesterov(product: Product, b: Array, ridge: Array, norm: Array) -> tuple[Any, Callable[[Any], Any]]:
    """Accelerated gradient descent with the step and momentum that are best for quadratics.

    Lessard, Recht and Packard, 2016 (arXiv 1408.3595), proposition 1: step `4 / (3 upper + lower)`, momentum
    `(sqrt(3 kappa + 1) - 2) / (sqrt(3 kappa + 1) + 2)`, which contracts by `1 - 2 / sqrt(3 kappa + 1)` an iteration.
    """
    lower, upper = eigenvalue_bounds(ridge, norm)
    root = jnp.sqrt(3 * upper / lower + 1)
    step, momentum = 4 / (3 * upper + lower), (root - 2) / (root + 2)

    def iterate(carry: Any) -> Any:
        x, previous = carry
        ahead = x + momentum * (x - previous)
        return ahead - step * (product(ahead) + ridge * ahead - b), x

    start = chebyshev_coefficients(ridge, norm).step * b
    return (start, start), iterate


class ConjugateState(NamedTuple):
    """The carry of conjugate gradients: iterate, residual `b - A x`, direction, the residual's squared norm, `beta`."""

    x: Array
    residual: Array
    direction: Array
    square: Array
    ratio: Array


def _conjugate_gradient(
    product: Product, b: Array, ridge: Array, norm: Array, epsilon: float | Array = 0.0
) -> tuple[Any, Callable[[Any], Any]]:
    """Hestenes and Stiefel's iteration from zero; a system whose residual has vanished stays where it is."""
    square = jnp.sum(jnp.square(b), axis=-1, keepdims=True)
    # Below this floor the carried residual is rounding error, and quotients of it would have very large derivatives.
    floor = square * jnp.finfo(b.dtype).eps ** 2

    def iterate(state: ConjugateState) -> ConjugateState:
        is_live = state.square > floor

        def quotient(numerator: Array, denominator: Array) -> Array:
            return jnp.where(is_live, numerator / (jnp.where(is_live, denominator, 1) + epsilon), 0)

        image = product(state.direction) + ridge * state.direction
        length = quotient(state.square, jnp.sum(state.direction * image, axis=-1, keepdims=True))
        residual = state.residual - length * image
        square = jnp.sum(jnp.square(residual), axis=-1, keepdims=True)
        ratio = quotient(square, state.square)
        direction = jnp.where(is_live, residual + ratio * state.direction, state.direction)
        return ConjugateState(state.x + length * state.direction, residual, direction, square, ratio)

    return ConjugateState(jnp.zeros_like(b), b, b, square, jnp.zeros_like(square)), iterate


_ITERATIONS = {
    "chebyshev": _chebyshev,
    "gradient_descent": _gradient_descent,
    "nesterov": _nesterov,
}


def iteration(
    solver: LinearSolver, product: Product, b: Array, ridge: Array, norm: Array
) -> tuple[Any, Callable[[Any], Any]]:
    """An iterative method as its start and its step, for callers that look at every iterate.

    Args:
        solver: any method but `"exact"`.
        product: `x -> H x` on `[..., K]`.
        b: right-hand sides `[..., K]`.
        ridge: `[..., 1 or K]`, positive.
        norm: Frobenius norm of `H`, `[..., 1]`.

    Returns:
        The carry before the first iteration, whose first entry is the iterate, and the function that advances it.
    """
    if solver.method == "conjugate_gradient":
        return _conjugate_gradient(product, b, ridge, norm, solver.epsilon)
    return _ITERATIONS[solver.method](product, b, ridge, norm)


def iterate(solver: LinearSolver, product: Product, b: Array, ridge: Array, norm: Array, iterations: int) -> Any:
    """Runs `iterations` steps of a method; arguments as `iteration`.

    Conjugate gradients square the right-hand side, so they run in units of `b`'s size. Otherwise the square of a tiny
    right-hand side, such as a cotangent that decayed over many tokens, would underflow and divide by zero.

    Returns:
        The last carry: a tuple whose first entry is the solution `[..., K]`.
    """
    if solver.method != "conjugate_gradient":
        carry, step = iteration(solver, product, b, ridge, norm)
        return jax.lax.fori_loop(0, iterations, lambda _, carry: step(carry), carry)
    size = _size(b)
    epsilon = solver.epsilon / jnp.square(size) if solver.epsilon else 0.0
    carry, step = _conjugate_gradient(product, b / size, ridge, norm, epsilon)
    carry = jax.lax.fori_loop(0, iterations, lambda _, carry: step(carry), carry)
    return carry._replace(x=carry.x * size)


def _size(b: Array) -> Array:
    """A power of two about the largest magnitude of `b` `[..., K]`, `[..., 1]`: dividing by it is exact."""
    limits = jnp.finfo(b.dtype)
    most = jnp.max(jnp.abs(jax.lax.stop_gradient(b)), axis=-1, keepdims=True)
    most = jnp.where(most > 0, jnp.clip(most, limits.tiny, limits.max / 4), 1)
    return jnp.ldexp(jnp.ones_like(most), jnp.frexp(most)[1] - 1)


def cholesky_solve(gram: Array, b: Array, ridge: Array) -> Array:
    """Solves `(gram + Diag(ridge)) x = b` by Cholesky factorisation.

    Args:
        gram: `[..., K, K]`, symmetric and positive semidefinite.
        b: `[..., K]`.
        ridge: `[..., 1 or K]`, positive.
    """
    size = gram.shape[-1]
    matrix = gram + jnp.broadcast_to(ridge, b.shape)[..., None] * jnp.eye(size, dtype=gram.dtype)
    factor = jnp.linalg.cholesky(matrix)
    half = jax.lax.linalg.triangular_solve(factor, b[..., None], left_side=True, lower=True)
    return jax.lax.linalg.triangular_solve(factor, half, left_side=True, lower=True, transpose_a=True)[..., 0]

"""The ridge solve token by token: the reference implementation, which every other is tested against."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.common.vma import pvary_together
from rnnlib.ops.arguments import accumulation_dtype, resets_of
from rnnlib.ops.ridge_solve.inputs import (
    RidgeInputs,
    SolveOptions,
    effective_ridge,
    norm_from_square,
    solvable,
    symmetric,
)
from rnnlib.ops.ridge_solve.solvers import LinearSolver, cholesky_solve, iterate


def solve_gram(solver: LinearSolver, iterations: int, gram: Array, b: Array, ridge: Array, norm: Array) -> Array:
    """Solves `(gram + Diag(ridge)) x = b` for a Gram matrix in memory.

    Args:
        solver: method and precision.
        iterations: of an iterative method.
        gram: `[..., K, K]`.
        b: `[..., K]`.
        ridge: `[..., 1 or K]`, positive.
        norm: Frobenius norm of `gram`, `[..., 1]`.
    """
    if solver.method == "exact":
        return cholesky_solve(gram, b, ridge)

    def product(x: Array) -> Array:
        return solver.product(gram, x[..., None])[..., 0]

    return iterate(solver, product, b, ridge, norm, iterations)[0]


def _solve_implicit(solver: LinearSolver, iterations: int, gram: Array, b: Array, ridge: Array, norm: Array) -> Array:
    """`solve_gram`, differentiated as the exact solution is (Gated KalmaNet, equations 6 and 22).

    Tangents and gradients are solved for by the same method. The norm has none: it only bounds eigenvalues.
    """

    def matrix(x: Array) -> Array:
        return (gram @ x[..., None])[..., 0] + ridge * x

    def solve(_: Any, b: Array) -> Array:
        return solve_gram(solver, iterations, gram, b, ridge, norm)

    return jax.lax.custom_linear_solve(matrix, b, solve, symmetric=True)


@functools.partial(jax.jit, static_argnames=("options",), inline=True)
def ridge_solve_scan(
    inputs: RidgeInputs,
    initial_gram: Array | None,
    segment_ids: Array | None,
    *,
    options: SolveOptions,
) -> tuple[Array, Array]:
    """Evaluates the recurrence of `rnnlib.ops.ridge_solve` with `jax.lax.scan` over tokens, forming every `H_t`.

    Args:
        inputs: arguments by token, and the ridge.
        initial_gram: None (zero) or `[B, H, K, K]`.
        segment_ids: None or `[B, T]`.
        options: of the solve; differentiation `"reversed"` is not served.

    Returns:
        Solutions `[B, T, H, K]` in `q`'s dtype and the final Gram matrix `[B, H, K, K]` in float32 (float64 for float64
        inputs).
    """
    adaptive, iterations, solver = options
    dtype = accumulation_dtype(*inputs, initial_gram)
    batch, _, heads, size = inputs.q.shape

    def by_token(x: Array) -> Array:
        return jnp.moveaxis(x.astype(dtype), 1, 0)

    log_decays = None if inputs.log_decay is None else by_token(inputs.log_decay)
    resets = None if segment_ids is None else jnp.moveaxis(resets_of(segment_ids), 1, 0)
    ridge = inputs.ridge.astype(dtype)
    if initial_gram is None:
        gram = jnp.zeros((batch, heads, size, size), dtype)
    else:
        gram = symmetric(initial_gram.astype(dtype))
    solve = _solve_implicit if solver.differentiation == "implicit" else solve_gram

    def step(gram: Array, token: tuple[Array, Array, Array | None, Array | None]) -> tuple[Array, Array]:
        q, k, log_decay, start = token
        if start is not None:
            gram = jnp.where(start[:, None, None, None], 0.0, gram)
        if log_decay is not None:
            gram = jnp.exp(log_decay)[..., None, None] * gram
        gram = gram + k[..., :, None] * k[..., None, :]
        norm = norm_from_square(jnp.sum(jnp.square(gram), axis=(-1, -2)))[..., None]
        diagonal = effective_ridge(ridge, norm, adaptive)
        return gram, solve(solver, iterations, gram, solvable(q, norm, adaptive), diagonal, norm)

    tokens = (by_token(inputs.q), by_token(inputs.k), log_decays, resets)
    gram, tokens, ridge = pvary_together((gram, tokens, ridge))
    with jax.default_matmul_precision("highest"):
        gram, x = jax.lax.scan(step, gram, tokens)
    return jnp.moveaxis(x, 0, 1).astype(inputs.q.dtype), gram

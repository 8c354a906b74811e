"""The ridge solve: checks, choice of implementation, documentation."""

import functools
from collections.abc import Callable
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from rnnlib.fields import PositiveInteger, check_value
from rnnlib.ops.arguments import (
    accumulation_dtype,
    check_array,
    check_chunk_size,
    check_positive,
    check_rank,
    check_segment_ids,
    check_shape,
    choose_implementation,
    floating_arrays,
)
from rnnlib.ops.context_parallel import context_axis, current_axis, enter_gram, of_last
from rnnlib.ops.linear_attention import linear_attention
from rnnlib.ops.ridge_solve.inputs import RidgeInputs, SolveOptions
from rnnlib.ops.ridge_solve.pallas import ridge_solve_triton, ridge_unsupported_reason
from rnnlib.ops.ridge_solve.reference import ridge_solve_scan
from rnnlib.ops.ridge_solve.solvers import METHODS, LinearSolver
from rnnlib.ops.ridge_solve.xla_chunked import ridge_solve_chunked
from rnnlib.ops.sharding import split_over_mesh

_NAME = "ridge_solve"


@split_over_mesh
def ridge_solve(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    *,
    ridge: float | Float[Array, ""] | Float[Array, "H"] | Float[Array, "H K"] = 0.02,
    adaptive: bool = True,
    log_decay: Float[Array, "B T H"] | None = None,
    iterations: int = 30,
    solver: str | LinearSolver = "chebyshev",
    initial_gram: Float[Array, "B H K K"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    chunk_size: int = 64,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T H K"], Float[Array, "B H K K"]]:
    r"""Queries of a ridge regression over the past: `x_t = (H_t + Diag(lambda_t))^-1 q_t`.

    Per head, with the Gram matrix `H [K, K]` of the keys in float32:

        H_t = exp(log_decay_t) H_{t-1} + k_t k_t^T        lambda_t = ridge * ||H_t||_F  (adaptive)  or  ridge

    Reading linear attention's state with `x_t` instead of `q_t` predicts by the linear map that best fits all past
    keys to their values. Gated KalmaNet (equation CH and section 4.1) solves by Chebyshev's iteration with an adaptive
    ridge, which bounds the condition number by `1 + 1 / ridge`. MesaNet solves by conjugate gradients with a learned
    constant ridge.

    The gradient is the gradient of the exact solution, computed by a second solve with the same method (implicit
    differentiation; Gated KalmaNet, table 1). For the methods other than conjugate gradients, which apply a fixed
    polynomial of a symmetric matrix, the gradient of `q` is exact after any number of iterations (lemma 2); the errors
    of the other gradients fall with the iterations. `LinearSolver` has exact alternatives. `jax.jvp` of the solve
    itself goes through `LinearSolver(differentiation="unrolled")` alone.

    Args:
        q: queries.
        k: keys. The solve is meant for keys of about unit length.
        ridge: strength of the regularisation, positive: one number, one per head, or one per head and channel.
        adaptive: whether the ridge is relative to `||H_t||_F`. A Gram matrix of norm 1e-10 or less then counts as zero,
            and the solution there is zero.
        log_decay: natural logarithm of the decay, `<= 0` (-inf is a hard reset); None is no decay.
        iterations: of the solver, at least 1; `"exact"` has none.
        solver: `"chebyshev"`, `"conjugate_gradient"`, `"gradient_descent"`, `"nesterov"`, `"exact"` (Cholesky), or a
            `LinearSolver`, which also says how to differentiate and in which precision to multiply. All start from
            zero. All but conjugate gradients take one gradient step that does not count as an iteration.
        initial_gram: the Gram matrix before the first token, symmetric and positive semidefinite; None is zero. Its
            symmetric part is used.
        segment_ids: documents packed into a row: the Gram matrix restarts where the id changes. The first token
            continues `initial_gram`.
        chunk_size: tokens in a chunk (16, 32, 64, 128 or 256) of the `"chunked"` implementation; kernels take 64.
        implementation: `"scan"` (token by token, forming every `H_t`: the reference), `"chunked"` (XLA, any device;
            forms none), `"triton"` (Pallas kernels on NVIDIA GPUs; on a CPU they are interpreted, which serves tests),
            or None for the fastest that supports the case.

    Returns:
        Solutions in `q`'s dtype, and the final Gram matrix (of the last segment) in float32, or float64 for float64
        inputs.

    Raises:
        ValueError: a shape, `ridge`, `adaptive`, `iterations`, `solver`, `chunk_size` or `implementation` is none of
            those above.
        TypeError: an argument is no array or not floating, `ridge` is no number, `segment_ids` is not of integers, or
            `solver` is no solver.
        NotImplementedError: the implementation named does not support the case.
    """
    ridge = ridge.item() if isinstance(ridge, np.generic) else ridge
    if not isinstance(ridge, (int, float)):
        check_array(_NAME, "ridge", ridge, expected="a number or an array")
    array = None if isinstance(ridge, (int, float)) else ridge
    q, k, array, log_decay, initial_gram = floating_arrays(
        _NAME, q=q, k=k, ridge=array, log_decay=log_decay, initial_gram=initial_gram
    )
    check_rank(_NAME, "q", q, 4, axes="[B, T, H, K]")
    check_shape(_NAME, "k", k, q.shape, axes="the shape of q, [B, T, H, K]")
    batch, length, heads, key_size = q.shape
    if array is not None:
        check_shape(_NAME, "ridge", array, (), (heads,), (heads, key_size), axes="a number, [H] or [H, K]")
    else:
        check_positive(_NAME, "ridge", cast(float, ridge))
    if log_decay is not None:
        check_shape(_NAME, "log_decay", log_decay, (batch, length, heads), axes="[B, T, H]")
    if initial_gram is not None:
        gram_shape = (batch, heads, key_size, key_size)
        check_shape(_NAME, "initial_gram", initial_gram, gram_shape, axes="[B, H, K, K]")
    check_segment_ids(_NAME, segment_ids, batch, length)
    check_chunk_size(_NAME, chunk_size)
    check_value(_NAME, "iterations", iterations, PositiveInteger)
    check_value(_NAME, "adaptive", adaptive, bool)
    solver = _checked_solver(solver)

    strength = jnp.asarray(ridge, accumulation_dtype(q, k, log_decay, initial_gram)) if array is None else array
    by_channel = strength if strength.ndim == 2 else strength.reshape(-1, 1)
    inputs = RidgeInputs(q, k, by_channel, log_decay)
    options = SolveOptions(bool(adaptive), iterations, solver)
    implementations: dict[str, Callable[..., tuple[Array, Array]]] = {
        "scan": functools.partial(ridge_solve_scan, options=options),
        "chunked": functools.partial(ridge_solve_chunked, options=options, chunk_size=chunk_size),
        "triton": functools.partial(ridge_solve_triton, options=options, chunk_size=chunk_size),
    }
    is_reversed, is_exact = solver.differentiation == "reversed", solver.method == "exact"
    run = choose_implementation(
        _NAME,
        implementation,
        implementations,
        length,
        scan=lambda: "running backwards through the iterations" if is_reversed else None,
        chunked=lambda: "the exact solver, which factorises every Gram matrix" if is_exact else None,
        triton=lambda: ridge_unsupported_reason(inputs, options, chunk_size),
    )
    axis = current_axis()
    if axis is None:
        return run(inputs, initial_gram, segment_ids)
    with context_axis(None):  # The Gram matrix is linear attention's state, with keys for values.
        call: dict[str, Any] = {"segment_ids": segment_ids, "chunk_size": chunk_size, "implementation": implementation}
        own = linear_attention(k, k, k, log_decay=log_decay, **call)[1]
    gram = enter_gram(own, log_decay, initial_gram, segment_ids, axis)
    out, final = run(inputs, gram, segment_ids)
    return out, of_last(final, axis)


def _checked_solver(solver: str | LinearSolver) -> LinearSolver:
    """The solver that the argument means."""
    if isinstance(solver, LinearSolver):
        return solver
    if not isinstance(solver, str):
        raise TypeError(f"{_NAME}: solver is {solver!r}, expected one of {METHODS} or a LinearSolver")
    if solver not in METHODS:
        raise ValueError(f"{_NAME}: solver is {solver!r}, expected one of {METHODS} or a LinearSolver")
    return LinearSolver(solver)

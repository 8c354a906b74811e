"""Gradients of the Gram matrices at the chunks' ends, last chunk to first.

    dH_0 = exp(G_C) dH_C + sum_t from_start_t dH_t,    dH_t = -g_t x_t^T + weight_t H_t / 2

with `x` the solution and `g` the gradient of its right-hand side: the recurrences A and B of Gated KalmaNet, equations
7 to 10. `H_t` in the second consists of the chunk's starting matrix and keys, with weights that the solve left. All
gradients of matrices here are sums of the gradient and its transpose.
"""

import jax.numpy as jnp
from jax import Array

from pallas_kernels.triton.backend import call, dot_tn
from pallas_kernels.triton.decay import CHUNK
from pallas_kernels.triton.problem import Problem
from pallas_kernels.triton.ridge_iterate import Solved, chunk_number
from pallas_kernels.triton.ridge_problem import Method, RidgeInputs, RidgeSchedule, Rows, rows_of_chunk
from pallas_kernels.triton.ridge_products import Parts, load_parts, multiply, parts
from pallas_kernels.triton.ridge_states import increments_shape, of_chunk, scan_chunks


def _start_gradients_kernel(r, *, precision: str):
    """The sum over a chunk's tokens of `from_start_t dH_t` and its transpose."""
    minus = -r.d_q[...].astype(jnp.float32)
    left = parts(minus if r.from_start is None else minus * r.from_start[...][:, None], precision)
    x = parts(r.x[...], precision)
    gradient = multiply(dot_tn, left, x, precision)
    gradient = multiply(dot_tn, x, left, precision, gradient)
    if r.key_weight is not None:
        k = parts(r.k[...], precision)
        weighted = parts(k.value * r.key_weight[...][:, None], precision)
        gradient = multiply(dot_tn, weighted, k, precision, gradient)
        gradient = gradient + r.start_weight[...] * load_parts(r.high, r.low).value
    r.increment[...] = gradient.astype(r.increment.dtype)


def state_gradients(
    problem: Problem,
    method: Method,
    inputs: RidgeInputs,
    rows: Rows,
    states: Parts,
    x: Array,
    solved: Solved,
    d_final: Array | None,
    schedule: RidgeSchedule,
) -> tuple[Parts, Array | None, Array | None]:
    """Gradients of the Gram matrix after each chunk, and of the initial one.

    Args:
        problem: static facts.
        method: of the solve.
        inputs: keys, and whether there is an initial Gram matrix.
        rows: decays.
        states: Gram matrices at the chunks' starts.
        x: solutions `[B, T, H, K]`.
        solved: what the solve with the solutions' gradient found.
        d_final: `[B, H, K, K]`, the gradient of the final Gram matrix and its transpose together; None for zero.
        schedule: compilation.

    Returns:
        `[B, H, N, K, K]`, gradient and transpose together; `[B, H, K, K]` float32 or None; and, where there is decay,
        the products of the first with the chunks' starting matrices, summed over rows, `[B, H, N, K]` float32.
    """
    p = problem

    def token(array):
        return p.of_token(array, CHUNK, lambda h, n, b: (b, n, h, 0))

    has_weights = solved.weight is not None
    increments = call(
        _start_gradients_kernel,
        "ridge_start_gradients",
        p.chunk_grid,
        {
            "d_q": token(solved.x),
            "x": token(x),
            "k": token(inputs.k if has_weights else None),
            "high": of_chunk(p, states.high if has_weights else None),
            "low": of_chunk(p, states.low if has_weights else None),
            "key_weight": p.of_head(solved.key_weight, (CHUNK,), lambda h, n, b: (b, h, n)),
            "start_weight": chunk_number(solved.start_weight),
            **rows_of_chunk(p, rows, ("from_start",)),
        },
        {"increment": of_chunk(p, increments_shape(p, method))},
        schedule.start_gradients,
        precision=method.precision,
    )["increment"]
    assert increments is not None
    has_decay = inputs.log_decay is not None
    return scan_chunks(
        p,
        method,
        rows,
        increments,
        d_final,
        schedule.reverse_scan,
        reverse=True,
        with_end=inputs.initial_gram is not None,
        other=states if has_decay else None,
        with_products=has_decay,
        factor=0.5,
    )

"""Gradients of the Gram matrices at the chunks' ends, last chunk to first, in segments that run side by side.

    dH_0 = exp(G_C) dH_C + sum_t from_start_t dH_t,    dH_t = -g_t x_t^T + weight_t H_t / 2

with `x` the solution and `g` the gradient of its right-hand side: the recurrences A and B of Gated KalmaNet, equations
7 to 10. `H_t` in the second consists of the chunk's starting matrix and keys, with weights that the solve left. All
gradients of matrices here are sums of the gradient and its transpose.
"""

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.triton.backend import Launch, Operand, call, dot_tn
from pallas_kernels.triton.decay import CHUNK
from pallas_kernels.triton.problem import Problem
from pallas_kernels.triton.ridge_iterate import Solved
from pallas_kernels.triton.ridge_problem import Method, RidgeInputs, RidgeSchedule, Rows, rows_of_sequence
from pallas_kernels.triton.ridge_products import Parts, multiply, parts
from pallas_kernels.triton.ridge_states import (
    fold_segments,
    kept_of_segments,
    segment_sum_operand,
    state_operands,
    store_state,
    sum_operands,
)
from pallas_kernels.triton.state import loop, segment_range, sequence_grid


def _scaled(x: Array, factor: Array | None, precision: str) -> Parts:
    return parts(x if factor is None else x.astype(jnp.float32) * factor[:, None], precision)


def _start_gradient(r, n, method: Method) -> Array:
    """What chunk `n`'s tokens add to the gradient of its starting matrix, a block of columns `[K, block]`."""
    rows, precision = pl.ds(n * CHUNK, CHUNK), method.precision
    minus = -r.from_start[rows] if r.from_start is not None else jnp.full((CHUNK,), -1.0, jnp.float32)
    left, left_block = (_scaled(ref[rows, :], minus, precision) for ref in (r.d_q, r.d_q_block))
    gradient = multiply(dot_tn, left, parts(r.x_block[rows, :], precision), precision)
    gradient = multiply(dot_tn, parts(r.x[rows, :], precision), left_block, precision, gradient)
    if r.key_weight is not None:
        weighted = _scaled(r.k[rows, :], r.key_weight[rows], precision)
        gradient = multiply(dot_tn, weighted, parts(r.k_block[rows, :], precision), precision, gradient)
        start = r.start_high[n, :, :].astype(jnp.float32)
        if r.start_low is not None:
            start = start + r.start_low[n, :, :].astype(jnp.float32)
        gradient = gradient + r.start_weight[n] * start
    return gradient


def _reverse_kernel(r, *, problem: Problem, method: Method, block: int):
    segment = lax.rem(pl.program_id(2), problem.segments)
    first, count = segment_range(problem, segment)
    is_sum = r.segment_sum is not None
    state = jnp.zeros((problem.key_size, block), jnp.float32)
    if not is_sum:
        if r.d_final is not None:
            state = r.d_final[...].astype(jnp.float32)
        if r.sums is not None:
            last = problem.segments - 1
            state = fold_segments(r, last - segment, lambda m: last - m, state)

    def body(m, state):
        n = first + count - 1 - m
        if not is_sum:
            store_state(r, n, state)
        keep = 1.0 if r.kept is None else r.kept[n]
        return keep * state + _start_gradient(r, n, method)

    state = loop(count, body, state)
    if is_sum:
        r.segment_sum[...] = state
    elif r.d_initial is not None:

        @pl.when(segment == 0)
        def _():
            r.d_initial[...] = 0.5 * state


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
) -> tuple[Parts, Array | None]:
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
        `[B, H, N, K, K]`, gradient and transpose together, and `[B, H, K, K]` float32 or None.
    """
    p = problem
    block = min(schedule.reverse.block, p.key_size)
    grid, at = sequence_grid(p, p.key_size, block)

    def token(array):
        return p.of_token(array, p.length, lambda *g: (*at(*g)[:3], 0))

    def column(array):
        return p.of_token(array, p.length, at, block)

    def of_state(array):
        return p.of_head(array, (p.chunks, p.key_size, block), lambda *g: (at(*g)[0], at(*g)[2], 0, 0, at(*g)[3]))

    def of_row(array):
        return None if array is None else p.of_head(array, array.shape[2:], lambda *g: (at(*g)[0], at(*g)[2], 0))

    def of_boundary(array):
        return p.of_head(array, (p.key_size, block), lambda *g: (at(*g)[0], at(*g)[2], 0, at(*g)[3]))

    has_weights = solved.weight is not None
    keys = inputs.k if has_weights else None
    sources = {
        "d_q": token(solved.x),
        "d_q_block": column(solved.x),
        "x": token(x),
        "x_block": column(x),
        "k": token(keys),
        "k_block": column(keys),
        "start_high": of_state(states.high) if has_weights else None,
        "start_low": of_state(states.low) if has_weights else None,
        "key_weight": of_row(solved.key_weight),
        "start_weight": of_row(solved.start_weight),
        **rows_of_sequence(p, rows, at),
    }

    def run(name: str, launch: Launch, sums: Array | None, only_sums: bool):
        outputs: dict[str, Operand | None] = dict.fromkeys(("segment_sum", "high", "low", "d_initial"))
        if only_sums:
            outputs["segment_sum"] = segment_sum_operand(p, block)
        else:
            outputs |= state_operands(p, method, at, block)
            if inputs.initial_gram is not None:
                outputs["d_initial"] = of_boundary(p.per_head(p.key_size, p.key_size, dtype=jnp.float32))
        kept = kept_of_segments(p, rows) if sums is not None else None
        return call(
            _reverse_kernel,
            name,
            grid,
            {
                **sources,
                **sum_operands(p, sums, kept, at, block),
                "d_final": None if only_sums else of_boundary(d_final),
            },
            outputs,
            launch,
            problem=p,
            method=method,
            block=block,
        )

    sums = run("ridge_reverse_sums", schedule.reverse, None, True)["segment_sum"] if p.segments > 1 else None
    results = run("ridge_reverse", schedule.reverse, sums, False)
    return Parts(results["high"], results["low"]), results["d_initial"]  # type: ignore[arg-type]

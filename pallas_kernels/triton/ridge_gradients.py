"""Gradients of keys and log decay, one program for each chunk of each head.

A key takes part in the Gram matrices of the chunk's later tokens, in their norms, and in the state after the chunk. A
decay is a factor `exp` of a sum over an interval of tokens, all of which get its gradient: for each token, the sum over
what crosses it, formed as a sum and never as a difference, so that nothing cancels.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array

from pallas_kernels.triton.backend import call, dot, dot_nt, dot_tn, iota
from pallas_kernels.triton.decay import CHUNK, MIN_LOG_DECAY
from pallas_kernels.triton.problem import Problem
from pallas_kernels.triton.ridge_iterate import Solved, pair_decays, total
from pallas_kernels.triton.ridge_problem import Method, RidgeInputs, RidgeSchedule, Rows, loaded_decay, rows_of_chunk
from pallas_kernels.triton.ridge_products import Parts, load_parts, multiply, parts


def _gradients_kernel(r, *, method: Method):
    precision = method.precision

    def product(kind, a: Parts, b: Parts, onto: Any = None) -> Any:
        return multiply(kind, a, b, precision, onto)

    def factor(x: Array) -> Parts:
        return parts(x, precision)

    keys, x = factor(r.k[...]), factor(r.x[...])
    left = factor(-r.d_q[...].astype(jnp.float32))
    start = load_parts(r.high, r.low)
    decay = loaded_decay(r)
    pairs = pair_decays(decay)

    left_keys, right_keys = product(dot_nt, left, keys), product(dot_nt, x, keys)
    d_k = product(dot_tn, factor(pairs * right_keys), left)
    d_k = product(dot_tn, factor(pairs * left_keys), x, d_k)
    d_pairs = left_keys * right_keys
    has_decay = r.d_log_decay is not None
    d_from_start: Any = jnp.sum(product(dot, left, start) * x.value, axis=1) if has_decay else None

    if r.weight is not None:
        weight = r.weight[...]
        products = product(dot_nt, keys, keys)
        keys_state = product(dot, keys, start)
        mask = product(dot_tn, factor(pairs), factor(weight[:, None] * pairs))
        d_k = d_k + r.key_weight[...][:, None] * keys_state
        d_k = product(dot, factor(products * mask), keys, d_k)
        if has_decay:
            forms = jnp.sum(keys_state * keys.value, axis=1)
            from_start = r.from_start[...]
            keys_in_gram = from_start[:, None] * forms[None, :]
            keys_in_gram = product(dot, factor(pairs), factor(products * products), keys_in_gram)
            d_pairs = d_pairs + 0.5 * weight[:, None] * keys_in_gram
            start_in_gram = from_start * total(start.value * start.value) + jnp.sum(pairs * forms[None, :], axis=1)
            d_from_start = d_from_start + 0.5 * weight * start_in_gram

    d_end = load_parts(r.d_end_high, r.d_end_low)
    d_written = product(dot, keys, d_end)
    to_end: Any = None if r.to_end is None else r.to_end[...]
    d_k = d_k + (d_written if to_end is None else to_end[:, None] * d_written)
    r.d_k[...] = d_k.astype(r.d_k.dtype)
    if has_decay:
        from_start = r.from_start[...]
        d_kept = 0.5 * total(d_end.value * start.value)
        d_to_end = 0.5 * jnp.sum(d_written * keys.value, axis=1)
        is_last = iota((CHUNK,), 0) == CHUNK - 1
        r.d_log_decay[...] = _over_intervals(
            r, d_pairs * pairs, from_start * (d_from_start + jnp.where(is_last, d_kept, 0.0)), to_end * d_to_end
        )


def _over_intervals(r, pairs: Array, from_start: Array, to_end: Array) -> Array:
    """Adds up gradients of the exponents of intervals at each token inside them, `[C]`.

    Args:
        r: the kernel's references.
        pairs: of the intervals from s, left out, to t, `[C (t), C (s)]`.
        from_start: of the intervals from the chunk's start to t, `[C]`.
        to_end: of the intervals from s, left out, to the chunk's end, `[C]`.
    """
    i, j = iota((CHUNK, CHUNK), 0), iota((CHUNK, CHUNK), 1)
    begun = dot(pairs, jnp.where(i < j, 1.0, 0.0), precise=True)  # [t, r]: sum over s < r
    crossing = jnp.sum(jnp.where(i >= j, begun + from_start[:, None], 0.0), axis=0)
    gradient = crossing + jnp.sum(jnp.where(i < j, to_end[:, None], 0.0), axis=0)
    is_flat = r.log_decay[...] <= MIN_LOG_DECAY
    if r.starts is not None:
        is_flat = is_flat | (r.starts[...] > 0)
    return jnp.where(is_flat, 0.0, gradient)


def argument_gradients(
    problem: Problem,
    method: Method,
    inputs: RidgeInputs,
    rows: Rows,
    states: Parts,
    d_ends: Parts,
    x: Array,
    solved: Solved,
    schedule: RidgeSchedule,
) -> tuple[Array, Array | None]:
    """Gradients of `k` `[B, T, H, K]` and of `log_decay` `[B, T, H]` (None if there is none).

    Args:
        problem: static facts.
        method: of the solve.
        inputs: arguments but for `q`.
        rows: decays.
        states: Gram matrices at the chunks' starts.
        d_ends: gradients of those at the chunks' ends.
        x: solutions.
        solved: what the solve with their gradient found.
        schedule: compilation.
    """
    p = problem

    def at(h, n, b):
        return b, n, h, 0

    def token(array):
        return p.of_token(array, CHUNK, at)

    def of_state(array):
        return p.of_head(array, (None, p.key_size, p.key_size), lambda h, n, b: (b, h, n, 0, 0))

    def of_row(array):
        return p.of_head(array, (CHUNK,), lambda h, n, b: (b, h, n))

    log_decay = token(inputs.log_decay)
    results = call(
        _gradients_kernel,
        "ridge_gradients",
        p.chunk_grid,
        {
            "k": token(inputs.k),
            "x": token(x),
            "d_q": token(solved.x),
            "high": of_state(states.high),
            "low": of_state(states.low),
            "d_end_high": of_state(d_ends.high),
            "d_end_low": of_state(d_ends.low),
            "weight": of_row(solved.weight),
            "key_weight": of_row(solved.key_weight),
            "log_decay": log_decay,
            "starts": p.of_position(inputs.starts, at),
            **rows_of_chunk(p, rows, ("total", "fine", "runs", "from_start", "to_end")),
        },
        {"d_k": token(inputs.k), "d_log_decay": log_decay},
        schedule.gradients,
        method=method,
    )
    return results["d_k"], results["d_log_decay"]  # type: ignore[return-value]

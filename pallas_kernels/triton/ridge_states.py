"""Gram matrices at the chunks' starts, in segments of the sequence that run side by side.

    H_C = exp(G_C) H_0 + K_tail^T K,  K_tail_r = exp(G_C - G_r) k_r

The decay is a number a token, so a segment's map needs no matrix: what it adds to the state is found for all segments
at once, and each segment then starts from the decayed sum of those before it. `ridge_reverse` does the same backwards.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.triton.backend import Launch, Operand, call, dot_tn
from pallas_kernels.triton.decay import CHUNK
from pallas_kernels.triton.problem import Problem
from pallas_kernels.triton.ridge_problem import Method, RidgeInputs, RidgeSchedule, Rows, rows_of_sequence, split
from pallas_kernels.triton.ridge_products import Parts, multiply, parts
from pallas_kernels.triton.state import loop, segment_range, sequence_grid


def store_state(r, n, state: Array) -> None:
    """Stores `state` as chunk `n`'s, in two parts where there are references for two."""
    if r.low is None:
        r.high[n, :, :] = state.astype(r.high.dtype)
    else:
        r.high[n, :, :], r.low[n, :, :] = split(state)


def _tail_update(r, rows, precision: str) -> Array:
    k = parts(r.k[rows, :], precision)
    tail = k if r.to_end is None else parts(k.value * r.to_end[rows][:, None], precision)
    return multiply(dot_tn, tail, parts(r.k_block[rows, :], precision), precision)


def fold_segments(r, count, segment_at: Callable, state: Any) -> Array:
    """The state after `count` segments, `segment_at(0)` first, from their sums and the state before them."""

    def body(m, state):
        p = segment_at(m)
        keep = 1.0 if r.kept_of_segments is None else r.kept_of_segments[p]
        return keep * state + r.sums[p, :, :]

    return loop(count, body, state)


def _states_kernel(r, *, problem: Problem, precision: str, block: int):
    segment = lax.rem(pl.program_id(2), problem.segments)
    first, count = segment_range(problem, segment)
    state = jnp.zeros((problem.key_size, block), jnp.float32)
    is_sum = r.segment_sum is not None
    if not is_sum:
        if r.initial is not None:
            state = r.initial[...].astype(jnp.float32)
        if r.sums is not None:
            state = fold_segments(r, segment, lambda m: m, state)

    def body(m, state):
        n = first + m
        if not is_sum:
            store_state(r, n, state)
        keep = 1.0 if r.kept is None else r.kept[n]
        return keep * state + _tail_update(r, pl.ds(n * CHUNK, CHUNK), precision)

    state = loop(count, body, state)
    if is_sum:
        r.segment_sum[...] = state
    else:

        @pl.when(segment == problem.segments - 1)
        def _():
            r.final[...] = state


def kept_of_segments(problem: Problem, rows: Rows) -> Array | None:
    """Decay over each segment, `[B, H, P]`; None without decay."""
    if rows.kept is None:
        return None
    p = problem
    missing = p.segments * p.chunks_per_segment - p.chunks
    kept = jnp.pad(rows.kept, ((0, 0), (0, 0), (0, missing)), constant_values=1.0)
    return jnp.prod(kept.reshape(p.batch, p.value_heads, p.segments, p.chunks_per_segment), axis=-1)


def sum_operands(problem: Problem, sums: Array | None, kept: Array | None, at, block: int) -> dict[str, Operand | None]:
    """What `fold_segments` reads."""
    p = problem
    return {
        "sums": p.of_head(sums, (p.segments, p.key_size, block), lambda *g: (at(*g)[0], at(*g)[2], 0, 0, at(*g)[3])),
        "kept_of_segments": p.of_head(
            kept if sums is not None else None, (p.segments,), lambda *g: (at(*g)[0], at(*g)[2], 0)
        ),
    }


def segment_sum_operand(problem: Problem, block: int) -> Operand | None:
    """Where a pass that only sums leaves `[B, H, P, K, K]` float32."""
    p = problem
    shape = p.per_head(p.segments, p.key_size, p.key_size, dtype=jnp.float32)

    def place(c, h, z):
        return lax.div(z, p.segments), h, lax.rem(z, p.segments), 0, c

    return p.of_head(shape, (None, p.key_size, block), place)


def state_operands(problem: Problem, method: Method, at, block: int) -> dict[str, Operand | None]:
    """Where a pass leaves a matrix for each chunk, `[B, H, N, K, K]`."""
    p = problem
    shape = p.per_head(p.chunks, p.key_size, p.key_size, dtype=method.state_dtype)
    operand = p.of_head(shape, (p.chunks, p.key_size, block), lambda *g: (at(*g)[0], at(*g)[2], 0, 0, at(*g)[3]))
    return {"high": operand, "low": operand if method.parts == 2 else None}


def gram_states(
    problem: Problem, method: Method, inputs: RidgeInputs, rows: Rows, schedule: RidgeSchedule
) -> tuple[Parts, Array]:
    """Gram matrices before each chunk `[B, H, N, K, K]`, and after the last `[B, H, K, K]` float32."""
    p = problem

    def run(name: str, launch: Launch, sums: Array | None, only_sums: bool):
        block = min(launch.block, p.key_size)
        grid, at = sequence_grid(p, p.key_size, block)
        boundary = p.per_head(p.key_size, p.key_size, dtype=jnp.float32)

        def of_boundary(array):
            return p.of_head(array, (p.key_size, block), lambda *g: (at(*g)[0], at(*g)[2], 0, at(*g)[3]))

        keys = {
            "k": p.of_token(inputs.k, p.length, lambda *g: (*at(*g)[:3], 0)),
            "k_block": p.of_token(inputs.k, p.length, at, block),
        }
        kept = kept_of_segments(p, rows) if sums is not None else None
        outputs: dict[str, Operand | None] = {"segment_sum": None, "high": None, "low": None, "final": None}
        if only_sums:
            outputs["segment_sum"] = segment_sum_operand(p, block)
        else:
            outputs |= {**state_operands(p, method, at, block), "final": of_boundary(boundary)}
        return call(
            _states_kernel,
            name,
            grid,
            {
                **keys,
                **rows_of_sequence(p, rows, at),
                **sum_operands(p, sums, kept, at, block),
                "initial": None if only_sums else of_boundary(inputs.initial_gram),
            },
            outputs,
            launch,
            problem=p,
            precision=method.precision,
            block=block,
        )

    sums = run("ridge_segment_sums", schedule.sums, None, True)["segment_sum"] if p.segments > 1 else None
    results = run("ridge_states", schedule.states, sums, False)
    return Parts(results["high"], results["low"]), results["final"]  # type: ignore[arg-type, return-value]

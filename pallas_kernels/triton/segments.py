"""Parts of one sequence that run side by side.

What a segment does to the state is an affine map, `S -> M S + N`. `segment_maps` finds M and N of all segments at once,
`fold_segments` applies them in order, which gives the state at each segment's start; the output pass starts there. The
gradient goes back through a segment by `dS -> M^T dS + N'`, with the same M. Nothing is approximated or cut off.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.triton.backend import Launch, call, dot, dot_nt, iota
from pallas_kernels.triton.prepare import Prepared
from pallas_kernels.triton.problem import Inputs, Problem
from pallas_kernels.triton.state import chunk_step, loop, pass_operands, segment_range, sequence_grid


class SegmentMaps(NamedTuple):
    """Affine maps of the segments, transposed. P is the number of segments.

    Attributes:
        offset: N, `[B, HV, P, V, K]` float32.
        transition: M in the dtype of matrix operands, `[B, HV, P, K, K]`.
        transition_rest: what rounding to that dtype left of M; None for float32.
    """

    offset: Array
    transition: Array
    transition_rest: Array | None


def _maps_kernel(r, *, problem: Problem, block: int):
    first, count = segment_range(problem, lax.rem(pl.program_id(2), problem.segments))
    column = pl.program_id(0) - problem.value_size // block
    is_value = column < 0  # else a block of columns of M: what becomes of unit states, nothing being written
    shape = (block, problem.key_size)
    is_unit = (iota(shape, 0) + column * block == iota(shape, 1)) & jnp.logical_not(is_value)

    def body(m, state):
        return chunk_step(r, first + m, state, problem, is_value)[1]

    state = loop(count, body, jnp.where(is_unit, 1.0, 0.0))

    @pl.when(is_value)
    def _():
        r.offset[...] = state

    @pl.when(jnp.logical_not(is_value))
    def _():
        high = state.astype(r.transition.dtype)
        r.transition[...] = high
        if r.transition_rest is not None:
            r.transition_rest[...] = (state - high.astype(jnp.float32)).astype(r.transition_rest.dtype)


def _fold_kernel(r, *, problem: Problem, block: int, reverse: bool):
    state = jnp.zeros((block, problem.key_size), jnp.float32)
    if r.boundary is not None:
        state = r.boundary[...].astype(jnp.float32).T
    product = dot_nt if reverse else dot  # M is stored transposed; gradients go back through M itself

    def body(m, state):
        p = problem.segments - 1 - m if reverse else m
        r.folded[p, :, :] = state
        transition, offset = r.transition[p, :, :], r.offset[p, :, :]
        high = state.astype(transition.dtype)
        after = product(high, transition) + offset
        if r.transition_rest is not None:  # M and S in two parts each, all but the smallest product
            rest = (state - high.astype(jnp.float32)).astype(high.dtype)
            after = after + product(rest, transition) + product(high, r.transition_rest[p, :, :])
        return after

    loop(problem.segments, body, state)


def segment_maps(problem: Problem, inputs: Inputs, prepared: Prepared, launch: Launch) -> SegmentMaps:
    """M and N of each segment."""
    p = problem
    block = min(launch.block, p.value_size, p.key_size)
    value_blocks = p.value_size // block
    grid, at = sequence_grid(p, p.value_size + p.key_size, block)

    def at_value(c, h, z):  # programs that own columns of M read some values and drop them
        b, t, h, c = at(c, h, z)
        return b, t, h, lax.rem(c, value_blocks)

    def place(column):
        return lambda c, h, z: (lax.div(z, p.segments), h, lax.rem(z, p.segments), column(c), 0)

    offset = p.per_head(p.segments, p.value_size, p.key_size, dtype=jnp.float32)
    transition = p.per_head(p.segments, p.key_size, p.key_size)
    of_transition = p.of_head(transition, (None, block, p.key_size), place(lambda c: lax.max(c - value_blocks, 0)))
    results = call(
        _maps_kernel,
        "delta_segment_maps",
        grid,
        pass_operands(p, inputs, prepared, at_value, block, with_reads=False),
        {
            "offset": p.of_head(offset, (None, block, p.key_size), place(lambda c: lax.min(c, value_blocks - 1))),
            "transition": of_transition,
            "transition_rest": None if p.dtype == jnp.float32 else of_transition,
        },
        launch,
        problem=p,
        block=block,
    )
    return SegmentMaps(**results)  # type: ignore[arg-type]


def fold_segments(
    problem: Problem, maps: SegmentMaps, boundary: Array | None, launch: Launch, reverse: bool = False
) -> Array:
    """The state at each segment's start or, in `reverse`, its gradient at each segment's end.

    Args:
        problem: static facts.
        maps: of the segments; in `reverse` the offset is that of the gradient.
        boundary: `[B, HV, K, V]`, the state before the sequence or the gradient after it; None for zero.
        launch: compilation.
        reverse: from the last segment to the first.

    Returns:
        `[B, HV, P, V, K]` float32.
    """
    p = problem
    block = min(launch.block, p.value_size)

    def of_transition(x):
        return p.of_head(x, (p.segments, p.key_size, p.key_size), lambda c, h, b: (b, h, 0, 0, 0))

    def of_state(x):
        return p.of_head(x, (p.segments, block, p.key_size), lambda c, h, b: (b, h, 0, c, 0))

    result = call(
        _fold_kernel,
        "delta_fold_segments",
        (p.value_size // block, p.value_heads, p.batch),
        {
            "transition": of_transition(maps.transition),
            "transition_rest": of_transition(maps.transition_rest),
            "offset": of_state(maps.offset),
            "boundary": p.of_head(boundary, (p.key_size, block), lambda c, h, b: (b, h, 0, c)),
        },
        {"folded": of_state(p.per_head(p.segments, p.value_size, p.key_size, dtype=jnp.float32))},
        launch,
        problem=p,
        block=block,
        reverse=reverse,
    )
    return result["folded"]  # type: ignore[return-value]

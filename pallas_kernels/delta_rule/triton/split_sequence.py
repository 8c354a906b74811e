"""Parts of one sequence that run side by side.

A split maps the state before it to the state after it by an affine map, `S -> M S + N`. `split_transitions` computes
M and N of all splits side by side. `combine_splits` applies them in order, which gives the state at each split's start,
where the output pass begins. The gradient goes back through a split by `dS -> M^T dS + N'`, with the same M.
`compose_splits` gives the map of all splits together, which devices exchange where they share a row (`row_shards`).

One thing is dropped: where less than 1e-15 of a state survives a split, it counts as zero. M is not computed for such
a split. Where a state survives only a few splits, the states at all splits are found side by side.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.common.config import KernelConfig
from pallas_kernels.common.decay import FORGOTTEN
from pallas_kernels.common.kernel_shape import cdiv, next_power_of_two, split_range
from pallas_kernels.common.triton.backend import call, dot, dot_nt, iota, load_rows
from pallas_kernels.common.triton.chunks import loop, sequence_grid
from pallas_kernels.common.triton.kernel_shape import KernelShape
from pallas_kernels.delta_rule.inputs import Inputs
from pallas_kernels.delta_rule.triton.fwd import chunk_step, pass_operands
from pallas_kernels.delta_rule.triton.wy import WYFactors


class SplitTransitions(NamedTuple):
    """Affine maps of the splits, transposed. P is the number of splits.

    Attributes:
        offset: N, `[B, HV, P, V, K]` float32.
        transition: M in the dtype of matrix operands, `[B, HV, P, K, K]`; for linear attention, which erases nothing,
            its diagonal alone, `[B, HV, P, K]` float32.
        transition_rest: what rounding to that dtype left of M; None for float32.
        survival: log of the most that a split leaves of a state, `[B, HV, P]` float32; None without decay.
    """

    offset: Array
    transition: Array
    transition_rest: Array | None
    survival: Array | None


# With more splits than this to go through, one program for all of them takes less time than one for each.
_SHORT_REACH = 4


def _survival(r, kernel_shape: KernelShape, first, count) -> Array:
    """Log of what chunks `first` to `first + count` leave of a state: of its slowest channel's decay, and of writes."""
    size = min(next_power_of_two(kernel_shape.chunks_per_split), 32)  # chunks at a time

    def part(m):
        start = first + m * size
        kept = load_rows(r.kept, start, size, first + count, 1.0)
        logs = jnp.sum(jnp.log(jnp.maximum(kept, 1e-37)), axis=0)
        if r.growth is None:
            return logs
        return logs + jnp.sum(load_rows(r.growth, start, size, first + count, 0.0))

    logs = part(0)
    parts = cdiv(kernel_shape.chunks_per_split, size)
    if parts > 1:
        logs = lax.fori_loop(1, parts, lambda m, logs: logs + part(m), logs)
    return jnp.max(logs)


def _reach(survival, kernel_shape: KernelShape, reverse: bool) -> Array:
    """How many of the splits before each one (`reverse`: after it) still reach it, `[P]`, zero beyond P."""
    size = next_power_of_two(kernel_shape.num_splits)
    shape = (size, size)
    until = jnp.cumsum(load_rows(survival, 0, size, kernel_shape.num_splits, 0.0), axis=0)
    here, there = iota(shape, 0), iota(shape, 1)
    # What decays strictly between two splits: `until` the one before the last, less `until` the first.
    first, last = (here, there) if reverse else (there, here)
    before_last = jnp.min(jnp.where(iota(shape, 0) < iota(shape, 1), until[:, None], 0.0), axis=0)
    upper = before_last[None, :] if reverse else before_last[:, None]
    lower = until[:, None] if reverse else until[None, :]
    is_within = (first < last) & (last < kernel_shape.num_splits) & (upper - lower > FORGOTTEN)
    return jnp.sum(is_within.astype(jnp.int32), axis=1)


def _linear_maps_kernel(r, *, kernel_shape: KernelShape, block: int):
    """For linear attention: the sum that a split adds, and the factor by which each channel decays in it."""
    first, count = split_range(kernel_shape, lax.rem(pl.program_id(2), kernel_shape.num_splits))

    def body(m, carry):
        state, kept = carry
        return chunk_step(r, first + m, state, kernel_shape)[1], kept * r.kept[first + m, :]

    start = jnp.zeros((block, kernel_shape.key_size), jnp.float32), jnp.ones((kernel_shape.key_size,), jnp.float32)
    r.offset[...], r.transition[...] = loop(count, body, start)
    r.survival[...] = _survival(r, kernel_shape, first, count)


def _maps_kernel(r, *, kernel_shape: KernelShape, block: int):
    first, count = split_range(kernel_shape, lax.rem(pl.program_id(2), kernel_shape.num_splits))
    column = pl.program_id(0) - kernel_shape.value_size // block
    is_value = column < 0  # else a block of columns of M: what becomes of unit states, nothing being written
    shape = (block, kernel_shape.key_size)
    is_unit = (iota(shape, 0) + column * block == iota(shape, 1)) & jnp.logical_not(is_value)
    state = jnp.where(is_unit, 1.0, 0.0)

    def pass_over(state):
        return loop(count, lambda m, state: chunk_step(r, first + m, state, kernel_shape, is_value)[1], state)

    if r.survival is None:
        state = pass_over(state)
    else:
        survival = _survival(r, kernel_shape, first, count)
        r.survival[...] = survival
        is_needed = is_value | (survival > FORGOTTEN)
        state = lax.cond(is_needed, pass_over, jnp.zeros_like, state)

    @pl.when(is_value)
    def _():
        r.offset[...] = state

    @pl.when(jnp.logical_not(is_value))
    def _():
        high = state.astype(r.transition.dtype)
        r.transition[...] = high
        if r.transition_rest is not None:
            r.transition_rest[...] = (state - high.astype(jnp.float32)).astype(r.transition_rest.dtype)


def _through_split(r, p, state: Array, kernel_shape: KernelShape, reverse: bool, is_value=None) -> Array:
    """A state, or its gradient, `[block, K]`, through split `p`; without the offset where `is_value` is false."""
    product = dot_nt if reverse else dot  # M is stored transposed; gradients go back through M itself
    offset = r.offset[p, :, :]
    if is_value is not None:
        offset = jnp.where(is_value, offset, 0.0)
    if not kernel_shape.online:
        return r.transition[p, :][None, :] * state + offset
    transition = r.transition[p, :, :]
    high = state.astype(transition.dtype)
    after = product(high, transition) + offset
    if r.transition_rest is not None:  # M and S in two parts each, all but the smallest product
        rest = (state - high.astype(jnp.float32)).astype(high.dtype)
        after = after + product(rest, transition) + product(high, r.transition_rest[p, :, :])
    return after


def _boundary(r, kernel_shape: KernelShape, block: int) -> Array:
    """The state, or its gradient, `[block, K]`, from which splits are gone through."""
    if r.boundary is None:
        return jnp.zeros((block, kernel_shape.key_size), jnp.float32)
    return r.boundary[...].astype(jnp.float32).T


def _fold_kernel(r, *, kernel_shape: KernelShape, block: int, reverse: bool):
    """The state at the start of each split, which are numbered here in the order of the fold.

    Without decay, or where it is weak, one program goes through all splits. Where it is strong there is a program for
    each split, which goes through the few that reach it.
    """
    boundary = _boundary(r, kernel_shape, block)

    def place(m):
        return kernel_shape.num_splits - 1 - m if reverse else m

    def step(m, state):
        return _through_split(r, place(m), state, kernel_shape, reverse)

    def in_order():
        def body(m, state):
            r.folded[place(m), :, :] = state
            return step(m, state)

        loop(kernel_shape.num_splits, body, boundary)

    def side_by_side(own, reach):
        # What reaches the split begins with the state that another one leaves, or with the boundary.
        from_boundary = reach == own
        begin = jnp.where(from_boundary, 0, own - reach + 1)
        state = jnp.where(from_boundary, boundary, r.offset[place(jnp.maximum(begin - 1, 0)), :, :])
        r.folded[place(own), :, :] = loop(own - begin, lambda m, state: step(begin + m, state), state)

    if r.survival is None:
        in_order()
        return
    own = lax.rem(pl.program_id(2), kernel_shape.num_splits)
    reach = _reach(r.survival, kernel_shape, reverse)
    is_strong = jnp.max(reach) <= _SHORT_REACH
    own_reach = jnp.sum(jnp.where(iota(reach.shape, 0) == place(own), reach, 0))
    pl.when(is_strong)(lambda: side_by_side(own, own_reach))
    pl.when(jnp.logical_not(is_strong) & (own == 0))(in_order)


def _compose_kernel(r, *, kernel_shape: KernelShape, block: int, reverse: bool):
    """Through all splits: the boundary and, in the programs after those of the values, unit states; these give M."""
    column = pl.program_id(0) - kernel_shape.value_size // block
    is_value = column < 0
    shape = (block, kernel_shape.key_size)
    is_unit = iota(shape, 0) + column * block == iota(shape, 1)
    state = jnp.where(is_value, _boundary(r, kernel_shape, block), jnp.where(is_unit, 1.0, 0.0))

    def step(m, state):
        p = kernel_shape.num_splits - 1 - m if reverse else m
        return _through_split(r, p, state, kernel_shape, reverse, is_value)

    r.composed[...] = loop(kernel_shape.num_splits, step, state)


def split_transitions(
    kernel_shape: KernelShape, inputs: Inputs, prepared: WYFactors, launch: KernelConfig
) -> SplitTransitions:
    """M and N of each split."""
    p = kernel_shape
    block = min(launch.block, p.value_size, p.key_size)
    value_blocks = p.value_size // block
    grid, at = sequence_grid(p, p.value_size + (p.key_size if p.online else 0), block)

    def at_value(c, h, z):  # programs that own columns of M read some values and drop them
        b, t, h, c = at(c, h, z)
        return b, t, h, lax.rem(c, value_blocks)

    def place(column):
        return lambda c, h, z: (*p.split_at(h, z), column(c), 0)

    offset = p.per_head(p.num_splits, p.value_size, p.key_size, dtype=jnp.float32)
    if p.online:
        transition = p.per_head(p.num_splits, p.key_size, p.key_size)
        of_transition = p.of_head(transition, (None, block, p.key_size), place(lambda c: lax.max(c - value_blocks, 0)))
    else:
        diagonal = p.per_head(p.num_splits, p.key_size, dtype=jnp.float32)
        of_transition = p.of_head(diagonal, (None, p.key_size), lambda c, h, z: (*p.split_at(h, z), 0))
    results = call(
        _maps_kernel if p.online else _linear_maps_kernel,
        "delta_segment_maps",
        grid,
        {
            **pass_operands(p, inputs, prepared, at_value, block, with_reads=False),
            "growth": p.of_head(prepared.growth, (p.chunks,), lambda c, h, z: (lax.div(z, p.num_splits), h, 0)),
        },
        {
            "offset": p.of_head(offset, (None, block, p.key_size), place(lambda c: lax.min(c, value_blocks - 1))),
            "transition": of_transition,
            "transition_rest": of_transition if p.online and p.dtype != jnp.float32 else None,
            "survival": p.of_head(
                None if prepared.kept is None else p.per_head(p.num_splits, dtype=jnp.float32),
                (None,),
                lambda c, h, z: p.split_at(h, z),
            ),
        },
        launch,
        kernel_shape=p,
        block=block,
    )
    return SplitTransitions(**results)  # type: ignore[arg-type]


def combine_splits(
    kernel_shape: KernelShape,
    maps: SplitTransitions | None,
    boundary: Array | None,
    launch: KernelConfig,
    reverse: bool = False,
) -> Array | None:
    """The state at each split's start or, in `reverse`, its gradient at each split's end.

    Args:
        kernel_shape: static facts.
        maps: of the splits; in `reverse` the offset is that of the gradient.
        boundary: `[B, HV, K, V]`, the state before the sequence or the gradient after it; None for zero.
        launch: compilation.
        reverse: from the last split to the first.

    Returns:
        `[B, HV, P, V, K]` float32; None where there is one split.
    """
    p = kernel_shape
    if maps is None:
        return None
    block = min(launch.block, p.value_size)
    side_by_side = 1 if maps.survival is None else p.num_splits

    def head(array, shape, *block_index):
        return p.of_head(array, shape, lambda c, h, z: (lax.div(z, side_by_side), h, *(i(c) for i in block_index)))

    def zero(c):
        return 0

    def column(c):
        return c

    def of_transition(array):
        sizes = (p.key_size,) * (2 if p.online else 1)
        return head(array, (p.num_splits, *sizes), *(zero,) * (1 + len(sizes)))

    def of_state(array):
        return head(array, (p.num_splits, block, p.key_size), zero, column, zero)

    result = call(
        _fold_kernel,
        "delta_fold_segments",
        (p.value_size // block, p.value_heads, p.batch * side_by_side),
        {
            "transition": of_transition(maps.transition),
            "transition_rest": of_transition(maps.transition_rest),
            "survival": head(maps.survival, (p.num_splits,), zero),
            "offset": of_state(maps.offset),
            "boundary": head(boundary, (p.key_size, block), zero, column),
        },
        {"folded": of_state(p.per_head(p.num_splits, p.value_size, p.key_size, dtype=jnp.float32))},
        launch,
        kernel_shape=p,
        block=block,
        reverse=reverse,
    )
    return result["folded"]  # type: ignore[return-value]


def compose_splits(
    kernel_shape: KernelShape,
    maps: SplitTransitions,
    boundary: Array | None,
    launch: KernelConfig,
    reverse: bool = False,
) -> tuple[Array, Array | None]:
    """All splits as one: what they make of the boundary and, but in `reverse`, their transition M, both transposed.

    Args:
        kernel_shape: static facts.
        maps: of the splits; in `reverse` the offset is that of the gradient.
        boundary: as of `combine_splits`.
        launch: compilation.
        reverse: from the last split to the first.

    Returns:
        `[B, HV, V, K]` float32, with no boundary N; and `[B, HV, K, K]` float32, for linear attention M's diagonal
        `[B, HV, K]`, or None.
    """
    p = kernel_shape
    block = min(launch.block, p.value_size, p.key_size)
    value_blocks, with_matrix = p.value_size // block, p.online and not reverse

    def head(array, shape, *place):
        return p.of_head(array, shape, lambda c, h, z: (z, h, *(i(c) for i in place)))

    def zero(c):
        return 0

    def column(c):
        return c

    def value(c):  # programs of unit states read some values and drop them
        return lax.min(c, value_blocks - 1)

    sizes = (p.key_size,) * (2 if p.online else 1)
    composed = p.per_head(p.value_size + (p.key_size if with_matrix else 0), p.key_size, dtype=jnp.float32)
    result = call(
        _compose_kernel,
        "delta_compose_segments",
        (composed.shape[2] // block, p.value_heads, p.batch),
        {
            "transition": head(maps.transition, (p.num_splits, *sizes), *(zero,) * (1 + len(sizes))),
            "transition_rest": head(maps.transition_rest, (p.num_splits, *sizes), *(zero,) * (1 + len(sizes))),
            "offset": head(maps.offset, (p.num_splits, block, p.key_size), zero, value, zero),
            "boundary": head(boundary, (p.key_size, block), zero, value),
        },
        {"composed": head(composed, (block, p.key_size), column, zero)},
        launch,
        kernel_shape=p,
        block=block,
        reverse=reverse,
    )["composed"]
    state: Array = result[:, :, : p.value_size]  # type: ignore[index]
    if reverse:
        return state, None
    return state, result[:, :, p.value_size :] if p.online else jnp.prod(maps.transition, axis=2)  # type: ignore[index]

"""Rows whose tokens are split over devices: each device has one shard of every row, in the devices' order.

All functions are for the inside of a `jax.shard_map` over a mesh with the axis that they name. Over a shard a state
becomes `M state + N`. Devices exchange M and N, whose size does not grow with the row, and each composes those of the
devices before it.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.common.vma import pvary_together


def from_before(x: Array, axis: str) -> Array:
    """The previous device's `x`; zeros on the first device."""
    size = lax.axis_size(axis)
    return lax.ppermute(x, axis, [(i, i + 1) for i in range(size - 1)])


def continues(segment_ids: Array, axis: str) -> Array:
    """Whether a shard's first token continues the last document of the previous shard, `[B]` bool.

    True on the first device, where it continues the initial state.
    """
    same = from_before(segment_ids[:, -1], axis) == segment_ids[:, 0]
    return same | (lax.axis_index(axis) == 0)


def of_first_shard(x: Array, axis: str | None) -> Array:
    """`x` on the first device, zeros on the others: the initial state's gradient, from that of what enters a shard.

    With no axis, whose devices have whole rows, it is `x`.
    """
    return x if axis is None else jnp.where(lax.axis_index(axis) == 0, x, 0)


def entering(
    transition: Array,
    offset: Array,
    boundary: Array,
    product: Callable[[Array, Array], Array],
    axis: str,
    *,
    reverse: bool = False,
) -> Array:
    """The state that enters this device's shard or, in `reverse`, the gradient that comes back to its end.

    Args:
        transition: M of the shard; in `reverse` that of the gradient.
        offset: N of the shard, of the state's shape; likewise.
        boundary: the state that enters the first device's shard, or the gradient after the last one's.
        product: of a transition and a state.
        axis: the mesh axis over which tokens are split.
        reverse: from the last device to the first.
    """
    transition, offset, boundary = pvary_together((transition, offset, boundary.astype(offset.dtype)))
    shards = lax.all_gather((transition, offset), axis)

    def step(state: Array, shard: tuple[Array, Array]) -> tuple[Array, Array]:
        return product(shard[0], state) + shard[1], state

    _, states = lax.scan(step, boundary, shards, reverse=reverse)
    return lax.dynamic_index_in_dim(states, lax.axis_index(axis), keepdims=False)


def matrix_product(transition: Array, state: Array) -> Array:
    """`transition @ state`, unrounded."""
    return jnp.matmul(transition, state, precision=lax.Precision.HIGHEST)

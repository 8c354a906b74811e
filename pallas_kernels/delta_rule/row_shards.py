"""Shards of rows that devices share: the state before a shard, and the gradient of the state after it.

A shard is to a row what a split is to a shard. The maps of a shard's splits, which are needed anyway, compose to the
map of the shard; devices exchange these (`common.row_shards`). The gradient goes back the same way, with the offsets of
the gradient and the transposed transitions, so that no map is differentiated.
"""

import jax.numpy as jnp
from jax import Array

from pallas_kernels.common.config import KernelConfig
from pallas_kernels.common.row_shards import entering, matrix_product
from pallas_kernels.common.triton.kernel_shape import KernelShape
from pallas_kernels.delta_rule.triton.split_sequence import SplitTransitions, compose_splits


def state_before(
    kernel_shape: KernelShape,
    maps: SplitTransitions | None,
    initial_state: Array | None,
    launch: KernelConfig,
    axis: str | None,
) -> tuple[Array | None, Array | None]:
    """The state before this device's shard, `[B, HV, K, V]`, and the shard's transition as `gradient_after` takes it.

    Of whole rows the state is the initial one, and there is no transition.

    Args:
        kernel_shape: static facts.
        maps: of the shard's splits.
        initial_state: the state before the first device's shard; None for zero.
        launch: compilation.
        axis: the mesh axis over which tokens are split; None where each device has whole rows.
    """
    if axis is None:
        return initial_state, None
    assert maps is not None
    offset, transition = compose_splits(kernel_shape, maps, None, launch)
    assert transition is not None
    offset = jnp.swapaxes(offset, 2, 3)
    boundary = jnp.zeros_like(offset) if initial_state is None else initial_state
    forward = jnp.swapaxes(transition, 2, 3) if kernel_shape.online else transition
    return entering(forward, offset, boundary, _product(kernel_shape), axis), transition


def gradient_after(
    kernel_shape: KernelShape,
    adjoint: SplitTransitions,
    transition: Array,
    d_final_state: Array,
    launch: KernelConfig,
    axis: str,
) -> Array:
    """The gradient of the state after this device's shard, all uses by later devices included, `[B, HV, K, V]`.

    Args:
        kernel_shape: static facts.
        adjoint: the maps of the splits with the offsets of the gradient.
        transition: of the shard.
        d_final_state: the gradient of the shard's final state as a result.
        launch: compilation.
        axis: the mesh axis over which tokens are split.
    """
    offset, _ = compose_splits(kernel_shape, adjoint, d_final_state, launch, reverse=True)
    offset = jnp.swapaxes(offset, 2, 3)
    later = entering(transition, offset, jnp.zeros_like(offset), _product(kernel_shape), axis, reverse=True)
    return d_final_state + later


def _product(kernel_shape: KernelShape):
    """The product of a transition, a matrix or a diagonal, and a state."""
    return matrix_product if kernel_shape.online else lambda transition, state: transition[..., None] * state

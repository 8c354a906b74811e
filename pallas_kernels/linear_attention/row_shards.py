"""Shards of rows that devices share, under a decay of one number a token (`common.row_shards`).

A shard is to a row what a split is to a shard: what its splits add, which is needed anyway, adds up to what it adds.
Devices exchange that, and the gradient goes back the same way.
"""

import jax.numpy as jnp
from jax import Array

from pallas_kernels.common.row_shards import entering, of_first_shard
from pallas_kernels.delta_rule.inputs import Inputs


def boundary_of_shard(
    kept: Array | None, offset: Array, boundary: Array | None, axis: str, *, reverse: bool = False
) -> Array:
    """The state before this device's shard (`reverse`: the gradient of the state after it), `[B, HV, R, S]`.

    Args:
        kept: what parts of the shard leave of the state, `[B, HV, ...]`; None for all.
        offset: what the shard adds to the state (`reverse`: to the gradient), `[B, HV, R, S]` float32.
        boundary: the state before the first device's shard, in `reverse` the gradient of this shard's own final state;
            None for zero.
        axis: the mesh axis over which tokens are split.
        reverse: from the last device to the first.
    """
    transition = jnp.ones(offset.shape[:2], jnp.float32) if kept is None else jnp.prod(kept, axis=2)
    zero = jnp.zeros_like(offset)
    boundary = zero if boundary is None else boundary.astype(jnp.float32)
    if not reverse:
        return entering(transition, offset, boundary, _scaled, axis)
    later = entering(transition, _scaled(transition, boundary) + offset, zero, _scaled, axis, reverse=True)
    return boundary + later


def _scaled(transition: Array, state: Array) -> Array:
    return transition[..., None, None] * state


def initial_state_gradient(inputs: Inputs, d_start: Array, axis: str | None) -> Array | None:
    """The initial state's gradient, `[B, HV, K, V]`, from that of the state before the tokens; None without one."""
    if inputs.initial_state is None:
        return None
    return of_first_shard(d_start, axis).astype(inputs.initial_state.dtype)

"""What differs between devices inside `jax.shard_map`, whose arrays have the mesh axes they vary along as a type."""

from typing import Any

import jax
from jax import Array, lax


def varying_axes(arrays: Any) -> frozenset[str]:
    """The mesh axes along which any array of a tree differs between devices; none outside of `jax.shard_map`."""
    return frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in jax.tree.leaves(arrays)))


def vary_alike(arrays: Any) -> Any:
    """The same arrays, each taken to differ along every mesh axis that any of them does.

    A scan's carry must begin as it goes on. And an argument of what has a backward pass of its own must vary as its
    gradient does: that of one that did not, such as a weight that devices share, is summed over the devices here.
    """
    varying = varying_axes(arrays)

    def vary(x: Array) -> Array:
        return lax.pcast(x, tuple(sorted(varying - jax.typeof(x).manual_axis_type.varying)), to="varying")

    return jax.tree.map(vary, arrays)

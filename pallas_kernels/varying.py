"""What differs between devices inside `jax.shard_map`, whose arrays have the mesh axes they vary along as a type.

Likewise what differs along the axis of a `jax.vmap`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
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


def batch_alike(arguments: Any, results: Any) -> Any:
    """The results, each taken to depend on every argument, so that `jax.vmap` over one argument batches all of them.

    What a function with a backward pass of its own returns is to be so. Under `jax.vmap` that pass runs for each index,
    and jax (0.11) gives the whole cotangent of a result that is not batched to each of them: summed over the indices
    once more, it comes out too large by their number.
    """
    first = (x[(0,) * x.ndim] for x in jax.tree.leaves(arguments))
    any_number = functools.reduce(jnp.logical_and, (x == x for x in first))
    return jax.tree.map(lambda x: lax.select_n(any_number, x, x), results)  # XLA drops a choice between equals

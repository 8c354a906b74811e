"""Arrays that differ between devices inside `jax.shard_map`, or between the indices of a `jax.vmap`.

Inside `jax.shard_map` an array's type names the mesh axes along which the array varies.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax


def varying_axes(arrays: Any) -> frozenset[str]:
    """The mesh axes along which any array of a tree differs between devices; none outside of `jax.shard_map`."""
    return frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in jax.tree.leaves(arrays)))


def pvary_together(arrays: Any) -> Any:
    """The same arrays, each taken to differ along every mesh axis that any of them does.

    Two cases need this. The carry of a scan must have the same type before the first step as after it. An argument of a
    function with a custom backward pass must vary along the same axes as its gradient. Where the argument did not vary,
    as a weight that devices share, this function's own backward pass sums the gradient over the devices.
    """
    varying = varying_axes(arrays)

    return jax.tree.map(functools.partial(vary_along, varying), arrays)


def vary_along(axes: frozenset[str], x: Array) -> Array:
    """The same array, taken to differ along some mesh axes, beside those along which it does."""
    return lax.pcast(x, tuple(sorted(axes - jax.typeof(x).manual_axis_type.varying)), to="varying")


def batch_alike(arguments: Any, results: Any) -> Any:
    """The results, each taken to depend on every argument, so that `jax.vmap` over one argument batches all of them.

    A function with a custom backward pass must return its results through this function. Under `jax.vmap` the backward
    pass runs once for each index. Jax (0.11) hands the whole cotangent of an unbatched result to each of these runs and
    then sums over the indices, so that the gradient would be too large by the number of indices.
    """
    first = (x[(0,) * x.ndim] for x in jax.tree.leaves(arguments))
    any_number = functools.reduce(jnp.logical_and, (x == x for x in first))
    return jax.tree.map(lambda x: lax.select_n(any_number, x, x), results)  # XLA drops a choice between equals

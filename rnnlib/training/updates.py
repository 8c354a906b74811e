"""Updates that are left out where a step's numbers are not finite, many arrays in one kernel of a GPU."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels.platform import platform

NUMBERS = 6_000_000
"""Of all arrays that one kernel updates, at most, where it updates several. With nine million kernels were slower."""


def where_finite(finite: Array, new: Any, old: Any, parameters: Any) -> Any:
    """`new` if a step's numbers were finite, else `old`.

    On a GPU a launch takes as long as AdamW's update of a million numbers, and most arrays have fewer. XLA makes one
    kernel of operations on arrays of one shape if they read an array in common, and no number alone. So those that are
    to share a kernel read their condition from a row of constants, too, which is always true.

    Args:
        finite: `[]` bool.
        new: parameters or an optimizer's state, after the update.
        old: the same before it.
        parameters: the pytree of parameters, or of its shapes. Parts of `new` with this structure are parameters or
            moments, and those of one parameter share its kernel.
    """
    if platform() != "gpu":
        return jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old)
    structure: Any = jax.tree.structure(parameters)
    shared = _shared_conditions(jax.tree.leaves(parameters))

    def chosen(new: Any, old: Any) -> Any:
        if jax.tree.structure(new) != structure:
            return jnp.where(finite, new, old)
        before = jax.tree.leaves(old)
        after = [jnp.where(finite, n, o) for n, o in zip(jax.tree.leaves(new), before, strict=True)]
        for number, condition in shared.items():
            after[number] = jnp.where(condition, after[number], before[number])
        return structure.unflatten(after)

    return jax.tree.map(chosen, new, old, is_leaf=lambda part: jax.tree.structure(part) == structure)


def _shared_conditions(arrays: list[Any]) -> dict[int, Array]:
    """What is true, read from the row of constants of each array that shares a kernel, by the array's number."""
    by_shape: dict[tuple[int, ...], list[int]] = {}
    for number, array in enumerate(arrays):
        by_shape.setdefault(array.shape, []).append(number)
    conditions: dict[int, Array] = {}
    rows = 0
    for numbers in by_shape.values():
        count = max(1, NUMBERS // max(1, arrays[numbers[0]].size))
        for start in range(0, len(numbers), count):
            group = numbers[start : start + count]
            if len(group) > 1:
                rows += 1
                # XLA takes equal constants for one row. So each has another number of ends, which nothing reads.
                row = jax.lax.optimization_barrier(np.array([True] * len(group) + [False] * rows))
                conditions |= {number: row[place] for place, number in enumerate(group)}
    return conditions

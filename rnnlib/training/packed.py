"""Pytrees with their arrays in one list, for functions that are called often.

A call of a compiled function flattens its arguments and makes its results anew, each variable of flax by some Python.
Of a training state that takes longer than a short step. Here both are done when somebody looks into the tree.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, cast

import jax


@jax.tree_util.register_pytree_node_class
class Packed:
    """A pytree of the same arrays in one list."""

    def __init__(self, tree: Any):
        """Flattens a pytree."""
        self._leaves: Sequence[Any]
        self._leaves, structure = jax.tree.flatten(tree)
        self._structure = _only(_Structure(structure))

    @property
    def tree(self) -> Any:
        """The pytree itself, made anew."""
        return jax.tree.unflatten(self._structure.tree, self._leaves)

    def tree_flatten(self) -> "tuple[Sequence[Any], _Structure]":
        """For JAX: the arrays, and what is static."""
        return self._leaves, self._structure

    @classmethod
    def tree_unflatten(cls, structure: "_Structure", leaves: Sequence[Any]) -> "Packed":
        """For JAX: the contrary."""
        made = object.__new__(cls)
        made._leaves, made._structure = leaves, structure
        return made


class _Structure:
    """A pytree's structure, which is compared in no time with itself."""

    def __init__(self, tree: Any):
        self.tree = tree

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, _Structure) and self.tree == other.tree)

    def __hash__(self) -> int:
        return hash(self.tree)


@functools.lru_cache(256)
def _only(structure: _Structure) -> _Structure:
    """The one object of this structure."""
    return structure


def packed[State](state: State) -> State:
    """A dataclass of pytrees with each of them packed; what is an array alone or None stays."""
    fields = {field.name: getattr(state, field.name) for field in dataclasses.fields(cast(Any, state))}
    trees = {name: x for name, x in fields.items() if x is not None and not jax.tree_util.all_leaves([x])}
    return dataclasses.replace(cast(Any, state), **{name: Packed(x) for name, x in trees.items()})


def unpacked(tree: Any) -> Any:
    """A pytree with the trees themselves in place of packed ones."""

    def is_packed(x: Any) -> bool:
        return isinstance(x, Packed)

    return jax.tree.map(lambda x: x.tree if is_packed(x) else x, tree, is_leaf=is_packed)

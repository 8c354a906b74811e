"""A module's variables by path: what running a block changes, and what a file of weights holds."""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec


def values_by_path(module: nnx.Module, kind: Any) -> dict[str, Any]:
    """Values of the variables of a kind (a filter of nnx), by path such as `"mixer.gain.mean"`.

    Arrays that are plain attributes are no variables.
    """
    return {path: leaf.get_value() for path, (_, leaf) in _by_path(module, kind).items()}


class ColumnValues(Mapping[str, Any]):
    """Values of variables by path, with the columns of every input projection one by one, whichever kernel stores them.

    Queries' columns are `"mixer.input_projection.query.kernel"`, the first map of a decay of low rank is
    `"mixer.input_projection.decay.down.kernel"`. A column is cut out of its kernel when it is asked for.
    """

    def __init__(self, module: Any, kind: Any):
        self._places: dict[str, tuple[str, nnx.Variable, tuple[int, int] | None]] = {}
        for path, (_, leaf) in _by_path(module, kind).items():
            columns = _columns(leaf)
            if not columns:
                self._places[path] = path, leaf, None
            self._places |= {_column_path(path, name): (path, leaf, (first, size)) for name, first, size in columns}

    def __getitem__(self, path: str) -> Any:
        """The array, or of an abstract module its shape and dtype."""
        _, leaf, place = self._places[path]
        return leaf.get_value() if place is None else _cut(leaf.get_value(), *place)

    def __iter__(self) -> Iterator[str]:
        """All paths."""
        return iter(self._places)

    def __len__(self) -> int:
        """How many paths there are."""
        return len(self._places)

    def of_kernels(self, paths: Iterable[str]) -> dict[str, None]:
        """All columns of the kernels that have some columns, in order."""
        touched = {self._places[path][0] for path in paths}
        return {path: None for path, (kernel, _, place) in self._places.items() if place and kernel in touched}

    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shape and dtype of each, by path."""
        found = {}
        for path, (_, leaf, place) in self._places.items():
            value = leaf.get_value()
            shape = value.shape if place is None else (*value.shape[:-1], place[1])
            found[path] = jax.ShapeDtypeStruct(shape, value.dtype)
        return found


def values_by_column(module: Any, kind: Any) -> ColumnValues:
    """`values_by_path`, with the columns of every input projection one by one; of a module, its state or a gradient."""
    return ColumnValues(module, kind)


def assign_by_column(module: nnx.Module, kind: Any, values: Mapping[str, Any]) -> None:
    """`assign_values` of some of what `values_by_column` gives. Columns that are not named stay as they are."""
    present = values_by_column(module, kind)
    of_kernels = present.of_kernels(values)
    given = {path: values[path] if path in values else present[path] for path in {**of_kernels, **values}}
    assign_values(module, kind, dict(by_variable(module, kind, given.items())))


def by_variable(module: nnx.Module, kind: Any, values: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """From paths and arrays as `values_by_column` has them to those of `values_by_path`.

    A kernel follows as soon as all its columns have come, in a dtype that represents all of them.

    Raises:
        ValueError: some columns of a kernel are missing.
    """
    kernels = {path: (leaf, _columns(leaf)) for path, (_, leaf) in _by_path(module, kind).items() if _columns(leaf)}
    kernel_of = {_column_path(path, name): path for path, (_, columns) in kernels.items() for name, *_ in columns}
    waiting: dict[str, dict[str, Any]] = {}
    for path, value in values:
        kernel = kernel_of.get(path)
        if kernel is None:
            yield path, value
            continue
        found = waiting.setdefault(kernel, {})
        found[path] = value
        leaf, columns = kernels[kernel]
        if len(found) == len(columns):
            arrays = [found[_column_path(kernel, name)] for name, *_ in columns]
            rest = leaf.get_value().shape[1] - sum(array.shape[1] for array in arrays)
            zeros = jnp.zeros((arrays[0].shape[0], rest), jnp.result_type(*(array.dtype for array in arrays)))
            yield kernel, jnp.concatenate([*arrays, zeros], axis=1)
            del waiting[kernel]
    for kernel, found in waiting.items():
        names = [_column_path(kernel, name) for name, *_ in kernels[kernel][1]]
        raise ValueError(f"{kernel}: {', '.join(sorted(set(names) - set(found)))} missing, expected all of its columns")


def separate_columns(tree: Any) -> Any:
    """A pytree whose `nnx.State`s have the columns of every input projection as variables of their own.

    Args:
        tree: of parameters, gradients or an optimizer's state: arrays, their shapes, or their shardings.
    """

    def separate(part: Any) -> Any:
        if not isinstance(part, nnx.State):
            return part
        found: list[tuple[tuple[Any, ...], Any]] = []
        for path, leaf in nnx.to_flat_state(part):
            columns = _columns(leaf)
            if not columns:
                found.append((path, leaf))
            for name, first, size in columns:
                value = _cut(leaf.get_raw_value(), first, size)
                found.append(((*path[:-1], *name.split("."), "kernel"), leaf.replace(value, columns=())))
        return nnx.from_flat_state(found)

    return jax.tree.map(separate, tree, is_leaf=lambda part: isinstance(part, nnx.State))


def fuse_columns(tree: Any, like: Any) -> Any:
    """The inverse of `separate_columns`: kernels as another pytree has them, such as `nnx.state` of an abstract model.

    Args:
        tree: a pytree whose columns are variables of their own.
        like: the pytree with kernels in place of columns.
    """

    def fuse(part: Any, like: Any) -> Any:
        if not isinstance(like, nnx.State):
            return part
        given = dict(nnx.to_flat_state(part))
        found = []
        for path, leaf in nnx.to_flat_state(like):
            columns = _columns(leaf)
            if path in given or not columns:
                found.append((path, given[path]))
                continue
            if not hasattr(leaf.get_raw_value(), "shape"):
                found.append((path, leaf))
                continue
            arrays = [given[*path[:-1], *name.split("."), "kernel"].get_raw_value() for name, _, _ in columns]
            xp = np if all(isinstance(array, np.ndarray) for array in arrays) else jnp
            rest = leaf.shape[-1] - sum(array.shape[-1] for array in arrays)
            kernel = xp.concatenate([*arrays, xp.zeros((*leaf.shape[:-1], rest), arrays[0].dtype)], axis=-1)
            found.append((path, leaf.replace(kernel)))
        return nnx.from_flat_state(found)

    return jax.tree.map(fuse, tree, like, is_leaf=lambda part: isinstance(part, nnx.State))


def count_values(tree: Any) -> int:
    """How many numbers parameters are; the zeros that fill an input projection's kernel up are none.

    Args:
        tree: a pytree of `nnx.State`s, of arrays or their shapes.
    """
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(separate_columns(shapes)))


def _columns(leaf: Any) -> tuple[tuple[str, int, int], ...]:
    """Of the kernel of an input projection, the name, the first column and the number of each."""
    return leaf.get_metadata().get("columns", ()) if isinstance(leaf, nnx.Variable) else ()


def _column_path(path: str, name: str) -> str:
    return f"{path.removesuffix('kernel')}{name}.kernel"


def _cut(value: Any, first: int, size: int) -> Any:
    if isinstance(value, jax.sharding.Sharding):
        if isinstance(value, NamedSharding) and len(value.spec) > 1:
            return NamedSharding(value.mesh, PartitionSpec())
        return value
    if isinstance(value, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((*value.shape[:-1], size), value.dtype)
    if not hasattr(value, "shape"):  # what an optimizer has in place of arrays that are another's
        return value
    return value[..., first : first + size]


def assign_values(module: nnx.Module, kind: Any, values: Mapping[str, Any]) -> None:
    """Gives variables of a kind new values, by path."""
    variables = _by_path(module, kind)
    given = [(variables[path][0], variables[path][1].replace(value)) for path, value in values.items()]
    nnx.update(module, nnx.from_flat_state(given))


def array_that_is_not_finite(module: nnx.Module) -> str | None:
    """The path of the first parameter that holds NaN, or else of the first that holds an infinity; None without any."""
    values = values_by_column(module, nnx.Param)
    for is_wrong in (jnp.isnan, jnp.isinf):
        for path, value in values.items():
            if jnp.issubdtype(value.dtype, jnp.floating) and bool(is_wrong(value).any()):
                return path
    return None


def _by_path(module: Any, kind: Any) -> dict[str, tuple[tuple[Any, ...], nnx.Variable]]:
    leaves = nnx.to_flat_state(
        nnx.filter_state(module, kind) if isinstance(module, nnx.State) else nnx.state(module, kind)
    )
    return {".".join(map(str, keys)): (keys, leaf) for keys, leaf in leaves if isinstance(leaf, nnx.Variable)}

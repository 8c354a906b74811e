"""Operators on meshes with Explicit axes, which are JAX's default: each device takes its own rows and heads.

Under such a mesh an array's type contains its sharding, and every operation needs a rule for the sharding of its
result. Chunks and kernels have no such rule. But an operator never mixes rows or heads, so it can run on each device's
shard unchanged. The axes of rows and heads come from the arguments' annotations: in `"B T H K"` the first axis is rows
and the third is heads.
"""

import functools
import inspect
import math
import typing
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from rnnlib.ops.checking import are_checked, call_with_checks

# Axes that may be sharded, by their name in annotations. Key and value heads are split together; channels are split
# only in operators that do not mix them (short convolutions).
_SHARDED = {"B": "rows", "H": "heads", "HV": "heads", "HK": "heads", "D": "channels"}

Axes = tuple[str, ...]


def is_split(array: Any) -> bool:
    """Whether an array is sharded over Explicit mesh axes."""
    return isinstance(array, Array) and any(axis is not None for axis in jax.typeof(array).sharding.spec)


def broadcast_like(array: Array, shape: tuple[int, ...], like: Array) -> Array:
    """`jnp.broadcast_to(array, shape)`, sharded like `like`."""
    return jnp.broadcast_to(array, shape, out_sharding=jax.typeof(like).sharding if is_split(like) else None)


def split_over_mesh[**Arguments, Result](operator: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """`operator`, for arguments whose rows and heads may be sharded over Explicit mesh axes.

    Results are sharded like the arguments. An argument that is whole along rows or heads is split like the others.

    Args:
        operator: a function whose arguments and results that are arrays have their axes' names in their annotations.

    Raises:
        ValueError: an argument is sharded along another axis, or two arguments differently; or heads do not divide
            evenly over the devices.
    """
    signature = inspect.signature(operator)
    layouts = {name: found for name, p in signature.parameters.items() if (found := _layouts(p.annotation))}
    results = [next(iter(_layouts(kind).values())) for kind in _members(signature.return_annotation)]

    @functools.wraps(operator)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if are_checked():
            given = signature.bind(*args, **kwargs).arguments
            return call_with_checks(operator.__name__, given, lambda: call(*args, **kwargs))
        if not any(map(is_split, (*args, *kwargs.values()))):
            return operator(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        arrays = {name: x for name, x in given.items() if name in layouts and isinstance(x, Array | np.ndarray)}
        if any(np.ndim(x) not in layouts[name] for name, x in arrays.items()):  # The operator itself raises the error.
            return operator(*args, **kwargs)
        axes = {name: layouts[name][np.ndim(x)] for name, x in arrays.items()}
        mesh_axes = _mesh_axes(operator.__name__, arrays, axes)
        mesh = mesh_of(next(filter(is_split, arrays.values())))

        def spec(of: Axes) -> P:
            return P(*map(mesh_axes.get, of))

        _check_divisible(operator.__name__, arrays, axes, mesh_axes, mesh)
        specs = tuple(spec(of) for of in axes.values())
        out_specs = tuple(map(spec, results))
        how = (
            operator,
            tuple(arrays),
            tuple((name, x) for name, x in given.items() if name not in arrays),
            mesh,
            specs,
            out_specs if len(results) > 1 else out_specs[0],
            frozenset(axis for over in mesh_axes.values() for axis in _mesh_axes_of(over)),
        )
        try:
            mapped = _mapped(*how)
        except TypeError:  # an option that is not hashable, such as a traced number
            mapped = _mapped.__wrapped__(*how)
        own = [jax.sharding.reshard(jnp.asarray(x), NamedSharding(mesh, s)) for x, s in zip(arrays.values(), specs)]
        return mapped(*own)

    return call


@functools.lru_cache(maxsize=256)
def _mapped(
    operator: Callable[..., Any],
    names: tuple[str, ...],
    options: tuple[tuple[str, Any], ...],
    mesh: Any,
    in_specs: tuple[P, ...],
    out_specs: Any,
    axis_names: frozenset[str],
) -> Callable[..., Any]:
    """An operator on each device's shard of the arguments `names`; kept, so that calls outside of jit compile once."""

    def run(*own: Array) -> Any:
        return operator(**dict(options), **dict(zip(names, own)))

    specs = {"in_specs": in_specs, "out_specs": out_specs, "axis_names": axis_names}
    return jax.jit(jax.shard_map(run, mesh=mesh, **specs))


def _members(annotation: Any) -> tuple[Any, ...]:
    """The types of a tuple's members, or the annotation itself."""
    return typing.get_args(annotation) if typing.get_origin(annotation) is tuple else (annotation,)


def _layouts(annotation: Any) -> dict[int, Axes]:
    """The names of axes of each array type in an annotation, by the number of axes."""
    options = typing.get_args(annotation) or (annotation,)
    found = [tuple(option.dim_str.split()) for option in options if hasattr(option, "dim_str")]
    return {len(axes): axes for axes in reversed(found)}


def mesh_of(array: Any) -> Any:
    """The mesh of a sharded array. In a traced function this is an abstract mesh, of which only the shape is known."""
    return (jax.typeof(array) if isinstance(array, jax.core.Tracer) else array).sharding.mesh


def _mesh_axes(operator: str, arrays: Mapping[str, Any], axes: Mapping[str, Axes]) -> dict[str, Any]:
    """The mesh axes of each kind of axis that is sharded, by its name."""
    mesh_axes: dict[str, Any] = {}
    for name, array in arrays.items():
        if not is_split(array):
            continue
        spec = jax.typeof(array).sharding.spec
        for axis, over in zip(axes[name], spec):
            if over is None:
                continue
            kind = _SHARDED.get(axis)
            if kind is None:
                able = " and ".join(a for a in axes[name] if a in _SHARDED) or "none"
                raise ValueError(
                    f"{operator}: {name} of shape {array.shape} is sharded over Explicit mesh axes as {spec}, expected "
                    f"at most {able} of its axes [{', '.join(axes[name])}] to be"
                )
            if mesh_axes.setdefault(kind, over) != over:
                raise ValueError(
                    f"{operator}: {name} of shape {array.shape} has its {kind} sharded over {over!r}, expected "
                    f"{mesh_axes[kind]!r} as in other arguments"
                )
    return {axis: mesh_axes[kind] for axis, kind in _SHARDED.items() if kind in mesh_axes}


def _mesh_axes_of(entry: str | tuple[str, ...]) -> tuple[str, ...]:
    """The mesh axes that an entry of a `PartitionSpec` names."""
    return (entry,) if isinstance(entry, str) else entry


def _check_divisible(
    operator: str, arrays: Mapping[str, Any], axes: Mapping[str, Axes], mesh_axes: Mapping[str, Any], mesh: Any
) -> None:
    for name, array in arrays.items():
        for size, axis in zip(array.shape, axes[name]):
            over = mesh_axes.get(axis, ())
            devices = math.prod(mesh.shape[mesh_axis] for mesh_axis in _mesh_axes_of(over))
            if size % devices:
                raise ValueError(
                    f"{operator}: {name} of shape {array.shape} has {size} {_SHARDED[axis]}, expected a multiple of "
                    f"the {devices} devices of mesh axis {over!r} that share them"
                )


def dot_general_over_mesh(lhs: Array, rhs: Array, dimension_numbers: Any, *args: Any, **options: Any) -> Array:
    """`jax.lax.dot_general`, summed over devices if the contracted axis is sharded over Explicit mesh axes.

    A mixer's output projection contracts heads that are sharded over devices, with kernel rows sharded in the same way.
    The sharding of all other axes is kept in the product.
    """
    (contracted, others), (batch, _) = dimension_numbers
    left, right = (jax.typeof(x).sharding.spec for x in (lhs, rhs))
    if not batch and any(left[axis] is not None for axis in contracted):
        kept = [entry for axis, entry in enumerate(left) if axis not in contracted]
        kept += [entry for axis, entry in enumerate(right) if axis not in others]
        options["out_sharding"] = NamedSharding(mesh_of(lhs), P(*kept))
    return jax.lax.dot_general(lhs, rhs, dimension_numbers, *args, **options)

"""A module's variables by path: what running a block changes, and what a file of weights holds."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx


def values_by_path(module: nnx.Module, kind: Any) -> dict[str, Any]:
    """Values of the variables of a kind (a filter of nnx), by path such as `"mixer.gain.mean"`.

    Arrays that are plain attributes are no variables.
    """
    return {path: leaf.get_value() for path, (_, leaf) in _by_path(module, kind).items()}


def assign_values(module: nnx.Module, kind: Any, values: Mapping[str, Any]) -> None:
    """Gives variables of a kind new values, by path."""
    variables = _by_path(module, kind)
    given = [(variables[path][0], variables[path][1].replace(value)) for path, value in values.items()]
    nnx.update(module, nnx.from_flat_state(given))


def array_that_is_not_finite(module: nnx.Module) -> str | None:
    """The path of the first parameter that holds NaN, or else of the first that holds an infinity; None without any."""
    values = values_by_path(module, nnx.Param)
    for is_wrong in (jnp.isnan, jnp.isinf):
        for path, value in values.items():
            if jnp.issubdtype(value.dtype, jnp.floating) and bool(is_wrong(value).any()):
                return path
    return None


def _by_path(module: nnx.Module, kind: Any) -> dict[str, tuple[tuple[Any, ...], nnx.Variable]]:
    leaves = nnx.to_flat_state(nnx.state(module, kind))
    return {".".join(map(str, keys)): (keys, leaf) for keys, leaf in leaves if isinstance(leaf, nnx.Variable)}

"""Linear maps of the same input, joined into as few matrix products as possible."""

import contextlib
import contextvars
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from rnnlib.ops.sharding import is_split
from rnnlib.ops.thin_products import row_product, thin_kernel_serves, thin_products

_MAPS_OF_A_LAUNCH = 8


def joined_products(x: Float[Array, "*batch D"], maps: Sequence[nnx.Linear]) -> Sequence[Float[Array, "*batch F"]]:
    """`[f(x) for f in maps]`, as one product with the concatenated kernels if there are many rows.

    The gradient of `x` is then one product too, in place of a sum of rounded products, and the gradients of the maps'
    outputs are written as one array. Joining copies the kernels, which pays where `x` has at least as many rows as a
    kernel.

    Args:
        x: the input of all maps.
        maps: `nnx.Linear` of the same dtype. Other modules, such as your own adapters, are called one by one.
    """
    rows, dtype = math.prod(x.shape[:-1]), maps[0].dtype
    if rows < x.shape[-1] or not all(_is_plain(f) and f.dtype == dtype for f in maps):
        return [f(x) for f in maps]
    kernels = [f.kernel[...] for f in maps]
    if is_split(x) or any(map(is_split, kernels)):  # a joined axis would not be spread over devices as its parts are
        return [f(x) for f in maps]
    x, *kernels = maps[0].promote_dtype((x, *kernels), dtype=dtype)
    # The barrier is one in the backward pass too: without it XLA writes each map's gradient, and then joins them.
    y = jax.lax.optimization_barrier(row_product(x, jnp.concatenate(kernels, axis=-1), preferred_element_type=x.dtype))
    return jnp.split(y, list(itertools.accumulate(f.out_features for f in maps[:-1])), axis=-1)


def gated_product(x: Float[Array, "*batch D"], gate: nnx.Linear, up: nnx.Linear) -> Float[Array, "*batch F"]:
    """`silu(gate(x)) * up(x)`, by one kernel for few rows if the kernel supports the call."""
    if _is_plain(gate) and _is_plain(up) and gate.dtype == up.dtype and gate.out_features == up.out_features:
        rows, *kernels = gate.promote_dtype((x, gate.kernel[...], up.kernel[...]), dtype=gate.dtype)
        if thin_kernel_serves(rows, kernels):
            return thin_products(rows, kernels, is_gated=True)[0]
    opened, raised = joined_products(x, (gate, up))
    return nnx.silu(opened) * raised


def _is_plain(f: nnx.Module) -> bool:
    """Whether a module is a product with a kernel, and nothing else."""
    return isinstance(f, nnx.Linear) and type(f) in (nnx.Linear, InputLinear) and f.bias is None


_PRODUCTS: contextvars.ContextVar[tuple[Any, dict[int, Array]]] = contextvars.ContextVar("products_of_an_input")


class InputLinear(nnx.Linear):
    """A linear map of a mixer's input. Within `joined_inputs` its product has been computed together with others."""

    def __call__(self, inputs: Array, out_sharding: Any = None) -> Array:
        """Maps `[..., D]` to `[..., F]`."""
        x, products = _PRODUCTS.get((None, {}))
        if x is inputs and id(self) in products:
            return products[id(self)]
        return super().__call__(inputs, out_sharding)


@contextlib.contextmanager
def joined_inputs(module: nnx.Module, x: Float[Array, "*batch D"]) -> Iterator[None]:
    """Within this context, all `InputLinear` of `module` that are called with `x` itself share one kernel launch.

    If no kernel supports the call, as for many rows, nothing changes.

    Args:
        module: a mixer, whose parts call their own maps.
        x: its input.
    """
    maps = _maps_in(module) if x.size and thin_kernel_serves(x, ()) else []
    maps = [f for f in maps if f.bias is None and f.dtype == x.dtype and f.in_features == x.shape[-1]]
    products: dict[int, Array] = {}
    for some in itertools.batched(maps, _MAPS_OF_A_LAUNCH):
        _, *kernels = some[0].promote_dtype((x, *(f.kernel[...] for f in some)), dtype=x.dtype)
        if len(some) > 1 and thin_kernel_serves(x, kernels):
            products |= {id(f): y for f, y in zip(some, thin_products(x, kernels))}
    token = _PRODUCTS.set((x, products))
    try:
        yield
    finally:
        _PRODUCTS.reset(token)


def _maps_in(module: nnx.Module) -> list[InputLinear]:
    return [node for _, node in nnx.iter_graph(module) if type(node) is InputLinear]

"""Linear maps of the same input, joined into as few matrix products as possible."""

import collections
import contextlib
import contextvars
import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.common.vma import vary_alike
from rnnlib.ops.arguments import is_symbolic
from rnnlib.ops.sharding import is_split
from rnnlib.ops.thin_products import Finish, row_product, thin_kernel_serves, thin_products

_MAPS_OF_A_LAUNCH = 8
_NARROW = 512  # Most columns of a map that joins a mixer's streams: they are copied out of the product.
_COLUMNS = 64  # A joined product has a multiple of so many, so that rows begin where large loads may.


def joined_products(x: Float[Array, "*batch D"], maps: Sequence[nnx.Linear]) -> Sequence[Float[Array, "*batch F"]]:
    """`[f(x) for f in maps]`, as one product with the concatenated kernels if there are many rows.

    The gradient of `x` is then one product too, in place of a sum of rounded products, and the gradients of the maps'
    outputs are written as one array. Joining copies the kernels, which pays where `x` has at least as many rows as a
    kernel.

    Args:
        x: the input of all maps.
        maps: `nnx.Linear` of the same dtype. Other modules, such as your own adapters, are called one by one.
    """
    dtype = maps[0].dtype
    if not _can_join(x, maps):
        return [f(x) for f in maps]
    x, *kernels = maps[0].promote_dtype((x, *(f.kernel[...] for f in maps)), dtype=dtype)
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


def _can_join(x: Array, maps: Sequence[nnx.Module]) -> bool:
    """Whether maps can be one product, and copying their kernels pays."""
    rows = math.prod(x.shape[:-1])
    if is_symbolic(rows) or rows < x.shape[-1] or not all(map(_is_plain, maps)):
        return False
    plain: Any = maps
    # A joined axis would not be spread over devices as its parts are.
    return len({f.dtype for f in plain}) == 1 and not any(map(is_split, (x, *(f.kernel[...] for f in plain))))


@dataclasses.dataclass(eq=False)
class _InputProducts:
    """What is known of the products of a mixer's input.

    Attributes:
        x: the input.
        maps: of it, that no product has been computed of.
        found: products by the identity of their map; of a `LowRank`, without its bias.
        finished: functions of products that `Finishing` parts asked for, by the identity of the map.
    """

    x: Array
    maps: list["InputLinear"]
    found: dict[int, Array] = dataclasses.field(default_factory=dict)
    finished: dict[int, Array] = dataclasses.field(default_factory=dict)


_PRODUCTS: contextvars.ContextVar[_InputProducts | None] = contextvars.ContextVar("products_of_an_input", default=None)


class InputLinear(nnx.Linear):
    """A linear map of a mixer's input. Within `joined_inputs` its product has been computed together with others."""

    def __call__(self, inputs: Array, out_sharding: Any = None) -> Array:
        """Maps `[..., D]` to `[..., F]`."""
        products = _PRODUCTS.get()
        if products is not None and products.x is inputs and id(self) in products.found:
            return products.found[id(self)]
        return super().__call__(inputs, out_sharding)


class LowRank(nnx.Module):
    """A map of low rank, `x W_1 W_2 (+ b)`, without a nonlinearity between.

    Within `joined_inputs` its product has been computed together with others, if both maps are as `MixerShape.project`
    makes them.
    """

    def __init__(self, down: nnx.Linear, up: nnx.Linear):
        self.down = down
        self.up = up

    def __call__(self, x: Array) -> Array:
        """Maps `[..., D]` to `[..., F]`."""
        y = self.found(x)
        if y is None or self.up.bias is None:
            return self.up(self.down(x)) if y is None else y
        y, bias = self.up.promote_dtype((y, self.up.bias[...]), dtype=self.up.dtype)
        return y + bias

    def found(self, x: Array) -> Array | None:
        """The product without its bias, if it has been computed."""
        products = _PRODUCTS.get()
        return products.found.get(id(self)) if products is not None and products.x is x else None


class Finishing:
    """A part that wants functions of its maps' products and not the products, which a kernel can compute with them."""

    def finishes(self) -> Sequence[tuple[nnx.Module, Finish]]:
        """Maps of the mixer's input that the part alone calls, and what it makes of their products."""
        return ()

    def finished(self, x: Array, dtype: DTypeLike) -> list[Array]:
        """What `finishes` names, of `x`: as a kernel has computed it, else by its formulas in `dtype`."""
        maps: Any = self.finishes()
        found = [finished_product(f, x) for f, _ in maps]
        return [finish(f(x).astype(dtype)) if y is None else y for (f, finish), y in zip(maps, found)]


def finished_product(f: nnx.Module, x: Array) -> Array | None:
    """What `Finishing.finishes` asked for of `f(x)`, `[..., F]` float32; None where it has not been computed."""
    products = _PRODUCTS.get()
    return products.finished.get(id(f)) if products is not None and products.x is x else None


@contextlib.contextmanager
def joined_inputs(module: nnx.Module, x: Float[Array, "*batch D"]) -> Iterator[None]:
    """Within this context, all `InputLinear` of `module` that are called with `x` itself share one kernel launch.

    The second maps of all `LowRank` share another. What `Finishing` parts make of products is part of either.

    Of many rows, which no such kernel supports, narrow maps can share the product of `joined_columns`.

    Args:
        module: a mixer, whose parts call their own maps.
        x: its input.
    """
    nodes = [node for _, node in nnx.iter_graph(module)] if x.size else []
    maps = [f for f in nodes if type(f) is InputLinear and f.bias is None]
    products = _InputProducts(x, [f for f in maps if f.dtype == x.dtype and f.in_features == x.shape[-1]])
    if thin_kernel_serves(x, ()):
        finishes = _finishes(nodes)
        _launch([_Product(f, x, f) for f in products.maps], finishes, products)
        raised = [f for f in nodes if type(f) is LowRank and _is_raised(f, products)]
        _launch([_Product(f, products.found[id(f.down)], f.up) for f in raised], finishes, products)
        computed = products.found.keys() | products.finished.keys()
        products.maps = [f for f in products.maps if id(f) not in computed]
    token = _PRODUCTS.set(products)
    try:
        yield
    finally:
        _PRODUCTS.reset(token)


class _Product(NamedTuple):
    """A product of a launch: of a part's map, by what input and last linear map."""

    of: nnx.Module
    x: Array
    last: nnx.Linear


def _finishes(nodes: Sequence[Any]) -> dict[int, Finish]:
    """What parts make of products, by the identity of their map; nothing of a map that two parts name."""
    wanted = [pair for node in nodes if isinstance(node, Finishing) for pair in node.finishes()]
    times = collections.Counter(id(f) for f, _ in wanted)
    is_whole = {id(f): not any(map(is_split, jax.tree.leaves(finish))) for f, finish in wanted}
    return {id(f): finish for f, finish in wanted if times[id(f)] == 1 and is_whole[id(f)]}


def _is_raised(f: LowRank, products: _InputProducts) -> bool:
    """Whether what a map's second part multiplies is there, and this part is a product with a kernel, and a bias."""
    return (
        id(f.down) in products.found
        and type(f.up) is nnx.Linear
        and f.up.dtype == products.x.dtype
        and f.up.in_features == f.down.out_features
    )


def _launch(wanted: Sequence[_Product], finishes: Mapping[int, Finish], products: _InputProducts) -> None:
    """Computes products in as few launches as possible, if the kernel serves them and they are several."""
    for some in itertools.batched(wanted, _MAPS_OF_A_LAUNCH):
        own = [finishes.get(id(one.of)) if one.last.bias is None else None for one in some]
        # One product of the mixer's input has an inner axis so long that programs share it: nothing can finish it.
        if len(some) == 1 and (own[0] is None or some[0].x is products.x):
            continue
        pairs = [one.last.promote_dtype((one.x, one.last.kernel[...]), dtype=one.x.dtype) for one in some]
        if not all(thin_kernel_serves(x, (kernel,)) for x, kernel in pairs):
            continue
        results = thin_products([x for x, _ in pairs], [kernel for _, kernel in pairs], finishes=own)
        for one, finish, y in zip(some, own, results):
            (products.found if finish is None else products.finished)[id(one.of)] = y


def columns_can_join(x: Float[Array, "*batch D"], maps: Sequence[nnx.Module]) -> bool:
    """Whether `joined_columns` supports the call: many rows, and maps without biases of the same dtype as `x`."""
    return _can_join(x, maps) and all(getattr(f, "dtype", None) == x.dtype for f in maps)


def joined_columns(
    x: Float[Array, "*batch D"], maps: Sequence[nnx.Linear]
) -> tuple[Float[Array, "*batch N"], list[InputLinear]]:
    """`x` times the kernels of `maps` and of the mixer's narrow maps, side by side in one product.

    The mixer's maps are those of the enclosing `joined_inputs`. Columns of zeros may follow theirs. The gradient of the
    kernels is computed in their own dtype.

    Args:
        x: the input of all maps.
        maps: the first columns' maps.

    Returns:
        The product, and the narrow maps: `joined_found` takes their columns.
    """
    products = _PRODUCTS.get()
    waiting = products.maps if products is not None and products.x is x else []
    chosen = {id(f) for f in maps}
    narrow = [f for f in waiting if id(f) not in chosen and f.out_features <= _NARROW and _can_join(x, (f,))]
    kernels = [f.kernel[...] for f in (*maps, *narrow)]
    columns = sum(kernel.shape[1] for kernel in kernels)
    kernels.append(jnp.zeros((kernels[0].shape[0], -columns % _COLUMNS), kernels[0].dtype))
    return _product_of_stored(*vary_alike((x, jnp.concatenate(kernels, axis=-1)))), narrow


def joined_found(columns: Float[Array, "*batch N"], narrow: Sequence[InputLinear]) -> None:
    """Gives each of the `narrow` maps of `joined_columns` its columns as its product."""
    products = _PRODUCTS.get()
    if products is not None and narrow:
        ends = list(itertools.accumulate(f.out_features for f in narrow))
        products.found |= {id(f): y for f, y in zip(narrow, jnp.split(columns, ends, axis=-1))}


@jax.custom_vjp
def _product_of_stored(x: Array, kernel: Array) -> Array:
    """`x @ kernel` in `x`'s dtype; the kernel's gradient is not rounded to it."""
    return _rounded_product(x, kernel)


def _rounded_product(x: Array, kernel: Array) -> Array:
    return row_product(x, kernel.astype(x.dtype), preferred_element_type=x.dtype)


def _product_forward(x: Array, kernel: Array) -> tuple[Array, tuple[Array, Array]]:
    # The product itself and not the function above, in which policies of `jax.checkpoint` would not see it.
    return _rounded_product(x, kernel), (x, kernel)


def _product_backward(residuals: tuple[Array, Array], d_y: Array) -> tuple[Array, Array]:
    x, kernel = residuals
    d_x = row_product(d_y, kernel.astype(x.dtype).T, preferred_element_type=x.dtype)
    rows = tuple(range(x.ndim - 1))
    return d_x, jax.lax.dot_general(x, d_y, ((rows, rows), ((), ())), preferred_element_type=kernel.dtype)


_product_of_stored.defvjp(_product_forward, _product_backward)

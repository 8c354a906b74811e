"""Linear maps that share a matmul or a kernel with another, and maps of low rank."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from rnnlib.ops.arguments import is_symbolic
from rnnlib.ops.float8 import float8_product
from rnnlib.ops.sharding import is_split
from rnnlib.ops.skinny_gemm import linear_product, skinny_kernel_supports, skinny_matmuls


class LowRank(nnx.Module):
    """A map of low rank, `x W_1 W_2 (+ b)`, without a nonlinearity between.

    Attributes:
        down: `x W_1`; None where an `InputProjection` stores `W_1` in its kernel.
        up: the second map.
    """

    def __init__(self, down: nnx.Linear | None, up: nnx.Linear):
        self.down = down
        self.up = up

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch F"]:
        """Maps `[..., D]` to `[..., F]`."""
        if self.down is None:
            raise ValueError(
                "LowRank: the input projection stores its first map; InputProjection.separate takes it out"
            )
        return self.up(self.down(x))


def rows_by_matrix(x: Array) -> Any:
    """Dimension numbers of `x @ kernel`."""
    return ((x.ndim - 1,), (0,)), ((), ())


def multiply_in_float8(model: nnx.Module) -> None:
    """Makes every linear map and input projection of a model multiply by `float8_product`.

    Those with a product of their own stay as they are: a router in float32, a head.
    """
    modules: Any = (module for _, module in nnx.iter_modules(model))
    for module in modules:
        if getattr(module, "dot_general", None) is linear_product:
            module.dot_general = float8_product


def is_plain(f: Any) -> bool:
    """Whether a module is a matmul with a kernel, and nothing else."""
    return type(f) is nnx.Linear and f.bias is None


def fused_matmuls(x: Float[Array, "*batch D"], maps: Sequence[nnx.Linear]) -> Sequence[Float[Array, "*batch F"]]:
    """`[f(x) for f in maps]`, as one product with the concatenated kernels if there are many rows.

    The gradient of `x` is then one product too, in place of a sum of rounded products, and the gradients of the maps'
    outputs are written as one array. Joining copies the kernels, which pays where `x` has at least as many rows as a
    kernel.

    Args:
        x: the input of all maps.
        maps: `nnx.Linear` of the same dtype, multiplied in the same way. Other modules, such as your own adapters, are
            called one by one.
    """
    dtype = maps[0].dtype
    if not can_join(x, maps):
        return [f(x) for f in maps]
    x, *kernels = maps[0].promote_dtype((x, *(f.kernel[...] for f in maps)), dtype=dtype)
    # The barrier is one in the backward pass too: without it XLA writes each map's gradient, and then joins them.
    y = jax.lax.optimization_barrier(
        maps[0].dot_general(x, jnp.concatenate(kernels, axis=-1), rows_by_matrix(x), preferred_element_type=x.dtype)
    )
    return jnp.split(y, list(itertools.accumulate(f.out_features for f in maps[:-1])), axis=-1)


def gated_product(x: Float[Array, "*batch D"], gate: nnx.Linear, up: nnx.Linear) -> Float[Array, "*batch F"]:
    """`silu(gate(x)) * up(x)`, by one kernel for few rows if the kernel supports the call."""
    if is_plain(gate) and is_plain(up) and gate.dtype == up.dtype and gate.out_features == up.out_features:
        rows, *kernels = gate.promote_dtype((x, gate.kernel[...], up.kernel[...]), dtype=gate.dtype)
        if skinny_kernel_supports(rows, kernels):
            return skinny_matmuls(rows, kernels, is_gated=True)[0]
    opened, raised = fused_matmuls(x, (gate, up))
    return nnx.silu(opened) * raised


def can_join(x: Array, maps: Sequence[nnx.Module]) -> bool:
    """Whether maps can be one product, and copying their kernels pays."""
    rows = math.prod(x.shape[:-1])
    if is_symbolic(rows) or rows < x.shape[-1] or not all(map(is_plain, maps)):
        return False
    plain: Any = maps
    # A joined axis would not be spread over devices as its parts are.
    return len({(f.dtype, f.dot_general) for f in plain}) == 1 and not any(
        map(is_split, (x, *(f.kernel[...] for f in plain)))
    )

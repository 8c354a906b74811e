"""The feed-forward half of a block: a SwiGLU, and the base class of other feed-forwards' configurations."""

import abc
import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from rnnlib.layers.part import PartConfig
from rnnlib.layers.tensor import current_shares, linear_of_shares, share_of
from rnnlib.ops.sharding import dot_general_over_mesh, is_split


def joined_products(x: Float[Array, "*batch D"], maps: Sequence[nnx.Linear]) -> Sequence[Float[Array, "*batch F"]]:
    """`[f(x) for f in maps]`, as one product with all kernels where there are many rows.

    The gradient of `x` is one product then too, in place of a sum of rounded ones, and what follows the maps has one
    gradient to write. It takes a copy of the kernels, so rows are to be at least as many as a kernel's.

    Args:
        x: what is mapped.
        maps: `nnx.Linear` of the same dtype. Others, such as adapters of one's own, are called one by one.
    """
    rows, dtype = math.prod(x.shape[:-1]), maps[0].dtype
    if rows < x.shape[-1] or not all(type(f) is nnx.Linear and f.bias is None and f.dtype == dtype for f in maps):
        return [f(x) for f in maps]
    kernels = [f.kernel[...] for f in maps]
    if is_split(x) or any(map(is_split, kernels)):  # a joined axis would not be spread over devices as its parts are
        return [f(x) for f in maps]
    x, *kernels = maps[0].promote_dtype((x, *kernels), dtype=dtype)
    # The barrier is one in the backward pass too: without it XLA writes each map's gradient, and then joins them.
    y = jax.lax.optimization_barrier(x @ jnp.concatenate(kernels, axis=-1))
    return jnp.split(y, list(itertools.accumulate(f.out_features for f in maps[:-1])), axis=-1)


class SwiGLU(nnx.Module):
    """Gated feed-forward `W_down (silu(W_gate x) * W_up x)`, without biases."""

    def __init__(self, width: int, hidden_width: int, *, initializer_std: float, dtype, param_dtype, rngs: nnx.Rngs):
        """Builds the three maps.

        Args:
            width: width of input and output, `D`.
            hidden_width: width in between.
            initializer_std: standard deviation of the initial weights.
            dtype: dtype of the products.
            param_dtype: dtype of the weights.
            rngs: source of the initial weights.
        """
        hidden_width = share_of(hidden_width, "the width of a feed-forward (--model.mlp-width)")
        options: dict[str, Any] = dict(
            use_bias=False,
            kernel_init=nnx.initializers.normal(initializer_std),
            dtype=dtype,
            param_dtype=param_dtype,
            dot_general=dot_general_over_mesh,
            rngs=rngs,
        )
        self.gate = nnx.Linear(width, hidden_width, **options)
        self.up = nnx.Linear(width, hidden_width, **options)
        self.down = linear_of_shares(current_shares())(hidden_width, width, **options)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Applies the block to `[B, T, D]` activations."""
        gate, up = joined_products(x, (self.gate, self.up))
        return self.down(nnx.silu(gate) * up)


@dataclasses.dataclass(frozen=True)
class FeedForwardConfig(PartConfig, abc.ABC):
    """Configuration of a layer's feed-forward that is not the model's SwiGLU."""

    @abc.abstractmethod
    def build(
        self,
        width: int,
        hidden_width: int,
        *,
        initializer_std: float,
        dtype: DTypeLike,
        param_dtype: DTypeLike,
        rngs: nnx.Rngs,
    ) -> nnx.Module:
        """Builds the module, which maps `[B, T, D]` to `[B, T, D]`.

        Args:
            width: the model's width D.
            hidden_width: hidden width of the model's SwiGLUs, used if the configuration gives none; 0 for none.
            initializer_std: standard deviation of the initial weights.
            dtype: dtype of the products.
            param_dtype: dtype of the weights.
            rngs: source of the initial weights.
        """

    def least_parameters(self, width: int, hidden_width: int) -> int:
        """A lower bound on the module's parameters; arguments as `build`'s."""
        return 0

    def describe(self, hidden_width: int) -> str:
        """The module in a few words, for a table of a model's parts."""
        return type(self).__name__

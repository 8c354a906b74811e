"""Feature maps of queries and keys: activations by name, and maps that are learned or change the number of channels."""

import abc
import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float

from rnnlib.fields import PositiveInteger
from rnnlib.layers.base import MixerShape
from rnnlib.layers.part import PartConfig

Activation = Literal["identity", "silu", "relu", "elu_plus_one", "sigmoid", "squared_relu", "gelu", "gelu_exact"]

ACTIVATIONS = {
    "identity": lambda x: x,
    "silu": jax.nn.silu,
    "relu": jax.nn.relu,
    "elu_plus_one": lambda x: jax.nn.elu(x) + 1.0,
    "sigmoid": jax.nn.sigmoid,
    "squared_relu": lambda x: jnp.square(jax.nn.relu(x)),
    "gelu": lambda x: jax.nn.gelu(x, approximate=True),
    "gelu_exact": lambda x: jax.nn.gelu(x, approximate=False),
}


class HeadMap(nnx.Module, abc.ABC):
    """A map of heads `[B, T, H, X]` to `[B, T, H, F]`, the same one for all heads."""

    @abc.abstractmethod
    def __call__(self, x: Float[Array, "B T H X"]) -> Float[Array, "B T H F"]:
        """Maps each head."""


@dataclasses.dataclass(frozen=True)
class FeatureMapConfig(PartConfig, abc.ABC):
    """Configuration of a feature map that is learned, or that changes the number of channels."""

    def features(self, size: int) -> int:
        """The number of channels F after the map, for a head of `size` channels."""
        return size

    @abc.abstractmethod
    def build(self, size: int, shape: MixerShape, *, rngs: nnx.Rngs) -> HeadMap:
        """Builds the module.

        Args:
            size: channels X of a head before the map.
            shape: the mixer's sizes, dtypes and initializer.
            rngs: source of parameters.
        """


FeatureMap = Activation | FeatureMapConfig


@dataclasses.dataclass(frozen=True)
class ProductMap(FeatureMapConfig):
    """`(W_1 x + b_1) * (W_2 x + b_2)`, channel by channel: flash-linear-attention's `elementwise_product`."""

    def build(self, size: int, shape: MixerShape, *, rngs: nnx.Rngs) -> "ProductHeadMap":
        """Builds the module."""
        return ProductHeadMap(size, shape, rngs=rngs)


class ProductHeadMap(HeadMap):
    """The product of two linear maps."""

    def __init__(self, size: int, shape: MixerShape, *, rngs: nnx.Rngs):
        self.first = shape.linear(size, size, use_bias=True, rngs=rngs)
        self.second = shape.linear(size, size, use_bias=True, rngs=rngs)

    def __call__(self, x: Float[Array, "B T H X"]) -> Float[Array, "B T H F"]:
        """Maps each head."""
        return self.first(x) * self.second(x)


@dataclasses.dataclass(frozen=True)
class ReluMap(FeatureMapConfig):
    """`relu(W x)`: T2R's map (Kasai et al., 2021, arXiv 2103.13076).

    Attributes:
        use_bias: whether there is a bias, `relu(W x + b)`.
    """

    use_bias: bool = False

    def build(self, size: int, shape: MixerShape, *, rngs: nnx.Rngs) -> "ReluHeadMap":
        """Builds the module."""
        return ReluHeadMap(self, size, shape, rngs=rngs)


class ReluHeadMap(HeadMap):
    """A linear map and a rectifier."""

    def __init__(self, config: ReluMap, size: int, shape: MixerShape, *, rngs: nnx.Rngs):
        self.linear = shape.linear(size, size, use_bias=config.use_bias, rngs=rngs)

    def __call__(self, x: Float[Array, "B T H X"]) -> Float[Array, "B T H F"]:
        """Maps each head."""
        return jax.nn.relu(self.linear(x))


@dataclasses.dataclass(frozen=True)
class HedgehogMap(FeatureMapConfig):
    """`softmax([2 y, -2 y])` of `y = W x + b`, twice as many channels (Zhang et al., 2024, arXiv 2402.04347).

    W starts as the identity, b at 0.
    """

    def features(self, size: int) -> int:
        """Twice the channels."""
        return 2 * size

    def build(self, size: int, shape: MixerShape, *, rngs: nnx.Rngs) -> "HedgehogHeadMap":
        """Builds the module."""
        return HedgehogHeadMap(size, shape, rngs=rngs)


class HedgehogHeadMap(HeadMap):
    """A linear map and a softmax over both signs."""

    def __init__(self, size: int, shape: MixerShape, *, rngs: nnx.Rngs):
        self.linear = shape.linear(size, size, use_bias=True, rngs=rngs)
        self.linear.kernel[...] = jnp.eye(size, dtype=shape.param_dtype)
        self.dtype = shape.gate_dtype

    def __call__(self, x: Float[Array, "B T H X"]) -> Float[Array, "B T H F"]:
        """Maps each head; the softmax is computed in float32 at least."""
        y = self.linear(x)
        wide = 2 * y.astype(self.dtype)
        return jax.nn.softmax(jnp.concatenate([wide, -wide], axis=-1), axis=-1).astype(y.dtype)


@dataclasses.dataclass(frozen=True)
class DPFPMap(FeatureMapConfig):
    """Deterministic parameter-free projection, `2 nu X` channels (Schlag et al., 2021, arXiv 2102.11174).

    With `r = [relu(x), relu(-x)]`, feature `j * 2 X + i` is `r_i r_(i - j - 1)`, indices modulo 2 X, `j < nu`.

    Attributes:
        nu: shifts, at most `2 X - 1`.
    """

    nu: PositiveInteger = 4

    def features(self, size: int) -> int:
        """`2 nu` times the channels."""
        return 2 * self.nu * size

    def build(self, size: int, shape: MixerShape, *, rngs: nnx.Rngs) -> "DPFPHeadMap":
        """Builds the module.

        Raises:
            ValueError: `nu` is more than the `2 X - 1` possible shifts.
        """
        if self.nu >= 2 * size:
            raise ValueError(f"DPFPMap: nu is {self.nu}, expected less than twice the {size} channels of a head")
        return DPFPHeadMap(self.nu)


class DPFPHeadMap(HeadMap):
    """Products of rectified channels with shifted ones."""

    def __init__(self, nu: int):
        self.nu = nu

    def __call__(self, x: Float[Array, "B T H X"]) -> Float[Array, "B T H F"]:
        """Maps each head."""
        rectified = jax.nn.relu(jnp.concatenate([x, -x], axis=-1))
        shifts = range(1, self.nu + 1)
        return jnp.concatenate([rectified * jnp.roll(rectified, shift, axis=-1) for shift in shifts], axis=-1)

"""Initial values of projection kernels."""

import dataclasses
from typing import Literal

import jax

from rnnlib.layers.part import PartConfig


@dataclasses.dataclass(frozen=True)
class Initializer(PartConfig):
    """A distribution of initial kernels.

    Attributes:
        kind: `"normal"` draws N(0, scale^2); `"xavier_uniform"` and `"fan_in_uniform"` draw
            U(-a, a) with `a = scale * sqrt(6 / (fan_in + fan_out))` and `a = scale * sqrt(1 / fan_in)`.
        scale: standard deviation of `"normal"`, gain of the others.
    """

    kind: Literal["normal", "xavier_uniform", "fan_in_uniform"] = "normal"
    scale: float = 0.02

    def build(self) -> jax.nn.initializers.Initializer:
        """The initializer as `jax.nn.initializers` writes it: a function of key, shape and dtype."""
        match self.kind:
            case "normal":
                return jax.nn.initializers.normal(self.scale)
            case "xavier_uniform":
                return jax.nn.initializers.variance_scaling(self.scale**2, "fan_avg", "uniform")
            case "fan_in_uniform":
                return jax.nn.initializers.variance_scaling(self.scale**2 / 3.0, "fan_in", "uniform")

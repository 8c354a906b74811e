"""Rotary positions: queries and keys turn with the token's position, so that their product knows the distance."""

import dataclasses
import math
from typing import Annotated

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from rnnlib.fields import PositiveInteger, Range
from rnnlib.layers.part import PartConfig
from rnnlib.ops.context_parallel import first_position
from rnnlib.ops.heads import rotate_pairs

RotaryBase = Annotated[float, Range(above=1, below=math.inf)]


@dataclasses.dataclass(frozen=True)
class Rotary(PartConfig):
    """Rotary position embedding (Su et al., 2021, arXiv 2104.09864).

    Attributes:
        base: channel pair `i` of R/2 turns by `base^(-2i/R)` radians a token.
        channels: how many channels R of a head turn, the first ones; None is all K.
    """

    base: RotaryBase = 10000.0
    channels: PositiveInteger | None = None

    def __call__(self, x: Float[Array, "B T H K"], positions: Int[Array, "B T"]) -> Float[Array, "B T H K"]:
        """Turns the channel pairs `(i, i + R/2)` of each head by the position's angle, computed in float32 at least.

        Args:
            x: queries or keys.
            positions: of each token, in tokens.

        Returns:
            Turned queries or keys, in `x`'s dtype.

        Raises:
            ValueError: R is odd or more than K.
        """
        angle = self.angle(x, positions)
        channels = 2 * angle.shape[-1]
        if channels == x.shape[-1]:
            return rotate_pairs(x, angle)
        return jnp.concatenate([rotate_pairs(x[..., :channels], angle), x[..., channels:]], axis=-1)

    def angle(self, x: Float[Array, "B T H K"], positions: Int[Array, "B T"]) -> Float[Array, "B T 1 P"]:
        """By how much the channel pairs of `x` turn, in radians, `P = R/2`; arguments and errors as for the call."""
        channels = x.shape[-1] if self.channels is None else self.channels
        if channels > x.shape[-1]:
            raise ValueError(f"Rotary: channels is {channels}, expected at most the {x.shape[-1]} of x {x.shape}")
        if channels % 2 != 0:
            raise ValueError(f"Rotary: x has shape {x.shape} and {channels} channels to turn, expected an even number")
        dtype = jnp.promote_types(x.dtype, jnp.float32)
        frequency = self.base ** (-jnp.arange(0, channels, 2, dtype=dtype) / channels)
        return positions[:, :, None, None].astype(dtype) * frequency


def running_positions(first: Int[Array, "B"] | None, batch: int, length: int) -> Int[Array, "B T"]:
    """Positions of `length` tokens that follow each other, from `first` (None: from the start of the row)."""
    start = jnp.full((batch,), first_position(length), jnp.int32) if first is None else first
    return start[:, None] + jnp.arange(length, dtype=jnp.int32)

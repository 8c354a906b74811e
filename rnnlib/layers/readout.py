"""The readout: from a recurrence's output to the mixer's, through skip, gate, norm and projection."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float

from rnnlib.layers.base import MixerShape, Rank
from rnnlib.layers.normalization import RMSNorm
from rnnlib.layers.part import PartConfig


@dataclasses.dataclass(frozen=True)
class ReadoutConfig(PartConfig):
    """How the recurrence's output is read.

    Attributes:
        gate: activation of the output gate `act(W x)`; `"none"` is no gate.
        gate_rank: of the gate's projection: None is full rank, `"value_size"` is V.
        gate_bias: whether the gate's projection has a bias.
        gate_first: gates before the norm (Mamba-2, `norm(o * silu(z))`) instead of after it.
        norm: RMS norm of each value head, of all heads together, or none.
        eps: of the norm.
        skip: adds `D v` with a learned `D` per value head, starting at 1, to the recurrence's output (Mamba-2).
    """

    gate: Literal["none", "silu", "sigmoid"] = "silu"
    gate_rank: Rank = None
    gate_bias: bool = False
    gate_first: bool = False
    norm: Literal["head", "all", "none"] = "head"
    eps: float = 1e-6
    skip: bool = False

    def build(self, shape: MixerShape, *, rngs: nnx.Rngs) -> "Readout":
        """Builds the module. A class of your own may give another, which is called as `Readout` is."""
        return Readout(self, shape, rngs=rngs)


class Readout(nnx.Module):
    """Skip, gate, norm, output projection."""

    def __init__(self, config: ReadoutConfig, shape: MixerShape, *, rngs: nnx.Rngs):
        self.config = config
        self.shape = shape
        features = shape.value_heads * shape.value_size
        self.skip = nnx.Param(jnp.ones((shape.value_heads,), shape.param_dtype)) if config.skip else None
        self.gate = (
            None
            if config.gate == "none"
            else shape.project(features, rank=config.gate_rank, use_bias=config.gate_bias, rngs=rngs)
        )
        normalised = shape.value_size if config.norm == "head" else features
        self.norm = (
            None
            if config.norm == "none"
            else RMSNorm(normalised, eps=config.eps, dtype=shape.gate_dtype, param_dtype=shape.param_dtype)
        )
        self.output = shape.linear(features, shape.width, rngs=rngs)

    def __call__(
        self, x: Float[Array, "B T D"], out: Float[Array, "B T HV V"], value: Float[Array, "B T HV V"]
    ) -> Float[Array, "B T D"]:
        """Reads the recurrence's output `out`; `x` is the mixer's input, `value` what was written."""
        y = out.astype(self.shape.gate_dtype)
        if self.skip is not None:
            y = y + self.skip[...].astype(y.dtype)[:, None] * value.astype(y.dtype)
        gate = self._gate(x)
        if gate is not None and self.config.gate_first:
            y = y * gate
        if self.norm is not None:
            flat = y.reshape(*y.shape[:2], -1) if self.config.norm == "all" else y
            y = self.norm(flat).reshape(y.shape)
        if gate is not None and not self.config.gate_first:
            y = y * gate
        return self.output(y.reshape(*y.shape[:2], -1).astype(self.shape.dtype))

    def _gate(self, x: Array) -> Array | None:
        if self.gate is None:
            return None
        activation = jax.nn.silu if self.config.gate == "silu" else jax.nn.sigmoid
        gate = activation(self.gate(x).astype(self.shape.gate_dtype))
        return gate.reshape(*x.shape[:2], self.shape.value_heads, self.shape.value_size)

"""Gains that only ablations need."""

import dataclasses

import jax.numpy as jnp
from flax import nnx
from jax import Array

from rnnlib.layers import ChannelGain, Decay, Gain, GainConfig, Gates, MixerShape


@dataclasses.dataclass(frozen=True)
class AveragedChannelGain(GainConfig):
    """Gated DeltaNet-2's gates with one of them averaged over its channels (its paper, table 5).

    The projections stay as they are, so that only the variation between channels goes.

    Attributes:
        erase: averages the erase gate over key channels ("w-only" in the paper).
        write: averages the write gate over value channels ("b-only").
    """

    erase: bool = False
    write: bool = False

    def build(self, shape: MixerShape, *, rngs: nnx.Rngs) -> "AveragedGates":
        """Builds the module."""
        return AveragedGates(self, shape, rngs=rngs)

    def describe(self) -> str:
        """The axis in a few words."""
        averaged = [name for name in ("erase", "write") if getattr(self, name)]
        return f"erase and write per channel, {' and '.join(averaged) or 'none'} averaged"


class AveragedGates(Gain):
    """Channel gates, averaged."""

    def __init__(self, config: AveragedChannelGain, shape: MixerShape, *, rngs: nnx.Rngs):
        self.config = config
        self.gates = ChannelGain().build(shape, rngs=rngs)

    def __call__(self, x: Array, decay: Decay) -> Gates:
        """Erase and write gates of `ChannelGain`, one of them constant over its channels."""
        gates = self.gates(x, decay)
        assert gates.erase is not None and gates.write is not None

        def averaged(gate: Array) -> Array:
            return jnp.broadcast_to(jnp.mean(gate, axis=-1, keepdims=True), gate.shape)

        return Gates(
            erase=averaged(gates.erase) if self.config.erase else gates.erase,
            write=averaged(gates.write) if self.config.write else gates.write,
        )

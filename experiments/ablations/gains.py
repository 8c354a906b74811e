"""Gains that only ablations need."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from rnnlib import ops
from rnnlib.layers import ChannelGain, Decay, Gain, GainConfig, Gates, MixerShape, ProjectedInput


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

    def __call__(self, inputs: ProjectedInput, decay: Decay) -> Gates:
        """Erase and write gates of `ChannelGain`, one of them constant over its channels."""
        gates = self.gates(inputs, decay)
        assert gates.erase is not None and gates.write is not None

        def averaged(gate: Array) -> Array:
            return jnp.broadcast_to(jnp.mean(gate, axis=-1, keepdims=True), gate.shape)

        return Gates(
            erase=averaged(gates.erase) if self.config.erase else gates.erase,
            write=averaged(gates.write) if self.config.write else gates.write,
        )


@dataclasses.dataclass(frozen=True)
class ScalarKaczmarzGain(GainConfig):
    """`beta_t = p / (k_t.k_t + eps)` with a learned number p per head: "learned scalar" (KLA paper, table 5).

    Attributes:
        initial: what p starts at; the text that we have leaves it open.
        eps: stabiliser, in the units of a squared key.
    """

    initial: float = 0.5
    eps: float = 1e-6

    def build(self, shape: MixerShape, *, rngs: nnx.Rngs) -> "ScalarKaczmarz":
        """Builds the module."""
        shape.expect_one_pair(type(self).__name__)
        return ScalarKaczmarz(self, shape)

    def describe(self) -> str:
        """The axis in a few words."""
        return "p / (k.k + eps), p learned"


class _Kaczmarz(Gain):
    """Gates `[B, T, HV]` divided by the squared length of the key, which value heads of a group share."""

    eps: float
    shape: MixerShape

    def normalize(self, gates: Gates, key: Array, write_key: Array | None = None) -> Gates:
        """The gates divided by the key's squared length."""
        assert gates.beta is not None
        grouped = gates.beta.reshape(*key.shape[:3], -1)
        divided = jax.vmap(ops.kaczmarz_gain, in_axes=(None, -1, None), out_axes=-1)(
            key.astype(self.shape.gate_dtype), grouped, self.eps
        )
        return Gates(beta=divided.reshape(gates.beta.shape))


class ScalarKaczmarz(_Kaczmarz):
    """The same gate at every token."""

    def __init__(self, config: ScalarKaczmarzGain, shape: MixerShape):
        self.eps = config.eps
        self.shape = shape
        self.gate = nnx.Param(jnp.full((shape.value_heads,), config.initial, jnp.float32))

    def __call__(self, inputs: ProjectedInput, decay: Decay) -> Gates:
        """Beta `[B, T, HV]`."""
        gate = self.gate[...].astype(self.shape.gate_dtype)
        return Gates(beta=jnp.broadcast_to(gate, (*inputs.x.shape[:2], self.shape.value_heads)))


@dataclasses.dataclass(frozen=True)
class SingleKaczmarzGain(GainConfig):
    """`beta_t = (1 - alpha_t) / (k_t.k_t + eps)`: one projection decides what is forgotten and what is written.

    "Single gate" (KLA paper, table 5, appendix D: decay and update bound to one projected mechanism); the form of the
    bond is our reading.

    Attributes:
        eps: stabiliser, in the units of a squared key.
    """

    eps: float = 1e-6

    def build(self, shape: MixerShape, *, rngs: nnx.Rngs) -> "SingleKaczmarz":
        """Builds the module."""
        shape.expect_one_pair(type(self).__name__)
        return SingleKaczmarz(self, shape)

    def describe(self) -> str:
        """The axis in a few words."""
        return "(1 - decay) / (k.k + eps)"


class SingleKaczmarz(_Kaczmarz):
    """The gate that the decay leaves."""

    def __init__(self, config: SingleKaczmarzGain, shape: MixerShape):
        self.eps = config.eps
        self.shape = shape

    def __call__(self, inputs: ProjectedInput, decay: Decay) -> Gates:
        """Beta `[B, T, HV]`.

        Raises:
            ValueError: there is no decay per head.
        """
        if decay.log_decay is None or decay.log_decay.ndim != 3:
            raise ValueError("SingleKaczmarzGain: expected a decay per head beside it")
        return Gates(beta=-jnp.expm1(decay.log_decay))

"""The keys axis: which key is written, and which query reads; the place of preconditioners."""

import abc
import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float, Int

from rnnlib.layers.base import MixerShape
from rnnlib.layers.decay import Decay
from rnnlib.layers.gates import Gates


class Keys(NamedTuple):
    """What the keys axis gives.

    Attributes:
        query: `[B, T, H, K]`, what reads the state.
        key: `[B, T, H, K]`, the read key of the delta rule.
        write_key: what the correction is written along: None (the read key), `[B, T, H, K]` or `[B, T, HV, K]`.
    """

    query: Array
    key: Array
    write_key: Array | None = None


class KeyMap(nnx.Module, abc.ABC):
    """Module of the keys axis."""

    @abc.abstractmethod
    def __call__(
        self,
        x: Float[Array, "B T D"],
        query: Float[Array, "B T H K"],
        key: Float[Array, "B T H K"],
        *,
        decay: Decay,
        gates: Gates,
        segment_ids: Int[Array, "B T"] | None = None,
        state: Any = None,
    ) -> tuple[Keys, Any]:
        """The keys that the recurrence takes, and the next state.

        Args:
            x: the mixer's input.
            query: queries after convolution, activation and norm.
            key: keys likewise.
            decay: what the decay axis gave, for maps whose own gates are tied to it.
            gates: what the gain axis gave before it was normalised by the keys, likewise.
            segment_ids: packed documents; a state restarts where the id changes.
            state: None (as `init_state` gives) or what the previous call returned.
        """

    def init_state(self, batch_size: int) -> Any:
        """The state before the first token, a pytree of arrays; None for maps without one."""
        return None


@dataclasses.dataclass(frozen=True)
class KeysConfig(abc.ABC):
    """Configuration of the keys axis."""

    @abc.abstractmethod
    def build(self, shape: MixerShape, *, rngs: nnx.Rngs) -> KeyMap:
        """Builds the module."""

    @abc.abstractmethod
    def describe(self) -> str:
        """The axis in a few words, for the table of mixers."""


@dataclasses.dataclass(frozen=True)
class PlainKeys(KeysConfig):
    """Reads with the query, erases and writes with the same key."""

    def build(self, shape: MixerShape, *, rngs: nnx.Rngs) -> "PlainKeyMap":
        """Builds the module."""
        return PlainKeyMap()

    def describe(self) -> str:
        """The axis in a few words, for the table of mixers."""
        return "k"


class PlainKeyMap(KeyMap):
    """Passes queries and keys on."""

    def __call__(
        self,
        x: Float[Array, "B T D"],
        query: Float[Array, "B T H K"],
        key: Float[Array, "B T H K"],
        *,
        decay: Decay,
        gates: Gates,
        segment_ids: Int[Array, "B T"] | None = None,
        state: Any = None,
    ) -> tuple[Keys, Any]:
        """Queries and keys as they are."""
        return Keys(query, key), None


@dataclasses.dataclass(frozen=True)
class OutputCorrection(KeysConfig):
    """Comba's output correction: the query `q - d k`, with a learned `d` per key head.

    Hu et al., 2025 (arXiv 2506.02475); taxonomy row in Preconditioned DeltaNet, table 2.

    Attributes:
        initial: what `d` starts at. The authors' code starts at 1 and recommends trying 0.02, the default here.
    """

    initial: float = 0.02

    def build(self, shape: MixerShape, *, rngs: nnx.Rngs) -> "OutputCorrectionMap":
        """Builds the module."""
        return OutputCorrectionMap(self, shape)

    def describe(self) -> str:
        """The axis in a few words, for the table of mixers."""
        return "k, query q - d k"


class OutputCorrectionMap(KeyMap):
    """`q - d k`."""

    def __init__(self, config: OutputCorrection, shape: MixerShape):
        self.correction = nnx.Param(jnp.full((shape.key_heads,), config.initial, shape.param_dtype))

    def __call__(
        self,
        x: Float[Array, "B T D"],
        query: Float[Array, "B T H K"],
        key: Float[Array, "B T H K"],
        *,
        decay: Decay,
        gates: Gates,
        segment_ids: Int[Array, "B T"] | None = None,
        state: Any = None,
    ) -> tuple[Keys, Any]:
        """The corrected query, and keys as they are."""
        return Keys(query - self.correction[...].astype(query.dtype)[:, None] * key, key), None

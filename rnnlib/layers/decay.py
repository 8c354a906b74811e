"""The decay axis: how much of the state each token keeps, as `log_decay <= 0`."""

import abc
import dataclasses
import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float

from rnnlib.fields import PositiveNumber
from rnnlib.layers.base import MixerShape, Rank
from rnnlib.layers.part import AxisConfig


class Decay(NamedTuple):
    """What the decay axis gives.

    Attributes:
        log_decay: natural log of the decay, float32: None (no decay), `[B, T, HV]` or `[B, T, HV, K]`.
        step: the discretisation step of decays that have one (Mamba-2's dt), shaped as `log_decay`; else None.
    """

    log_decay: Array | None = None
    step: Array | None = None


class DecayGate(nnx.Module, abc.ABC):
    """Module of the decay axis."""

    @abc.abstractmethod
    def __call__(self, x: Float[Array, "B T D"]) -> Decay:
        """The decay of each token of `x`."""


@dataclasses.dataclass(frozen=True)
class DecayConfig(AxisConfig):
    """Configuration of the decay axis."""

    @abc.abstractmethod
    def build(self, shape: MixerShape, *, rngs: nnx.Rngs) -> DecayGate:
        """Builds the module."""


@dataclasses.dataclass(frozen=True)
class NoDecay(DecayConfig):
    """`D_t = I`: nothing is forgotten but by the delta rule's own erasing."""

    words = "none"

    def build(self, shape: MixerShape, *, rngs: nnx.Rngs) -> "NoDecayGate":
        """Builds the module."""
        return NoDecayGate()


class NoDecayGate(DecayGate):
    """Gives no decay."""

    def __call__(self, x: Float[Array, "B T D"]) -> Decay:
        """An empty decay."""
        return Decay()


@dataclasses.dataclass(frozen=True)
class FixedDecay(DecayConfig):
    """RetNet's constant decay, `gamma_h = 1 - 2^(-first_exponent - h)` for value head `h = 0, 1, ...`."""

    words = "fixed per head"

    first_exponent: PositiveNumber = 5.0

    def build(self, shape: MixerShape, *, rngs: nnx.Rngs) -> "FixedDecayGate":
        """Builds the module."""
        return FixedDecayGate(self, shape)


class FixedDecayGate(DecayGate):
    """The same decay at every token."""

    def __init__(self, config: FixedDecay, shape: MixerShape):
        self.log_decay = tuple(
            math.log1p(-(2.0 ** -(config.first_exponent + head))) for head in range(shape.value_heads)
        )
        self.dtype = shape.gate_dtype

    def __call__(self, x: Float[Array, "B T D"]) -> Decay:
        """The constants, `[B, T, HV]`."""
        constants = jnp.asarray(self.log_decay, self.dtype)
        return Decay(log_decay=jnp.broadcast_to(constants, (*x.shape[:2], len(self.log_decay))))


_LOWEST_RATE = 1e-4  # of rates that tokens give themselves: what Mamba-3's code starts and stays above


@dataclasses.dataclass(frozen=True)
class SoftplusDecay(DecayConfig):
    """`log_decay = -exp(A_log) * softplus(W x + dt_bias)`, the state-space models' decay.

    Scalar per head it is Mamba-2's and Gated DeltaNet's; per key channel, Kimi Delta Attention's and Gated DeltaNet-2's
    (equation 12 there). Computed in float32; `A_log` and `dt_bias` are stored in float32.

    Attributes:
        channelwise: a decay per key channel instead of per head. `A_log` stays per head, `dt_bias` is per channel.
        rank: of the projection W; None is full rank, `"value_size"` is V.
        heads: whether each value head decays by itself or with its key head.
        rate: `exp(A_log)` starts uniformly in `(low, high]`. None: there is no `A_log`, the rate is the token's own,
            `softplus(W' x)` per head, at least 1e-4 (Mamba-3).
        step: softplus(dt_bias) starts log-uniformly in this range.
        step_floor: and not below this.
    """

    channelwise: bool = False
    rank: Rank = None
    heads: Literal["value", "key"] = "value"
    rate: tuple[float, float] | None = (0.0, 16.0)
    step: tuple[float, float] = (1e-3, 0.1)
    step_floor: float = 1e-4

    def build(self, shape: MixerShape, *, rngs: nnx.Rngs) -> "SoftplusDecayGate":
        """Builds the module."""
        if self.rate is not None and (not 0 <= self.rate[0] <= self.rate[1] or self.rate[1] <= 0):
            raise ValueError(f"SoftplusDecay: rate is {self.rate}, expected 0 <= low <= high, high > 0")
        if not 0 < self.step[0] <= self.step[1]:
            raise ValueError(f"SoftplusDecay: step is {self.step}, expected 0 < low <= high")
        return SoftplusDecayGate(self, shape, rngs=rngs)

    def describe(self) -> str:
        """The axis in a few words, for the table of mixers."""
        return "channel" if self.channelwise else "scalar"


class SoftplusDecayGate(DecayGate):
    """`-rate * softplus(W x + dt_bias)`."""

    def __init__(self, config: SoftplusDecay, shape: MixerShape, *, rngs: nnx.Rngs):
        self.shape = shape
        self.heads = config.heads
        self.channelwise = config.channelwise
        heads = shape.value_heads if config.heads == "value" else shape.key_heads
        features = heads * shape.key_size if config.channelwise else heads
        self.projection = shape.project(features, rank=config.rank, rngs=rngs)

        self.A_log = None if config.rate is None else self._initial_rate(heads, config.rate, rngs)
        self.rate_projection = shape.project(heads, rngs=rngs) if config.rate is None else None
        log_step = jax.random.uniform(
            rngs.params(), (features,), jnp.float32, math.log(config.step[0]), math.log(config.step[1])
        )
        step = jnp.maximum(jnp.exp(log_step), config.step_floor)
        self.dt_bias = nnx.Param(step + jnp.log(-jnp.expm1(-step)))  # softplus(dt_bias) = step

    @staticmethod
    def _initial_rate(heads: int, bounds: tuple[float, float], rngs: nnx.Rngs) -> nnx.Param:
        low, high = bounds
        # 1 - U[0, 1) is never 0, so that the logarithm is finite where the range begins at 0.
        rate = low + (high - low) * (1.0 - jax.random.uniform(rngs.params(), (heads,), jnp.float32))
        return nnx.Param(jnp.log(rate))

    def _rate(self, x: Array) -> Array:
        """`[heads]`, or `[B, T, heads]` where the token gives it."""
        dtype = self.shape.gate_dtype
        if self.A_log is not None:
            return jnp.exp(self.A_log[...].astype(dtype))
        assert self.rate_projection is not None
        return jnp.maximum(jax.nn.softplus(self.rate_projection(x).astype(dtype)), _LOWEST_RATE)

    def __call__(self, x: Float[Array, "B T D"]) -> Decay:
        """Decay and step, `[B, T, HV]` or `[B, T, HV, K]`, float32."""
        dtype = self.shape.gate_dtype
        step = jax.nn.softplus(self.projection(x).astype(dtype) + self.dt_bias[...].astype(dtype))
        rate = self._rate(x)
        if self.channelwise:
            step = step.reshape(*step.shape[:2], rate.shape[-1], self.shape.key_size)
            rate = rate[..., None]
        log_decay = -rate * step
        if self.heads == "key":
            log_decay, step = self.shape.repeat_key_heads(log_decay), self.shape.repeat_key_heads(step)
        return Decay(log_decay=log_decay, step=step)


@dataclasses.dataclass(frozen=True)
class LogSigmoidDecay(DecayConfig):
    """`log_decay = log sigmoid(W x + b) / divisor`: Gated Linear Attention's (per channel), MesaNet's (per head).

    Attributes:
        channelwise: a decay per key channel instead of per head.
        rank: of the projection W; None is full rank, `"value_size"` is V.
        divisor: GLA's temperature 16 keeps decays near 1.
        use_bias: whether the projection has a bias b.
    """

    channelwise: bool = True
    rank: Rank = 16
    divisor: PositiveNumber = 16.0
    use_bias: bool = True

    def build(self, shape: MixerShape, *, rngs: nnx.Rngs) -> "LogSigmoidDecayGate":
        """Builds the module."""
        return LogSigmoidDecayGate(self, shape, rngs=rngs)

    def describe(self) -> str:
        """The axis in a few words, for the table of mixers."""
        return "channel" if self.channelwise else "scalar"


class LogSigmoidDecayGate(DecayGate):
    """`log sigmoid(W x + b) / divisor`."""

    def __init__(self, config: LogSigmoidDecay, shape: MixerShape, *, rngs: nnx.Rngs):
        self.config = config
        self.shape = shape
        features = shape.value_heads * (shape.key_size if config.channelwise else 1)
        self.projection = shape.project(features, rank=config.rank, use_bias=config.use_bias, rngs=rngs)

    def __call__(self, x: Float[Array, "B T D"]) -> Decay:
        """Decay `[B, T, HV]` or `[B, T, HV, K]`, float32."""
        logits = self.projection(x).astype(self.shape.gate_dtype)
        log_decay = jax.nn.log_sigmoid(logits) / self.config.divisor
        if self.config.channelwise:
            log_decay = log_decay.reshape(*log_decay.shape[:2], self.shape.value_heads, self.shape.key_size)
        return Decay(log_decay=log_decay)

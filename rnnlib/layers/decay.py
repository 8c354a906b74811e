"""The decay axis: how much of the state each token keeps, as `log_decay <= 0`."""

import abc
import dataclasses
import math
from typing import Annotated, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from rnnlib.fields import NaturalNumber, PositiveInteger, PositiveNumber, Range
from rnnlib.layers.array_types import KeyHeads
from rnnlib.layers.base import MixerShape, Rank
from rnnlib.layers.input_projection import ColumnReader, ProjectedInput
from rnnlib.layers.part import AxisConfig
from rnnlib.layers.tensor import first_of_shard
from rnnlib.ops.skinny_gemm import Epilogue, LogDecay
from rnnlib.ops.softplus_decay import softplus_decay, softplus_decay_supports

NegativeNumber = Annotated[float, Range(below=0)]


class Decay(NamedTuple):
    """The result of the decay axis.

    Attributes:
        log_decay: natural log of the decay, float32: None (no decay), `[B, T, HV]` or `[B, T, HV, K]`.
        step: the discretisation step of decays that have one (Mamba-2's dt), shaped as `log_decay`; else None.
    """

    log_decay: Array | None = None
    step: Array | None = None


class DecayGate(nnx.Module, ColumnReader, abc.ABC):
    """Module of the decay axis."""

    @abc.abstractmethod
    def __call__(self, inputs: ProjectedInput) -> Decay:
        """The decay of each token.

        Args:
            inputs: the module's columns of the input projection by name, and the mixer's input `inputs.x` `[B, T, D]`.
        """

    def with_key(self, inputs: ProjectedInput, key: KeyHeads) -> tuple[Decay, KeyHeads]:
        """The decay, and the key as the recurrence takes it, for decays that are tied to the key."""
        return self(inputs), key


@dataclasses.dataclass(frozen=True)
class DecayConfig(AxisConfig):
    """Configuration of the decay axis."""

    @abc.abstractmethod
    def build(self, shape: MixerShape, *, rngs: nnx.Rngs) -> DecayGate:
        """Builds the module."""


@dataclasses.dataclass(frozen=True)
class NoDecay(DecayConfig):
    """`D_t = I`: nothing decays; only the delta rule erases."""

    words = "none"

    def build(self, shape: MixerShape, *, rngs: nnx.Rngs) -> "NoDecayGate":
        """Builds the module."""
        return NoDecayGate()


class NoDecayGate(DecayGate):
    """Gives no decay."""

    def __call__(self, inputs: ProjectedInput) -> Decay:
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
        heads = range(shape.value_heads * shape.tp_size)
        self.log_decay = tuple(math.log1p(-(2.0 ** -(config.first_exponent + head))) for head in heads)
        self.shape = shape
        self.dtype = shape.gate_dtype

    def __call__(self, inputs: ProjectedInput) -> Decay:
        """The constants, `[B, T, HV]`."""
        constants, own = jnp.asarray(self.log_decay, self.dtype), self.shape.value_heads
        if self.shape.tp_size > 1:
            constants = jax.lax.dynamic_slice(constants, (first_of_shard(own, self.shape.tp_size),), (own,))
        return Decay(log_decay=jnp.broadcast_to(constants, (*inputs.x.shape[:2], own)))


_LOWEST_RATE = 1e-4  # Lower bound of a rate computed from the token, as in Mamba-3's code.


@dataclasses.dataclass(frozen=True)
class StateSpaceDecay(DecayConfig):
    """A decay computed in float32 from a rate `exp(A_log)` and from `W x + dt_bias`.

    `A_log` and `dt_bias` are stored in float32.

    Attributes:
        channelwise: a decay per key channel instead of per head. `A_log` stays per head, `dt_bias` is per channel.
        rank: of the projection W; None is full rank, `"value_size"` is V.
        heads: whether each value head decays by itself or with its key head.
        rate: range `(low, high]` of the uniform initial value of `exp(A_log)`. With None there is no `A_log`: the rate
            is computed from the token as `softplus(W' x)` per head, at least 1e-4 (Mamba-3).
        step: range of the log-uniform initial value of `softplus(dt_bias)`.
        step_floor: lower bound of that initial value.
        use_bias: whether the projection has a bias beside dt_bias.
        scale: factor on `W x` (a multiplier of muP), not on `dt_bias`.
    """

    channelwise: bool = False
    rank: Rank = None
    heads: Literal["value", "key"] = "value"
    rate: tuple[float, float] | None = (0.0, 16.0)
    step: tuple[float, float] = (1e-3, 0.1)
    step_floor: float = 1e-4
    use_bias: bool = False
    scale: PositiveNumber = 1.0

    def check_ranges(self) -> None:
        """Raises ValueError, for `build`, if a range is empty or contains numbers that are not positive."""
        name = type(self).__name__
        if self.rate is not None and (not 0 <= self.rate[0] <= self.rate[1] or self.rate[1] <= 0):
            raise ValueError(f"{name}: rate is {self.rate}, expected 0 <= low <= high, high > 0")
        if not 0 < self.step[0] <= self.step[1]:
            raise ValueError(f"{name}: step is {self.step}, expected 0 < low <= high")

    def describe(self) -> str:
        """The axis in a few words, for the table of mixers."""
        return "channel" if self.channelwise else "scalar"


class StateSpaceDecayGate(DecayGate):
    """Base of the decays with a rate and `W x + dt_bias`."""

    def __init__(self, config: StateSpaceDecay, shape: MixerShape, *, rngs: nnx.Rngs):
        self.shape = shape
        self.heads = config.heads
        self.channelwise = config.channelwise
        heads = shape.value_heads if config.heads == "value" else shape.key_heads
        features = heads * shape.key_size if config.channelwise else heads
        maps = {"decay": shape.project(features, rank=config.rank, use_bias=config.use_bias, rngs=rngs)}
        self.scale = config.scale
        self.A_log = None if config.rate is None else self._initial_rate(heads, config.rate, rngs)
        if config.rate is None:
            maps["decay_rate"] = shape.project(heads, rngs=rngs)
        self.read_columns(**maps)
        log_step = jax.random.uniform(
            rngs.params(), (features,), jnp.float32, math.log(config.step[0]), math.log(config.step[1])
        )
        step = jnp.maximum(jnp.exp(log_step), config.step_floor)
        self.dt_bias = nnx.Param(step + jnp.log(-jnp.expm1(-step)))  # softplus(dt_bias) = step

    @staticmethod
    def _initial_rate(heads: int, bounds: tuple[float, float], rngs: nnx.Rngs) -> nnx.Param:
        low, high = bounds
        # 1 - U[0, 1) is never 0, so the logarithm is finite even if the range begins at 0.
        rate = low + (high - low) * (1.0 - jax.random.uniform(rngs.params(), (heads,), jnp.float32))
        return nnx.Param(jnp.log(rate))

    def rate(self, inputs: ProjectedInput) -> Array:
        """`[heads]`, or `[B, T, heads]` if it is computed from the token; by channel, with an axis of size 1 behind."""
        dtype = self.shape.gate_dtype
        if self.A_log is not None:
            rate = jnp.exp(self.A_log[...].astype(dtype))
        else:
            rate = jnp.maximum(jax.nn.softplus(inputs["decay_rate"].astype(dtype)), _LOWEST_RATE)
        return rate[..., None] if self.channelwise else rate

    def projected(self, inputs: ProjectedInput) -> Array:
        """`scale W x`, in the compute dtype."""
        return inputs["decay"] if self.scale == 1 else inputs["decay"] * self.scale

    def logits(self, inputs: ProjectedInput) -> Array:
        """`scale W x + dt_bias`, `[B, T, heads]` or `[B, T, heads, K]`, float32."""
        dtype = self.shape.gate_dtype
        return self._by_head(self.projected(inputs).astype(dtype) + self.dt_bias[...].astype(dtype))

    def _by_head(self, x: Array) -> Array:
        """What is by channel as `[B, T, heads, K]`; what is by head, as it is."""
        return x.reshape(*x.shape[:2], -1, self.shape.key_size) if self.channelwise else x

    def per_value_head(self, x: Array) -> Array:
        """An array of the decay's heads, repeated for each value head."""
        return self.shape.repeat_key_heads(x) if self.heads == "key" else x


@dataclasses.dataclass(frozen=True)
class SoftplusDecay(StateSpaceDecay):
    """`log_decay = -exp(A_log) * softplus(W x + dt_bias)`, the state-space models' decay.

    Scalar per head it is Mamba-2's and Gated DeltaNet's; per key channel, Kimi Delta Attention's and Gated DeltaNet-2's
    (equation 12 there).

    Attributes:
        step_limits: lower and upper limit that the softplus is clamped to (Mamba-2's `time_step_limit`); the upper one
            may be infinity. None is no clamp.
    """

    step_limits: tuple[float, float] | None = None

    def build(self, shape: MixerShape, *, rngs: nnx.Rngs) -> "SoftplusDecayGate":
        """Builds the module.

        Raises:
            ValueError: a range is empty, or allows what is not positive.
        """
        self.check_ranges()
        if self.step_limits is not None and not 0 <= self.step_limits[0] < self.step_limits[1]:
            raise ValueError(f"SoftplusDecay: step_limits is {self.step_limits}, expected 0 <= low < high")
        return SoftplusDecayGate(self, shape, rngs=rngs)


@jax.custom_jvp
def _with_derivative(log_decay: Array, rate: Array, logits: Array) -> Array:
    """`log_decay`, known to be `-rate * softplus(logits)`, with a derivative that is found from it and the rate alone.

    That derivative takes the place of the argument's own, which further derivatives go through.
    """
    return log_decay


@_with_derivative.defjvp
def _(primals: tuple[Array, ...], tangents: tuple[Array, ...]) -> tuple[Array, Array]:
    log_decay, rate, _ = primals
    step = -log_decay / jnp.maximum(rate, jnp.finfo(rate.dtype).tiny)
    sigmoid = -jnp.expm1(-step)  # of the logits
    return log_decay, -step * tangents[1] - rate * sigmoid * tangents[2]


class SoftplusDecayGate(StateSpaceDecayGate):
    """`-rate * softplus(W x + dt_bias)`."""

    def __init__(self, config: SoftplusDecay, shape: MixerShape, *, rngs: nnx.Rngs):
        super().__init__(config, shape, rngs=rngs)
        self.step_limits = config.step_limits

    def epilogues(self) -> dict[str, Epilogue]:
        """The log decay, of a rate that is no function of the token, without limits and without a scale."""
        if self.A_log is None or self.step_limits is not None or self.scale != 1:
            return {}
        dtype = self.shape.gate_dtype
        return {"decay": LogDecay(self.A_log[...].astype(dtype), self.dt_bias[...].astype(dtype))}

    def __call__(self, inputs: ProjectedInput) -> Decay:
        """Decay and step, `[B, T, HV]` or `[B, T, HV, K]`, float32. XLA drops the step where no gate takes it."""
        rate, log_decay = self.rate(inputs), inputs.epilogue("decay")
        if log_decay is not None:
            log_decay = self._by_head(log_decay)
            step = -log_decay / jnp.maximum(rate, jnp.finfo(rate.dtype).tiny)
        else:
            log_decay, step = self._log_decay_and_step(inputs, rate)
        return Decay(log_decay=self.per_value_head(log_decay), step=self.per_value_head(step))

    def _log_decay_and_step(self, inputs: ProjectedInput, rate: Array) -> tuple[Array, Array]:
        """Both from the column."""
        logits = self.logits(inputs)
        if self.step_limits is not None:
            step = jnp.clip(jax.nn.softplus(logits), *self.step_limits)
            return -self._summed_by_channel(rate, inputs) * step, step
        step = jax.nn.softplus(logits)
        if self.channelwise and rate.ndim == 2:
            of_channels, bias = jnp.repeat(rate[:, 0], self.shape.key_size), self.dt_bias[...]
            projected = self.projected(inputs)
            if softplus_decay_supports(projected, of_channels, bias):
                return softplus_decay(projected, of_channels, bias).reshape(logits.shape), step
        rate = self._summed_by_channel(rate, inputs)
        # The backward pass keeps the log decay, which the operator keeps as well, and neither step nor logits.
        return jax.checkpoint(_with_derivative)(-rate * step, rate, logits), step

    def _summed_by_channel(self, rate: Array, inputs: ProjectedInput) -> Array:
        """The rate; that of channels of many tokens behind a barrier.

        The barrier has the rate's gradient added up over tokens, then over channels. XLA would begin with the channels,
        which takes passes over all tokens of its own.
        """
        if not self.channelwise or rate.ndim != 2 or inputs.x.shape[1] == 1:
            return rate
        return jax.lax.optimization_barrier(jnp.broadcast_to(rate, (len(rate), self.shape.key_size)))


@dataclasses.dataclass(frozen=True)
class BoundedDecay(StateSpaceDecay):
    """`log_decay = lower_bound * sigmoid(exp(A_log) * (W x + dt_bias))`: its log is bounded from below.

    Kimi Delta Attention with a `lower_bound`, as flash-linear-attention has it. With such a bound, products of decays
    over 16 tokens stay within float32.

    Attributes:
        lower_bound: of the log decay.
    """

    lower_bound: NegativeNumber = -5.0

    def build(self, shape: MixerShape, *, rngs: nnx.Rngs) -> "BoundedDecayGate":
        """Builds the module.

        Raises:
            ValueError: a range is empty, or allows what is not positive.
        """
        self.check_ranges()
        return BoundedDecayGate(self, shape, rngs=rngs)


class BoundedDecayGate(StateSpaceDecayGate):
    """`lower_bound * sigmoid(rate * (W x + dt_bias))`."""

    def __init__(self, config: BoundedDecay, shape: MixerShape, *, rngs: nnx.Rngs):
        super().__init__(config, shape, rngs=rngs)
        self.lower_bound = config.lower_bound

    def __call__(self, inputs: ProjectedInput) -> Decay:
        """Decay `[B, T, HV]` or `[B, T, HV, K]`, float32."""
        log_decay = self.lower_bound * jax.nn.sigmoid(self.rate(inputs) * self.logits(inputs))
        return Decay(log_decay=self.per_value_head(log_decay))


@dataclasses.dataclass(frozen=True)
class LogSigmoidDecay(DecayConfig):
    """`log_decay = log sigmoid(W x + b) / divisor`: Gated Linear Attention's (per channel), MesaNet's (per head).

    Attributes:
        channelwise: a decay per key channel instead of per head.
        rank: of the projection W; None is full rank, `"value_size"` is V.
        divisor: GLA's temperature 16 keeps decays near 1.
        use_bias: whether the projection has a bias b.
        lowest: lower bound that the log decay is clamped to; None is no bound.
        heads: whether each value head has its own decay, or all heads with the same projected key and value share one
            (`RecurrentMixerConfig.shared_heads`).
    """

    channelwise: bool = True
    rank: Rank = 16
    divisor: PositiveNumber = 16.0
    use_bias: bool = True
    lowest: NegativeNumber | None = None
    heads: Literal["value", "shared"] = "value"

    def build(self, shape: MixerShape, *, rngs: nnx.Rngs) -> "LogSigmoidDecayGate":
        """Builds the module."""
        return LogSigmoidDecayGate(self, shape, rngs=rngs)

    def describe(self) -> str:
        """The axis in a few words, for the table of mixers."""
        return "channel" if self.channelwise else "scalar"


class LogSigmoidDecayGate(DecayGate):
    """`log sigmoid(W x + b) / divisor`, not below the lowest."""

    def __init__(self, config: LogSigmoidDecay, shape: MixerShape, *, rngs: nnx.Rngs):
        self.config = config
        self.shape = shape
        heads = shape.value_heads
        if config.heads == "shared" and shape.shared_heads is not None:
            heads = shape.shared_heads
        features = heads * (shape.decay_channels if config.channelwise else 1)
        self.read_columns(decay=shape.project(features, rank=config.rank, use_bias=config.use_bias, rngs=rngs))

    def __call__(self, inputs: ProjectedInput) -> Decay:
        """Decay `[B, T, HV]` or `[B, T, HV, K]`, float32."""
        logits = inputs["decay"].astype(self.shape.gate_dtype)
        log_decay = jax.nn.log_sigmoid(logits) / self.config.divisor
        if self.config.lowest is not None:
            log_decay = jnp.maximum(log_decay, self.config.lowest)
        if self.config.channelwise:
            log_decay = log_decay.reshape(*log_decay.shape[:2], -1, self.shape.decay_channels)
        return Decay(log_decay=self.shape.repeat_key_heads(log_decay))


@dataclasses.dataclass(frozen=True)
class KeyDecay(DecayConfig):
    """HGRN-2's decay (arXiv 2404.07904): `alpha = sigmoid(k)` per key channel, and the key is `1 - alpha`.

    What a token forgets of a channel it writes. With a lower bound, `alpha = b + (1 - b) sigmoid(k)`, where b rises
    from 0 in a model's first layer: `b_i = sum_(j <= i) p_j - p_0`, p being the softmax over layers of an array
    `[layers, H * K]` that all of them share (HGRN, arXiv 2311.04823, section 3.2).

    Attributes:
        num_layers: of the model, for lower bounds; None is no bound.
        layer: the layer's number in the model, from 0. In `ModelConfig`, layers of other numbers are variants,
            `"hgrn2/0"`, `"hgrn2/1"` and so on.
    """

    words = "channel, with the key 1 - decay"

    num_layers: PositiveInteger | None = None
    layer: NaturalNumber = 0

    def build(self, shape: MixerShape, *, rngs: nnx.Rngs) -> "KeyDecayGate":
        """Builds the module.

        Raises:
            ValueError: there are fewer layers, or more value heads than key heads.
        """
        if self.num_layers is not None and self.layer >= self.num_layers:
            raise ValueError(f"KeyDecay: layer is {self.layer}, expected less than num_layers = {self.num_layers}")
        if shape.group != 1 or shape.shared_heads is not None:
            raise ValueError("KeyDecay: several value heads use a key head, expected one each")
        return KeyDecayGate(self, shape)


class KeyDecayGate(DecayGate):
    """The decay and the key, of the key's branch.

    Attributes:
        lower_bounds: `[layers, H * K]`, or None.
    """

    # Names of variables that all layers of a model share (`rnnlib.models.block.share_variables`).
    shared_variables = ("lower_bounds",)

    def __init__(self, config: KeyDecay, shape: MixerShape):
        self.config = config
        self.shape = shape
        channels = (config.num_layers or 0, shape.key_heads * shape.key_size)
        self.lower_bounds = nnx.Param(jnp.zeros(channels, shape.param_dtype)) if config.num_layers else None

    def __call__(self, inputs: ProjectedInput) -> Decay:
        """TypeError: the decay is known with the key alone."""
        raise TypeError("KeyDecay: its decay depends on the key, expected a call of with_key")

    def with_key(self, inputs: ProjectedInput, key: KeyHeads) -> tuple[Decay, KeyHeads]:
        """The decay `[B, T, H, K]`, float32, and the key `1 - alpha`."""
        logits = key.astype(self.shape.gate_dtype)
        if self.lower_bounds is None or not self.config.layer:
            return Decay(jax.nn.log_sigmoid(logits)), jax.nn.sigmoid(-logits).astype(key.dtype)
        parts = jax.nn.softmax(self.lower_bounds[...].astype(logits.dtype), axis=0)
        bound = jnp.sum(parts[1 : self.config.layer + 1], axis=0).reshape(key.shape[2:])
        forgotten = (1 - bound) * jax.nn.sigmoid(-logits)
        return Decay(jnp.log1p(-forgotten)), forgotten.astype(key.dtype)

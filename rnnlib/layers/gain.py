"""The gain axis: how strongly a token erases and writes."""

import abc
import dataclasses
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float

from rnnlib import ops
from rnnlib.fields import PositiveNumber, Range
from rnnlib.layers.array_types import Gates
from rnnlib.layers.base import MixerShape
from rnnlib.layers.decay import Decay
from rnnlib.layers.input_projection import ColumnReader, ProjectedInput
from rnnlib.layers.part import AxisConfig
from rnnlib.ops.skinny_gemm import BoundedSigmoid, Epilogue


class Gain(nnx.Module, ColumnReader, abc.ABC):
    """Module of the gain axis: a learned gate, then a normalisation of it by the keys that will be written.

    A gain depends on one token: it gets neither documents nor a state. A rule that remembers earlier tokens, such as an
    average of key norms, belongs on the keys axis, whose maps have a state, and scales the write key.
    """

    @abc.abstractmethod
    def __call__(self, inputs: ProjectedInput, decay: Decay) -> Gates:
        """The learned gates of each token.

        Args:
            inputs: the module's columns of the input projection by name, and the mixer's input `inputs.x` `[B, T, D]`.
            decay: the result of the decay axis.
        """

    def normalize(
        self, gates: Gates, key: Float[Array, "B T H K"], write_key: Float[Array, "B T HX K"] | None = None
    ) -> Gates:
        """The gates normalised by the keys; unchanged for gains that do not depend on keys."""
        return gates


@dataclasses.dataclass(frozen=True)
class GainConfig(AxisConfig):
    """Configuration of the gain axis."""

    @abc.abstractmethod
    def build(self, shape: MixerShape, *, rngs: nnx.Rngs) -> Gain:
        """Builds the module."""


@dataclasses.dataclass(frozen=True)
class UnitGain(GainConfig):
    """No gate: every token writes with strength 1."""

    words = "1"

    def build(self, shape: MixerShape, *, rngs: nnx.Rngs) -> "UnitGate":
        """Builds the module."""
        return UnitGate()


class UnitGate(Gain):
    """Gives no gates."""

    def __call__(self, inputs: ProjectedInput, decay: Decay) -> Gates:
        """Empty gates, which stand for 1."""
        return Gates()


@dataclasses.dataclass(frozen=True)
class SigmoidGain(GainConfig):
    """`beta = sigmoid(W x)` per value head, the delta rule's writing strength (DeltaNet, equation 5 of GDN-2).

    Attributes:
        negative_eigenvalues: doubles beta, so that a transition's eigenvalue along the key lies in [-1, 1]
            (Grazzi et al., 2024, arXiv 2411.12537).
        use_bias: whether the projection has a bias, `sigmoid(W x + b)`.
        heads: whether each value head has a gain of its own or that of its key head.
    """

    words = "sigmoid"

    negative_eigenvalues: bool = False
    use_bias: bool = False
    heads: Literal["value", "key"] = "value"

    def build(self, shape: MixerShape, *, rngs: nnx.Rngs) -> "SigmoidGate":
        """Builds the module."""
        bound = 2.0 if self.negative_eigenvalues else 1.0
        return SigmoidGate(shape, bound=bound, use_bias=self.use_bias, heads=self.heads, rngs=rngs)


class SigmoidGate(Gain):
    """`bound * sigmoid(W x (+ b))`."""

    def __init__(
        self,
        shape: MixerShape,
        *,
        bound: float,
        use_bias: bool = False,
        heads: Literal["value", "key"] = "value",
        rngs: nnx.Rngs,
    ):
        self.shape = shape
        self.bound = bound
        gates = shape.value_heads if heads == "value" else shape.key_heads
        self.read_columns(write_gate=shape.project(gates, use_bias=use_bias, rngs=rngs))

    def __call__(self, inputs: ProjectedInput, decay: Decay) -> Gates:
        """Beta `[B, T, HV]`."""
        beta = inputs.epilogue("write_gate")
        if beta is None:
            beta = BoundedSigmoid(self.bound)(inputs["write_gate"].astype(self.shape.gate_dtype))
        return Gates(beta=self.shape.repeat_key_heads(beta))

    def epilogues(self) -> dict[str, Epilogue]:
        """Beta."""
        return {"write_gate": BoundedSigmoid(self.bound)}


class KeyEnergyGain(GainConfig):
    """A gain that is a formula of the key and of a learned gate, `sigmoid(W x)`."""

    @abc.abstractmethod
    def formula(self, key: Array, gate: Array) -> Array:
        """The gain `[B, T, H]` of keys `[B, T, H, K]` and gates `[B, T, H]`, both float32."""

    def build(self, shape: MixerShape, *, rngs: nnx.Rngs) -> "NormalizedGate":
        """Builds the module."""
        return NormalizedGate(self, shape, rngs=rngs)


class NormalizedGate(SigmoidGate):
    """A sigmoid gate, then a function of it and of the key."""

    def __init__(self, config: KeyEnergyGain, shape: MixerShape, *, bound: float = 1.0, rngs: nnx.Rngs):
        shape.expect_one_pair(type(config).__name__)
        super().__init__(shape, bound=bound, rngs=rngs)
        self.config = config

    def normalize(
        self, gates: Gates, key: Float[Array, "B T H K"], write_key: Float[Array, "B T HX K"] | None = None
    ) -> Gates:
        """The gates normalised by the gain's formula."""
        assert gates.beta is not None
        grouped = gates.beta.reshape(*key.shape[:3], -1)

        # The value heads of a group share a key: the keys are broadcast, not repeated.
        def formula(key: Array, gate: Array) -> Array:
            gain = self.config.formula(key, gate)
            name = f"{type(self.config).__name__}.formula"
            if not isinstance(gain, Array):
                raise TypeError(f"{name} gave a {type(gain).__name__}, expected an array [B, T, H] = {gate.shape}")
            if gain.shape != gate.shape:
                raise ValueError(f"{name} gave shape {gain.shape}, expected [B, T, H] = {gate.shape}")
            return gain

        gain = jax.vmap(formula, in_axes=(None, -1), out_axes=-1)(key.astype(self.shape.gate_dtype), grouped)
        return Gates(beta=gain.reshape(gates.beta.shape))


@dataclasses.dataclass(frozen=True)
class KaczmarzGain(KeyEnergyGain):
    """`beta = eta / (k.k + eps)`, `eta = sigmoid(W x)`: a relaxed projection onto `S^T k = v` (KLA, equation 3).

    Attributes:
        eps: stabiliser, in the units of a squared key.
        negative_eigenvalues: doubles eta; the transition's eigenvalue along the key stays in [-1, 1].
    """

    words = "eta / (k.k + eps)"

    eps: PositiveNumber = 1e-6
    negative_eigenvalues: bool = False

    def build(self, shape: MixerShape, *, rngs: nnx.Rngs) -> NormalizedGate:
        """Builds the module."""
        return NormalizedGate(self, shape, bound=2.0 if self.negative_eigenvalues else 1.0, rngs=rngs)

    def formula(self, key: Array, gate: Array) -> Array:
        """`gate / (key.key + eps)`."""
        return ops.kaczmarz_gain(key, gate, self.eps)


@dataclasses.dataclass(frozen=True)
class LonghornGain(KeyEnergyGain):
    """`b / (1 + b k.k)`, `b = sigmoid(W x)`: the implicit step of online regression.

    Liu et al., 2024 (arXiv 2407.14207).
    """

    words = "b / (1 + b k.k)"

    def formula(self, key: Array, gate: Array) -> Array:
        """`gate / (1 + gate key.key)`."""
        return ops.longhorn_gain(key, gate)


@dataclasses.dataclass(frozen=True)
class EFLAGain(KeyEnergyGain):
    """`(1 - exp(-b k.k)) / k.k`, `b = sigmoid(W x)`: the exact step of the continuous-time delta rule.

    Lei et al., 2025 (arXiv 2512.12602).
    """

    words = "(1 - exp(-b k.k)) / k.k"

    def formula(self, key: Array, gate: Array) -> Array:
        """`(1 - exp(-gate key.key)) / key.key`."""
        return ops.efla_gain(key, gate)


@dataclasses.dataclass(frozen=True)
class NLMSGain(GainConfig):
    """`1 / (k.k + eps)`: normalised least mean squares, each write an exact projection (test-time regression).

    Attributes:
        eps: stabiliser, in the units of a squared key.
    """

    words = "1 / k.k"

    eps: PositiveNumber = 1e-6

    def build(self, shape: MixerShape, *, rngs: nnx.Rngs) -> "NLMSGate":
        """Builds the module."""
        return NLMSGate(self, shape)


class NLMSGate(Gain):
    """`1 / (k.k + eps)`."""

    def __init__(self, config: NLMSGain, shape: MixerShape):
        shape.expect_one_pair("NLMSGain")
        self.shape = shape
        self.eps = config.eps

    def __call__(self, inputs: ProjectedInput, decay: Decay) -> Gates:
        """Nothing learned."""
        return Gates()

    def normalize(
        self, gates: Gates, key: Float[Array, "B T H K"], write_key: Float[Array, "B T HX K"] | None = None
    ) -> Gates:
        """Beta `[B, T, HV]` from the keys."""
        gain = ops.nlms_gain(key.astype(self.shape.gate_dtype), self.eps)
        return Gates(beta=self.shape.repeat_key_heads(gain))


@dataclasses.dataclass(frozen=True)
class ChannelGain(GainConfig):
    """Channel-wise `erase = sigmoid(W_b x)` per key channel and `write = sigmoid(W_w x)` per value channel.

    Gated DeltaNet-2, equations 8 and 11. With grouped value heads the erase gate belongs to the key head.

    Attributes:
        negative_eigenvalues: doubles the erase gate only, since the write gate does not enter the transition.
    """

    words = "erase per key channel, write per value channel"

    negative_eigenvalues: bool = False

    def build(self, shape: MixerShape, *, rngs: nnx.Rngs) -> "ChannelGates":
        """Builds the module."""
        return ChannelGates(self, shape, rngs=rngs)


class ChannelGates(Gain):
    """Erase and write gates per channel."""

    def __init__(self, config: ChannelGain, shape: MixerShape, *, rngs: nnx.Rngs):
        self.shape = shape
        self.erase_bound = 2.0 if config.negative_eigenvalues else 1.0
        erase = shape.project(shape.key_heads * shape.key_size, rngs=rngs)
        self.read_columns(erase_gate=erase, write_gate=shape.project(shape.value_heads * shape.value_size, rngs=rngs))

    def __call__(self, inputs: ProjectedInput, decay: Decay) -> Gates:
        """Erase `[B, T, HV, K]` and write `[B, T, HV, V]`."""
        erase, write = (
            epilogue(inputs[name].astype(self.shape.gate_dtype)) if (gate := inputs.epilogue(name)) is None else gate
            for name, epilogue in self.epilogues().items()
        )
        erase = erase.reshape(*erase.shape[:2], self.shape.key_heads, self.shape.key_size)
        write = write.reshape(*write.shape[:2], self.shape.value_heads, self.shape.value_size)
        return Gates(erase=self.shape.repeat_key_heads(erase), write=write)

    def epilogues(self) -> dict[str, Epilogue]:
        """Both gates."""
        return {"erase_gate": BoundedSigmoid(self.erase_bound), "write_gate": BoundedSigmoid()}


@dataclasses.dataclass(frozen=True)
class StepGain(GainConfig):
    """Mamba-2's write gate: the discretisation step of the decay (Dao and Gu, 2024, arXiv 2405.21060)."""

    words = "dt"

    def build(self, shape: MixerShape, *, rngs: nnx.Rngs) -> "StepGate":
        """Builds the module."""
        return StepGate()


class StepGate(Gain):
    """Writes with the decay's step."""

    def __call__(self, inputs: ProjectedInput, decay: Decay) -> Gates:
        """Write gate `[B, T, HV]`.

        Raises:
            ValueError: the decay has no step per head.
        """
        if decay.step is None or decay.step.ndim != 3:
            raise ValueError("StepGain: the decay gives no step per head, expected a scalar SoftplusDecay beside it")
        return Gates(write=decay.step)


@dataclasses.dataclass(frozen=True)
class TrapezoidalGain(GainConfig):
    """Mamba-3's gates: write `lambda dt`, and the previous token again with `(1 - lambda) dt alpha`.

    Equation 16 of the Gated DeltaNet-2 paper, exponential-trapezoidal. The equation leaves lambda open. Here it is
    `sigmoid(W x)` per value head, as in the authors' code (Lahoti et al., 2026, arXiv 2603.15569). With lambda = 1 the
    gates are those of `StepGain`.
    """

    words = "l dt, previous token (1 - l) dt decay"

    def build(self, shape: MixerShape, *, rngs: nnx.Rngs) -> "TrapezoidalGates":
        """Builds the module."""
        return TrapezoidalGates(shape, rngs=rngs)


class TrapezoidalGates(Gain):
    """Divides the decay's step between the token and the one before it."""

    def __init__(self, shape: MixerShape, *, rngs: nnx.Rngs):
        self.dtype = shape.gate_dtype
        self.read_columns(write_gate=shape.project(shape.value_heads, rngs=rngs))

    def __call__(self, inputs: ProjectedInput, decay: Decay) -> Gates:
        """Gates on the token's writing and on its predecessor's, `[B, T, HV]`.

        Raises:
            ValueError: the decay has no step per head.
        """
        if decay.log_decay is None or decay.step is None or decay.step.ndim != 3:
            raise ValueError(
                "TrapezoidalGain: the decay gives no step per head, expected a scalar SoftplusDecay beside it"
            )
        share = jax.nn.sigmoid(inputs["write_gate"].astype(self.dtype))
        return Gates(write=share * decay.step, previous=(1.0 - share) * decay.step)


@dataclasses.dataclass(frozen=True)
class CombaGain(GainConfig):
    """Comba's gates: write `beta_t`, erase `sigmoid(b) beta_t / alpha_t` with a learned `b` per value head.

    `S_t = alpha_t S_(t-1) - sigmoid(b) beta_t k_t (S_(t-1)^T k_t)^T + beta_t k_t v_t^T`: the feedback reads the state
    before it decays, hence the division by the decay alpha_t. Hu et al., 2025 (arXiv 2506.02475); taxonomy row in
    Preconditioned DeltaNet, table 2.

    Attributes:
        initial: the initial value of `b`.
        feedback: whether there is a `b`; without it the erase gate is `beta_t / alpha_t`.
        largest_log: upper limit of `-log(alpha_t)` in `1 / alpha_t`, which keeps a reset (`alpha_t = 0`) finite. A
            decay that reaches the limit leaves nothing in the state.
    """

    words = "write b, erase s b / decay"

    initial: float = 1.0
    largest_log: Annotated[float, Range(at_least=0, at_most=80)] = 60.0  # exp(88) is near the largest float32
    feedback: bool = True

    def build(self, shape: MixerShape, *, rngs: nnx.Rngs) -> "CombaGates":
        """Builds the module."""
        return CombaGates(self, shape, rngs=rngs)


class CombaGates(SigmoidGate):
    """Comba's write and erase gates."""

    def __init__(self, config: CombaGain, shape: MixerShape, *, rngs: nnx.Rngs):
        super().__init__(shape, bound=1.0, rngs=rngs)
        self.largest_log = config.largest_log
        self.feedback = (
            nnx.Param(jnp.full((shape.value_heads,), config.initial, shape.param_dtype)) if config.feedback else None
        )

    def __call__(self, inputs: ProjectedInput, decay: Decay) -> Gates:
        """Erase and write `[B, T, HV]`, or erase `[B, T, HV, K]` under a channel-wise decay."""
        beta = super().__call__(inputs, decay).beta
        assert beta is not None
        erase = beta
        if self.feedback is not None:
            erase = beta * jax.nn.sigmoid(self.feedback[...].astype(beta.dtype))
        if decay.log_decay is not None:
            inverse = jnp.exp(jnp.minimum(-decay.log_decay, self.largest_log))
            erase = (erase[..., None] if inverse.ndim == 4 else erase) * inverse
        return Gates(erase=erase, write=beta)

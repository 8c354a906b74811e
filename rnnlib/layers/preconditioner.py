"""Preconditioners on the keys axis: applied to the write key (ATK), to the query (ATQ), or to both.

Preconditioned DeltaNet (Tumma, Loo and Rus 2026, arXiv 2604.21100).
"""

import abc
import dataclasses
import math
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float

from rnnlib import ops
from rnnlib.fields import PositiveNumber, Range
from rnnlib.layers.array_types import Gates, KeyHeads, SegmentIds
from rnnlib.layers.base import MixerShape
from rnnlib.layers.decay import Decay, DecayConfig, NoDecay, SoftplusDecay
from rnnlib.layers.gain import Gain, GainConfig, SigmoidGain, SigmoidGate
from rnnlib.layers.input_projection import ColumnReader, ProjectedInput, with_prefix
from rnnlib.layers.keys import KeyMap, Keys, KeysConfig, StatelessKeyMap
from rnnlib.layers.normalization import l2_normalize
from rnnlib.layers.part import PartConfig

# x: a preconditioner lies in [1/x, x]. 1 is no preconditioner; up to 2 a gain of 1 is stable (lemma E.2).
Bound = Annotated[float, Range(at_least=1, at_most=2)]


@dataclasses.dataclass(frozen=True)
class GramConfig(PartConfig):
    """The recurrence of the diagonal Gram, `A_t = alpha_t A_(t-1) + beta_t k_t^2`.

    Attributes:
        gates: where alpha and beta come from. `"own"`: `decay`, one per key head, and a sigmoid, from projections of
            the layer's input. `"tied"`: the main recurrence's decay and gain (MesaNet does so; the paper found it worse
            for ATK, table 6). `"none"`: both are 1, equation 7.
        decay: of the preconditioner's own gates.
        unit_keys: whether A uses keys of unit length, for main recurrences with keys that are not normalised.
        heads: whether there is an A for each key head or, with gates of its own, for each value head.
    """

    gates: Literal["own", "tied", "none"] = "own"
    decay: DecayConfig = dataclasses.field(default=SoftplusDecay())
    unit_keys: bool = False
    heads: Literal["key", "value"] = "key"

    def shape_of(self, shape: MixerShape) -> MixerShape:
        """The mixer's sizes as the Gram sees them: its heads are the key heads."""
        return shape if self.heads == "key" else dataclasses.replace(shape, key_heads=shape.value_heads)


class GramGates(nnx.Module, ColumnReader):
    """Computes the inputs of the diagonal Gram: keys, decay and gain."""

    def __init__(self, config: GramConfig, shape: MixerShape, *, rngs: nnx.Rngs):
        shape.expect_one_pair("GramConfig")
        if config.gates == "tied" and shape.group != 1:
            raise ValueError(
                f"GramConfig: gates are tied, expected as many value heads as the {shape.key_heads} key heads, "
                f"not {shape.value_heads}"
            )
        self.config = config
        self.shape = shape
        key_heads = dataclasses.replace(shape, value_heads=shape.key_heads)
        own = config.gates == "own"
        self.decay = (config.decay if own else NoDecay()).build(key_heads, rngs=rngs)
        self.gain = SigmoidGain().build(key_heads, rngs=rngs) if own else None

    def take_maps(self) -> dict[str, Any]:
        """The maps of the Gram's own decay and gain, their names behind `"gram_"`."""
        return with_prefix("gram_", super().take_maps())

    def epilogues(self) -> dict[str, Any]:
        """Those of the Gram's own decay and gain."""
        return with_prefix("gram_", super().epilogues())

    def __call__(self, inputs: ProjectedInput, key: KeyHeads, decay: Decay, gates: Gates) -> dict[str, Any]:
        """The arguments `k`, `log_decay` and `gain` of `rnnlib.ops.diagonal_gram`."""
        if self.config.unit_keys:
            key = l2_normalize(key.astype(self.shape.gate_dtype))
        if self.config.gates == "tied":
            gain = gates.beta if gates.beta is not None else gates.write
            if gain is not None and gain.ndim == 4:
                gain = gates.erase  # A write gate per value channel cannot multiply a key; the erase gate can.
            return {"k": key, "log_decay": decay.log_decay, "gain": gain}
        own = inputs.under("gram_")
        own_gain = None if self.gain is None else self.gain(own, decay).beta
        return {"k": key, "log_decay": self.decay(own).log_decay, "gain": own_gain}


class GramKeyMap(KeyMap):
    """A key map whose state is the diagonal Gram, `[B, H, K]` float32, with a head for each of the Gram's."""

    def __init__(self, gram: GramConfig, shape: MixerShape, *, rngs: nnx.Rngs):
        self.shape = gram.shape_of(shape)
        self.gram = GramGates(gram, self.shape, rngs=rngs)

    def __call__(
        self,
        inputs: ProjectedInput,
        query: KeyHeads,
        key: KeyHeads,
        *,
        decay: Decay,
        gates: Gates,
        segment_ids: SegmentIds | None = None,
        state: Any = None,
    ) -> tuple[Keys, Any]:
        """The preconditioned keys, and the diagonal Gram after the last token."""
        if self.gram.config.heads == "value":
            query, key = self.shape.repeat_key_heads(query), self.shape.repeat_key_heads(key)
        recurrence = self.gram(inputs, key, decay, gates) | {"initial_state": state, "segment_ids": segment_ids}
        return self.precondition(query, key, recurrence, decay, gates)

    @abc.abstractmethod
    def precondition(
        self, query: Array, key: Array, recurrence: dict[str, Any], decay: Decay, gates: Gates
    ) -> tuple[Keys, Array]:
        """The preconditioned keys and the next Gram.

        Args:
            query: queries `[B, T, H, K]`.
            key: keys likewise.
            recurrence: arguments of `rnnlib.ops.diagonal_gram`.
            decay: the result of the decay axis.
            gates: the result of the gain axis.
        """

    def init_state(self, batch_size: int) -> Float[Array, "B H K"]:
        """The diagonal Gram before the first token: zeros."""
        return jnp.zeros((batch_size, self.shape.key_heads, self.shape.key_size), self.shape.gate_dtype)


@dataclasses.dataclass(frozen=True)
class ApplyToKey(KeysConfig):
    """The stable apply-to-key preconditioner: writes along `B_t * k_t`, equation 9.

    `B_t = exp(-log(bound) s)`, `s = r / (1 + |r|)`, `r = log(A_t + eps) - center`, `center` learned per key head.

    Attributes:
        gram: the recurrence of A.
        bound: x; B lies in [1/x, x]. The delta rule's transitions are stable for a gain of up to `2 / x`.
        interval: `"symmetric"` is [1/x, x], `"amplify"` [1, x], `"dampen"` [1/x, 1].
        squash: s: `"rational"` as above, or `"tanh"`.
        normalization: factor on the write key, of `rnnlib.ops.write_key_normalization`; the paper's is none (table 7).
        positive_center: whether log(center) is learned, as in the paper, instead of center, as in its authors' code.
            With keys of unit length most of A is below 1, so a positive center leaves B mostly above 1.
        initial_center: the initial value of `center` or, with `positive_center`, of its logarithm.
        eps: added to A under the logarithm.
    """

    words = "k, write B k (ATK)"

    gram: GramConfig = GramConfig()
    bound: Bound = 1.5
    interval: Literal["symmetric", "amplify", "dampen"] = "symmetric"
    squash: Literal["rational", "tanh"] = "rational"
    normalization: Literal["projection", "implicit", "decayed_implicit"] | None = None
    positive_center: bool = False
    initial_center: float = -0.2
    eps: float = 1e-6

    def build(self, shape: MixerShape, *, rngs: nnx.Rngs) -> "ApplyToKeyMap":
        """Builds the module."""
        return ApplyToKeyMap(self, shape, rngs=rngs)


class ApplyToKeyMap(GramKeyMap):
    """Write keys `B_t * k_t`."""

    def __init__(self, config: ApplyToKey, shape: MixerShape, *, rngs: nnx.Rngs):
        super().__init__(config.gram, shape, rngs=rngs)
        self.config = config
        self.center = nnx.Param(jnp.full((self.shape.key_heads,), config.initial_center, jnp.float32))

    def precondition(
        self, query: Array, key: Array, recurrence: dict[str, Any], decay: Decay, gates: Gates
    ) -> tuple[Keys, Array]:
        """The write key beside query and read key."""
        gram_key = recurrence["k"] if self.config.gram.unit_keys else None
        options = recurrence | self._squash_options() | {"k": key, "gram_key": gram_key}
        # Not rounded, so that its gradient is not: large terms of that gradient cancel in the gates' gradients.
        options["write_key_dtype"] = self.shape.gate_dtype
        key, write_key, gram = ops.precondition_key(**options)
        if self.config.normalization is not None:
            write_key = self._normalization(key, write_key, decay, gates)[..., None] * write_key
        return Keys(query, key, write_key), gram

    def preconditioner(self, recurrence: dict[str, Any]) -> tuple[Array, Array]:
        """B `[B, T, H, K]`, and A after the last token.

        Args:
            recurrence: arguments of `rnnlib.ops.diagonal_gram`.
        """
        return ops.diagonal_preconditioner(**recurrence, **self._squash_options())

    def squash(self, gram: Float[Array, "*batch H K"]) -> Float[Array, "*batch H K"]:
        """B of a diagonal Gram A."""
        return ops.squash_to_interval(gram, **self._squash_options())

    def _squash_options(self) -> dict[str, Any]:
        config = self.config
        return {
            "center": self.centers(),
            "bound": config.bound,
            "eps": config.eps,
            "interval": config.interval,
            "squash": config.squash,
        }

    def centers(self) -> Float[Array, " H"]:
        """The learned log A at which B is in the middle of its interval, per key head."""
        center = self.center[...].astype(self.shape.gate_dtype)
        return jnp.exp(center) if self.config.positive_center else center

    def _normalization(self, key: Array, write_key: Array, decay: Decay, gates: Gates) -> Array:
        kind = self.config.normalization
        assert kind is not None
        if kind != "decayed_implicit":
            return ops.write_key_normalization(key, write_key, kind)
        if self.shape.group != 1:
            raise ValueError(
                f"ApplyToKey: normalization is {kind!r}, expected as many value heads as the {self.shape.key_heads} "
                f"key heads, not {self.shape.value_heads}"
            )
        if gates.beta is None or (decay.log_decay is not None and decay.log_decay.ndim == 4):
            raise ValueError(
                f"ApplyToKey: normalization is {kind!r}, expected a gain that gives beta and a decay that is not "
                "channelwise"
            )
        return ops.write_key_normalization(key, write_key, kind, gain=gates.beta, log_decay=decay.log_decay)


@dataclasses.dataclass(frozen=True)
class ApplyToKeyUnstable(KeysConfig):
    """The write key of Sherman and Morrison's formula with the previous diagonal Gram, equation 8 and appendix F.1.2.

    `k~_t = P k_t / (1 + k_t^T P k_t)`, `P = Diag(A_(t-1) + ridge)^-1`. The paper found it to train worse than no
    preconditioner (table 6) and uses the stable form instead.

    Attributes:
        gram: the recurrence of A.
        initial_ridge: what the learned ridge, one per key head, starts at.
    """

    words = "k, write k / (A + ridge) normalised (unstable ATK)"

    gram: GramConfig = GramConfig()
    initial_ridge: PositiveNumber = 1.0

    def build(self, shape: MixerShape, *, rngs: nnx.Rngs) -> "ApplyToKeyUnstableMap":
        """Builds the module."""
        return ApplyToKeyUnstableMap(self, shape, rngs=rngs)


class Ridge(nnx.Module):
    """A learned positive number per key head, `softplus(p)`."""

    def __init__(self, initial: float, shape: MixerShape):
        self.dtype = shape.gate_dtype
        start = initial + math.log(-math.expm1(-initial))  # softplus(start) = initial
        self.ridge = nnx.Param(jnp.full((shape.key_heads,), start, jnp.float32))

    def __call__(self) -> Float[Array, " H"]:
        """The ridge of each head."""
        return jax.nn.softplus(self.ridge[...].astype(self.dtype))


class ApplyToKeyUnstableMap(GramKeyMap):
    """Write keys of Sherman and Morrison's formula."""

    def __init__(self, config: ApplyToKeyUnstable, shape: MixerShape, *, rngs: nnx.Rngs):
        super().__init__(config.gram, shape, rngs=rngs)
        self.ridge = Ridge(config.initial_ridge, self.shape)

    def precondition(
        self, query: Array, key: Array, recurrence: dict[str, Any], decay: Decay, gates: Gates
    ) -> tuple[Keys, Array]:
        """The write key beside query and read key."""
        write_key, gram = ops.sherman_morrison_key(**recurrence, ridge=self.ridge())
        return Keys(query, key, write_key.astype(key.dtype)), gram


@dataclasses.dataclass(frozen=True)
class ApplyToQuery(KeysConfig):
    """The apply-to-query preconditioner: reads with `q_t / (A_t + ridge)`, equation 8 and appendix F.1.1.

    By default the gates are tied to those of the main recurrence. A and linear attention's state then weigh past tokens
    alike, as least squares demands.

    Attributes:
        gram: the recurrence of A.
        initial_ridge: what the learned ridge, one per key head, starts at.
    """

    words = "k, query q / (A + ridge) (ATQ)"

    gram: GramConfig = GramConfig(gates="tied")
    initial_ridge: PositiveNumber = 1.0

    def build(self, shape: MixerShape, *, rngs: nnx.Rngs) -> "ApplyToQueryMap":
        """Builds the module."""
        return ApplyToQueryMap(self, shape, rngs=rngs)


class ApplyToQueryMap(GramKeyMap):
    """Queries divided by the diagonal Gram."""

    def __init__(self, config: ApplyToQuery, shape: MixerShape, *, rngs: nnx.Rngs):
        super().__init__(config.gram, shape, rngs=rngs)
        self.ridge = Ridge(config.initial_ridge, self.shape)

    def precondition(
        self, query: Array, key: Array, recurrence: dict[str, Any], decay: Decay, gates: Gates
    ) -> tuple[Keys, Array]:
        """The preconditioned query beside the key."""
        preconditioned, gram = ops.precondition_query(query, **recurrence, ridge=self.ridge())
        return Keys(preconditioned.astype(query.dtype), key), gram


@dataclasses.dataclass(frozen=True)
class ApplyToBoth(KeysConfig):
    """Two maps at once: the write key of one, the query of the other (appendix B names it as future work).

    Attributes:
        key: gives the write key.
        query: gives the query.
    """

    words = "k, write B k, query q / (A + ridge) (ATK and ATQ)"

    key: KeysConfig = ApplyToKey()
    query: KeysConfig = ApplyToQuery()

    def build(self, shape: MixerShape, *, rngs: nnx.Rngs) -> "ApplyToBothMap":
        """Builds the module."""
        return ApplyToBothMap(self, shape, rngs=rngs)


class ApplyToBothMap(KeyMap):
    """The write key of one map and the query of another; each keeps its own state."""

    def __init__(self, config: ApplyToBoth, shape: MixerShape, *, rngs: nnx.Rngs):
        self.key_map = config.key.build(shape, rngs=rngs)
        self.query_map = config.query.build(shape, rngs=rngs)

    def take_maps(self) -> dict[str, Any]:
        """Those of both maps, their names behind `"key_"` and `"query_"`."""
        return with_prefix("key_", self.key_map.take_maps()) | with_prefix("query_", self.query_map.take_maps())

    def epilogues(self) -> dict[str, Any]:
        """Those of both maps."""
        return with_prefix("key_", self.key_map.epilogues()) | with_prefix("query_", self.query_map.epilogues())

    def __call__(
        self, inputs: ProjectedInput, query: KeyHeads, key: KeyHeads, *, state: Any = None, **others: Any
    ) -> tuple[Keys, Any]:
        """Both maps of the same arguments."""
        key_state, query_state = (None, None) if state is None else state
        written, key_state = self.key_map(inputs.under("key_"), query, key, state=key_state, **others)
        read, query_state = self.query_map(inputs.under("query_"), query, key, state=query_state, **others)
        return Keys(read.query, written.key, written.write_key), (key_state, query_state)

    def init_state(self, batch_size: int) -> tuple[Any, Any]:
        """The states of both maps before the first token."""
        return self.key_map.init_state(batch_size), self.query_map.init_state(batch_size)


@dataclasses.dataclass(frozen=True)
class FixedPreconditioner(KeysConfig):
    """Writes along `B * k_t` with a learned B that is the same for every token: a preconditioner without recurrence.

    `B = bound^tanh(p)` with a `p` per channel of each key head, so that the bounds of `ApplyToKey` hold here too. This
    map is a control: it separates the cost and benefit of a second key from those of the diagonal Gram.

    Attributes:
        bound: x; B lies in [1/x, x] and starts at 1.
    """

    words = "k, write B k, B fixed"

    bound: Bound = 1.5

    def build(self, shape: MixerShape, *, rngs: nnx.Rngs) -> "FixedPreconditionerMap":
        """Builds the module."""
        return FixedPreconditionerMap(self, shape)


class FixedPreconditionerMap(StatelessKeyMap):
    """Write keys `B * k_t`; no state."""

    def __init__(self, config: FixedPreconditioner, shape: MixerShape):
        shape.expect_one_pair("FixedPreconditioner")
        self.config = config
        self.shape = shape
        # A vector, so that no optimizer decays it.
        self.strength = nnx.Param(jnp.zeros((shape.key_heads * shape.key_size,), jnp.float32))

    def keys(self, query: KeyHeads, key: KeyHeads) -> Keys:
        """Queries and keys as they are, and the write key."""
        strength = self.strength[...].astype(self.shape.gate_dtype)
        factor = jnp.exp(math.log(self.config.bound) * jnp.tanh(strength)).reshape(key.shape[2:])
        return Keys(query, key, (factor * key.astype(factor.dtype)).astype(key.dtype))


@dataclasses.dataclass(frozen=True)
class PreconditionedGain(GainConfig):
    """A gain that stays within what a preconditioner in [1/x, x] allows, `gain * x <= 2` (lemma E.2).

    Attributes:
        gain: a gain in [0, 1], which any preconditioner allows, with a field `negative_eigenvalues` that doubles it.
        negative_eigenvalues: stretches the gain to [0, 2/x], so that a transition's eigenvalue along the key lies in
            [-1, 1]. The doubled gain of other mixers would leave the unit disk (appendix E.4).
        bound: the preconditioner's x.
    """

    gain: GainConfig = dataclasses.field(default=SigmoidGain())
    negative_eigenvalues: bool = False
    bound: Bound = 1.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if not any(field.name == "negative_eigenvalues" for field in dataclasses.fields(self.gain)):
            raise ValueError(
                f"PreconditionedGain: gain is {self.gain}, expected one with a field 'negative_eigenvalues'"
            )

    def build(self, shape: MixerShape, *, rngs: nnx.Rngs) -> "PreconditionedGate":
        """Builds the module."""
        changes: dict[str, Any] = {"negative_eigenvalues": self.negative_eigenvalues}
        gain = dataclasses.replace(self.gain, **changes).build(shape, rngs=rngs)
        return PreconditionedGate(gain, 1 / self.bound if self.negative_eigenvalues else 1.0)

    def describe(self) -> str:
        """The axis in a few words, for the table of mixers."""
        return self.gain.describe()


class PreconditionedGate(Gain):
    """Another gain's gates, with the erasing gate scaled by a constant."""

    def __init__(self, gain: Gain, scale: float):
        self.gain = gain
        self.scale = scale

    def __call__(self, inputs: ProjectedInput, decay: Decay) -> Gates:
        """The gates of each token."""
        gates = self.gain(inputs, decay)
        scaled = {name: self.scale * gate for name in ("beta", "erase") if (gate := getattr(gates, name)) is not None}
        return gates._replace(**scaled)

    def normalize(self, gates: Gates, key: KeyHeads, write_key: Float[Array, "B T HX K"] | None = None) -> Gates:
        """Normalises as the inner gain does."""
        return self.gain.normalize(gates, key, write_key)


@dataclasses.dataclass(frozen=True)
class ImplicitWriteGain(GainConfig):
    """`b / (1 + b k.w)`, `b = sigmoid(W x)`, w the write key: Longhorn's implicit step under a preconditioner.

    The minimum of `|S - S_{t-1}|^2` in the preconditioner's norm plus `b |S k - v|^2` (Preconditioned DeltaNet,
    appendix G.2). The transition's eigenvalue along the write key, `1 / (1 + b k.w)`, lies in (0, 1] whatever the keys'
    length and the preconditioner's bound. Without a preconditioner it is `LonghornGain`.
    """

    words = "b / (1 + b k.B k)"

    def build(self, shape: MixerShape, *, rngs: nnx.Rngs) -> "ImplicitWriteGate":
        """Builds the module."""
        return ImplicitWriteGate(shape, rngs=rngs)


class ImplicitWriteGate(SigmoidGate):
    """A sigmoid gate, normalised by the product of key and write key."""

    def __init__(self, shape: MixerShape, *, rngs: nnx.Rngs):
        shape.expect_one_pair("ImplicitWriteGain")
        super().__init__(shape, bound=1.0, rngs=rngs)

    def normalize(self, gates: Gates, key: KeyHeads, write_key: Float[Array, "B T HX K"] | None = None) -> Gates:
        """The gates divided by `1 + gate key.write_key`."""
        assert gates.beta is not None
        along = key if write_key is None else write_key
        energy = jnp.sum(key.astype(self.shape.gate_dtype) * along.astype(self.shape.gate_dtype), axis=-1)
        # The value heads of a group share a key.
        grouped = gates.beta.reshape(*energy.shape, -1)
        return Gates(beta=(grouped / (1 + grouped * energy[..., None])).reshape(gates.beta.shape))

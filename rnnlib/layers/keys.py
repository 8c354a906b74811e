"""The keys axis: which key is written and which query reads. Preconditioners belong here."""

import abc
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float

from rnnlib.layers.array_types import Gates, KeyHeads, SegmentIds
from rnnlib.layers.base import MixerShape
from rnnlib.layers.decay import Decay
from rnnlib.layers.input_projection import ColumnReader, ProjectedInput
from rnnlib.layers.normalization import l2_normalize
from rnnlib.layers.part import AxisConfig
from rnnlib.ops.arguments import resets_of
from rnnlib.ops.context_parallel import current_axis, enter_gram
from rnnlib.ops.rotated_keys import rotated_keys


class Keys(NamedTuple):
    """The result of the keys axis.

    The heads are those of the input branches: H, or H * mimo_rank if a token writes several keys. A key map may also
    return value heads in place of key heads: HV, or HV * mimo_rank.

    Attributes:
        query: `[B, T, H, K]`, reads the state.
        key: `[B, T, H, K]`, the read key of the delta rule.
        write_key: the key along which the correction is written: None (the read key), `[B, T, H, K]` or
            `[B, T, HV, K]`. If its dtype is wider than the key's, its gradient is not rounded.
    """

    query: Array
    key: Array
    write_key: Array | None = None

    @property
    def written(self) -> Array:
        """The key of a solve that takes one key: the write key, in the key's dtype."""
        return self.key if self.write_key is None else self.write_key.astype(self.key.dtype)


class KeyMap(nnx.Module, ColumnReader, abc.ABC):
    """Module of the keys axis."""

    @abc.abstractmethod
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
        """The keys that the recurrence takes, and the next state.

        Args:
            inputs: the module's columns of the input projection by name, and the mixer's input `inputs.x` `[B, T, D]`.
            query: queries after convolution, activation and norm.
            key: keys likewise.
            decay: the result of the decay axis, for maps whose own gates are tied to it.
            gates: the result of the gain axis before its normalisation by the keys, for the same purpose.
            segment_ids: packed documents; a state restarts where the id changes.
            state: None (the state of `init_state`) or the state that the previous call returned.
        """

    def init_state(self, batch_size: int) -> Any:
        """The state before the first token, a pytree of arrays; None for maps without one."""
        return None


class StatelessKeyMap(KeyMap):
    """A key map that depends on the token's query and key only."""

    def __call__(self, inputs: ProjectedInput, query: KeyHeads, key: KeyHeads, **others: Any) -> tuple[Keys, Any]:
        """Calls `keys` and ignores the other arguments; there is no state."""
        return self.keys(query, key), None

    @abc.abstractmethod
    def keys(self, query: KeyHeads, key: KeyHeads) -> Keys:
        """The keys that the recurrence takes."""


@dataclasses.dataclass(frozen=True)
class KeysConfig(AxisConfig):
    """Configuration of the keys axis."""

    @abc.abstractmethod
    def build(self, shape: MixerShape, *, rngs: nnx.Rngs) -> KeyMap:
        """Builds the module."""


@dataclasses.dataclass(frozen=True)
class PlainKeys(KeysConfig):
    """Reads with the query, erases and writes with the same key."""

    words = "k"

    def build(self, shape: MixerShape, *, rngs: nnx.Rngs) -> "PlainKeyMap":
        """Builds the module."""
        return PlainKeyMap()


class PlainKeyMap(StatelessKeyMap):
    """Passes queries and keys on."""

    def keys(self, query: KeyHeads, key: KeyHeads) -> Keys:
        """Queries and keys as they are."""
        return Keys(query, key)


@dataclasses.dataclass(frozen=True)
class OutputCorrection(KeysConfig):
    """Comba's output correction: the query `q - d k`, with a learned `d` per key head.

    Hu et al., 2025 (arXiv 2506.02475); taxonomy row in Preconditioned DeltaNet, table 2.

    Attributes:
        initial: what `d` starts at. The authors' code starts at 1 and recommends trying 0.02, the default here.
    """

    words = "k, query q - d k"

    initial: float = 0.02

    def build(self, shape: MixerShape, *, rngs: nnx.Rngs) -> "OutputCorrectionMap":
        """Builds the module."""
        return OutputCorrectionMap(self, shape)


class OutputCorrectionMap(StatelessKeyMap):
    """`q - d k`."""

    def __init__(self, config: OutputCorrection, shape: MixerShape):
        shape.expect_one_pair("OutputCorrection")
        self.correction = nnx.Param(jnp.full((shape.key_heads,), config.initial, shape.param_dtype))

    def keys(self, query: KeyHeads, key: KeyHeads) -> Keys:
        """The corrected query, and keys as they are."""
        return Keys(query - self.correction[...].astype(query.dtype)[:, None] * key, key)


@dataclasses.dataclass(frozen=True)
class CorrectionBeforeNorms(KeysConfig):
    """Comba's keys as in its authors' code, which corrects the query by `p = sigmoid(b) k` before the norms.

    Reads with `unit(q - d p)`, erases with `unit(p)` and writes with `unit(k)`, with `b` and `d` learned per key head.
    The norm removes the factor from p again, up to the norm's eps. The mixer's own norms of q and k must be none, and
    the gain must have no feedback of its own: `CombaGain(feedback=False)`.

    Attributes:
        initial: what `d` starts at.
        initial_feedback: what `b` starts at.
    """

    words = "unit k, query unit(q - d p), erase unit(p)"

    initial: float = 1.0
    initial_feedback: float = 1.0

    def build(self, shape: MixerShape, *, rngs: nnx.Rngs) -> "CorrectionBeforeNormsMap":
        """Builds the module."""
        return CorrectionBeforeNormsMap(self, shape)


class CorrectionBeforeNormsMap(StatelessKeyMap):
    """`unit(q - d p)`, `unit(p)` and `unit(k)` with `p = sigmoid(b) k`."""

    def __init__(self, config: CorrectionBeforeNorms, shape: MixerShape):
        shape.expect_one_pair("CorrectionBeforeNorms")
        self.shape = shape
        self.correction = nnx.Param(jnp.full((shape.key_heads,), config.initial, shape.param_dtype))
        self.feedback = nnx.Param(jnp.full((shape.key_heads,), config.initial_feedback, shape.param_dtype))

    def keys(self, query: KeyHeads, key: KeyHeads) -> Keys:
        """Query, erase key and write key."""
        wide = self.shape.gate_dtype
        share = jax.nn.sigmoid(self.feedback[...].astype(wide))[:, None]
        erased = share * key.astype(wide)
        corrected = query.astype(wide) - self.correction[...].astype(wide)[:, None] * erased
        return Keys(*(l2_normalize(y).astype(key.dtype) for y in (corrected, erased, key)))


@dataclasses.dataclass(frozen=True)
class RotatedKeys(KeysConfig):
    """Mamba-3's keys and queries: a bias, then a rotation that accumulates over the tokens, all per value head.

    `k~_t = R_(1:t)^T (k_t + b)` (Gated DeltaNet-2 paper, equation 16), and likewise for queries: the phase of a complex
    decay. The equation leaves biases and angles open. Here they are those of the authors' code (Lahoti et al., 2026,
    arXiv 2603.15569): token t rotates channel pair i by `pi tanh(W x_t)_i dt_t` more than token t - 1, with the decay's
    step dt per head.

    Attributes:
        fraction: the fraction of channels that are rotated, in pairs `(i, i + K/2)` from the first on.
        initial_bias: the initial value of the biases.
    """

    words = "k and q turned by learned angles"

    fraction: float = 0.5
    initial_bias: float = 1.0

    def build(self, shape: MixerShape, *, rngs: nnx.Rngs) -> "RotatedKeyMap":
        """Builds the module.

        Raises:
            ValueError: K is odd, or no pair of channels turns.
        """
        if shape.key_size % 2 != 0:
            raise ValueError(f"RotatedKeys: keys have {shape.key_size} channels, expected an even number")
        if not 0 < self.fraction <= 1 or int(self.fraction * shape.key_size) < 2:
            raise ValueError(
                f"RotatedKeys: fraction is {self.fraction}, expected at most 1 and at least a pair of "
                f"{shape.key_size} channels"
            )
        return RotatedKeyMap(self, shape, rngs=rngs)


class RotatedKeyMap(KeyMap):
    """`R_(1:t)^T (k + b)`; the state is the angle, `[B, HV, P]` float32, in revolutions."""

    def __init__(self, config: RotatedKeys, shape: MixerShape, *, rngs: nnx.Rngs):
        self.shape = shape
        self.turning = int(config.fraction * shape.key_size) // 2
        self.read_columns(angle=shape.project(self.turning, rngs=rngs))
        # Vectors, so that no optimizer decays them.
        features = (shape.value_heads * shape.mimo_rank * shape.key_size,)
        self.query_bias = nnx.Param(jnp.full(features, config.initial_bias, shape.param_dtype))
        self.key_bias = nnx.Param(jnp.full(features, config.initial_bias, shape.param_dtype))

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
        """Queries and keys `[B, T, HV * mimo_rank, K]`, and the angle after the last token.

        Raises:
            ValueError: the decay has no step per head.
        """
        if decay.step is None or decay.step.ndim != 3:
            raise ValueError("RotatedKeys: the decay gives no step per head, expected a scalar SoftplusDecay beside it")
        of_key = self.shape.mimo_rank, self.shape.key_size
        rate = 0.5 * jnp.tanh(inputs["angle"].astype(self.shape.gate_dtype))
        turn = rate[:, :, None] * decay.step[..., None]
        if state is not None:
            turn = turn.at[:, 0].add(state)
        resets = jnp.zeros(query.shape[:2], bool) if segment_ids is None else resets_of(segment_ids)
        _, angle = jax.lax.associative_scan(_accumulate, (resets[:, :, None, None], turn), axis=1)
        axis = current_axis()
        if axis is not None:  # continue from the angle at the end of the previous device's shard
            entering = enter_gram(angle[:, -1], None, None, segment_ids, axis)
            own = jnp.cumsum(resets, axis=1)[:, :, None, None] == 0
            angle = angle + jnp.where(own, (entering - jnp.round(entering))[:, None], 0)
        query_rows, key_rows = (y.reshape(*y.shape[:2], self.shape.key_heads, *of_key) for y in (query, key))
        query_bias, key_bias = (bias[...].reshape(-1, *of_key) for bias in (self.query_bias, self.key_bias))
        turned = rotated_keys(query_rows, key_rows, query_bias, key_bias, angle)
        flat = (y.reshape(*query.shape[:2], -1, self.shape.key_size) for y in turned)
        return Keys(*flat), angle[:, -1] - jnp.round(angle[:, -1])

    def init_state(self, batch_size: int) -> Float[Array, "B HV P"]:
        """The angle before the first token: zero."""
        return jnp.zeros((batch_size, self.shape.value_heads, self.turning), self.shape.gate_dtype)


def _accumulate(first: tuple[Array, Array], second: tuple[Array, Array]) -> tuple[Array, Array]:
    """Combines two runs of tokens: whether a document starts in them, and the revolutions since its start."""
    total = jnp.where(second[0], 0.0, first[1]) + second[1]
    # Dropping whole revolutions is exact and keeps the angles of long documents as precise as those of short ones.
    return first[0] | second[0], total - jnp.round(total)

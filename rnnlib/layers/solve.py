"""The solve axis: which operator turns queries, keys, values and gates into outputs."""

import abc
import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float

from rnnlib import ops
from rnnlib.layers.array_types import Gates, SegmentIds, ValueHeads
from rnnlib.layers.base import MixerShape
from rnnlib.layers.decay import Decay
from rnnlib.layers.input_projection import ColumnReader, ProjectedInput
from rnnlib.layers.keys import Keys
from rnnlib.layers.part import AxisConfig
from rnnlib.ops.delayed_update import DelayedState, delay_updates, delayed_token
from rnnlib.ops.gated_delta_rule.reference import DeltaRuleInputs
from rnnlib.ops.gates import resolve_gates


class RecurrenceInputs(NamedTuple):
    """The inputs of a recurrence: the results of the other axes.

    Attributes:
        keys: query, key and write key.
        value: `[B, T, HV, V]`.
        gates: erase and write gates.
        decay: log decay.
    """

    keys: Keys
    value: Array
    gates: Gates
    decay: Decay


@dataclasses.dataclass(frozen=True)
class OperatorOptions:
    """How a mixer's operator is called.

    Attributes:
        scale: factor on the output; None is `K**-0.5`.
        chunk_size: tokens in a chunk of the chunked implementations.
        implementation: `"scan"`, `"chunked"`, `"triton"`, `"mosaic"`, or None for the best that supports the case.
    """

    scale: float | None = None
    chunk_size: int = 64
    implementation: str | None = None

    def arguments(self) -> dict[str, Any]:
        """The operator's arguments, by name."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


def expect_no_previous(solver: str, gates: Gates) -> None:
    """ValueError, naming `solver`, where the gain gates the previous token: for solvers that write a token once."""
    if gates.previous is not None:
        raise ValueError(f"{solver}: the gain gives a gate on the previous token, which only Trapezoidal takes")


class Solver(nnx.Module, ColumnReader, abc.ABC):
    """Module of the solve axis."""

    @abc.abstractmethod
    def __call__(
        self,
        inputs: ProjectedInput,
        recurrence_inputs: RecurrenceInputs,
        *,
        segment_ids: SegmentIds | None = None,
        state: Any = None,
    ) -> tuple[ValueHeads, Any]:
        """Output and next state.

        Args:
            inputs: the module's columns of the input projection by name, and the mixer's input `inputs.x` `[B, T, D]`.
            recurrence_inputs: the results of the other axes.
            segment_ids: packed documents; the state restarts where the id changes.
            state: None (the state of `init_state`) or the state that the previous call returned.
        """

    @abc.abstractmethod
    def init_state(self, batch_size: int) -> Any:
        """The state before the first token, a pytree of arrays."""

    def delay_updates(self, state: Any, recurrence_inputs: RecurrenceInputs) -> Any:
        """The state as a loop over single tokens carries it: one beside which writes wait, where that is faster.

        `rnnlib.inference.delayed_updates` flushes each `DelayedState` after the loop.

        Args:
            state: as for a call.
            recurrence_inputs: of any token of the loop: shapes and dtypes count, not values.
        """
        return state


@dataclasses.dataclass(frozen=True)
class SolveConfig(AxisConfig):
    """Configuration of the solve axis."""

    @abc.abstractmethod
    def build(self, shape: MixerShape, options: OperatorOptions, *, rngs: nnx.Rngs) -> Solver:
        """Builds the module."""

    def mimo_rank(self) -> int:
        """Keys and values that a token writes into each head's state, and queries that read it."""
        return 1

    def decay_size(self) -> int | None:
        """Channels of a decay per channel; None is one for each key channel."""
        return None

    def erases(self) -> bool | None:
        """Whether a token's transition of the state erases as the delta rule's does, or decays alone.

        None means neither, or unknown. `rnnlib.analysis`, which computes eigenvalues of transitions, then rejects the
        layer.
        """
        return None


class MatrixStateSolver(Solver):
    """A solver whose state is one matrix `[B, HV, K, V]`, float32."""

    def __init__(self, shape: MixerShape, options: OperatorOptions):
        self.shape = shape
        self.options = options

    def init_state(self, batch_size: int) -> Float[Array, "B HV K V"]:
        """The state before the first token: zeros."""
        shape = self.shape
        return jnp.zeros((batch_size, shape.value_heads, shape.key_size, shape.value_size), shape.gate_dtype)


@dataclasses.dataclass(frozen=True)
class DeltaRule(SolveConfig):
    """The delta rule, `S_t = D_t S_(t-1) + k~_t (w_t v_t - (D_t S_(t-1))^T (b_t k_t))^T`."""

    words = "delta rule"

    def build(self, shape: MixerShape, options: OperatorOptions, *, rngs: nnx.Rngs) -> "DeltaRuleSolver":
        """Builds the module."""
        return DeltaRuleSolver(shape, options)

    def erases(self) -> bool:
        """True: each token erases along its read key."""
        return True


class DeltaRuleSolver(MatrixStateSolver):
    """Calls `rnnlib.ops.gated_delta_rule`."""

    def __call__(
        self,
        inputs: ProjectedInput,
        recurrence_inputs: RecurrenceInputs,
        *,
        segment_ids: SegmentIds | None = None,
        state: Any = None,
    ) -> tuple[ValueHeads, Any]:
        """Output and next state."""
        expect_no_previous("DeltaRule", recurrence_inputs.gates)
        if isinstance(state, DelayedState):
            scale, implementation = self.options.scale, self.options.implementation
            return delayed_token(self._token(recurrence_inputs), state, scale=scale, implementation=implementation)
        return ops.gated_delta_rule(
            recurrence_inputs.keys.query,
            recurrence_inputs.keys.key,
            recurrence_inputs.value,
            beta=recurrence_inputs.gates.beta,
            erase=recurrence_inputs.gates.erase,
            write=recurrence_inputs.gates.write,
            write_key=recurrence_inputs.keys.write_key,
            log_decay=recurrence_inputs.decay.log_decay,
            initial_state=state,
            segment_ids=segment_ids,
            **self.options.arguments(),
        )

    def delay_updates(self, state: Any, recurrence_inputs: RecurrenceInputs) -> Any:
        """The state, beside which writes wait where that is faster."""
        return delay_updates(state, self._token(recurrence_inputs), implementation=self.options.implementation)

    def _token(self, recurrence_inputs: RecurrenceInputs) -> DeltaRuleInputs:
        keys, gates = recurrence_inputs.keys, recurrence_inputs.gates
        both = resolve_gates("DeltaRule", gates.beta, gates.erase, gates.write, recurrence_inputs.value.shape[:3])
        log_decay = recurrence_inputs.decay.log_decay
        return DeltaRuleInputs(keys.query, keys.key, recurrence_inputs.value, both, keys.write_key, log_decay)


@dataclasses.dataclass(frozen=True)
class LinearAttention(SolveConfig):
    """Linear attention, `S_t = D_t S_(t-1) + k~_t (w_t v_t)^T`: nothing is erased.

    Attributes:
        normalize: divides the output by `scale * z_t.q_t + 1e-10`, `z_t = D_t z_(t-1) + w_t k~_t`: weights of the past
            that add up to 1 (Katharopoulos et al., 2020, arXiv 2006.16236). For feature maps above 0.
    """

    words = "additive"

    normalize: bool = False

    def build(self, shape: MixerShape, options: OperatorOptions, *, rngs: nnx.Rngs) -> "LinearAttentionSolver":
        """Builds the module."""
        return (NormalizedLinearAttentionSolver if self.normalize else LinearAttentionSolver)(shape, options)

    def describe(self) -> str:
        """The axis in a few words, for the table of mixers."""
        return "additive, over the sum of weights" if self.normalize else self.words

    def erases(self) -> bool:
        """False: the state decays alone."""
        return False


class LinearAttentionSolver(MatrixStateSolver):
    """Calls `rnnlib.ops.linear_attention`."""

    def __call__(
        self,
        inputs: ProjectedInput,
        recurrence_inputs: RecurrenceInputs,
        *,
        segment_ids: SegmentIds | None = None,
        state: Any = None,
    ) -> tuple[ValueHeads, Any]:
        """Output and next state.

        The only key that linear attention has is the one that it writes.

        Raises:
            ValueError: the gain gives an erase gate: linear attention has none.
        """
        gates = recurrence_inputs.gates
        expect_no_previous("LinearAttention", gates)
        if gates.erase is not None:
            raise ValueError(
                "LinearAttention: the gain gives an erase gate, expected beta or write: linear attention erases nothing"
            )
        token = self._token(recurrence_inputs)
        if isinstance(state, DelayedState):
            scale, implementation = self.options.scale, self.options.implementation
            return delayed_token(token, state, scale=scale, online=False, implementation=implementation)
        return ops.linear_attention(
            token.q,
            token.k,
            token.v,
            log_decay=token.log_decay,
            write=token.gates.write,
            initial_state=state,
            segment_ids=segment_ids,
            **self.options.arguments(),
        )

    def delay_updates(self, state: Any, recurrence_inputs: RecurrenceInputs) -> Any:
        """The state, beside which writes wait where that is faster."""
        return delay_updates(state, self._token(recurrence_inputs), implementation=self.options.implementation)

    def _token(self, recurrence_inputs: RecurrenceInputs) -> DeltaRuleInputs:
        keys, gates = recurrence_inputs.keys, recurrence_inputs.gates
        write = gates.beta if gates.write is None else gates.write
        own = resolve_gates("LinearAttention", None, None, write, recurrence_inputs.value.shape[:3])
        return DeltaRuleInputs(
            keys.query, keys.written, recurrence_inputs.value, own, None, recurrence_inputs.decay.log_decay
        )


class NormalizedState(NamedTuple):
    """The state of a solver with a denominator, float32.

    Attributes:
        memory: `[B, HV, K, V]`, linear attention's state.
        weight: `[B, HV, K]`, z, the sum of the keys.
    """

    memory: Array
    weight: Array


class NormalizedLinearAttentionSolver(LinearAttentionSolver):
    """Linear attention whose values have one more channel, equal to 1: its output is the denominator."""

    def __call__(
        self,
        inputs: ProjectedInput,
        recurrence_inputs: RecurrenceInputs,
        *,
        segment_ids: SegmentIds | None = None,
        state: Any = None,
    ) -> tuple[ValueHeads, Any]:
        """Output and next state.

        Raises:
            ValueError: the gain gives an erase gate, or a write gate per value channel.
        """
        if recurrence_inputs.gates.write is not None and recurrence_inputs.gates.write.ndim == 4:
            raise ValueError("LinearAttention: normalize takes a write gate per head, not per value channel")
        wide, dtype = self.shape.gate_dtype, recurrence_inputs.value.dtype
        value, keys = recurrence_inputs.value.astype(wide), recurrence_inputs.keys
        keys = Keys(keys.query.astype(wide), keys.written.astype(wide))
        value = jnp.concatenate([value, jnp.ones_like(value[..., :1])], axis=-1)
        if state is not None:
            state = jnp.concatenate([state.memory, state.weight[..., None]], axis=-1)
        recurrence_inputs = recurrence_inputs._replace(keys=keys, value=value)
        out, state = super().__call__(inputs, recurrence_inputs, segment_ids=segment_ids, state=state)
        state = NormalizedState(state[..., :-1], state[..., -1])
        return (out[..., :-1] / (out[..., -1:] + 1e-10)).astype(dtype), state

    def delay_updates(self, state: Any, recurrence_inputs: RecurrenceInputs) -> Any:
        """The state as it is: its two parts become one array for each call."""
        return state

    def init_state(self, batch_size: int) -> Any:
        """The state before the first token: zeros."""
        memory = super().init_state(batch_size)
        return NormalizedState(memory, memory[..., 0])

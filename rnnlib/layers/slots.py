"""Gated slots: a memory of a fixed number of keys and values, which a softmax reads (Zhang et al., 2024)."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from rnnlib import ops
from rnnlib.fields import PositiveInteger
from rnnlib.layers.array_types import SegmentIds, ValueHeads
from rnnlib.layers.base import MixerShape
from rnnlib.layers.input_projection import ProjectedInput
from rnnlib.layers.solve import OperatorOptions, RecurrenceInputs, SolveConfig, Solver, expect_no_previous


class SlotState(NamedTuple):
    """What the slots of each head hold, float32.

    Attributes:
        key: `[B, HV, M, K]`.
        value: `[B, HV, M, V]`.
    """

    key: Array
    value: Array


@dataclasses.dataclass(frozen=True)
class GatedSlots(SolveConfig):
    """Gated slot attention (arXiv 2409.07146): each slot keeps a running mean of keys and of values.

    Slot m of M forgets by its own decay and takes what it forgets from the token: `K_m <- a_m K_m + (1 - a_m) k`, and
    likewise V_m. The output is `sum_m softmax_m(K_m.q) V_m`. The decay axis gives the decays of the slots, in place of
    those of key channels.

    Attributes:
        num_slots: M.
    """

    num_slots: PositiveInteger = 64

    words = "softmax over slots"

    def build(self, shape: MixerShape, options: OperatorOptions, *, rngs: object = None) -> "GatedSlotsSolver":
        """Builds the module.

        Raises:
            ValueError: there are more value heads than key heads.
        """
        if shape.group != 1:
            raise ValueError(f"GatedSlots: {shape.group} value heads use a key head, expected one each")
        return GatedSlotsSolver(self, shape, options)

    def describe(self) -> str:
        """The axis in a few words, for the table of mixers."""
        return f"softmax over {self.num_slots} slots"

    def decay_size(self) -> int:
        """A decay for each slot."""
        return self.num_slots


class GatedSlotsSolver(Solver):
    """Two passes of `rnnlib.ops.linear_attention`: one gives the softmax's logits, the other its reading."""

    def __init__(self, config: GatedSlots, shape: MixerShape, options: OperatorOptions):
        self.slots = config.num_slots
        self.shape = shape
        self.options = options

    def __call__(
        self,
        inputs: ProjectedInput,
        recurrence_inputs: RecurrenceInputs,
        *,
        segment_ids: SegmentIds | None = None,
        state: SlotState | None = None,
    ) -> tuple[ValueHeads, SlotState]:
        """Output and next state.

        Raises:
            ValueError: there is no decay per slot, or the gain has gates.
        """
        expect_no_previous("GatedSlots", recurrence_inputs.gates)
        log_decay, gates = recurrence_inputs.decay.log_decay, recurrence_inputs.gates
        if log_decay is None or log_decay.ndim != 4:
            raise ValueError("GatedSlots: the decay axis gives none per channel, expected one for each slot")
        if any(gate is not None for gate in (gates.beta, gates.erase, gates.write)):
            raise ValueError("GatedSlots: the gain gives gates, expected UnitGain: a slot takes what it forgets")
        batch, length, heads, slots = log_decay.shape
        taken = -jnp.expm1(log_decay)
        options = {**self.options.arguments(), "scale": 1.0, "segment_ids": segment_ids}
        # Logits: a slot is a value head of one channel, with a decay of its own.
        logits, keys = ops.linear_attention(
            recurrence_inputs.keys.query,
            recurrence_inputs.keys.written,
            taken.reshape(batch, length, heads * slots, 1),
            log_decay=log_decay.reshape(batch, length, heads * slots),
            initial_state=None if state is None else state.key.reshape(batch, heads * slots, -1, 1),
            **options,
        )
        weights = jax.nn.softmax(logits.reshape(batch, length, heads, slots), axis=-1)
        value = recurrence_inputs.value
        out, values = ops.linear_attention(
            weights.astype(value.dtype),
            taken.astype(value.dtype),
            value,
            log_decay=log_decay,
            initial_state=None if state is None else state.value,
            **options,
        )
        return out, SlotState(keys.reshape(batch, heads, slots, -1), values)

    def init_state(self, batch_size: int) -> SlotState:
        """The state before the first token: zeros."""
        shape = self.shape
        heads = (batch_size, shape.value_heads, self.slots)
        sizes = (shape.key_size, shape.value_size)
        return SlotState(*(jnp.zeros((*heads, size), shape.gate_dtype) for size in sizes))

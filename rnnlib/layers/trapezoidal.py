"""The trapezoidal solve: each token's key and value are written twice, at the token and at the next one (Mamba-3)."""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax import Array

from rnnlib import ops
from rnnlib.fields import PositiveInteger
from rnnlib.layers.array_types import SegmentIds, ValueHeads
from rnnlib.layers.base import MixerShape
from rnnlib.layers.input_projection import ProjectedInput
from rnnlib.layers.solve import OperatorOptions, RecurrenceInputs, SolveConfig, Solver
from rnnlib.ops.arguments import matmul_precision
from rnnlib.ops.context_parallel import current_axis, document_starts, of_first, of_last, token_after


class TrapezoidalState(NamedTuple):
    """The state of a trapezoidal solver, float32.

    Attributes:
        memory: `S_t`, `[B, HV, K, V]`.
        key: the last token's keys, `[B, HV, R, K]`.
        value: its value, `[B, HV, V]`.
    """

    memory: Array
    key: Array
    value: Array


@dataclasses.dataclass(frozen=True)
class Trapezoidal(SolveConfig):
    """Linear attention, `S_t = alpha_t S_(t-1) + eta_t sum_r k_(t-1,r) v_(t-1,r)^T + zeta_t sum_r k_(t,r) v_(t,r)^T`.

    Mamba-3's recurrence (Gated DeltaNet-2 paper, table 1 with equation 16), with the gain axis's `write` as zeta and
    `previous` as eta / alpha; nothing of the previous token is written where a document starts. Read by
    `o_t = sum_r c_r * S_t^T q_(t,r)`.

    Attributes:
        rank: R, pairs of key and value that a token writes, and queries that read (multiple-input multiple-output).
            Above 1, `v_r = u_r * v`, with `u` and `c` learned per value head and channel, starting at 1/R. A chunk of
            `chunk_size` then holds `chunk_size / R` tokens.
    """

    rank: PositiveInteger = 1

    def build(self, shape: MixerShape, options: OperatorOptions, *, rngs: nnx.Rngs) -> "TrapezoidalSolver":
        """Builds the module."""
        return TrapezoidalSolver(shape, options)

    def describe(self) -> str:
        """The axis in a few words, for the table of mixers."""
        return "additive, trapezoidal" + ("" if self.rank == 1 else f", {self.rank} pairs a token")

    def mimo_rank(self) -> int:
        """The rank."""
        return self.rank

    def erases(self) -> bool:
        """False: the state decays alone."""
        return False


class TrapezoidalSolver(Solver):
    """Calls `rnnlib.ops.linear_attention` with a gate of its own on what a token reads of its own write.

    Later tokens read token t's pairs by `zeta_t + eta_(t+1) / alpha_(t+1)`, which the next token has part in; the token
    itself reads them by `zeta_t`, the operator's `diagonal`. The gain gives `eta / alpha`, so that nothing is divided.
    R pairs of a token are R rows of linear attention, of which only the first decays.
    """

    def __init__(self, shape: MixerShape, options: OperatorOptions):
        self.shape = shape
        self.options = options
        # Rows of a token for the operator, a power of two; those above the rank are zeros.
        self.rows = 1 << (shape.mimo_rank - 1).bit_length()
        rank, several = shape.mimo_rank, shape.mimo_rank > 1

        def equal_weights() -> nnx.Param:
            # A vector, so that no optimizer decays it; an array of its own, so that a training step may be given both.
            return nnx.Param(jnp.full((shape.value_heads * rank * shape.value_size,), 1.0 / rank, shape.param_dtype))

        self.value_scale = equal_weights() if several else None
        self.read_scale = equal_weights() if several else None

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
            ValueError: the gain gives other gates than `write` and `previous` per head.
        """
        gates, keys, log_decay = recurrence_inputs.gates, recurrence_inputs.keys, recurrence_inputs.decay.log_decay
        if gates.previous is None or gates.write is None or gates.erase is not None or log_decay is None:
            raise ValueError("Trapezoidal: the gain gives no gate on the previous token, expected TrapezoidalGain")
        value, axis = recurrence_inputs.value, current_axis()
        query, key = (self._by_row(y) for y in (keys.query, keys.written))
        previous, memory = gates.previous, None
        if state is not None:
            # The token before the first is in the state, but for what the first adds to it.
            first = previous[:, 0] if axis is None else of_first(previous[:, 0], axis)
            memory = state.memory + self._write(first, state.key, state.value)
        if segment_ids is not None:
            previous = jnp.where(document_starts(segment_ids)[..., None], 0.0, previous)
        after = jnp.zeros_like(previous[:, 0]) if axis is None else token_after(previous, axis)
        write = gates.write + jnp.concatenate([previous[:, 1:], after[:, None]], axis=1)

        rows = self.rows
        out, memory = ops.linear_attention(
            query,
            key,
            self._values(value),
            log_decay=_in_first_row(log_decay, rows),
            write=jnp.repeat(write, rows, axis=1),
            diagonal=jnp.repeat(gates.write, rows, axis=1),
            diagonal_size=rows,
            initial_state=memory,
            segment_ids=None if segment_ids is None else jnp.repeat(segment_ids, rows, axis=1),
            **self.options.arguments(),
        )
        last_key = keys.written[:, -1:].reshape(len(value), 1, -1, *self.shape_of_keys)
        last = self.shape.repeat_key_heads(last_key)[:, 0], value[:, -1]
        if axis is not None:
            last = of_last(last[0], axis), of_last(last[1], axis)
        return self._sum_reads(out, value), TrapezoidalState(memory, *(x.astype(self.shape.gate_dtype) for x in last))

    @property
    def shape_of_keys(self) -> tuple[int, int]:
        """R and K."""
        return self.shape.mimo_rank, self.shape.key_size

    def _by_row(self, y: Array) -> Array:
        """Keys or queries of any heads, with R of each token, row by row: `[B, T * rows, heads, K]`."""
        rank, size = self.shape_of_keys
        if rank == 1:
            return y
        y = jnp.moveaxis(y.reshape(*y.shape[:2], -1, rank, size), 3, 2)
        return _by_row(y, self.rows)

    def _values(self, value: Array) -> Array:
        """The R values of each value `[B, T, HV, V]`, row by row: `[B, T * rows, HV, V]`."""
        if self.value_scale is None:
            return value
        return _by_row(value[:, :, None] * self._by_rank(self.value_scale).astype(value.dtype), self.rows)

    def _sum_reads(self, out: Array, value: Array) -> Array:
        """What the R rows of each token read, summed with their weights: as `value`, `[B, T, HV, V]`."""
        if self.read_scale is None:
            return out
        out = out.reshape(*value.shape[:2], self.rows, *value.shape[2:])[:, :, : self.shape.mimo_rank]
        return jnp.sum(out * self._by_rank(self.read_scale), axis=2).astype(value.dtype)

    def _by_rank(self, scale: nnx.Param) -> Array:
        """Learned weights, `[R, HV, V]`."""
        shape = self.shape
        by_head = scale[...].astype(shape.gate_dtype).reshape(shape.value_heads, shape.mimo_rank, shape.value_size)
        return jnp.swapaxes(by_head, 0, 1)

    def _write(self, gate: Array, key: Array, value: Array) -> Array:
        """What one token adds to the state, `[B, HV, K, V]`, of its keys `[B, HV, R, K]` and its value `[B, HV, V]`."""
        values = value[:, :, None]
        if self.value_scale is not None:
            values = values * jnp.swapaxes(self._by_rank(self.value_scale), 0, 1)
        precision = matmul_precision(key, values)
        return jnp.einsum("bhrk,bhrv->bhkv", gate[:, :, None, None] * key, values, precision=precision)

    def init_state(self, batch_size: int) -> TrapezoidalState:
        """The state before the first token: zeros."""
        shape = self.shape
        heads, rank, keys, values = shape.value_heads, shape.mimo_rank, shape.key_size, shape.value_size
        sizes = (heads, keys, values), (heads, rank, keys), (heads, values)
        return TrapezoidalState(*(jnp.zeros((batch_size, *size), shape.gate_dtype) for size in sizes))


def _by_row(y: Array, rows: int) -> Array:
    """R rows a token, and zeros up to `rows`: `[B, T, R, H, X]` to `[B, T * rows, H, X]`."""
    y = jnp.pad(y, ((0, 0), (0, 0), (0, rows - y.shape[2]), (0, 0), (0, 0)))
    return y.reshape(y.shape[0], -1, *y.shape[3:])


def _in_first_row(log_decay: Array, rows: int) -> Array:
    """`[B, T, H]` as `[B, T * rows, H]`: the first row of each token decays."""
    batch, _, heads = log_decay.shape
    return jnp.pad(log_decay[:, :, None], ((0, 0), (0, 0), (0, rows - 1), (0, 0))).reshape(batch, -1, heads)

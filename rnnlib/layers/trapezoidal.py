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
from rnnlib.ops.context_parallel import current_axis, document_starts, token_before


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
    `previous` as eta; nothing of the previous token is written where a document starts. Read by
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
    """Calls `rnnlib.ops.linear_attention` with the previous tokens' keys and values, and adds each token's own.

    Without the token's own write, the state at token t is
    `P_t = alpha_t P_(t-1) + (eta_t + alpha_t zeta_(t-1)) k_(t-1) v_(t-1)^T`: linear attention with shifted keys and
    values. R pairs of a token are R steps of linear attention, of which only the first decays.
    """

    def __init__(self, shape: MixerShape, options: OperatorOptions):
        self.shape = shape
        self.options = options
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
        initial_memory, first_key, first_value = (None, None, None) if state is None else state
        query = self._per_value_head(keys.query)
        key = self._per_value_head(keys.written)
        value = recurrence_inputs.value
        key_before, value_before = _shift(key, first_key), _shift(value, first_value)
        # The state already includes the write of the token before the first.
        write_before = _shift(gates.write)
        write_before = gates.previous + jnp.exp(log_decay) * write_before
        if segment_ids is not None:
            write_before = jnp.where(document_starts(segment_ids)[..., None], 0.0, write_before)

        rank = self.shape.mimo_rank
        out, memory = ops.linear_attention(
            _steps(query),
            _steps(key_before),
            _steps(self._values(value_before)),
            log_decay=_steps(jnp.pad(log_decay[..., None, None], ((0, 0),) * 3 + ((0, rank - 1), (0, 0))))[..., 0],
            write=jnp.repeat(write_before, rank, axis=1),
            initial_state=initial_memory,
            segment_ids=None if segment_ids is None else jnp.repeat(segment_ids, rank, axis=1),
            **self.options.arguments(),
        )
        out = self._sum_reads(jnp.moveaxis(out.reshape(*value.shape[:2], rank, *value.shape[2:]), 2, 3))
        out = out + self._read(query, key, value, gates.write, jnp.ones((rank, rank)))
        if rank > 1:
            # Query r stands at step r, but reads all R pairs.
            out = out + self._read(query, key_before, value_before, write_before, jnp.triu(jnp.ones((rank, rank)), 1))
        dtype = self.shape.gate_dtype
        last_values = self._values(value[:, -1])
        last = gates.write[:, -1, :, None, None] * key[:, -1].astype(dtype)
        precision = matmul_precision(key, last_values)
        memory = memory + jnp.einsum("bhrk,bhrv->bhkv", last, last_values.astype(dtype), precision=precision)
        new = TrapezoidalState(memory, *(y[:, -1].astype(dtype) for y in (key, value)))
        return out.astype(value.dtype), new

    def _per_value_head(self, y: Array) -> Array:
        """Keys or queries of any heads, `[B, T, HV, R, K]`."""
        return self.shape.repeat_key_heads(y.reshape(*y.shape[:2], -1, self.shape.mimo_rank, self.shape.key_size))

    def _values(self, value: Array) -> Array:
        """The R values `[..., HV, R, V]` of each value `[..., HV, V]`."""
        if self.value_scale is None:
            return value[..., None, :]
        return value[..., None, :] * self._per_head(self.value_scale).astype(value.dtype)

    def _sum_reads(self, out: Array) -> Array:
        """The R queries' outputs `[B, T, HV, R, V]`, summed with their weights."""
        return out[..., 0, :] if self.read_scale is None else jnp.sum(out * self._per_head(self.read_scale), axis=-2)

    def _per_head(self, scale: nnx.Param) -> Array:
        shape = self.shape
        return scale[...].astype(shape.gate_dtype).reshape(shape.value_heads, shape.mimo_rank, shape.value_size)

    def _read(self, query: Array, key: Array, value: Array, write: Array, seen: Array) -> Array:
        """What each token's queries read of R pairs, summed: pair j by query r where `seen[r, j]` is 1.

        `sum_rj c_r * (w_rj u_j * v) = v * sum_rj w_rj (c_r * u_j)`, with `w_rj = q_r . k_j`: nothing has R values.
        """
        rank, dtype = self.shape.mimo_rank, self.shape.gate_dtype
        query, key = query.astype(dtype), key.astype(dtype)
        # Pair by pair, sums of products, since R is 1 or 4: as fast on a GPU as a batch of matrix products, and faster
        # on a CPU. [B, T, HV, R, R]
        weights = jnp.stack([jnp.sum(query * key[..., j : j + 1, :], axis=-1) for j in range(rank)], axis=-1)
        scale = self.shape.key_size**-0.5 if self.options.scale is None else self.options.scale
        weights = weights * scale * write[..., None, None] * seen.astype(dtype)
        if self.value_scale is None or self.read_scale is None:
            return weights[..., 0] * value.astype(dtype)
        # [HV, R, R, V]
        mixing = self._per_head(self.read_scale)[:, :, None] * self._per_head(self.value_scale)[:, None]
        precision = matmul_precision(query, value)
        return value.astype(dtype) * jnp.einsum("bthrj,hrjv->bthv", weights, mixing, precision=precision)

    def init_state(self, batch_size: int) -> TrapezoidalState:
        """The state before the first token: zeros."""
        shape = self.shape
        heads, rank, keys, values = shape.value_heads, shape.mimo_rank, shape.key_size, shape.value_size
        sizes = (heads, keys, values), (heads, rank, keys), (heads, values)
        return TrapezoidalState(*(jnp.zeros((batch_size, *size), shape.gate_dtype) for size in sizes))


def _shift(y: Array, first: Array | None = None) -> Array:
    """`y` `[B, T, ...]` one token later, `first` `[B, ...]` in front, or zeros, or the device's before."""
    axis = current_axis()
    if first is None and axis is not None:
        first = token_before(y, axis)
    row = jnp.zeros_like(y[:, :1]) if first is None else first[:, None].astype(y.dtype)
    return jnp.concatenate([row, y[:, :-1]], axis=1)


def _steps(y: Array) -> Array:
    """R steps a token: `[B, T, H, R, X]` to `[B, T * R, H, X]`."""
    return jnp.moveaxis(y, 3, 2).reshape(y.shape[0], -1, y.shape[2], y.shape[4])

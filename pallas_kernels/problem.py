"""What a call of the delta rule or of linear attention is about, for every backend: its arrays and its static facts."""

from dataclasses import dataclass
from typing import Any, NamedTuple, TypeGuard

import jax
import jax.numpy as jnp
from jax import Array

CHUNK = 64  # tokens of a chunk


def cdiv(a: int, b: int) -> int:
    """`ceil(a / b)`."""
    return -(-a // b)


def next_power_of_two(size: int) -> int:
    """The smallest power of two that is at least `size` and 16, the smallest side of a matrix product."""
    return max(16, 1 << (size - 1).bit_length())


def segment_starts(segment_ids: Array | None) -> Array | None:
    """1 at each token whose id differs from the one before it, `[B, T]` int32; None where no segment can start."""
    if segment_ids is None or segment_ids.shape[1] == 1:
        return None
    changes = segment_ids[:, 1:] != segment_ids[:, :-1]
    return jnp.pad(changes, ((0, 0), (1, 0))).astype(jnp.int32)


class Inputs(NamedTuple):
    """Arguments of a call, lengths padded to whole chunks and channels to powers of two.

    Attributes:
        q: `[B, T, H, K]`.
        k: `[B, T, H, K]`.
        v: `[B, T, HV, V]`.
        write_key: None (`k`), `[B, T, H, K]` or `[B, T, HV, K]`.
        erase: None (1), `[B, T, HV]` or `[B, T, HV, K]`.
        write: None (1), `[B, T, HV]` or `[B, T, HV, V]`.
        log_decay: None, `[B, T, HV]` or `[B, T, HV, K]`.
        initial_state: None (zero) or `[B, HV, K, V]` float32.
        starts: None, or `[B, T]` int32, 1 at each token that starts a segment.
    """

    q: Array
    k: Array
    v: Array
    write_key: Array | None = None
    erase: Array | None = None
    write: Array | None = None
    log_decay: Array | None = None
    initial_state: Array | None = None
    starts: Array | None = None


def make_inputs(
    q: Array,
    k: Array,
    v: Array,
    write_key: Array | None,
    erase: Array | None,
    write: Array | None,
    log_decay: Array | None,
    initial_state: Array | None,
    segment_ids: Array | None,
) -> Inputs:
    """Brings the matrices to one dtype and the gates to one that kernels load, and marks the segments' first tokens."""
    dtype = jnp.result_type(q, k, v)
    starts = segment_starts(segment_ids)
    if starts is not None and log_decay is None:
        log_decay = jnp.zeros(v.shape[:3], jnp.float32)

    def widened(x):
        return x if x is None or x.dtype in (jnp.bfloat16, jnp.float32) else x.astype(jnp.float32)

    is_shared, erase = write is erase, widened(erase)
    return Inputs(
        q=q.astype(dtype),
        k=k.astype(dtype),
        v=v.astype(dtype),
        write_key=widened(write_key),
        erase=erase,
        write=erase if is_shared else widened(write),
        log_decay=widened(log_decay),
        initial_state=widened(initial_state),
        starts=starts,
    )


def pad_inputs(inputs: Inputs, whole_chunks: bool = True) -> Inputs:
    """Pads channels to powers of two and, with `whole_chunks`, the length to whole chunks; the padding does nothing."""
    key_size, value_size = inputs.q.shape[3], inputs.v.shape[3]
    tokens = -inputs.q.shape[1] % CHUNK if whole_chunks else 0
    keys, values = next_power_of_two(key_size) - key_size, next_power_of_two(value_size) - value_size
    if not (tokens or keys or values):
        return inputs

    def pad(x, channels):
        return None if x is None else jnp.pad(x, [(0, 0), (0, tokens), (0, 0), (0, channels)][: x.ndim])

    state = inputs.initial_state
    return Inputs(
        q=pad(inputs.q, keys),
        k=pad(inputs.k, keys),
        v=pad(inputs.v, values),
        write_key=pad(inputs.write_key, keys),
        erase=pad(inputs.erase, keys),
        write=pad(inputs.write, values),
        log_decay=pad(inputs.log_decay, keys),
        initial_state=None if state is None else jnp.pad(state, [(0, 0), (0, 0), (0, keys), (0, values)]),
        starts=pad(inputs.starts, 0),
    )


def crop_results(inputs: Inputs, results: tuple[Array, Array]) -> tuple[Array, Array]:
    """Output and state without what `pad_inputs` added to `inputs`."""
    (out, state), key_size, value_size = results, inputs.q.shape[3], inputs.v.shape[3]
    return out[:, : inputs.q.shape[1], :, :value_size], state[:, :, :key_size, :value_size]


def is_channel_wise(gate: Array | None) -> TypeGuard[Array]:
    """Whether a gate or decay is one number a channel."""
    return gate is not None and gate.ndim == 4


def is_sum(inputs: Inputs, online: bool) -> bool:
    """Whether a call is a sum over pairs of tokens with one weight each, which takes kernels of its own."""
    return not online and not is_channel_wise(inputs.log_decay)


@dataclass(frozen=True)
class Problem:
    """Static facts of a call; each backend adds where its programs find their part of an array.

    Attributes:
        batch: B.
        length: T, a multiple of the chunk's 64.
        key_heads: H.
        value_heads: HV.
        key_size: K.
        value_size: V.
        dtype: dtype of q, k and v, and of the operands of matrix products.
        online: whether writes correct what the state already holds (delta rule), or just add (linear attention).
        scale: factor on the output.
        segments: into how many equal parts of whole chunks the sequence is split to run side by side.
    """

    batch: int
    length: int
    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    dtype: Any
    online: bool
    scale: float
    segments: int = 1

    @property
    def chunks(self) -> int:
        """Number of chunks."""
        return self.length // CHUNK

    @property
    def chunks_per_segment(self) -> int:
        """Number of chunks in a segment (the last may have fewer)."""
        return cdiv(self.chunks, self.segments)

    def per_head(self, *shape: int, dtype: Any = None) -> jax.ShapeDtypeStruct:
        """Shape and dtype of an array `[B, HV, *shape]`."""
        return jax.ShapeDtypeStruct((self.batch, self.value_heads, *shape), dtype or self.dtype)


def segment_range(problem: Problem, segment) -> tuple[Any, Any]:
    """First chunk of a segment and its number of chunks, which is static where all segments are alike."""
    size = problem.chunks_per_segment
    first = segment * size
    if problem.chunks == size * problem.segments:
        return first, size
    return first, jnp.clip(problem.chunks - first, 0, size)


def problem_of[Kind: Problem](
    kind: type[Kind], inputs: Inputs, *, online: bool, scale: float, segments: int = 1
) -> Kind:
    """The static facts of a call on `inputs`, as a backend's `kind` of problem."""
    batch, length, key_heads, key_size = inputs.q.shape
    value_heads, value_size = inputs.v.shape[2:]
    dtype = jnp.dtype(inputs.v.dtype)
    return kind(batch, length, key_heads, value_heads, key_size, value_size, dtype, online, scale, segments)

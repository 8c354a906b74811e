"""What a call is about: its arrays, its static facts, and where a program finds its part of each array."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeGuard

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.triton.backend import Operand, cdiv
from pallas_kernels.triton.decay import CHUNK


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


At = Callable[..., tuple[Any, Any, Any, Any]]


@dataclass(frozen=True)
class Problem:
    """Static facts of a call.

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

    @property
    def chunk_grid(self) -> tuple[int, int, int]:
        """One program for each chunk of each value head."""
        return self.value_heads, self.chunks, self.batch

    def segment_at(self, h: Any, z: Any) -> tuple[Any, Any, Any]:
        """Batch, head and segment of a program on a grid whose last axis goes over all segments of all sequences."""
        return lax.div(z, self.segments), h, lax.rem(z, self.segments)

    def of_token(self, x: Array | jax.ShapeDtypeStruct | None, rows: int, at: At, width: int = 0) -> Operand | None:
        """Rows of one head of `[B, T, heads]` or `[B, T, heads, D]`, `width` channels of D (0: all).

        `at` maps the grid's indices to (batch, block of rows, value head, block of channels).
        """
        if x is None:
            return None
        group = self.value_heads // x.shape[2]

        def place(*indices):
            b, t, h, c = at(*indices)
            h = h if group == 1 else lax.div(h, group)
            return (b, t, h, c) if x.ndim == 4 else (b, t, h)

        tail = (width or x.shape[3],) if x.ndim == 4 else ()
        return Operand(x, (None, rows, None, *tail), place)

    def of_one_token(self, x: Array | jax.ShapeDtypeStruct | None, at: At, width: int = 0) -> Operand | None:
        """One head of one token of `[B, 1, heads]` (a number) or `[B, 1, heads, D]` (`width` channels; 0: all)."""
        operand = self.of_token(x, 1, at, width)
        if operand is None:
            return None
        return Operand(operand.array, (None, None, *operand.block[2:]), operand.place)

    def of_position(self, x: Array | None, at: At) -> Operand | None:
        """One chunk of `[B, T]`."""
        return None if x is None else Operand(x, (None, CHUNK), lambda *indices: at(*indices)[:2])

    def of_head(self, x: Array | jax.ShapeDtypeStruct | None, block: tuple[int | None, ...], place) -> Operand | None:
        """A block of `[B, HV, ...]`, whose first two axes a program sees at one index."""
        return None if x is None else Operand(x, (None, None, *block), place)

    def per_head(self, *shape: int, dtype: Any = None) -> jax.ShapeDtypeStruct:
        """Shape and dtype of an array `[B, HV, *shape]`."""
        return jax.ShapeDtypeStruct((self.batch, self.value_heads, *shape), dtype or self.dtype)


def is_channel_wise(gate: Array | None) -> TypeGuard[Array]:
    """Whether a gate or decay is one number a channel."""
    return gate is not None and gate.ndim == 4


def is_sum(inputs: Inputs, online: bool) -> bool:
    """Whether a call is a sum over pairs of tokens with one weight each, which takes kernels of its own."""
    return not online and not is_channel_wise(inputs.log_decay)


def problem_of(inputs: Inputs, *, online: bool, scale: float, segments: int = 1) -> Problem:
    """The static facts of a call on `inputs`."""
    batch, length, key_heads, key_size = inputs.q.shape
    value_heads, value_size = inputs.v.shape[2:]
    dtype = jnp.dtype(inputs.v.dtype)
    return Problem(batch, length, key_heads, value_heads, key_size, value_size, dtype, online, scale, segments)

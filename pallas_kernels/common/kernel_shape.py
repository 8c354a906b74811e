"""What a call of the delta rule or of linear attention is about, for every backend: its arrays and its static facts."""

from dataclasses import dataclass
from typing import Any, TypeGuard

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


def resets_of(segment_ids: Array | None) -> Array | None:
    """1 at each token whose id differs from the one before it, `[B, T]` int32; None where no document can start."""
    if segment_ids is None or segment_ids.shape[1] == 1:
        return None
    changes = segment_ids[:, 1:] != segment_ids[:, :-1]
    return jnp.pad(changes, ((0, 0), (1, 0))).astype(jnp.int32)


def is_channel_wise(gate: Array | None) -> TypeGuard[Array]:
    """Whether a gate or decay is one number a channel."""
    return gate is not None and gate.ndim == 4


@dataclass(frozen=True)
class KernelShape:
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
        num_splits: into how many equal parts of whole chunks the sequence is split to run side by side.
        tokens: how many of the T tokens are the caller's; the rest is padding. None is all.
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
    num_splits: int = 1
    tokens: int | None = None

    @property
    def chunks(self) -> int:
        """Number of chunks."""
        return self.length // CHUNK

    @property
    def chunks_per_split(self) -> int:
        """Number of chunks in a split (the last may have fewer)."""
        return cdiv(self.chunks, self.num_splits)

    def last_token(self, chunk: Any) -> Any:
        """Row of a chunk's last token that is not padding."""
        return CHUNK - 1 if self.tokens is None else jnp.minimum(self.tokens - CHUNK * chunk, CHUNK) - 1

    def per_head(self, *shape: int, dtype: Any = None) -> jax.ShapeDtypeStruct:
        """Shape and dtype of an array `[B, HV, *shape]`."""
        return jax.ShapeDtypeStruct((self.batch, self.value_heads, *shape), dtype or self.dtype)


def split_range(kernel_shape: KernelShape, split) -> tuple[Any, Any]:
    """First chunk of a split and its number of chunks, which is static where all splits are alike."""
    size = kernel_shape.chunks_per_split
    first = split * size
    if kernel_shape.chunks == size * kernel_shape.num_splits:
        return first, size
    return first, jnp.clip(kernel_shape.chunks - first, 0, size)

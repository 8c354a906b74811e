"""A call's static facts, and where a program finds its part of each array."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax import Array, lax

from pallas_kernels.common import kernel_shape
from pallas_kernels.common.kernel_shape import CHUNK
from pallas_kernels.common.triton.backend import Operand

At = Callable[..., tuple[Any, Any, Any, Any]]


@dataclass(frozen=True)
class KernelShape(kernel_shape.KernelShape):
    """A call's static facts, and where a program finds its part of each array."""

    @property
    def chunk_grid(self) -> tuple[int, int, int]:
        """One program for each chunk of each value head."""
        return self.value_heads, self.chunks, self.batch

    def split_at(self, h: Any, z: Any) -> tuple[Any, Any, Any]:
        """Batch, head and split of a program on a grid whose last axis goes over all splits of all sequences."""
        return lax.div(z, self.num_splits), h, lax.rem(z, self.num_splits)

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

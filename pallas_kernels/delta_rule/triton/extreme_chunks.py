"""The chunks whose channel-wise decay is extreme (`channel_decay`), listed once a call for all kernels that serve them.

Nearly always there are none. 49,152 programs that load a mark each and end take 0.079 ms on an H200, those that read
how long the list is 0.051, and as many as the card holds at once, each of which goes over a part of the list, 0.005.
Such a loop costs kernels with the most registers a fifth where chunks are extreme: they have a program for each place.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.common.config import KernelConfig
from pallas_kernels.common.triton.backend import call, iota, load_masked, store_masked, whole
from pallas_kernels.common.triton.kernel_shape import KernelShape
from pallas_kernels.common.triton.visits import Visits

EXTREME_WIDTH = 32
"""Width of a block of key channels of an extreme chunk: wider ones would hold more than there are registers."""
_MARKS = 4096
"""Marks that are loaded at once."""


def list_extreme(marks: Array) -> Array:
    """How many marks `[B, HV, N]` int32 are not zero, then the places of these, in order, then others; int32."""
    count = marks.size
    block = min(_MARKS, 1 << (count - 1).bit_length())
    size = -(-count // block) * block
    results = call(
        _list_kernel,
        "delta_list_extreme",
        (1,),
        {"marks": whole(marks.reshape(-1))},
        {"listed": whole(jax.ShapeDtypeStruct((1 + size,), jnp.int32))},
        KernelConfig(num_warps=8),
        block=block,
    )
    return results["listed"]  # type: ignore[return-value]


def _list_kernel(r, *, block: int):
    size = r.listed.shape[0] - 1

    def step(i, found):
        place = i * block + iota((block,), 0)
        mark = jnp.where(load_masked(r.marks, (place,), place < r.marks.shape[0]) != 0, 1, 0)
        until = found + jnp.cumsum(mark, axis=0)
        # What is not marked goes to the end, so that no two are stored at one place.
        store_masked(r.listed, (jnp.where(mark > 0, until, size - (place - until)),), place, None)
        return found + jnp.sum(mark)

    r.listed[0] = lax.fori_loop(0, size // block, step, jnp.int32(0))


def extreme_visits(kernel_shape: KernelShape, listed: Array, programs: int | None = None, parts: int = 1) -> Visits:
    """The listed chunks' places on a grid of value heads, chunks, and `parts` of each row.

    Args:
        kernel_shape: static facts.
        listed: `list_extreme`.
        programs: see `Visits`.
        parts: of each chunk, side by side along the grid's last axis.
    """
    p = kernel_shape

    def place(chunk: Any, part: Any) -> tuple[Any, Any, Any]:
        row = lax.div(chunk, p.chunks)
        batch, head = lax.div(row, p.value_heads), lax.rem(row, p.value_heads)
        return head, lax.rem(chunk, p.chunks), batch * parts + part

    return Visits(listed, parts, place, p.batch * p.value_heads * p.chunks * parts, programs)

"""How Pallas kernels are interpreted on a CPU: JAX's interpreter with less work around each program of the grid.

For every operand it makes an index per axis that may count from the end, reads a block, and writes the block back, be
it an input. That is a quarter of the operations of such a program, and of the time to trace and compile it. Here an
axis that a block covers has no index, an index counts from the start (the starts of blocks are not negative), and a
block that the kernel did not write is not written back. Results are the same, bit by bit.

It leans on private names of jax, as `tests/pallas_kernels/mosaic_interpreter.py` does.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax._src.pallas import hlo_interpreter

_read: dict[int, Any] = {}
"""The block that was last read of an operand, by the operand's `id`, until it is written."""


def _starts(starts: Sequence[Any], block: Sequence[int], shape: Sequence[int]) -> list[Any]:
    whole = [size == all_of_it for size, all_of_it in zip(block, shape)]
    return [np.int32(0) if covered else jax.numpy.asarray(start, np.int32) for start, covered in zip(starts, whole)]


def _read_block(starts: Sequence[Any], block: tuple[int, ...], operand: jax.Array, squeezed: Sequence[bool]) -> Any:
    found = operand
    if tuple(block) != operand.shape:
        starts = _starts(starts, block, operand.shape)
        found = lax.dynamic_slice(operand, starts, block, allow_negative_indices=False)
    if any(squeezed):
        found = lax.squeeze(found, np.flatnonzero(squeezed).tolist())
    _read[id(operand)] = found
    return found


def _write_block(
    starts: Sequence[Any], block: tuple[int, ...], operand: jax.Array, new: jax.Array, squeezed: Sequence[bool]
) -> jax.Array:
    if new is _read.pop(id(operand), None):
        return operand
    new = lax.broadcast_in_dim(new, block, np.flatnonzero(np.logical_not(squeezed)).tolist())
    if tuple(block) == operand.shape:
        return new
    starts = _starts(starts, block, operand.shape)
    return lax.dynamic_update_slice(operand, new, starts, allow_negative_indices=False)


def install() -> None:
    """From here on, for every kernel that is interpreted."""
    hlo_interpreter._dynamic_slice = _read_block
    hlo_interpreter._dynamic_update_slice = _write_block

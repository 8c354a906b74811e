"""A decay of one number a token, added up once for kernels that come back to a chunk, or go over many."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from pallas_kernels.common.config import KernelConfig
from pallas_kernels.common.kernel_shape import CHUNK
from pallas_kernels.common.triton.backend import Operand, call
from pallas_kernels.common.triton.decay import (
    ChunkDecay,
    chunk_decay,
    decay_from_start,
    decay_of_chunk,
    decay_to_end,
    load_resets,
)
from pallas_kernels.common.triton.kernel_shape import KernelShape


class Rows(NamedTuple):
    """A decay's numbers for each token and chunk, of one value head each; all None without decay.

    Attributes:
        total: cumulative log decay in its chunk, `[B, HV, T]` float32; see `ChunkDecay`.
        fine: the rest of its digits.
        runs: document starts in its chunk up to it, int32; None without restarts.
        from_start: what is left at a token of the state before its chunk.
        to_end: what is left of a token's write after its chunk.
        kept: what a chunk leaves of the state, `[B, HV, N]` float32.
    """

    total: Array | None = None
    fine: Array | None = None
    runs: Array | None = None
    from_start: Array | None = None
    to_end: Array | None = None
    kept: Array | None = None


def _rows_kernel(r):
    decay = chunk_decay(r.log_decay[...].astype(jnp.float32), load_resets(r))
    r.total[...], r.fine[...] = decay.total, decay.fine
    if r.runs is not None:
        r.runs[...] = decay.runs
    r.from_start[...], r.to_end[...] = decay_from_start(decay), decay_to_end(decay)
    r.kept[...] = decay_of_chunk(decay)


def decay_rows(
    kernel_shape: KernelShape, log_decay: Array | None, resets: Array | None, *, name: str, num_warps: int
) -> Rows:
    """The numbers of a call's decay.

    Args:
        kernel_shape: static facts.
        log_decay: `[B, T, HV]`, or None.
        resets: `[B, T]` int32, 1 at each token that starts a document, or None.
        name: of the kernel in profiles.
        num_warps: of its programs, one for each chunk of each value head.
    """
    p = kernel_shape
    if log_decay is None:
        return Rows()

    def at(h, n, b):
        return b, n, h, 0

    def row(dtype=jnp.float32):
        return p.of_head(p.per_head(p.length, dtype=dtype), (CHUNK,), lambda h, n, b: (b, h, n))

    results = call(
        _rows_kernel,
        name,
        p.chunk_grid,
        {"log_decay": p.of_token(log_decay, CHUNK, at), "resets": p.of_position(resets, at)},
        {
            "total": row(),
            "fine": row(),
            "runs": None if resets is None else row(jnp.int32),
            "from_start": row(),
            "to_end": row(),
            "kept": p.of_head(p.per_head(p.chunks, dtype=jnp.float32), (None,), lambda h, n, b: (b, h, n)),
        },
        KernelConfig(num_warps=num_warps, num_stages=1),
    )
    return Rows(**results)


def rows_of_chunk(kernel_shape: KernelShape, rows: Rows, names: tuple[str, ...]) -> dict[str, Operand | None]:
    """Operands for kernels of one program a chunk, on `chunk_grid`."""

    def operand(name):
        return kernel_shape.of_head(getattr(rows, name), (CHUNK,), lambda h, n, b: (b, h, n))

    return {name: operand(name) for name in names}


def loaded_decay(r, rows: Any = ...) -> ChunkDecay:
    """The `ChunkDecay` that `decay_rows` stored, of a chunk's `rows` where a program sees more than the chunk."""
    if r.total is None:
        return ChunkDecay(None, None, None)
    return ChunkDecay(r.total[rows], r.fine[rows], None if r.runs is None else r.runs[rows])

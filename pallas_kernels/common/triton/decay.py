"""Decay and restarts inside one chunk, as values inside a kernel.

A document's first token begins a new *run*. A token reads only tokens of its own run. Only the first run reads the
state before the chunk, and only the last run writes to the state after it.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from pallas_kernels.common.decay import split_steps
from pallas_kernels.common.kernel_shape import CHUNK
from pallas_kernels.common.triton.backend import exp, iota


class ChunkDecay(NamedTuple):
    """Decay of one chunk.

    Attributes:
        total: inclusive cumulative log decay, `[C]` float32; None without one, and where it is channel-wise.
        fine: the small rest of the same sum, which float32 would lose in `total`. It is added after the difference of
            two totals is taken. None where `total` is None.
        runs: number of document starts up to and including each token, `[C]` int32; None without restarts.
    """

    total: Array | None
    fine: Array | None
    runs: Array | None


def load_resets(r) -> Array | None:
    """A chunk's marks of document starts `[C]`; None without restarts."""
    return None if r.resets is None else r.resets[...]


def chunk_decay(log_decay: Array | None, resets: Array | None) -> ChunkDecay:
    """Adds up one chunk's log decay, `[C]` float32, and counts its document starts `[C]`."""
    total = fine = runs = None
    if log_decay is not None:
        total, fine = (jnp.cumsum(part, axis=0) for part in split_steps(log_decay))
    if resets is not None:
        runs = jnp.cumsum(resets, axis=0)
    return ChunkDecay(total, fine, runs)


def pick_row(x: Array, n: int) -> Array:
    """Row `n` of `[C, ...]`."""
    return jnp.sum(jnp.where(iota(x.shape, 0) == n, x, 0), axis=0)


def decay_from_start(decay: ChunkDecay) -> Array | None:
    """The factor by which the state before the chunk has decayed at each token, `[C]`; None for 1."""
    if decay.total is None or decay.fine is None:
        return None
    factor = exp(decay.total + decay.fine)
    return factor if decay.runs is None else jnp.where(decay.runs == 0, factor, 0.0)


def decay_to_end(decay: ChunkDecay) -> Array | None:
    """The factor by which each token's write has decayed at the chunk's end, `[C]`; None for 1."""
    if decay.total is None or decay.fine is None:
        return None
    difference = pick_row(decay.total, CHUNK - 1)[None] - decay.total
    difference = difference + (pick_row(decay.fine, CHUNK - 1)[None] - decay.fine)
    factor = exp(difference)
    return factor if decay.runs is None else jnp.where(decay.runs == jnp.max(decay.runs), factor, 0.0)


def decay_of_chunk(decay: ChunkDecay) -> Array | None:
    """The factor by which the state decays over the chunk, a scalar; None for 1."""
    if decay.total is None or decay.fine is None:
        return None
    last = pick_row(decay.total, CHUNK - 1)
    factor = exp(last + pick_row(decay.fine, CHUNK - 1))
    return factor if decay.runs is None else jnp.where(jnp.max(decay.runs) == 0, factor, 0.0)


def causal_mask(decay: ChunkDecay, strict: bool, reverse: bool = False) -> Array:
    """Pairs `[C, C]` of one run in which the column's token comes before the row's, or is it unless `strict`.

    In `reverse` it comes after the row's.
    """
    later, earlier = iota((CHUNK, CHUNK), int(reverse)), iota((CHUNK, CHUNK), int(not reverse))
    mask = later > earlier if strict else later >= earlier
    return mask if decay.runs is None else mask & (decay.runs[:, None] == decay.runs[None, :])

"""The backward's gradients of the pairs' matrices, `dP` and `dT`; `bwd_dqkg` has the equations.

With a value key (`dplr`) there are two matrices more, of its scores and of its products with what erases:

    dP_k = tril(dO V^T)      dL = -tril(dW V^T, -1)
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from pallas_kernels.common.config import NUM_SMS, KernelConfig
from pallas_kernels.common.decay import divisible
from pallas_kernels.common.kernel_shape import CHUNK, is_channel_wise
from pallas_kernels.common.triton.backend import call, dot, dot_nt
from pallas_kernels.common.triton.decay import ChunkDecay
from pallas_kernels.common.triton.kernel_shape import KernelShape
from pallas_kernels.common.triton.pairs import diagonal, sum_of_parts, weigh_pairs
from pallas_kernels.delta_rule.inputs import Inputs
from pallas_kernels.delta_rule.triton.bwd_dh import Reversed
from pallas_kernels.delta_rule.triton.extreme_chunks import extreme_visits
from pallas_kernels.delta_rule.triton.wy import load_chunk_decay, load_wide


class Saved(NamedTuple):
    """What the passes over chunks left for this stage.

    Attributes:
        states: before each chunk, transposed, `[B, HV, N, V, K]`.
        residuals: R, transposed, `[B, HV, N, V, C]`; None where they are the values (linear attention in Mosaic GPU).
        back: gradients that the reverse pass found.
        rests: what rounding left of the states, for linear attention in Mosaic GPU (`rounded_rests` there); else None.
    """

    states: Array
    residuals: Array | None
    back: Reversed
    rests: Array | None = None


class PairGradients(NamedTuple):
    """Gradients of the pairs' matrices.

    Attributes:
        d_scores: dP, weighted by a scalar decay, `[B, HV, N, C, C]`; float32 if the decay is channel-wise.
        d_erased: dT, likewise, times an erase gate of one number a token; None for linear attention.
        d_own: the diagonal of dP, `[B, HV, N, C]` float32, if there is a decay, and it is zero in `d_scores`. A token's
            score with itself has no decay: in the decay's gradient `q dq` and `k~ dk~` of it cancel. Their rounding
            would be left, and where a token forgets nearly all that is all there is.
        d_added_scores: with a value key, that of its scores, as `d_scores`; else None.
        d_added_pairs: with a value key, that of its products with what erases, as `d_erased`; else None.
        d_added_own: with a value key, the diagonal of its scores' gradient, as `d_own`; else None.
    """

    d_scores: Array
    d_erased: Array | None
    d_own: Array | None
    d_added_scores: Array | None = None
    d_added_pairs: Array | None = None
    d_added_own: Array | None = None


def is_row(gate: Any) -> bool:
    """Whether a gate, as a reference or a value, is one number a token."""
    return gate is not None and len(gate.shape) == 1


def loaded_reader_ratio(r, tied_gates: bool) -> Any:
    """`reader_ratio` of a chunk's gates; None where nothing is left to do since both gates are one."""
    if tied_gates:
        return None
    return reader_ratio(load_wide(r.erase) if is_row(r.erase) else None, load_wide(r.gate))


def reader_ratio(erase: Array | None, gate: Array | None) -> Any:
    """What turns rows of `dW`, as they are stored, to the gradient of what reads; None for 1.

    What reads is the key where the erase gate is one number a token, which the gradient then includes, and `erase * k`
    where it is one a channel.

    Args:
        erase: the erase gate, one number a token in float32; None for 1, and where it is one a channel.
        gate: the write gate by which the stored `dW` is multiplied, likewise.
    """
    ratio = None if erase is None else divisible(erase)
    if gate is None:
        return ratio
    inverse = 1.0 / divisible(gate)
    return inverse if ratio is None else ratio * inverse


def scale_rows(x: Any, rows: Any) -> Any:
    """`x` `[C, ...]` times a number a row; `x` for None."""
    return x if rows is None else rows[:, None] * x


def load_residuals(r, part) -> Array:
    """A block of channels of R, `[., C]`."""
    return r.values[:, part].T if r.residuals is None else r.residuals[part, :]


def _pairs_kernel(r, *, kernel_shape: KernelShape, block: int, tied_gates: bool):
    def terms(part):
        residual = load_residuals(r, part)
        d_scores = dot(r.d_out[:, part], residual)
        return (d_scores, dot(r.d_values[:, part], residual)) if kernel_shape.online else (d_scores,)

    zero = jnp.zeros((CHUNK, CHUNK), jnp.float32)
    d_scores, *rest = sum_of_parts(
        kernel_shape.value_size, block, terms, (zero, zero) if kernel_shape.online else (zero,)
    )
    # Of a channel-wise decay only the restarts concern the pairs' mask.
    decay = load_chunk_decay(r)
    d_scores = kernel_shape.scale * d_scores
    if r.d_own is not None:
        r.d_own[...] = diagonal(d_scores, axis=1)
    r.d_scores[...] = weigh_pairs(d_scores, decay, strict=r.d_own is not None).astype(r.d_scores.dtype)
    for d_erased in rest:
        d_erased = scale_rows(-d_erased, loaded_reader_ratio(r, tied_gates))
        r.d_erased[...] = weigh_pairs(d_erased, decay, strict=True).astype(r.d_erased.dtype)
    if r.v is not None:
        _store_added_pairs(r, kernel_shape, block, decay)


def _store_added_pairs(r, kernel_shape: KernelShape, block: int, decay: ChunkDecay):
    """With a value key, the gradients of its scores with queries and of its products with what erases."""

    def terms(part):
        values = r.v[:, part]
        return dot_nt(r.d_out[:, part], values), dot_nt(r.d_values[:, part], values)

    zero = jnp.zeros((CHUNK, CHUNK), jnp.float32)
    d_scores, d_pairs = sum_of_parts(kernel_shape.value_size, block, terms, (zero, zero))
    d_scores = kernel_shape.scale * d_scores
    r.d_added_own[...] = diagonal(d_scores, axis=1)
    r.d_added_scores[...] = weigh_pairs(d_scores, decay, strict=True).astype(r.d_added_scores.dtype)
    r.d_added_pairs[...] = weigh_pairs(-d_pairs, decay, strict=True).astype(r.d_added_pairs.dtype)


def bwd_pairs(
    kernel_shape: KernelShape,
    inputs: Inputs,
    d_out: Array,
    saved: Saved,
    launch: KernelConfig,
    tied_gates: bool = False,
    listed: Array | None = None,
) -> PairGradients:
    """DP and dT of each chunk, `[B, HV, N, C, C]`; with `listed` (`list_extreme`) only of these."""
    p, x = kernel_shape, inputs

    def at(h, n, b):
        return b, n, h, 0

    def of_matrix(array, rows):
        return p.of_head(array, (None, rows, CHUNK), lambda h, n, b: (b, h, n, 0, 0))

    def token(array):
        return p.of_token(array, CHUNK, at)

    is_scaled, has_decay = is_channel_wise(x.log_decay), x.log_decay is not None
    pairs = of_matrix(p.per_head(p.chunks, CHUNK, CHUNK, dtype=jnp.float32 if is_scaled else None), CHUNK)
    own = p.of_head(p.per_head(p.chunks, CHUNK, dtype=jnp.float32), (None, CHUNK), lambda h, n, b: (b, h, n, 0))
    results = call(
        _pairs_kernel,
        "delta_pair_gradients",
        p.chunk_grid,
        {
            "erase": None if is_channel_wise(x.erase) or tied_gates else token(x.erase),
            "gate": None if is_channel_wise(x.write) or tied_gates else token(x.write),
            "log_decay": token(x.log_decay) if x.log_decay is not None and x.log_decay.ndim == 3 else None,
            "resets": p.of_position(x.resets, at),
            "d_out": token(d_out),
            "residuals": of_matrix(saved.residuals, p.value_size),
            "values": token(x.v) if saved.residuals is None else None,
            "d_values": token(saved.back.d_values) if p.online else None,
            "v": None if x.value_key is None else token(x.v),
        },
        {
            "d_scores": pairs,
            "d_erased": pairs if p.online else None,
            "d_own": own if has_decay else None,
            "d_added_scores": None if x.value_key is None else pairs,
            "d_added_pairs": None if x.value_key is None else pairs,
            "d_added_own": None if x.value_key is None else own,
        },
        launch,
        visits=None if listed is None else extreme_visits(p, listed, 3 * NUM_SMS),
        kernel_shape=p,
        block=min(launch.inner, p.value_size),
        tied_gates=tied_gates,
    )
    return PairGradients(**results)  # type: ignore[arg-type]

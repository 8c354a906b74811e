"""Decay and write gate of one number a token, as the numbers that the kernels multiply by; formulas of XLA."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.common.decay import split_gate, split_steps
from pallas_kernels.common.kernel_shape import CHUNK, KernelShape
from pallas_kernels.delta_rule.inputs import Inputs


class Decay(NamedTuple):
    """Of one value head each; float32, N chunks of C = 64 tokens. All None without decay.

    Attributes:
        coarse: cumulative log decay in its chunk, of multiples of 1/16, `[B, HV, N, C]`; see `split_steps`.
        fine: that of the rest.
        run: documents that start in the chunk up to a token, likewise; None without documents.
        from_start: what is left at a token of the state before its chunk.
        to_end: what is left of a token's write after its chunk.
        kept: what a chunk leaves of the state, `[B, HV, N]`.
    """

    coarse: Array | None = None
    fine: Array | None = None
    run: Array | None = None
    from_start: Array | None = None
    to_end: Array | None = None
    kept: Array | None = None


class Factors(NamedTuple):
    """What a sum in one direction is multiplied by, `[B, HV, N, C]` float32; None is 1, but for `reads`: the scale.

    Attributes:
        gate: on a pair: of the token that is read or, in reverse, of the one that reads.
        reads: on what a token reads of other chunks, with the scale.
        writes: on a token's value as the state takes it.
        rest: on the result: what of a gate next to 0 is not in `gate` (`split_gate`).
        diagonal: on the pairs of a token with itself in place of `gate`, of the token that reads.
    """

    gate: Array | None = None
    reads: Array | None = None
    writes: Array | None = None
    rest: Array | None = None
    diagonal: Array | None = None


def by_chunk(x: Array) -> Array:
    """`[B, T, HV]` as `[B, HV, N, C]`."""
    batch, length, heads = x.shape
    return x.reshape(batch, length // CHUNK, CHUNK, heads).transpose(0, 3, 1, 2)


def by_token(x: Array) -> Array:
    """`[B, HV, N, C]` as `[B, T, HV]`."""
    batch, heads = x.shape[:2]
    return x.reshape(batch, heads, -1).swapaxes(1, 2)


def _running_sum(x: Array) -> Array:
    """The sum over a chunk's tokens up to each, `[B, HV, N, C]`, of `[B, T, HV]` float32.

    As a product, which also turns the axes: in one kernel, where a running sum takes three.
    """
    batch, length, heads = x.shape
    x = x.reshape(batch, length // CHUNK, CHUNK, heads)
    return jnp.einsum("bnsh,rs->bhnr", x, jnp.tri(CHUNK, dtype=x.dtype), precision=lax.Precision.HIGHEST)


def decay_of(log_decay: Array | None, resets: Array | None) -> Decay:
    """The numbers of a call's decay.

    Args:
        log_decay: `[B, T, HV]`, or None.
        resets: `[B, T]`, 1 at each token that starts a document, or None; with it comes a log decay.
    """
    if log_decay is None:
        return Decay()
    coarse, fine = (_running_sum(x) for x in split_steps(log_decay.astype(jnp.float32)))
    last_coarse, last_fine = coarse[..., -1:], fine[..., -1:]
    from_start, to_end = jnp.exp(coarse + fine), jnp.exp((last_coarse - coarse) + (last_fine - fine))
    kept, run = jnp.exp(last_coarse + last_fine)[..., 0], None
    if resets is not None:
        run = _running_sum(resets[:, :, None].astype(jnp.float32))
        last = run[..., -1:]
        from_start, to_end = jnp.where(run == 0, from_start, 0.0), jnp.where(run == last, to_end, 0.0)
        kept = jnp.where(last[..., 0] == 0, kept, 0.0)
        run = jnp.broadcast_to(run, coarse.shape)
    return Decay(coarse, fine, run, from_start, to_end, kept)


def gate_factors(write: Array | None) -> tuple[Array | None, Array | None]:
    """The two factors that `split_gate` makes of a write gate, `[B, HV, N, C]` float32; None for 1."""
    return (None, None) if write is None else split_gate(by_chunk(write.astype(jnp.float32)))


def _product(x: Array | None, y: Array | None) -> Array | None:
    return y if x is None else x if y is None else x * y


def factors_of(kernel_shape: KernelShape, decay: Decay, inputs: Inputs, *, reverse: bool) -> Factors:
    """The factors of a sum over earlier tokens or, in `reverse`, over later ones."""
    scale = jnp.float32(kernel_shape.scale)
    diagonal = None if inputs.diagonal is None else by_chunk(inputs.diagonal.astype(jnp.float32))
    if reverse:
        divisor, rest = gate_factors(inputs.write)
        reads = _product(divisor, decay.to_end)
        # With a diagonal the gate is no smaller than `divisible` leaves it.
        rest = rest if diagonal is None else None
        return Factors(divisor, None if reads is None else scale * reads, decay.from_start, rest, diagonal)
    gate = None if inputs.write is None else by_chunk(inputs.write.astype(jnp.float32))
    reads = None if decay.from_start is None else scale * decay.from_start
    return Factors(gate, reads, _product(gate, decay.to_end), None, diagonal)


def fold_parts(
    kernel_shape: KernelShape, decay: Decay, added: Array, boundary: Array | None, *, reverse: bool = False
) -> Array:
    """The state at each part's start (`reverse`: end), `[B, HV, P, D, A]` float32.

    Args:
        kernel_shape: static facts.
        decay: of the call.
        added: what each part adds, likewise.
        boundary: the state before the first token (`reverse`: after the last), `[B, HV, D, A]`; None for zero.
        reverse: from the last part to the first.
    """
    p, parts = kernel_shape, kernel_shape.num_splits
    is_before = jnp.tri(parts, k=-1, dtype=bool)
    is_before = is_before.T if reverse else is_before
    if decay.coarse is None:
        weights, from_boundary = is_before.astype(jnp.float32), None
    else:
        logs = [_of_parts(p, x[..., -1]) for x in (decay.coarse, decay.fine)]  # type: ignore[index]
        restarts = 0.0 if decay.run is None else _of_parts(p, decay.run[..., -1])

        def between(x):
            """The sums over the parts that lie between two parts, `[B, HV, P, P]`."""
            total = jnp.cumsum(x, axis=2)
            before = total - x
            if reverse:
                return before[:, :, None, :] - total[:, :, :, None]
            return before[:, :, :, None] - total[:, :, None, :]

        def to_boundary(x):
            total = jnp.cumsum(x, axis=2)
            return total[:, :, -1:] - total if reverse else total - x

        is_linked, reaches = is_before, True
        if decay.run is not None:
            is_linked, reaches = is_before & (between(restarts) == 0), to_boundary(restarts) == 0
        weights = jnp.exp(jnp.where(is_linked, between(logs[0]) + between(logs[1]), -jnp.inf))
        from_boundary = jnp.where(reaches, jnp.exp(to_boundary(logs[0]) + to_boundary(logs[1])), 0.0)
    flat = added.reshape(*added.shape[:3], -1)
    equation = "pj,bhjx->bhpx" if weights.ndim == 2 else "bhpj,bhjx->bhpx"
    resets = jnp.einsum(equation, weights, flat, precision=lax.Precision.HIGHEST).reshape(added.shape)
    if boundary is None:
        return resets
    start = boundary.astype(jnp.float32)[:, :, None]
    return resets + (start if from_boundary is None else from_boundary[..., None, None] * start)


def _of_parts(kernel_shape: KernelShape, x: Array) -> Array:
    """The sum over the chunks of each part, `[B, HV, P]`, of one number a chunk."""
    p, size = kernel_shape, kernel_shape.chunks_per_split
    padded = jnp.pad(x, ((0, 0), (0, 0), (0, p.num_splits * size - p.chunks)))
    return padded.reshape(*x.shape[:2], p.num_splits, size).sum(axis=3)

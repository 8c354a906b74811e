"""Decay and gates of one number a token, as the numbers that the kernels multiply by."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.common.config import KernelConfig
from pallas_kernels.common.decay import split_gate
from pallas_kernels.common.kernel_shape import CHUNK
from pallas_kernels.common.triton.backend import call
from pallas_kernels.common.triton.chunks import product
from pallas_kernels.common.triton.decay import (
    chunk_decay,
    decay_from_start,
    decay_of_chunk,
    decay_to_end,
    load_resets,
)
from pallas_kernels.common.triton.kernel_shape import KernelShape
from pallas_kernels.delta_rule.inputs import Inputs

_ROWS = KernelConfig(num_warps=2, num_stages=1)


class Factors(NamedTuple):
    """What a sum in one direction is multiplied by, of one value head each; N chunks of C = 64 tokens.

    Attributes:
        lines: `[B, HV, N, L, C]` float32: one line for each of `names`; None without any.
        names: what the lines are.

            `coarse`: cumulative log decay in its chunk, of multiples of 1/16; see `split_steps`.
            `fine`: that of the rest.
            `run`: documents that start in the chunk up to a token.
            `gate`: on a pair: of the token that is read or, in reverse, of the one that reads.
            `reads`: on what a token reads of other chunks, but for the scale.
            `writes`: on a token's value as the state takes it.
            `rest`: on the result: what of a gate next to 0 is not in `gate` (`split_gate`).
            `diagonal`: on the pairs of a token with itself in place of `gate`, of the token that reads.

            One that is not there is 1, or 0 of the first three.
        kept: what a chunk leaves of the state, `[B, HV, N]` float32; None without decay.
    """

    lines: Array | None
    names: tuple[str, ...]
    kept: Array | None


def by_chunk(x: Array) -> Array:
    """`[B, T, HV]` as `[B, HV, N, C]`."""
    batch, length, heads = x.shape
    return x.reshape(batch, length // CHUNK, CHUNK, heads).transpose(0, 3, 1, 2)


def by_token(x: Array) -> Array:
    """`[B, HV, N, C]` as `[B, T, HV]`."""
    batch, heads = x.shape[:2]
    return x.reshape(batch, heads, -1).swapaxes(1, 2)


def _names(inputs: Inputs, reverse: bool) -> tuple[str, ...]:
    """The lines of a direction. Without a write gate those of the other are the same arrays."""
    has_decay, has_gate = inputs.log_decay is not None, inputs.write is not None
    from_start, to_end = ("writes", "reads") if reverse else ("reads", "writes")
    has_line = {
        "coarse": has_decay,
        "fine": has_decay,
        "run": has_decay and inputs.resets is not None,
        "gate": has_gate,
        from_start: has_decay,
        to_end: has_decay or has_gate,
        # With a diagonal the gate is no smaller than `divisible` leaves it.
        "rest": has_gate and reverse and inputs.diagonal is None,
        "diagonal": inputs.diagonal is not None,
    }
    return tuple(name for name, is_there in has_line.items() if is_there)


def _lines_kernel(r, *, names: tuple[str, ...], reverse: bool):
    """The lines of one chunk of one head."""

    def numbers(ref):
        return None if ref is None else ref[...].astype(jnp.float32)

    decay, gate, rest = chunk_decay(numbers(r.log_decay), load_resets(r)), numbers(r.write), None
    if gate is not None and reverse:
        gate, rest = split_gate(gate)
    from_start, to_end = decay_from_start(decay), product(gate, decay_to_end(decay))
    by_name = {
        "coarse": decay.total,
        "fine": decay.fine,
        "run": decay.runs,
        "gate": gate,
        "reads": to_end if reverse else from_start,
        "writes": from_start if reverse else to_end,
        "rest": rest,
        "diagonal": numbers(r.diagonal),
    }
    for i, name in enumerate(names):
        r.lines[i, :] = by_name[name].astype(jnp.float32)
    if r.kept is not None:
        r.kept[...] = decay_of_chunk(decay)


def factors_of(kernel_shape: KernelShape, inputs: Inputs, *, reverse: bool = False) -> Factors:
    """The factors of a sum over earlier tokens or, in `reverse`, over later ones.

    Args:
        kernel_shape: static facts.
        inputs: padded arguments. With `resets` comes a log decay.
        reverse: the direction.
    """
    p, names = kernel_shape, _names(inputs, reverse)
    if not names:
        return Factors(None, (), None)

    def at(h: Any, n: Any, b: Any) -> tuple[Any, ...]:
        return b, n, h, 0

    lines = jax.ShapeDtypeStruct((p.batch, p.value_heads, p.chunks, len(names), CHUNK), jnp.float32)
    kept = None if inputs.log_decay is None else p.per_head(p.chunks, dtype=jnp.float32)
    results = call(
        _lines_kernel,
        "linear_rows",
        p.chunk_grid,
        {
            "log_decay": p.of_token(inputs.log_decay, CHUNK, at),
            "resets": p.of_position(inputs.resets, at),
            "write": p.of_token(inputs.write, CHUNK, at),
            "diagonal": p.of_token(inputs.diagonal, CHUNK, at),
        },
        {
            "lines": p.of_head(lines, (None, len(names), CHUNK), lambda h, n, b: (b, h, n, 0, 0)),
            "kept": p.of_head(kept, (None,), lambda h, n, b: (b, h, n)),
        },
        _ROWS,
        names=names,
        reverse=reverse,
    )
    return Factors(results["lines"], names, results["kept"])


def factors_back(kernel_shape: KernelShape, inputs: Inputs, ahead: Factors) -> Factors:
    """The factors of a sum over later tokens, from those of one over earlier tokens where they are the same numbers."""
    if inputs.write is not None:
        return factors_of(kernel_shape, inputs, reverse=True)
    return ahead._replace(names=_names(inputs, reverse=True))


def factors_ahead(inputs: Inputs, lines: Array | None, kept: Array | None) -> Factors:
    """What `factors_of` a sum over earlier tokens returned, from its arrays."""
    return Factors(lines, _names(inputs, reverse=False), kept)

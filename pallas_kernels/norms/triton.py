"""Kernels of the RMS norm: a program goes over some rows, a few at a time.

t = x + skip v or x      a = act(z + bias) or 1      r = 1 / sqrt(mean u^2 + eps)
gate behind the norm:    u = t      y = scale u r a      h = dy scale a      dz = dy scale u r act'(z + bias)
gate before the norm:    u = t a    y = scale u r        h = dy scale        dz = du t act'(z + bias)
du = r (h - u r mean(h u r))        dt = du or du a      dx = dt + what else reaches x      dv = dt skip
d scale = sum_n dy u r (a or 1)     d bias = sum_n dz    d skip = sum_n dt v;  each over its head's rows, n mod H = h
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.common.triton.backend import iota, load_masked, rounded, sigmoid, store_masked


@dataclass(frozen=True)
class Cut:
    """Static facts of a kernel.

    Attributes:
        rows: N.
        features: F.
        columns: F, or the next power of two.
        block: rows at a time, a power of two.
        blocks: of a program.
        eps: added to the mean square.
        activation: of the gate; None where there is none.
        gate_first: whether the gate stands before the norm.
        ahead: whether a block is loaded while the one before it is worked on.
        parts: S, arrays that are added to the rows before they are normalised; 0 where there are none.
    """

    rows: int
    features: int
    columns: int
    block: int
    blocks: int
    eps: float
    activation: str | None
    gate_first: bool = False
    ahead: bool = False
    parts: int = 0


def _gate(z: Array, activation: str | None) -> tuple[Array, Array]:
    """The gate, and its derivative."""
    s = sigmoid(z)
    if activation == "sigmoid":
        return s, s * (1.0 - s)
    return z * s, s * (1.0 + z * (1.0 - s))


def _index(cut: Cut, rows: int) -> tuple[tuple[Array, Array], Array | None]:
    """Index of an array `[rows, columns]`, and which of its columns exist; None where all do."""
    shape = (rows, cut.columns)
    row, column = iota(shape, 0), iota(shape, 1)
    return (row, column), None if cut.columns == cut.features else column < cut.features


def _block_at(cut: Cut) -> Callable[[Any], tuple[tuple[Array, Array], Array | None]]:
    """From the number of a program's block to its index, and which of it exists; None where all does."""
    (row, column), columns = _index(cut, cut.block)
    first = pl.program_id(0) * (cut.blocks * cut.block)

    def at(i):
        rows, mask = first + i * cut.block + row, columns
        if cut.rows % (cut.block * cut.blocks):
            mask = rows < cut.rows if mask is None else mask & (rows < cut.rows)
        return (rows, column), mask

    return at


def _over_blocks(cut: Cut, load: Callable[[Any], Any], body: Callable[[Any, Any, Any], Any], state: Any) -> Any:
    """`state = body(i, load(i), state)` for all blocks of a program."""

    def step(i, carry):
        state, loaded = carry
        following = load(lax.min(i + 1, cut.blocks - 1)) if cut.ahead else None
        return body(i, loaded if cut.ahead else load(i), state), following

    return lax.fori_loop(0, cut.blocks, step, (state, load(0) if cut.ahead else None))[0]


def _of_heads(ref, cut: Cut) -> Any:
    """What heads `[H, F]` have, for the rows of a block, which is of whole cycles of heads; one row if H is 1."""
    if ref is None:
        return None
    heads = ref.shape[0]
    (row, column), mask = _index(cut, cut.block if heads > 1 else 1)
    return load_masked(ref, (row % heads, column), mask).astype(jnp.float32)


def _store_sums(ref, total: Array | None, cut: Cut) -> None:
    """A program's sums over its blocks; for one head, over their rows too."""
    if total is None:
        return
    if ref.shape[0] == 1:
        total = jnp.sum(total, axis=0)[None]
    index, mask = _index(cut, total.shape[0])
    store_masked(ref, index, total, mask)


def _normalised(cut: Cut, x: Array) -> tuple[Array, Array]:
    """Rows of mean square 1, and the factors that make them so."""
    inverse = lax.rsqrt(jnp.sum(x * x, axis=1) * (1.0 / cut.features) + cut.eps)[:, None]
    return x * inverse, inverse


def _loads(r, cut: Cut, *names: str) -> Callable[[Any], list[Any]]:
    """From the number of a block to its rows of the references with these names, as they are in memory."""
    at = _block_at(cut)

    def load(i):
        index, mask = at(i)
        refs = [getattr(r, name) for name in names]
        return [None if ref is None else load_masked(ref, index, mask) for ref in refs]

    return load


def _wide(loaded: list[Any]) -> list[Any]:
    return [None if x is None else x.astype(jnp.float32) for x in loaded]


def _sum_of_parts(r, index: tuple[Array, Array], mask: Array | None, cut: Cut, x: Array) -> Array:
    """Rows that are normalised, float32. Where they are a sum, it is stored, and they are what is stored."""
    if not cut.parts:
        return x
    total = load_masked(r.parts, (0, *index), mask)
    for part in range(1, cut.parts):
        total = total + load_masked(r.parts, (part, *index), mask)
    total = rounded(total + x, r.x.dtype)
    store_masked(r.total, index, total, mask)
    return total.astype(jnp.float32)


def norm_kernel(r, *, cut: Cut):
    """The result, and of parts the sum."""
    scale, bias, skip = (_of_heads(ref, cut) for ref in (r.scale, r.bias, r.skip))
    at = _block_at(cut)

    def body(i, loaded, state):
        index, mask = at(i)
        x, v, z = _wide(loaded)
        x, gate = _sum_of_parts(r, index, mask, cut, x), None
        if v is not None:
            x = x + skip * v
        if z is not None:
            gate = _gate(z if bias is None else z + bias, cut.activation)[0]
        if gate is not None and cut.gate_first:
            x = x * gate
        y = _normalised(cut, x)[0] * scale
        if gate is not None and not cut.gate_first:
            y = y * gate
        store_masked(r.y, index, y, mask)
        return state

    _over_blocks(cut, _loads(r, cut, "x", "v", "z"), body, jnp.int32(0))


def reverse_norm_kernel(r, *, cut: Cut):
    """Gradients in rows, and a program's part of those in what heads have: scale, the gates' bias and the skip."""
    scale, bias, skip = (_of_heads(ref, cut) for ref in (r.scale, r.bias, r.skip))
    at = _block_at(cut)

    def body(i, loaded, totals):
        total, total_z, total_v = totals
        x, d_y, d_kept, v, z = _wide(loaded)
        index, mask = at(i)
        gate: Any = None
        slope: Any = None
        if v is not None:
            x = x + skip * v
        if z is not None:
            gate, slope = _gate(z if bias is None else z + bias, cut.activation)
        before, behind = (gate if is_there else None for is_there in (cut.gate_first, not cut.gate_first))
        normalised, inverse = _normalised(cut, x if before is None else x * before)
        if behind is not None:
            d_z = d_y * scale * normalised * slope
            store_masked(r.d_z, index, d_z, mask)
            total_z = None if total_z is None else total_z + d_z
            d_y = d_y * behind
        d_normalised = d_y * scale
        along = (jnp.sum(d_normalised * normalised, axis=1) * (1.0 / cut.features))[:, None]
        d_x = inverse * (d_normalised - normalised * along)
        if before is not None:
            d_z = d_x * x * slope
            store_masked(r.d_z, index, d_z, mask)
            total_z = None if total_z is None else total_z + d_z
            d_x = d_x * before
        if v is not None:
            total_v = total_v + d_x * v
        if d_kept is not None:
            d_x = d_x + d_kept
        store_masked(r.d_x, index, d_x, mask)
        # Rows are added up behind the loop: a sum in it would make warps wait for one another.
        return total + d_y * normalised, total_z, total_v

    zeros = jnp.zeros((cut.block, cut.columns), jnp.float32)
    totals = (zeros, None if bias is None else zeros, None if skip is None else zeros)
    # Loaded all at once: the sums over rows in between wait, and loads do not pass them.
    totals = _over_blocks(cut, _loads(r, cut, "x", "d_y", "d_kept", "v", "z"), body, totals)
    for ref, total in zip((r.d_scale, r.d_bias, r.d_skip), totals):
        _store_sums(ref, total, cut)

"""Kernels of the RMS norm: a program goes over some rows, a few at a time.

r = 1 / sqrt(mean x^2 + eps)      y = scale x r a,  a = act(z + bias) or 1
dx = r (h - x r mean(h x r)) + what else reaches x,  h = dy scale a
d scale = sum_n dy a x r          dz = dy scale x r act'(z + bias)      d bias_h = sum_n dz,  n mod H = h
"""

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
        heads: H, of which the gates have a bias each, in turn; a divisor of `block`.
        parts: S, arrays that are added to the rows before they are normalised; 0 where there are none.
    """

    rows: int
    features: int
    columns: int
    block: int
    blocks: int
    eps: float
    activation: str | None
    heads: int
    parts: int = 0


def _gate(z: Array, activation: str | None) -> tuple[Array, Array]:
    """The gate, and its derivative."""
    s = sigmoid(z)
    if activation == "sigmoid":
        return s, s * (1.0 - s)
    return z * s, s * (1.0 + z * (1.0 - s))


def _blocks(cut: Cut, body: Any, state: Any) -> Any:
    """`state = body(index, mask, state)` for all blocks of rows of a program."""
    (row, column), columns = _of_block(cut)
    first = pl.program_id(0) * (cut.blocks * cut.block)

    def step(i, state):
        rows = first + i * cut.block + row
        mask = columns
        if cut.rows % (cut.block * cut.blocks):
            mask = rows < cut.rows if mask is None else mask & (rows < cut.rows)
        return body((rows, column), mask, state)

    return lax.fori_loop(0, cut.blocks, step, state)


def _scale(r, cut: Cut) -> Array:
    """`[1, columns]`."""
    column = iota((1, cut.columns), 1)
    mask = None if cut.columns == cut.features else column < cut.features
    return load_masked(r.scale, (column,), mask).astype(jnp.float32)


def _of_block(cut: Cut) -> tuple[tuple[Array, Array], Array | None]:
    """Index of a block of rows `[block, columns]`, and which of its columns exist; None where all do."""
    shape = (cut.block, cut.columns)
    row, column = iota(shape, 0), iota(shape, 1)
    return (row, column), None if cut.columns == cut.features else column < cut.features


def _bias(r, cut: Cut) -> Array | None:
    """The gates' bias of a block's rows, the same for every block: one has whole cycles of heads."""
    if r.bias is None:
        return None
    (row, column), mask = _of_block(cut)
    return load_masked(r.bias, (row % cut.heads, column), mask).astype(jnp.float32)


def _gate_argument(r, index: tuple[Array, Array], mask: Array | None, bias: Array | None) -> Array:
    z = load_masked(r.z, index, mask).astype(jnp.float32)
    return z if bias is None else z + bias


def _normalised(cut: Cut, x: Array) -> tuple[Array, Array]:
    """Rows of mean square 1, and the factors that make them so."""
    inverse = lax.rsqrt(jnp.sum(x * x, axis=1) * (1.0 / cut.features) + cut.eps)[:, None]
    return x * inverse, inverse


def _rows(r, index: tuple[Array, Array], mask: Array | None, cut: Cut) -> Array:
    """Rows that are normalised, float32. Where they are a sum, it is stored, and they are what is stored."""
    x = load_masked(r.x, index, mask).astype(jnp.float32)
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
    scale, bias = _scale(r, cut), _bias(r, cut)

    def body(index, mask, state):
        y = _normalised(cut, _rows(r, index, mask, cut))[0] * scale
        if r.z is not None:
            y = y * _gate(_gate_argument(r, index, mask, bias), cut.activation)[0]
        store_masked(r.y, index, y, mask)
        return state

    _blocks(cut, body, jnp.int32(0))


def reverse_norm_kernel(r, *, cut: Cut):
    """Gradients in rows and gates, and a program's part of those in the scale and the gates' bias."""
    scale, bias = _scale(r, cut), _bias(r, cut)

    def body(index, mask, totals):
        total, total_z = totals
        x, d_y = (load_masked(ref, index, mask).astype(jnp.float32) for ref in (r.x, r.d_y))
        # Loaded here and not where it is added: the sums over rows in between wait, and loads do not pass them.
        d_kept = None if r.d_kept is None else load_masked(r.d_kept, index, mask).astype(jnp.float32)
        argument = None if r.z is None else _gate_argument(r, index, mask, bias)
        normalised, inverse = _normalised(cut, x)
        if argument is not None:
            gate, slope = _gate(argument, cut.activation)
            d_z = d_y * scale * normalised * slope
            store_masked(r.d_z, index, d_z, mask)
            total_z = None if total_z is None else total_z + d_z
            d_y = d_y * gate
        d_normalised = d_y * scale
        along = (jnp.sum(d_normalised * normalised, axis=1) * (1.0 / cut.features))[:, None]
        d_x = inverse * (d_normalised - normalised * along)
        if d_kept is not None:
            d_x = d_x + d_kept
        store_masked(r.d_x, index, d_x, mask)
        # Rows are added up behind the loop: a sum in it would make warps wait for one another.
        return total + d_y * normalised, total_z

    zeros = jnp.zeros((cut.block, cut.columns), jnp.float32)
    total, total_z = _blocks(cut, body, (zeros, None if bias is None else zeros))
    if total_z is not None:
        index, mask = _of_block(cut)
        store_masked(r.d_bias, index, total_z, mask)
    total = jnp.sum(total, axis=0)[None]
    column = iota((1, cut.columns), 1)
    store_masked(r.d_scale, (column,), total, None if cut.columns == cut.features else column < cut.features)

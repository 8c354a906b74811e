"""Kernels of the RMS norm: a program goes over some rows, a few at a time.

r = 1 / sqrt(mean x^2 + eps)      y = scale x r a,  a = act(z) or 1
dx = r (h - x r mean(h x r)) + what else reaches x,  h = dy scale a
d scale = sum_n dy a x r          dz = dy scale x r act'(z)
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.triton.common.backend import exp, iota, load_masked, reciprocal, store_masked


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
    """

    rows: int
    features: int
    columns: int
    block: int
    blocks: int
    eps: float
    activation: str | None


def _gate(z: Array, activation: str | None) -> tuple[Array, Array]:
    """The gate, and its derivative."""
    s = reciprocal(1.0 + exp(-z))
    if activation == "sigmoid":
        return s, s * (1.0 - s)
    return z * s, s * (1.0 + z * (1.0 - s))


def _blocks(cut: Cut, body: Any, state: Any) -> Any:
    """`state = body(index, mask, state)` for all blocks of rows of a program."""
    shape = (cut.block, cut.columns)
    row, column = iota(shape, 0), iota(shape, 1)
    columns = None if cut.columns == cut.features else column < cut.features
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


def _normalised(cut: Cut, x: Array) -> tuple[Array, Array]:
    """Rows of mean square 1, and the factors that make them so."""
    inverse = lax.rsqrt(jnp.sum(x * x, axis=1) * (1.0 / cut.features) + cut.eps)[:, None]
    return x * inverse, inverse


def norm_kernel(r, *, cut: Cut):
    """The result."""
    scale = _scale(r, cut)

    def body(index, mask, state):
        y = _normalised(cut, load_masked(r.x, index, mask).astype(jnp.float32))[0] * scale
        if r.z is not None:
            y = y * _gate(load_masked(r.z, index, mask).astype(jnp.float32), cut.activation)[0]
        store_masked(r.y, index, y, mask)
        return state

    _blocks(cut, body, jnp.int32(0))


def reverse_norm_kernel(r, *, cut: Cut):
    """Gradients in rows and gates, and a program's part of that in the scale."""
    scale = _scale(r, cut)

    def body(index, mask, total):
        normalised, inverse = _normalised(cut, load_masked(r.x, index, mask).astype(jnp.float32))
        d_y = load_masked(r.d_y, index, mask).astype(jnp.float32)
        if r.z is not None:
            gate, slope = _gate(load_masked(r.z, index, mask).astype(jnp.float32), cut.activation)
            store_masked(r.d_z, index, d_y * scale * normalised * slope, mask)
            d_y = d_y * gate
        d_normalised = d_y * scale
        along = (jnp.sum(d_normalised * normalised, axis=1) * (1.0 / cut.features))[:, None]
        d_x = inverse * (d_normalised - normalised * along)
        if r.d_kept is not None:
            d_x = d_x + load_masked(r.d_kept, index, mask).astype(jnp.float32)
        store_masked(r.d_x, index, d_x, mask)
        return total + jnp.sum(d_y * normalised, axis=0)[None]

    total = _blocks(cut, body, jnp.zeros((1, cut.columns), jnp.float32))
    column = iota((1, cut.columns), 1)
    store_masked(r.d_scale, (column,), total, None if cut.columns == cut.features else column < cut.features)

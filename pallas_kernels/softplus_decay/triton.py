"""Kernels of the softplus decay: a program goes over some rows of some channels.

g = -rate softplus(p + bias)
softplus(z) = max(z, 0) + log(1 + e^-|z|)      log(1 + t) = 2 atanh(t / (2 + t))

step = -g / rate = softplus(z)      slope = 1 - e^-step = softplus'(z)
dp = -rate slope dg      d rate = -sum_n step dg      d bias = sum_n dp
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.common.decay import LOG2_E
from pallas_kernels.common.triton.backend import exp2, iota, load_masked, multiply_add, reciprocal, store_masked


@dataclass(frozen=True)
class Cut:
    """Static facts of a kernel.

    Attributes:
        rows: N.
        features: F.
        columns: of a program, a power of two.
        blocks: rows of a program.
    """

    rows: int
    features: int
    columns: int
    blocks: int


def _channels(cut: Cut) -> tuple[Array, Array | None]:
    """A program's channels, and which of them exist; None where all do."""
    column = pl.program_id(0) * cut.columns + iota((cut.columns,), 0)
    return column, None if cut.features % cut.columns == 0 else column < cut.features


def _rows(cut: Cut, mask: Array | None, body: Any, state: Any) -> Any:
    """`state = body(row, mask, state)` for all rows of a program."""
    first = pl.program_id(1) * cut.blocks

    def step(i, state):
        row, own = first + i, mask
        if cut.rows % cut.blocks:
            is_row = jnp.broadcast_to(row < cut.rows, (cut.columns,))
            own = is_row if mask is None else mask & is_row
        return body(row, own, state)

    return lax.fori_loop(0, cut.blocks, step, state)


# atanh(s) / s in s^2 on [0, 1/9]: of s = 0 to 1/3 within 6e-8.
_ATANH = (1.0, 1 / 3, 1 / 5, 1 / 7, 1 / 9, 1 / 11, 1 / 13, 1 / 15)
# (1 - e^-s) / s: within 3e-8 for s below 1/2.
_BELOW_HALF = (1.0, -1 / 2, 1 / 6, -1 / 24, 1 / 120, -1 / 720, 1 / 5040, -1 / 40320)


def _polynomial(coefficients: tuple[float, ...], x: Array) -> Array:
    """By Horner's rule, the coefficient of 1 first."""
    total = jnp.full(x.shape, coefficients[-1], jnp.float32)
    for coefficient in reversed(coefficients[:-1]):
        total = multiply_add(total, x, jnp.full(x.shape, coefficient, jnp.float32))
    return total


def softplus(z: Array) -> Array:
    """`log(1 + e ** z)` of float32, of any size."""
    t = exp2(jnp.abs(z) * -LOG2_E)
    s = t * reciprocal(t + 2.0)
    return multiply_add(s + s, _polynomial(_ATANH, s * s), jnp.maximum(z, 0.0))


def decay_kernel(r, *, cut: Cut):
    """The log decay."""
    column, mask = _channels(cut)
    rate = load_masked(r.rate, (column,), mask).astype(jnp.float32)
    bias = load_masked(r.bias, (column,), mask).astype(jnp.float32)

    def body(row, mask, state):
        z = load_masked(r.p, (row, column), mask).astype(jnp.float32) + bias
        store_masked(r.g, (row, column), softplus(z) * -rate, mask)
        return state

    _rows(cut, mask, body, jnp.int32(0))


def reverse_decay_kernel(r, *, cut: Cut):
    """Gradients in the projection, and a program's part of those in rate and bias."""
    column, mask = _channels(cut)
    rate = load_masked(r.rate, (column,), mask).astype(jnp.float32)
    # A rate of 0 has neither a step nor a slope that g shows.
    per_rate = jnp.where(rate > 0.0, -1.0 / jnp.maximum(rate, 1e-30), 0.0)

    def body(row, mask, totals):
        step = load_masked(r.g, (row, column), mask).astype(jnp.float32) * per_rate
        d_g = load_masked(r.d_g, (row, column), mask).astype(jnp.float32)
        below = _polynomial(_BELOW_HALF, step) * step
        slope = jnp.where(step < 0.5, below, 1.0 - exp2(step * -LOG2_E))
        d_p = d_g * (slope * -rate)
        store_masked(r.d_p, (row, column), d_p, mask)
        d_rate, d_bias = totals
        return multiply_add(-step, d_g, d_rate), d_bias + d_p

    zero = jnp.zeros((cut.columns,), jnp.float32)
    d_rate, d_bias = _rows(cut, mask, body, (zero, zero))
    store_masked(r.d_rate, (column,), d_rate, mask)
    store_masked(r.d_bias, (column,), d_bias, mask)

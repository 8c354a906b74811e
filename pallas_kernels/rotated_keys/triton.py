"""Kernels of turned keys: a program goes over some tokens of one row and one key head, with all its value heads.

a = x_i + b_i                     c = x_(i + K/2) + b_(i + K/2)
y_i = a cos - c sin               y_(i + K/2) = c cos + a sin
da = dy_i cos + dy_(i + K/2) sin  dc = dy_(i + K/2) cos - dy_i sin      dx = sum over value heads      db = over tokens
d angle = dy_(i + K/2) y_i - dy_i y_(i + K/2), of queries and of keys, with y as it was rounded
"""

import math
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.common.triton.backend import cosine, iota, load_masked, rounded, sine, store_masked

_TURN = 2.0 * math.pi
NAMES = ("query", "key")


@dataclass(frozen=True)
class Cut:
    """Static facts of a kernel.

    Attributes:
        tokens: N.
        rank: R, rows of a token.
        heads: value heads of a key head, a power of two.
        half: K / 2, a power of two.
        pairs: P, of channels that turn.
        blocks: tokens of a program.
    """

    tokens: int
    rank: int
    heads: int
    half: int
    pairs: int
    blocks: int


class _Places:
    """Where a program's tile `[heads, K / 2]` lies in the arrays."""

    def __init__(self, cut: Cut):
        self.cut = cut
        self.first = pl.program_id(0) * cut.blocks
        self.row, self.key_head = pl.program_id(1), pl.program_id(2)
        shape = (cut.heads, cut.half)
        self.head, self.column = self.key_head * cut.heads + iota(shape, 0), iota(shape, 1)

    def mask(self, token: Any, shape: tuple[int, ...]) -> Array | None:
        """Whether the token exists; None where all do."""
        return None if self.cut.tokens % self.cut.blocks == 0 else jnp.broadcast_to(token < self.cut.tokens, shape)

    def halves(self, ref, *before: Any, mask: Array | None = None) -> tuple[Array, Array]:
        """The first and the last K / 2 channels of what `ref` has at these places, as they are in memory."""
        first, second = (
            load_masked(ref, (*before, place), mask) for place in (self.column, self.column + self.cut.half)
        )
        return first, second

    def input_row(self) -> Any:
        """A token's row of queries or keys before they are those of value heads."""
        return self.key_head * self.cut.rank + self.row

    def biases(self, r) -> list[tuple[Array, Array]]:
        """Of queries and of keys."""
        return [_wide(self.halves(getattr(r, f"{name}_bias"), self.head, self.row)) for name in NAMES]

    def turning(self, mask: Array | None) -> Array:
        """Which channels turn, of tokens that exist."""
        turns = self.column < self.cut.pairs
        return turns if mask is None else turns & mask

    def angles(self, r, token: Any, mask: Array | None) -> tuple[Array, Array]:
        """Cosines and sines; 1 and 0 for channels that do not turn."""
        turn = load_masked(r.turns, (token, self.head, self.column), self.turning(mask))
        turn = turn - jnp.floor(turn + 0.5)
        return cosine(turn * _TURN), sine(turn * _TURN)


def _wide(halves: tuple[Array, Array]) -> tuple[Array, Array]:
    return halves[0].astype(jnp.float32), halves[1].astype(jnp.float32)


def _turned(halves: tuple[Array, Array], bias: tuple[Array, Array], angles: tuple[Array, Array]) -> tuple[Array, Array]:
    first, second = _wide(halves)
    a, c = first + bias[0], second + bias[1]
    return a * angles[0] - c * angles[1], c * angles[0] + a * angles[1]


def rotated_keys_kernel(r, *, cut: Cut):
    """Queries and keys of value heads."""
    at = _Places(cut)
    biases = at.biases(r)

    def body(i, state):
        token = at.first + i
        mask = at.mask(token, (cut.heads, cut.half))
        angles = at.angles(r, token, mask)
        for name, bias in zip(NAMES, biases):
            y = _turned(at.halves(getattr(r, name), token, at.input_row(), mask=mask), bias, angles)
            for part, column in zip(y, (at.column, at.column + cut.half)):
                store_masked(getattr(r, f"turned_{name}"), (token, at.row, at.head, column), part, mask)
        return state

    lax.fori_loop(0, cut.blocks, body, jnp.int32(0))


def reverse_rotated_keys_kernel(r, *, cut: Cut):
    """Gradients of queries and keys; a program's part of those in biases, and its row's of those in turns."""
    at = _Places(cut)
    biases = at.biases(r)
    columns = iota((cut.half,), 0)

    def body(i, totals):
        token = at.first + i
        mask = at.mask(token, (cut.heads, cut.half))
        # Loaded all at once: the sums over heads in between wait, and loads do not pass them.
        loaded = [
            (
                at.halves(getattr(r, f"d_turned_{name}"), token, at.row, at.head, mask=mask),
                at.halves(getattr(r, name), token, at.input_row(), mask=mask),
            )
            for name in NAMES
        ]
        cos, sin = at.angles(r, token, mask)
        d_angle, found = jnp.zeros((cut.heads, cut.half), jnp.float32), []
        for name, bias, (d_turned, x), total in zip(NAMES, biases, loaded, totals):
            d_y = _wide(d_turned)
            # Rounded as the recurrence read them: what a pair of tokens gives to later angles then cancels.
            y = [rounded(part, d_turned[0].dtype).astype(jnp.float32) for part in _turned(x, bias, (cos, sin))]
            d_angle = d_angle + (d_y[1] * y[0] - d_y[0] * y[1])
            d_x = d_y[0] * cos + d_y[1] * sin, d_y[1] * cos - d_y[0] * sin
            for part, column in zip(d_x, (columns, columns + cut.half)):
                index = (token, at.input_row(), column)
                store_masked(getattr(r, f"d_{name}"), index, jnp.sum(part, axis=0), at.mask(token, (cut.half,)))
            found.append((total[0] + d_x[0], total[1] + d_x[1]))
        store_masked(r.d_turns, (at.row, token, at.head, at.column), d_angle * _TURN, at.turning(mask))
        return tuple(found)

    zero = jnp.zeros((cut.heads, cut.half), jnp.float32)
    totals = lax.fori_loop(0, cut.blocks, body, ((zero, zero), (zero, zero)))
    for name, total in zip(NAMES, totals):
        for part, column in zip(total, (at.column, at.column + cut.half)):
            store_masked(getattr(r, f"d_{name}_bias"), (pl.program_id(0), at.head, at.row, column), part, None)

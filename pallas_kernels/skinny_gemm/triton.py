"""The kernel of products with few rows: a program has some columns of one matrix, and some of the inner axis or all."""

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.common.kernel_shape import cdiv
from pallas_kernels.common.triton.backend import dot, exp, iota, load_masked, rounded, sigmoid, store_masked
from pallas_kernels.softplus_decay.triton import softplus


@dataclass(frozen=True)
class Cut:
    """Static facts of a call.

    Attributes:
        rows: M.
        inner: K of each matrix, the axis that is summed over.
        columns: N of each matrix.
        firsts: its first column in the array that it is part of.
        inputs: which of the inputs each matrix is multiplied with.
        bounds: of each result that ends as a sigmoid, its factor; None for the others.
        block_rows: of a program.
        block_columns: of a program.
        block_inner: of a step of its loop.
        is_gated: whether the result is `silu(x W_0) * (x W_1)`.
        splits: of the inner axis. With more than one the results are sums over parts of it, `[splits, M, N]` float32,
            and of a gated call both products.
    """

    rows: int
    inner: tuple[int, ...]
    columns: tuple[int, ...]
    firsts: tuple[int, ...]
    inputs: tuple[int, ...]
    bounds: tuple[float | None, ...]
    block_rows: int
    block_columns: int
    block_inner: int
    is_gated: bool
    splits: int

    def steps(self, i: int) -> int:
        """Steps of a program's loop over a matrix."""
        return cdiv(cdiv(self.inner[i], self.block_inner), self.splits)

    @property
    def blocks(self) -> tuple[int, ...]:
        """Blocks of columns of each matrix; of a gated call those of the result."""
        return tuple(cdiv(n, self.block_columns) for n in (self.columns[:1] if self.is_gated else self.columns))


@dataclass(frozen=True)
class Tile:
    """The numbers of a block of rows, of a block of a matrix's columns, and of a part of the inner axis."""

    row: Array
    column: Array
    split: Array


def skinny_matmuls_kernel(r, *, cut: Cut):
    """One block of one of the results."""
    row, column, split = (pl.program_id(axis) for axis in range(3))
    if cut.is_gated:
        tile = Tile(row, column, split)
        gate, up = _sums(r, cut, (0, 1), tile)
        if cut.splits > 1:
            _store(r.y_0, gate, cut, 0, tile)
            _store(r.y_1, up, cut, 1, tile)
        else:
            _store(r.y_0, gate * sigmoid(gate) * up, cut, 0, tile)
        return
    first = 0
    for i, blocks in enumerate(cut.blocks):
        tile = Tile(row, column - first, split)

        def own(i=i, tile=tile):
            (total,) = _sums(r, cut, (i,), tile)
            _store(getattr(r, f"y_{i}"), _with_epilogue(r, cut, i, total, tile), cut, i, tile, r.added)

        if len(cut.columns) == 1:
            own()
        else:
            pl.when((tile.column >= 0) & (tile.column < blocks))(own)
        first += blocks


def _sums(r, cut: Cut, matrices: tuple[int, ...], tile: Tile) -> tuple[Array, ...]:
    """`x W` of a block of rows and columns for each of some matrices of one shape and one input, float32."""
    i = matrices[0]
    x, inner, columns = getattr(r, f"x_{cut.inputs[i]}"), cut.inner[i], cut.columns[i]
    kernels, firsts = [getattr(r, f"kernel_{j}") for j in matrices], [cut.firsts[j] for j in matrices]
    left, right = (cut.block_rows, cut.block_inner), (cut.block_inner, cut.block_columns)
    row = tile.row * cut.block_rows + iota(left, 0)
    column = tile.column * cut.block_columns + iota(right, 1)
    places = [column + first if first else column for first in firsts]
    row_mask = None if cut.rows % cut.block_rows == 0 else row < cut.rows
    column_mask = None if columns % cut.block_columns == 0 else column < columns
    is_whole = inner % (cut.block_inner * cut.steps(i)) == 0  # no step of any part is beyond the end
    start = tile.split * cut.steps(i) * cut.block_inner

    def within(index: Array, mask: Array | None) -> Array | None:
        if is_whole:
            return mask
        return index < inner if mask is None else mask & (index < inner)

    def step(j, totals):
        first = start + j * cut.block_inner
        along, down = first + iota(left, 1), first + iota(right, 0)
        rows = load_masked(x, (row, along), within(along, row_mask))
        mask = within(down, column_mask)
        return tuple(
            total + dot(rows, load_masked(kernel, (down, place), mask))
            for total, kernel, place in zip(totals, kernels, places)
        )

    zeros = tuple(jnp.zeros((cut.block_rows, cut.block_columns), jnp.float32) for _ in kernels)
    return lax.fori_loop(0, cut.steps(i), step, zeros)


def _with_epilogue(r, cut: Cut, i: int, total: Array, tile: Tile) -> Array:
    """What is stored of a sum. A function of it is one of the sum as it would be stored, rounded."""
    bound, log_rate, bias = cut.bounds[i], getattr(r, f"log_rate_{i}"), getattr(r, f"bias_{i}")
    if bound is None and log_rate is None:
        return total
    y = rounded(total, r.x_0.dtype).astype(jnp.float32)
    if bound is not None:
        return bound * sigmoid(y)
    column = tile.column * cut.block_columns + iota((1, cut.block_columns), 1)
    mask = None if cut.columns[i] % cut.block_columns == 0 else column < cut.columns[i]
    of_rate = lax.div(column, jnp.int32(cut.columns[i] // log_rate.shape[0]))
    rate = exp(load_masked(log_rate, (of_rate,), mask).astype(jnp.float32))
    return softplus(y + load_masked(bias, (column,), mask).astype(jnp.float32)) * -rate


def _store(y, value: Array, cut: Cut, i: int, tile: Tile, added=None) -> None:
    shape, columns = (cut.block_rows, cut.block_columns), cut.columns[i]
    row = tile.row * cut.block_rows + iota(shape, 0)
    column = tile.column * cut.block_columns + iota(shape, 1)
    mask = None
    if cut.rows % cut.block_rows:
        mask = row < cut.rows
    if columns % cut.block_columns:
        mask = column < columns if mask is None else mask & (column < columns)
    if added is not None:
        value = value + load_masked(added, (row, column), mask).astype(jnp.float32)
    index = (row, column) if cut.splits == 1 else (tile.split, row, column)
    store_masked(y, index, value, mask)

"""The kernel of products with few rows: a program has some columns of one matrix, and some of the inner axis or all."""

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.problem import cdiv
from pallas_kernels.triton.common.backend import dot, iota, load_masked, sigmoid, store_masked


@dataclass(frozen=True)
class Cut:
    """Static facts of a call.

    Attributes:
        rows: M.
        inner: K, the axis that is summed over.
        columns: N of each matrix.
        block_rows: of a program.
        block_columns: of a program.
        block_inner: of a step of its loop.
        is_gated: whether the result is `silu(x W_0) * (x W_1)`.
        splits: of the inner axis. With more than one the results are sums over parts of it, `[splits, M, N]` float32,
            and of a gated call both products.
    """

    rows: int
    inner: int
    columns: tuple[int, ...]
    block_rows: int
    block_columns: int
    block_inner: int
    is_gated: bool
    splits: int

    @property
    def steps(self) -> int:
        """Steps of a program's loop."""
        return cdiv(cdiv(self.inner, self.block_inner), self.splits)

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


def thin_products_kernel(r, *, cut: Cut):
    """One block of one of the results."""
    kernels = [getattr(r, f"kernel_{i}") for i in range(len(cut.columns))]
    row, column, split = (pl.program_id(axis) for axis in range(3))
    if cut.is_gated:
        tile = Tile(row, column, split)
        gate, up = _sums(r.x, kernels, cut, cut.columns[0], tile)
        if cut.splits > 1:
            _store(r.y_0, gate, cut, cut.columns[0], tile)
            _store(r.y_1, up, cut, cut.columns[0], tile)
        else:
            _store(r.y_0, gate * sigmoid(gate) * up, cut, cut.columns[0], tile)
        return
    first = 0
    for i, blocks in enumerate(cut.blocks):
        tile = Tile(row, column - first, split)

        def own(i=i, tile=tile):
            (total,) = _sums(r.x, [kernels[i]], cut, cut.columns[i], tile)
            _store(getattr(r, f"y_{i}"), total, cut, cut.columns[i], tile, r.added)

        if len(kernels) == 1:
            own()
        else:
            pl.when((tile.column >= 0) & (tile.column < blocks))(own)
        first += blocks


def _sums(x, kernels, cut: Cut, columns: int, tile: Tile) -> tuple[Array, ...]:
    """`x W` of a block of rows and columns for each of some matrices, float32."""
    left, right = (cut.block_rows, cut.block_inner), (cut.block_inner, cut.block_columns)
    row = tile.row * cut.block_rows + iota(left, 0)
    column = tile.column * cut.block_columns + iota(right, 1)
    row_mask = None if cut.rows % cut.block_rows == 0 else row < cut.rows
    column_mask = None if columns % cut.block_columns == 0 else column < columns
    is_whole = cut.inner % (cut.block_inner * cut.steps) == 0  # no step of any part is beyond the end
    start = tile.split * cut.steps * cut.block_inner

    def within(inner: Array, mask: Array | None) -> Array | None:
        if is_whole:
            return mask
        return inner < cut.inner if mask is None else mask & (inner < cut.inner)

    def step(j, totals):
        first = start + j * cut.block_inner
        along, down = first + iota(left, 1), first + iota(right, 0)
        rows = load_masked(x, (row, along), within(along, row_mask))
        mask = within(down, column_mask)
        return tuple(
            total + dot(rows, load_masked(kernel, (down, column), mask)) for total, kernel in zip(totals, kernels)
        )

    zeros = tuple(jnp.zeros((cut.block_rows, cut.block_columns), jnp.float32) for _ in kernels)
    return lax.fori_loop(0, cut.steps, step, zeros)


def _store(y, value: Array, cut: Cut, columns: int, tile: Tile, added=None) -> None:
    shape = (cut.block_rows, cut.block_columns)
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

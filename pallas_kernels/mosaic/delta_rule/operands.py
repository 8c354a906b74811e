"""What the passes over chunks read, and where a program finds its part of it."""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from pallas_kernels.mosaic.backend import (
    SIDE,
    Place,
    Tile,
    load_row,
    load_state,
    load_turned,
    quotient,
    remainder,
    scale_columns,
    zeros,
)
from pallas_kernels.mosaic.delta_rule import digits
from pallas_kernels.problem import CHUNK, Problem


class Keys(NamedTuple):
    """Queries or keys.

    Attributes:
        array: `[B, T, H, K]`, or `[B, HV, T, K]` as the first stage leaves them.
        by_head: whether it is the latter.
    """

    array: Array
    by_head: bool


class PassArrays(NamedTuple):
    """Arrays of the passes over chunks; see `Prepared` in `pallas_kernels.triton.delta_rule` for those of its fields.

    Attributes:
        written: keys that are written.
        erased: keys that are erased; None where they are the same.
        read: queries; None where nothing is read.
        v: values `[B, T, HV, V]`; None where no values take part.
        inverse: A, `[B, HV, N, C, C]`.
        scores: P, likewise; None where nothing is read.
        write: the write gate if it is one number a channel, `[B, T, HV, V]` bfloat16 or float32, else None.
        write_rows: the write gate if it is one number a token, `[B, HV, T]` float32, else None.
        erased_rows: likewise, see `Prepared`.
        written_rows: likewise.
        read_rows: likewise.
        kept: `[B, HV, N]` or `[B, HV, N, K]`; None without decay.
    """

    written: Keys
    erased: Keys | None
    read: Keys | None
    v: Array | None
    inverse: Array
    scores: Array | None
    write: Array | None
    write_rows: Array | None
    erased_rows: Array | None
    written_rows: Array | None
    read_rows: Array | None
    kept: Array | None

    def by_name(self) -> dict[str, Array | None]:
        """The arrays alone."""
        return {name: x.array if isinstance(x, Keys) else x for name, x in self._asdict().items()}


ROWS = ("write_rows", "erased_rows", "written_rows", "read_rows")


def tokens(chunk: Any) -> Any:
    """A chunk's tokens."""
    return pl.ds(chunk * CHUNK, CHUNK)


def run_rows(problem: Problem, starts: Array | None) -> dict[str, Array]:
    """Numbers a token of rows in which segments start, `[B, HV, T]` float32; none without.

    `goes_on` is 0 at a start, `run` counts starts in the chunk, `sees` is 1 where the state before the chunk is read,
    `reaches` where a write is left at the chunk's end.
    """
    p = problem
    if starts is None:
        return {}
    starts = starts.reshape(p.batch, p.chunks, CHUNK)
    run = jnp.cumsum(starts, axis=2)
    by_token = {"goes_on": starts == 0, "run": run, "sees": run == 0, "reaches": run == run[:, :, -1:]}
    shape = (p.batch, p.value_heads, p.length)
    by_token = {name: row.reshape(p.batch, 1, p.length).astype(jnp.float32) for name, row in by_token.items()}
    return {name: jnp.broadcast_to(row, shape) for name, row in by_token.items()}


def chunk_at(problem: Problem, i: Any) -> tuple[Any, Any, Any]:
    """Batch, chunk and value head of the i-th of all chunks. Heads are neighbours in memory."""
    rest = quotient(i, problem.value_heads)
    return quotient(rest, problem.chunks), remainder(rest, problem.chunks), remainder(i, problem.value_heads)


def chunk_tiles(problem: Problem, x: PassArrays, groups: int) -> dict[str, Tile]:
    """The parts of the arrays that one step of a pass takes."""
    tiles: dict[str, Tile] = {}
    for name in ("written", "erased", "read"):
        keys = getattr(x, name)
        if keys is not None:
            tiles[name] = _key_tile(problem, name, keys)
    if x.v is not None:
        tiles["v"] = value_tile("v", groups)
        if x.write is not None:
            tiles["write"] = dataclasses.replace(value_tile("write", groups), dtype=x.write.dtype)
    for name in ("inverse", "scores"):
        if getattr(x, name) is not None:
            tiles[name] = Tile((CHUNK, CHUNK), lambda r, at, n, name=name: getattr(r, name).at[at.batch, at.head, n])
    for name in ROWS:
        if getattr(x, name) is not None:
            tiles[name] = Tile((CHUNK,), lambda r, at, n, name=name: getattr(r, name).at[at.batch, at.head, tokens(n)])
    if x.kept is not None and x.kept.ndim == 4:
        tiles["kept"] = Tile((problem.key_size,), lambda r, at, n: r.kept.at[at.batch, at.head, n])
    return tiles


def _key_tile(problem: Problem, name: str, keys: Keys) -> Tile:
    group = problem.value_heads // keys.array.shape[2]

    def source(r, at, n):
        if keys.by_head:
            return getattr(r, name).at[at.batch, at.head, tokens(n)]
        return getattr(r, name).at[at.batch, tokens(n), quotient(at.head, group)]

    return Tile((CHUNK, problem.key_size), source)


def value_tile(name: str, groups: int) -> Tile:
    """Values, or something like them, of the program's block of channels."""
    width = SIDE * groups

    def source(r, at, n):
        return getattr(r, name).at[at.batch, tokens(n), at.head, pl.ds(at.block * width, width)]

    return Tile((CHUNK, width), source)


def residual_tile(groups: int) -> Tile:
    """What a chunk's tokens write, transposed, of the program's block of channels."""
    return _channel_tile("residuals", groups, CHUNK, jnp.bfloat16)


def digit_tile(groups: int) -> Tile:
    """Further digits of what `residual_tile` has."""
    return _channel_tile("digits", groups, digits.COLUMNS, jnp.int16)


def _channel_tile(name: str, groups: int, columns: int, dtype: Any) -> Tile:
    """A chunk's part of an array `[B, HV, N, V, columns]`, of the program's block of channels."""
    width = SIDE * groups

    def source(r, at, n):
        return getattr(r, name).at[at.batch, at.head, n, pl.ds(at.block * width, width)]

    return Tile((width, columns), source, dtype)


def load_kept(r: Any, tiles: Any, place: Any, slot: Any, chunk: Any) -> Array | None:
    """What a chunk keeps of the state: a number, one for each key channel, or None for 1."""
    if hasattr(tiles, "kept"):
        return load_row(tiles.kept.at[slot])
    return None if r.kept is None else r.kept[place.batch, place.head, chunk]


def keep(state: Array, kept: Any) -> Array:
    """The state after a chunk's decay."""
    if kept is None:
        return state
    return state * kept if kept.ndim == 0 else scale_columns(state, kept)


def load_written(tiles: Any, slot: Any, own: Any) -> Array:
    """A chunk's values times the write gate, Z, transposed, of a warpgroup's own channels of the program's."""
    values = load_turned(tiles.v.at[slot, :, own])
    if hasattr(tiles, "write"):
        return values * load_turned(tiles.write.at[slot, :, own])
    return scale_columns(values, row_of(tiles, "write_rows", slot))


def row_of(tiles: Any, name: str, slot: Any) -> Array | None:
    """One of `ROWS` of a chunk; None where the pass has none."""
    return load_row(getattr(tiles, name).at[slot]) if hasattr(tiles, name) else None


def start_state(states: Any, place: Place, key_size: int) -> Array:
    """The state, or its gradient, that a program's loop starts from: its part of `[B, HV, P, V, K]`; zero for None."""
    if states is None:
        return zeros(SIDE, key_size)
    return load_state(states.at[place.batch, place.head, place.segment, place.channels])

"""First stage under a channel-wise decay: everything of a chunk that does not need the state.

The equations and the results are those of `pallas_kernels.triton.delta_rule.chunk_factors`, the factors those of
`channel_decay` there. With m the chunk's middle row, and `Q' = q exp(G - G_m)`, `E' = erase k exp(G - G_m)`,
`K' = k~ exp(G_m - G)`:

    A = (I + tril(E' K'^T, -1))^-1    P = scale * tril(Q' K'^T)
    read = front Q'    erased = front E'    written = tail K'    front = exp(G_m)    tail = exp(G_C - G_m)

A warpgroup has a chunk for itself, and goes over its key channels in blocks of 64. Sums over tokens, of the log decay,
are products with matrices of -1, 0 and 1. Q' and E' are left operands of the pairs' products, in registers; K' goes
through shared memory. The scaled matrices leave through the tiles that they are made of.

What the kernel finds of an extreme chunk, but for `extreme`, `front`, `tail` and `kept`, is not a number; a kernel in
Triton replaces it.
"""

import functools
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.decay import MIN_LOG_DECAY
from pallas_kernels.mosaic.backend import (
    SIDE,
    WARPS,
    added,
    arrive,
    awaited,
    barrier,
    begin_copy,
    column_numbers,
    launch,
    load_channels,
    load_column,
    load_matrix,
    load_row,
    matrix_buffer,
    maximum,
    multiply,
    number_buffer,
    publish,
    quotient,
    remainder,
    row_numbers,
    split,
    spread_columns,
    spread_rows,
    store,
    total,
    use_registers,
    wait,
    wait_for_stores,
    wide_buffer,
    with_accumulators,
    zero,
    zeros,
)
from pallas_kernels.mosaic.delta_rule.operands import run_rows, tokens
from pallas_kernels.mosaic.delta_rule.triangular_inverse import unit_lower_inverse
from pallas_kernels.mosaic.delta_rule.walk import diagonal
from pallas_kernels.problem import CHUNK, Inputs, Problem, is_channel_wise

_LOG2_E = 1.4426950408889634
_MIDDLE = CHUNK // 2
_GROUPS = 2
_REGISTERS = 232, 40
_MAX_LOSS = 50.0 * _LOG2_E  # of a half that is not extreme, as in `channel_decay`
_NUMBERS = ("front", "tail", "kept", "loss")
_SUMS = 8  # the fewest columns of a product
_KEYS = ("q", "k", "write_key", "erase", "log_decay")


class _Walk(NamedTuple):
    """A warpgroup's way through its chunks, and in each of these through blocks of key channels.

    Attributes:
        problem: static facts.
        rows: names of the numbers a token, in the order in which they are stored.
        programs: number of programs.
        slots: blocks of channels whose tiles are in shared memory at once.
        depth: chunks whose numbers a token are.
        group: the warpgroup, among those that compute.
        barriers: `full` and `free`, of each warpgroup's slots, and `rows_full` and `rows_free`.
    """

    problem: Problem
    rows: tuple[str, ...]
    programs: int
    slots: int
    depth: int
    group: Any
    barriers: Any

    @property
    def parts(self) -> int:
        """Blocks of key channels."""
        return self.problem.key_size // SIDE

    @property
    def count(self) -> Any:
        """Chunks of this warpgroup."""
        p, step = self.problem, self.programs * _GROUPS
        return quotient(p.batch * p.value_heads * p.chunks - self._first + (step - 1), step)

    @property
    def _first(self) -> Any:
        return lax.axis_index("program") + self.programs * self.group

    def at(self, m: Any) -> tuple[Any, Any, Any]:
        """Batch, chunk and value head of the warpgroup's m-th chunk. Heads are neighbours in memory."""
        i = self._first + m * (self.programs * _GROUPS)
        rest, chunks = quotient(i, self.problem.value_heads), self.problem.chunks
        return quotient(rest, chunks), remainder(rest, chunks), remainder(i, self.problem.value_heads)

    def own(self, m: Any) -> Any:
        """The warpgroup as an expression of m: addresses that follow from a constant would all be kept in registers."""
        return self.group + zero(m)

    def slot(self, m: Any, part: int) -> Any:
        """The slot, of all warpgroups', of a block of channels; there are as many as blocks, or one."""
        return self.own(m) * self.slots + part % self.slots

    def place(self, m: Any) -> Any:
        """Likewise of a chunk's numbers a token."""
        return self.own(m) * self.depth + remainder(m, self.depth)


def _copy_tiles(r: Any, tiles: Any, walks: list[_Walk]) -> None:
    """Copies the tiles of all warpgroups, a block of channels of each by turns."""

    def fetch(walk, m, part):
        b, n, h = walk.at(m)
        if part == 0 and r.rows is not None:
            at, place = walk.barriers, walk.place(m)
            pl.when(m >= walk.depth)(lambda: wait(at.rows_free.at[place]))
            begin_copy(r.rows.at[b, h, n], tiles.rows.at[place], at.rows_full.at[place])
        slot, channels = walk.slot(m, part), pl.ds(part * SIDE, SIDE)

        @pl.when((m > 0) | (part >= walk.slots))
        def _():
            wait(walk.barriers.free.at[slot])

        for name in _KEYS:
            x = getattr(r, name)
            if x is not None:
                head = quotient(h, walk.problem.value_heads // x.shape[2])
                source = x.at[b, tokens(n), head, channels]
                begin_copy(source, getattr(tiles, name).at[slot], walk.barriers.full.at[slot])

    @pl.loop(0, walks[0].count)
    def _(m):
        for part in range(walks[0].parts):
            for walk in walks:
                pl.when(m < walk.count)(functools.partial(fetch, walk, m, part))

    for walk in walks:  # a program ends when nothing is on its way any more
        for part in range(walk.parts - walk.slots, walk.parts):
            slot = walk.slot(jnp.maximum(walk.count - 1, 0), part)
            pl.when(walk.count > 0)(functools.partial(wait, walk.barriers.free.at[slot]))
        for i in range(walk.depth if r.rows is not None else 0):
            place = walk.place(jnp.maximum(walk.count - 1 - i, 0))
            pl.when(i < walk.count)(functools.partial(wait, walk.barriers.rows_free.at[place]))


def _compute(r: Any, tiles: Any, memory: Any, walk: _Walk) -> None:
    """One warpgroup's chunks."""
    p = walk.problem

    def numbers(m, name):
        """One of `_NUMBERS`, of all channels."""
        return memory.numbers.at[walk.own(m), _NUMBERS.index(name)]

    def row(name, m, load=load_column) -> Any:
        """One number a token, for a matrix whose rows are tokens unless `load` says otherwise; None for 1."""
        return load(tiles.rows.at[walk.place(m), walk.rows.index(name)]) if name in walk.rows else None

    def by_token(x, name, m):
        token = row(name, m)
        return x if token is None else x * spread_rows(token)

    def matrix(name, slot):
        return load_matrix(getattr(tiles, name).at[slot]).astype(jnp.float32)

    def part_of(m, i):
        """Shared memory for a matrix's two bfloat16 parts."""
        return memory.parts.at[walk.own(m), i]

    def store_parts(m, x):
        for i, rounded in enumerate(split(x)):
            part_of(m, i)[...] = rounded

    def decays(m, part, slot):
        """Binary exponent of `exp(G - G_m)`; stores what the channels' decay comes to, and its part of `numbers`."""
        step = by_token(jnp.maximum(matrix("log_decay", slot), MIN_LOG_DECAY), "goes_on", m)
        store_parts(m, step * _LOG2_E)
        publish()

        def body(exponent, sums):
            for i in (0, 1):
                multiply(exponent, memory.signs.at[zero(m)], part_of(m, i))
                multiply(sums, part_of(m, i).T, memory.ends.at[zero(m)].T)
            return awaited(exponent), awaited(sums)

        exponent, sums = with_accumulators(body, SIDE, _SUMS)
        column = spread_columns(column_numbers(_SUMS))
        before, after, to_middle = (jnp.sum(jnp.where(column == i, sums, 0.0), axis=1) for i in range(3))
        kept = jnp.exp2(before + after)
        passes = row("passes", m)
        found = {
            "front": jnp.exp2(before),
            "tail": jnp.exp2(after),
            "kept": kept if passes is None else kept * passes,
            "loss": jnp.maximum(-to_middle, -after),
        }
        for name, x in found.items():
            numbers(m, name).at[pl.ds(part * SIDE, SIDE)][...] = x
        publish()
        return exponent

    def number(m, name, part):
        return spread_columns(load_row(numbers(m, name).at[pl.ds(part * SIDE, SIDE)]))

    def release_before(m, part):
        """Frees the block before this one, once the matrices that it holds have left."""

        def release():
            slot = walk.slot(m, part - 1) if part else walk.slot(m - 1, walk.parts - 1)
            wait_for_stores()
            arrive(walk.barriers.free.at[slot])

        release() if part else pl.when(m > 0)(release)

    def add_block(m, part, scores, erased_pairs):
        """Adds a block's pairs, and stores its scaled matrices."""
        b, n, h = walk.at(m)
        slot, channels = walk.slot(m, part), pl.ds(part * SIDE, SIDE)
        release_before(m, part)
        wait(walk.barriers.full.at[slot])
        exponent = decays(m, part, slot)
        front, tail = number(m, "front", part), number(m, "tail", part)

        def leave(name, x, mask):
            """Puts a matrix in the tile through which it leaves; one after another, for few registers."""
            tile(name, slot)[...] = by_token(x, mask, m).astype(jnp.bfloat16)

        k = matrix("k", slot)
        written = (k if r.write_key is None else matrix("write_key", slot)) * jnp.exp2(-exponent)
        leave("written", written * tail, "reaches")
        store_parts(m, written)
        reads = jnp.exp2(exponent)
        erased = k * reads
        erased = by_token(matrix("erase", slot) * erased if r.erase is not None else erased, "erase", m)
        leave("erased", erased * front, "sees")
        read = matrix("q", slot) * reads
        leave("read", read * front, "sees")
        erased, (high, low) = erased.astype(jnp.bfloat16), split(read)
        publish()
        for name in ("written", "erased", "read"):
            store(tile(name, slot), getattr(r, name).at[b, h, tokens(n), channels], last=name == "read")

        def body(scores, erased_pairs):
            # Q' and K' go in two parts each: rounding them would double the error of the output.
            multiply(erased_pairs, erased, part_of(m, 0).T)
            multiply(erased_pairs, erased, part_of(m, 1).T)
            multiply(scores, high, part_of(m, 0).T)
            multiply(scores, low, part_of(m, 0).T)
            multiply(scores, high, part_of(m, 1).T)

        return added(body, scores, erased_pairs)

    def tile(name, slot):
        """The tile through which a scaled matrix leaves."""
        source = {"read": "q", "erased": "k", "written": "written" if r.write_key is None else "write_key"}[name]
        return getattr(tiles, source).at[slot]

    def causal(m, pairs, *, strict):
        rows, columns = spread_rows(row_numbers(m)), spread_columns(column_numbers())
        pairs = jnp.where(rows > columns if strict else rows >= columns, pairs, 0.0)
        if "run" not in walk.rows:
            return pairs
        return jnp.where(spread_rows(row("run", m)) == spread_columns(row("run", m, load_row)), pairs, 0.0)

    def reduce_line(m, reduce):
        """The largest or the sum of `loss`, whose place is then free for another line of numbers."""
        line = numbers(m, "loss")
        loaded = load_channels(line)
        publish()
        return reduce(loaded, line.at[pl.ds(0, WARPS)])

    def step(m, _):
        b, n, h = walk.at(m)
        if walk.rows:
            wait(walk.barriers.rows_full.at[walk.place(m)])
        scores, erased_pairs = zeros(CHUNK, CHUNK), zeros(CHUNK, CHUNK)
        for part in range(walk.parts):
            scores, erased_pairs = add_block(m, part, scores, erased_pairs)
        pairs = memory.pairs.at[walk.own(m)]
        pairs[...] = (p.scale * causal(m, scores, strict=False)).astype(jnp.bfloat16)
        own = diagonal(erased_pairs, m)
        lower = causal(m, erased_pairs, strict=True)
        publish()
        store(pairs, r.scores.at[b, h, n])
        for name in ("front", "tail", "kept"):
            store(numbers(m, name), getattr(r, name).at[b, h, n], last=name == "kept")
        r.extreme[b, h, n] = (reduce_line(m, maximum) > _MAX_LOSS).astype(jnp.int32)
        if r.growth is not None:
            line = numbers(m, "loss")
            left = jnp.log(jnp.maximum(jnp.abs(1.0 - own), 1.0))
            publish()
            line.at[pl.ds(0, CHUNK)][...] = left
            for start in range(CHUNK, p.key_size, CHUNK):
                line.at[pl.ds(start, CHUNK)][...] = 0.0 * left
            publish()
            r.growth[b, h, n] = reduce_line(m, total)
        if walk.rows:
            publish()
            arrive(walk.barriers.rows_free.at[walk.place(m)])
        inverse = unit_lower_inverse(
            lower, row_numbers(m), part_of(m, 0), (part_of(m, 1), pairs), before_second=wait_for_stores
        )
        pairs[...] = inverse.astype(jnp.bfloat16)
        publish()
        store(pairs, r.inverse.at[b, h, n])
        return _

    lax.fori_loop(0, walk.count, step, jnp.int32(0))
    release_before(walk.count, 0)
    wait_for_stores(only_read=False)


def chunk_factors(problem: Problem, inputs: Inputs, *, slots: int, programs: int) -> dict[str, Array | None]:
    """The first stage's results of all chunks that are not extreme, by the names of `Prepared`.

    Args:
        problem: static facts.
        inputs: arguments, with a channel-wise decay.
        slots: blocks of 64 key channels whose tiles are in shared memory at once, for each of two warpgroups.
        programs: at most; the number of processors.
    """
    p, x = problem, inputs
    rows = run_rows(p, x.starts)
    if x.erase is not None and not is_channel_wise(x.erase):
        rows = {"erase": jnp.swapaxes(x.erase.astype(jnp.float32), 1, 2)} | rows
    by_chunk = (p.batch, p.value_heads, p.chunks, CHUNK)
    stacked = jnp.stack([row.reshape(by_chunk) for row in rows.values()], axis=3) if rows else None
    token = jnp.arange(CHUNK)
    row, is_early = token[:, None], token <= _MIDDLE
    signs = jnp.where(token <= row, jnp.where(is_early, 0.0, 1.0), jnp.where(is_early, -1.0, 0.0))
    ends = jnp.stack([is_early, ~is_early, is_early & (token > 0), *[token < 0] * (_SUMS - 3)])
    keys = {name: getattr(x, name) for name in _KEYS}
    keys["erase"] = x.erase if is_channel_wise(x.erase) else None
    sums = {"signs": signs.astype(jnp.bfloat16), "ends": ends.astype(jnp.bfloat16)}
    matrix, channels = p.per_head(p.chunks, CHUNK, CHUNK), p.per_head(p.length, p.key_size)
    numbers = p.per_head(p.chunks, p.key_size, dtype=jnp.float32)
    outputs = {
        "inverse": matrix,
        "scores": matrix,
        "read": channels,
        "erased": channels,
        "written": channels,
        "front": numbers,
        "tail": numbers,
        "kept": numbers,
        "growth": p.per_head(p.chunks, dtype=jnp.float32) if p.segments > 1 else None,
        "extreme": p.per_head(p.chunks, dtype=jnp.int32),
    }
    depth = 2 if len(rows) < 2 else 1
    tiles = {name: _key_buffer(x.dtype, slots) for name, x in keys.items() if x is not None}
    if x.write_key is None:
        tiles["written"] = _key_buffer(jnp.bfloat16, slots)
    if rows:
        tiles["rows"] = number_buffer(_GROUPS * depth, len(rows), CHUNK)
    copied = sum(x is not None for x in keys.values())
    barriers = {"full": barrier(copied, _GROUPS * slots), "free": barrier(1, _GROUPS * slots), "begun": barrier(2)}
    if rows:
        barriers |= {"rows_full": barrier(1, _GROUPS * depth), "rows_free": barrier(1, _GROUPS * depth)}
    buffers = {
        "signs": matrix_buffer(1, CHUNK, CHUNK),
        "ends": matrix_buffer(1, _SUMS, CHUNK),
        "parts": matrix_buffer(_GROUPS, 2, CHUNK, CHUNK),
        "pairs": matrix_buffer(_GROUPS, CHUNK, CHUNK),
        "numbers": number_buffer(_GROUPS, len(_NUMBERS), p.key_size),
    }
    programs = min(programs, p.batch * p.value_heads * p.chunks)

    def program(r, memory):
        there = SimpleNamespace(**dict(zip(tiles, memory.tiles)))
        at = SimpleNamespace(**dict(zip(barriers, memory.barriers)))
        warpgroup = lax.axis_index("warpgroup")
        computing, copying = _REGISTERS

        def walk(group):
            return _Walk(p, tuple(rows), programs, slots, depth, group, at)

        @pl.when(warpgroup < _GROUPS)
        def _():
            use_registers(computing, more=True)
            wait(at.begun)
            _compute(r, there, memory, walk(warpgroup))

        @pl.when(warpgroup == _GROUPS)
        def _():
            use_registers(copying, more=False)
            for name in sums:
                begin_copy(getattr(r, name), getattr(memory, name).at[0], at.begun)
            _copy_tiles(r, there, [walk(jnp.int32(group)) for group in range(_GROUPS)])

    return launch(
        program,
        "delta_chunk_factors",
        {**keys, **sums, "rows": stacked},
        outputs,
        {"tiles": tuple(tiles.values()), "barriers": tuple(barriers.values()), **buffers},
        grid={"program": programs},
        warpgroups=_GROUPS + 1,
    )


def _key_buffer(dtype: Any, slots: int) -> Any:
    return (wide_buffer if dtype == jnp.float32 else matrix_buffer)(_GROUPS * slots, CHUNK, SIDE)

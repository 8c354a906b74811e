"""First stage where the decay and the erase gate are one number a token: all of a chunk that does not need the state.

The equations and the results are those of `pallas_kernels.delta_rule.triton.wy`:

    A = (I + tril(b (k k~^T) exp(G_r - G_s), -1))^-1    P = scale * tril((q k~^T) exp(G_r - G_s))

A warpgroup has a chunk for itself. Keys and queries are free as soon as they are multiplied, so that those of its next
chunk come while it inverts. The cumulative log decay G is a sum over masked rows, of multiples of 1/16 and of the rest.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.common.decay import MIN_LOG_DECAY
from pallas_kernels.common.mosaic_gpu import (
    awaited,
    column_numbers,
    load_column,
    load_row,
    multiply,
    number_buffer,
    publish,
    row_numbers,
    spread_columns,
    spread_rows,
    store,
    wait_for_stores,
    with_accumulators,
)
from pallas_kernels.common.problem import CHUNK, Problem
from pallas_kernels.delta_rule.inputs import Inputs
from pallas_kernels.delta_rule.mosaic_gpu.bwd_tile_scheduler import diagonal
from pallas_kernels.delta_rule.mosaic_gpu.pipeline import run_rows, tokens
from pallas_kernels.delta_rule.mosaic_gpu.wy_tile_scheduler import (
    ChunkWalk,
    call,
    pair_buffers,
    store_growth,
    store_inverse,
)

# The first two are steps of the log decay, the next two their sums.
_LINES = ("coarse_step", "fine_step", "coarse", "fine", "read_rows", "written_rows", "erased_rows", "")


def _compute(r: Any, tiles: Any, memory: Any, walk: ChunkWalk) -> None:
    """One warpgroup's chunks."""
    p = walk.problem
    has_decay = r.log_decay is not None

    def line(m, name):
        i = _LINES.index(name)
        return memory.lines.at[walk.own(m), i // 2, pl.ds(i % 2 * CHUNK, CHUNK)]

    def row(name, m, load=load_column) -> Any:
        return walk.row(tiles, name, m, load)

    def sum_decay(m):
        """Adds up the log decay to each token, multiples of 1/16 and the rest apart, and stores both."""
        step = jnp.maximum(walk.gate(tiles, "log_decay", m), MIN_LOG_DECAY)
        coarse = (step * 16.0).astype(jnp.int32).astype(jnp.float32) * 0.0625
        line(m, "coarse_step")[...], line(m, "fine_step")[...] = coarse, step - coarse
        publish()
        is_before = spread_rows(row_numbers(m)) >= spread_columns(column_numbers())
        for name in ("coarse", "fine"):
            steps = spread_columns(load_row(line(m, f"{name}_step")))
            line(m, name)[...] = jnp.sum(jnp.where(is_before, steps, 0.0), axis=1)
        publish()

    def weigh(m, *pairs):
        """Pairs that are causal and of one run, times `exp(G_r - G_s)`; zero elsewhere."""
        is_near = spread_rows(row_numbers(m)) >= spread_columns(column_numbers())
        if "run" in walk.rows:
            is_near &= spread_rows(row("run", m)) == spread_columns(row("run", m, load_row))
        if not has_decay:
            return [jnp.where(is_near, x, 0.0) for x in pairs]
        coarse, fine = (
            spread_rows(load_column(line(m, name))) - spread_columns(load_row(line(m, name)))
            for name in ("coarse", "fine")
        )
        weight = jnp.exp(jnp.where(is_near, coarse + fine, -jnp.inf))
        return [weight * x for x in pairs]

    def find_rows(m, erase):
        """Stores the factors on what reads and on what is written, and the chunk's."""
        b, n, h = walk.at(m)
        if not has_decay:
            if r.erased_rows is not None:
                line(m, "erased_rows")[...] = erase
            return

        def masked(factor, name):
            mask = row(name, m)
            return factor if mask is None else factor * mask

        coarse, fine = (load_column(line(m, name)) for name in ("coarse", "fine"))
        # The last token's, as one number.
        last_coarse, last_fine = (memory.lines[walk.own(m), 1, i * CHUNK + CHUNK - 1] for i in (0, 1))
        from_start = masked(jnp.exp(coarse + fine), "sees")
        line(m, "read_rows")[...] = p.scale * from_start
        line(m, "erased_rows")[...] = from_start if erase is None else erase * from_start
        to_end = jnp.exp((last_coarse - coarse) + (last_fine - fine))
        line(m, "written_rows")[...] = masked(to_end, "reaches")
        r.kept[b, h, n] = jnp.exp(last_coarse + last_fine) * walk.passes(tiles, m)

    def step(m, _):
        b, n, h = walk.at(m)
        walk.wait_for_rows(m)
        erase = walk.gate(tiles, "erase", m)
        slot = walk.wait(m)
        written = (tiles.k if r.write_key is None else tiles.write_key).at[slot]

        def body(scores, erased):
            multiply(scores, tiles.q.at[slot], written.T)
            multiply(erased, tiles.k.at[slot], written.T)
            wait_for_stores()  # what the chunk before stores leaves the lines and `pairs`
            if has_decay:
                sum_decay(m)
            return awaited(scores), awaited(erased)

        scores, erased = with_accumulators(body, CHUNK, CHUNK)
        publish()
        walk.release(m)
        scores, erased = weigh(m, scores, erased)
        pairs = memory.pairs.at[walk.own(m)]
        pairs[...] = (p.scale * scores).astype(jnp.bfloat16)
        if erase is not None:
            erased = spread_rows(erase) * erased
        find_rows(m, erase)
        publish()
        walk.release_rows(m)
        store(pairs, r.scores.at[b, h, n])
        for name in ("read_rows", "written_rows", "erased_rows"):
            if getattr(r, name) is not None:
                store(line(m, name), getattr(r, name).at[b, h, tokens(n)])
        store_growth(r, walk, m, diagonal(erased, m), memory.lines.at[walk.own(m), 0])
        lower = jnp.where(spread_rows(row_numbers(m)) > spread_columns(column_numbers()), erased, 0.0)
        store_inverse(r, memory, walk, m, lower)
        return _

    lax.fori_loop(0, walk.count, step, jnp.int32(0))
    wait_for_stores(only_read=False)


def chunk_factors(problem: Problem, inputs: Inputs, *, groups: int, programs: int) -> dict[str, Array | None]:
    """The first stage's results of all chunks, by the names of `Prepared`.

    Args:
        problem: static facts.
        inputs: arguments; the decay and the erase gate are one number a token, or absent.
        groups: warpgroups of a program that compute, with chunks of their own.
        programs: at most; the number of processors.
    """
    p, x = problem, inputs
    rows = {name: row for name, row in run_rows(p, x.starts).items() if name != "goes_on"}
    matrix, by_token = p.per_head(p.chunks, CHUNK, CHUNK), p.per_head(p.length, dtype=jnp.float32)
    by_chunk = p.per_head(p.chunks, dtype=jnp.float32)
    has_decay = x.log_decay is not None
    outputs = {
        "inverse": matrix,
        "scores": matrix,
        "read_rows": by_token if has_decay else None,
        "written_rows": by_token if has_decay else None,
        "erased_rows": by_token if has_decay or x.erase is not None else None,
        "kept": by_chunk if has_decay else None,
        "growth": by_chunk if has_decay and p.segments > 1 else None,
    }

    def buffers(groups):
        return pair_buffers(groups) | {"lines": number_buffer(groups, len(_LINES) // 2, 2 * CHUNK)}

    return call(
        _compute,
        "delta_chunk_factors",
        p,
        {name: getattr(x, name) for name in ("q", "k", "write_key")},
        {"log_decay": x.log_decay, "erase": x.erase},
        rows,
        {},
        outputs,
        buffers,
        groups=groups,
        parts=1,
        slots=1,
        programs=programs,
    )

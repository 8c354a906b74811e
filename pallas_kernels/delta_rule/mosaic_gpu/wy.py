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
from pallas_kernels.common.kernel_shape import CHUNK, KernelShape
from pallas_kernels.common.mosaic_gpu import (
    awaited,
    fence_smem,
    load_column,
    multiply,
    number_buffer,
    spread_rows,
    store,
    wait_for_stores,
    with_accumulators,
)
from pallas_kernels.delta_rule.inputs import Inputs
from pallas_kernels.delta_rule.mosaic_gpu.bwd_tile_scheduler import diagonal
from pallas_kernels.delta_rule.mosaic_gpu.pipeline import run_rows, tokens, weigh_pairs
from pallas_kernels.delta_rule.mosaic_gpu.prefix_sum import prefix_sums
from pallas_kernels.delta_rule.mosaic_gpu.wy_tile_scheduler import (
    WYTileScheduler,
    call,
    pair_buffer,
    parts_buffer,
    store_growth,
    store_inverse,
)

# The log decay added up to each token: from the first of its warp's rows, then from the first of all.
_SUMS = "coarse_in_warp", "fine_in_warp", "coarse", "fine"
_LINES = (*_SUMS, "read_rows", "written_rows", "erased_rows", "write_rows")


def _compute(r: Any, tiles: Any, memory: Any, scheduler: WYTileScheduler) -> None:
    """One warpgroup's chunks."""
    p = scheduler.kernel_shape
    has_decay = r.log_decay is not None

    def line(m, name):
        i = _LINES.index(name)
        return memory.lines.at[scheduler.own(m), i // 2, pl.ds(i % 2 * CHUNK, CHUNK)]

    def row(name, m) -> Any:
        return scheduler.row(tiles, name, m)

    def sum_decay(m):
        """Adds up the log decay to each token, multiples of 1/16 and the rest apart, and stores both."""
        step = jnp.maximum(scheduler.gate(tiles, "log_decay", m), MIN_LOG_DECAY)
        coarse = (step * 16.0).astype(jnp.int32).astype(jnp.float32) * 0.0625
        sums = prefix_sums(m, [coarse, step - coarse], memory.lines.at[scheduler.own(m), 0])
        for name, x in zip(("coarse", "fine"), sums):
            line(m, name)[...] = x
        fence_smem()

    def weigh(m, *pairs):
        run = tiles.rows.at[scheduler.own(m), scheduler.rows.index("run")] if "run" in scheduler.rows else None
        sums = [line(m, name) for name in ("coarse", "fine")] if has_decay else None
        return weigh_pairs(m, sums, run, *pairs)

    def find_rows(m, erase):
        """Stores the factors on what reads and on what is written, and the chunk's."""
        b, n, h = scheduler.at(m)
        if not has_decay:
            if r.erased_rows is not None:
                line(m, "erased_rows")[...] = erase
            return

        def masked(factor, name):
            mask = row(name, m)
            return factor if mask is None else factor * mask

        coarse, fine = (load_column(line(m, name)) for name in ("coarse", "fine"))
        # The last token's, as one number.
        last_coarse, last_fine = (memory.lines[scheduler.own(m), 1, i * CHUNK + CHUNK - 1] for i in (0, 1))
        from_start = masked(jnp.exp(coarse + fine), "sees")
        line(m, "read_rows")[...] = p.scale * from_start
        line(m, "erased_rows")[...] = from_start if erase is None else erase * from_start
        to_end = jnp.exp((last_coarse - coarse) + (last_fine - fine))
        line(m, "written_rows")[...] = masked(to_end, "reaches")
        if r.write_rows is not None:
            line(m, "write_rows")[...] = erase
        r.kept[b, h, n] = jnp.exp(last_coarse + last_fine) * scheduler.passes(tiles, m)

    def step(m, _):
        b, n, h = scheduler.at(m)
        scheduler.wait_for_rows(m)
        erase = scheduler.gate(tiles, "erase", m)
        slot = scheduler.wait(m)
        written = (tiles.k if r.write_key is None else tiles.write_key).at[slot]

        def body(*sums):
            *scores, erased = sums
            for x in scores:
                multiply(x, tiles.q.at[slot], written.T)
            multiply(erased, tiles.k.at[slot], written.T)
            wait_for_stores()  # what the chunk before stores leaves the lines and `pairs`
            if has_decay:
                sum_decay(m)
            return tuple(awaited(x) for x in (*scores, erased))

        *scores, erased = with_accumulators(body, *[CHUNK] * (1 if r.scores is None else 2))
        fence_smem()
        scheduler.release(m)
        *scores, erased = weigh(m, *scores, erased)
        pairs = memory.pairs.at[scheduler.own(m)]
        for x in scores:
            pairs[...] = (p.scale * x).astype(jnp.bfloat16)
        if erase is not None:
            erased = spread_rows(erase) * erased
        find_rows(m, erase)
        fence_smem()
        scheduler.release_rows(m)
        if scores:
            store(pairs, r.scores.at[b, h, n])
        if r.decay_sums is not None:
            store(memory.lines.at[scheduler.own(m), _LINES.index("coarse") // 2], r.decay_sums.at[b, h, n])
        for name in ("read_rows", "written_rows", "erased_rows", "write_rows"):
            if getattr(r, name) is not None:
                store(line(m, name), getattr(r, name).at[b, h, tokens(n)])
        store_growth(r, scheduler, m, diagonal(erased, m), memory.lines.at[scheduler.own(m), 0])
        store_inverse(r, memory, scheduler, m, erased, memory.parts.at[scheduler.own(m)])
        return _

    lax.fori_loop(0, scheduler.count, step, jnp.int32(0))
    wait_for_stores(only_read=False)


def wy_factors(
    kernel_shape: KernelShape, inputs: Inputs, *, num_compute_warpgroups: int, num_ctas: int, with_scores: bool = True
) -> dict[str, Array | None]:
    """The first stage's results of all chunks, by the names of `WYFactors`.

    Args:
        kernel_shape: static facts.
        inputs: arguments; the decay and the erase gate are one number a token, or absent.
        num_compute_warpgroups: warpgroups of a program that compute, with chunks of their own.
        num_ctas: at most; the number of processors.
        with_scores: whether to find the queries' scores; if not, `decay_sums` are what finding them takes.
    """
    p, x = kernel_shape, inputs
    rows = {name: row for name, row in run_rows(p, x.resets).items() if name != "goes_on"}
    matrix, by_token = p.per_head(p.chunks, CHUNK, CHUNK), p.per_head(p.length, dtype=jnp.float32)
    by_chunk = p.per_head(p.chunks, dtype=jnp.float32)
    has_decay = x.log_decay is not None
    is_tied = x.erase is not None and x.write is x.erase
    outputs = {
        "inverse": matrix,
        "scores": matrix if with_scores else None,
        "decay_sums": p.per_head(p.chunks, 2 * CHUNK, dtype=jnp.float32) if has_decay and not with_scores else None,
        "read_rows": by_token if has_decay else None,
        "written_rows": by_token if has_decay else None,
        "erased_rows": by_token if has_decay or x.erase is not None else None,
        "write_rows": by_token if has_decay and is_tied else None,  # by head, which the copy engine takes
        "kept": by_chunk if has_decay else None,
        "growth": by_chunk if has_decay and p.num_splits > 1 else None,
    }

    def buffers(num_compute_warpgroups):
        return {
            "parts": parts_buffer(num_compute_warpgroups),
            "pairs": pair_buffer(num_compute_warpgroups),
            "lines": number_buffer(num_compute_warpgroups, len(_LINES) // 2, 2 * CHUNK),
        }

    found = call(
        _compute,
        "delta_chunk_factors",
        p,
        {"q": x.q if with_scores else None, "k": x.k, "write_key": x.write_key},
        {"log_decay": x.log_decay, "erase": x.erase},
        rows,
        {},
        outputs,
        buffers,
        num_compute_warpgroups=num_compute_warpgroups,
        parts=1,
        num_stages=1,
        num_ctas=num_ctas,
    )
    # Without a decay the factor on what is erased is the gate itself.
    return found if has_decay or not is_tied else {**found, "write_rows": found["erased_rows"]}

"""Last stage of the backward under a channel-wise decay; `bwd_dqkg` has the equations.

Each operand of a product of pairs is scaled by its decay relative to the chunk's middle row m, as in
`pallas_kernels.delta_rule.triton.channel_decay`: `Q' = q exp(G - G_m)`, `E' = k exp(G - G_m)`, `K' = k~ exp(G_m - G)`.
Such products round neither factor to bfloat16. Each goes in two bfloat16 parts, for three products in place of one.

All matrices of tokens and channels are held transposed, channels by tokens. A scaled operand is then the left operand
of its products, in registers, and only the pairs' gradients need shared memory:

    dQ^T = exp(G - G_m) (front dO S_0^T + dP K')^T = exp(G - G_m) (front S_0 dO^T + K'^T dP^T)

and so on. Sums over later tokens, of the log decay and of its gradient, are products with a matrix of 0 and 1.

An erase gate of one number a key channel is one more tile. It multiplies the key where that reads, and its gradient
leaves through its place. The log decay's leaves in float32 through that of the pairs' gradients, once these are read.

Linear attention has neither dT nor dW, and R is the values. The first warpgroup finds dP for both. States and their
gradients have four more bits for the one product in which nothing else is rounded (`rounded_rests`).

What the kernel finds of an extreme chunk is not a number; a kernel in Triton replaces it.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.common.decay import LOG2_E, MIN_LOG_DECAY
from pallas_kernels.common.kernel_shape import CHUNK, KernelShape
from pallas_kernels.common.mosaic_gpu import (
    SIDE,
    added,
    arrive,
    arrive_and_wait,
    awaited,
    barrier,
    begin_across,
    column_numbers,
    column_sums,
    either_buffer,
    fence_smem,
    load_across,
    load_column,
    load_matrix,
    load_plain,
    load_row,
    load_turned,
    matrix_buffer,
    multiply,
    number_buffer,
    row_numbers,
    split,
    spread_columns,
    spread_rows,
    store,
    store_across,
    store_turned,
    sum_buffer,
    turned,
    wait,
    wait_for_stores,
    wide_buffer,
    with_accumulators,
    zero,
)
from pallas_kernels.delta_rule.mosaic_gpu.bwd_tile_scheduler import (
    GradientArrays,
    KeyTiles,
    Structs,
    TileScheduler,
    call,
    diagonal,
    scaled_pairs,
)
from pallas_kernels.delta_rule.mosaic_gpu.pipeline import run_rows, tokens
from pallas_kernels.delta_rule.mosaic_gpu.rounded_rests import WIDTH, refined

_MIDDLE = CHUNK // 2
_PARTS = ((0, 0), (1, 0), (0, 1))  # of two factors: all but the product of both rests
_ENDS = ("front", "tail", "kept")
_SMALLEST = 2.0**-126


def _token_rows(kernel_shape: KernelShape, x: GradientArrays) -> dict[str, Array]:
    """Numbers a token, `[B, HV, T]` float32; one that is absent is 1."""
    rows = {} if x.ratio is None else {"ratio": jnp.swapaxes(x.ratio, 1, 2)}
    return rows | run_rows(kernel_shape, x.resets)


def _compute(r: Any, tiles: Any, memory: Any, scheduler: TileScheduler) -> None:
    """One warpgroup's half of the key channels of all chunks of a program."""
    p, half = scheduler.kernel_shape, lax.axis_index("warpgroup")
    channels = pl.ds(half * SIDE, SIDE)
    count, has_resets = scheduler.count, "run" in scheduler.rows
    has_gate, online = r.erase is not None, p.online
    keys = KeyTiles(r, tiles, scheduler, half, is_across=True)
    all_pairs, wide = memory.pairs_or_wide if online else (memory.pairs, memory.wide)

    def pairs_of(m, which, part):
        return all_pairs.at[zero(m) + which, part]

    def row(name, m, load=load_row) -> Any:
        return scheduler.row(tiles, name, m, load)

    def by_token(x, name, m):
        """`x`, channels by tokens, times one number a token."""
        numbers = row(name, m)
        return x if numbers is None else x * spread_columns(numbers)

    def by_channel(x, name, m):
        """Likewise times one number a channel."""
        return x * spread_rows(load_end(name, m))

    def load_end(name, m):
        return load_column(tiles.ends.at[scheduler.place("rows", m), scheduler.ends.index(name), channels])

    def store_later():
        """The matrix that adds up over later tokens."""

        @pl.when(half == 0)
        def _():
            is_later = spread_rows(row_numbers()) > spread_columns(column_numbers())
            memory.later[0] = jnp.where(is_later, 1.0, 0.0).astype(jnp.bfloat16)
            fence_smem()

        arrive_and_wait(memory.begun)

    def store_pairs(m, pairs):
        """Stores dP (first warpgroup) or dT. A token's score with itself has no decay, and is kept apart."""
        pairs = scaled_pairs(pairs, half, p.scale, row("ratio", m, load_column)) if online else p.scale * pairs
        rows, columns = row_numbers(m), column_numbers()

        def store_own():
            memory.own[...] = diagonal(pairs, m)

        pl.when(half == 0)(store_own) if online else store_own()
        pairs = jnp.where(spread_rows(rows) > spread_columns(columns), pairs, 0.0)
        if has_resets:
            is_near = spread_rows(row("run", m, load_column)) == spread_columns(row("run", m))
            pairs = jnp.where(is_near, pairs, 0.0)
        for part, x in enumerate(split(pairs)):
            pairs_of(m, half if online else 0, part)[...] = x
        fence_smem()
        arrive(memory.ready)

    def begin_log_decay(m):
        b, n, h = scheduler.at(m)
        return begin_across(r.log_decay.at[b, tokens(n), h, channels])

    def load_gate(m):
        """The erase gate of one number a channel."""
        if keys.holds_gate:
            return load_turned(keys.gate_of(m))
        b, n, h = scheduler.at(m)
        return load_across(r.erase.at[b, tokens(n), h, channels])

    def erase_key(m, tile):
        """What reads to erase; an erase gate of one number a token is in the pairs' gradients."""
        return load_gate(m) * load_turned(tile) if has_gate else load_turned(tile)

    def store_erase(m, x):
        """Stores the gradient of an erase gate by channel: through the gate's tile, which is read, or directly."""
        b, n, h = scheduler.at(m)
        target = r.d_erase.at[b, tokens(n), h, channels]
        if not keys.holds_gate:
            store_across(target, x)
            fence_smem()
            return
        store_turned(keys.gate_of(m), x)
        fence_smem()
        store(keys.gate_of(m), target)

    def store_log_decay(m, x):
        """Stores the log decay's gradient, once nobody reads the pairs' gradients in its place any more."""
        b, n, h = scheduler.at(m)
        if online:
            wait(memory.used)
        store_across(wide.at[half], x)
        fence_smem()
        store(wide.at[half], r.d_log_decay.at[b, tokens(n), h, channels])

    def near_tiles(m):
        """The tiles of dO and dW, or in linear attention of dO and V, and R `[V, C]`."""
        near = tiles.near.at[scheduler.place("near", m)]
        return near, tiles.residuals.at[scheduler.place("near", m)] if online else near.at[1].T

    def exponent_and_pairs(m, log_decay):
        """Binary exponent of `exp(G - G_m)`; stores the pairs' gradients."""
        step = by_token(jnp.maximum(turned(log_decay), MIN_LOG_DECAY), "goes_on", m)
        parts = split(step * LOG2_E)
        scheduler.wait("near", m)
        near, residuals = near_tiles(m)

        def begin_pairs(pairs):
            multiply(pairs, near.at[half if online else 0], residuals)

        def begin_later(later):
            for part in parts:
                multiply(later, part, memory.later.at[zero(m)])

        def products(*begins):
            def body(*totals):
                for begin, total in zip(begins, totals):
                    begin(total)
                return tuple(awaited(total) for total in totals)

            return with_accumulators(body, *[CHUNK] * len(begins))

        def wait_and_store(pairs):
            pl.when(m > 0)(lambda: wait(memory.used))
            store_pairs(m, pairs)

        if online:
            pairs, later = products(begin_pairs, begin_later)
            keys.release_before(m)
            store_pairs(m, pairs)
        else:
            pl.when(half == 0)(lambda: wait_and_store(*products(begin_pairs)))
            (later,) = products(begin_later)
            keys.release_before(m)
        after_middle = jnp.sum(jnp.where(spread_columns(column_numbers()) == _MIDDLE, later, 0.0), axis=1)
        return spread_rows(after_middle) - later

    def begin_rests(m):
        """Begins to load what rounding left of the states, and of their gradients, by blocks of value channels."""
        if online:
            return []
        b, n, h = scheduler.at(m)
        columns, starts = pl.ds(half * WIDTH, WIDTH), range(0, p.value_size, SIDE)
        return [
            [load_plain(x.at[b, h, n, pl.ds(start, SIDE), columns]) for start in starts] for x in (r.rests, r.d_rests)
        ]

    def crossed(state, d_state, rests):
        """The sum of `S_0 * dS_C` over value channels, of what these were before they were rounded."""
        total: Any = 0.0
        for i, start in enumerate(range(0, p.value_size, SIDE)):
            x, y = (refined(load_matrix(t.at[pl.ds(start, SIDE)]), rest[i]) for t, rest in zip((state, d_state), rests))
            total = total + x * y
        place = memory.column_sums.at[half]
        sums = column_sums(total, place)
        fence_smem()
        place.at[pl.ds(0, SIDE)][...] = sums
        fence_smem()
        return load_column(place.at[pl.ds(0, SIDE)])

    def far_products(m, rests):
        """`S_0 dO^T`, `S_0 dW^T` if there is dW, `dS_C R^T`, and the sum of `S_0 * dS_C` over value channels."""
        near, residuals = near_tiles(m)
        state = tiles.states.at[scheduler.place("states", m), half]
        d_state = tiles.d_states.at[scheduler.place("d_states", m), half]

        def body(read, *others):
            *erased, written = others
            scheduler.wait("states", m)
            for total, tile in zip((read, *erased), (0, 1)):
                multiply(total, state.T, near.at[tile].T)
            scheduler.wait("d_states", m)
            multiply(written, d_state.T, residuals)
            kept: Any = 0.0
            if not online:
                kept = crossed(state, d_state, rests)
            for start in range(0, p.value_size if online else 0, CHUNK):
                x, y = (load_matrix(t.at[pl.ds(start, CHUNK)].T).astype(jnp.float32) for t in (state, d_state))
                kept = kept + jnp.sum(x * y, axis=1)
            return *(awaited(x) for x in (read, *erased, written)), kept

        results = with_accumulators(body, *[CHUNK] * (3 if online else 2))
        fence_smem()
        for name in ("near", "states", "d_states"):
            scheduler.release(name, m)
        return results

    def near_products(m, resets, factor, pairs, *, transposed):
        """Adds products of a scaled factor with the pairs' gradients to each of `resets`."""
        parts = split(factor)

        def body(*totals):
            for i, j in _PARTS:
                for total, which in zip(totals, pairs):
                    matrix = pairs_of(m, which, j)
                    multiply(total, parts[i], matrix.T if transposed else matrix)

        return added(body, *resets)

    def inverse(x):
        """`1 / x` of a positive number; the card has no fast division."""
        root = lax.rsqrt(x)
        return root * root

    def step(m, log_decay):
        b, n, h = scheduler.at(m)
        rests = begin_rests(m)  # on their way meanwhile
        scheduler.wait("rows", m)
        reads = jnp.exp2(exponent_and_pairs(m, log_decay))
        read, *erased, written, kept = far_products(m, rests)
        read = by_token(by_channel(p.scale * read, "front", m), "sees", m)
        erased = [by_token(by_token(by_channel(-x, "front", m), "ratio", m), "sees", m) for x in erased]
        written = by_token(by_channel(written, "tail", m), "reaches", m)

        scheduler.wait("keys", m)
        q_tile, k_tile, key_tile = keys.of(m)

        wait(memory.ready)
        scaled = load_turned(key_tile) * inverse(reads)
        # What the last token writes reaches the chunk's end whole: no decay of this chunk weakens it.
        decays = spread_columns(column_numbers()) < p.last_token(n)
        d_end = load_end("kept", m) * kept + jnp.sum(jnp.where(decays, scaled * written, 0.0), axis=1)
        read, *erased = near_products(m, (read, *erased), scaled, (0, 1), transposed=True)
        (written,) = near_products(m, (written,), load_turned(q_tile) * reads, (0,), transposed=False)
        if online:
            (written,) = near_products(m, (written,), erase_key(m, k_tile) * reads, (1,), transposed=False)
        own = load_row(memory.own)
        fence_smem()
        arrive(memory.used)

        d_total: Any = None
        if online:
            (d_erased,) = (x * reads for x in erased)
            d_total = load_turned(k_tile) * d_erased
        if has_gate:
            gate, d_erase = load_gate(m), d_total
            d_total, d_erased = gate * d_erase, gate * d_erased
            store_erase(m, d_erase)
        elif r.d_erase is not None:
            r.d_erase[half, b, h, tokens(n)] = column_sums(d_total, memory.column_sums.at[half])
        read = read * reads
        of_queries = load_turned(q_tile) * read
        d_total = of_queries if d_total is None else d_total + of_queries
        written = written * inverse(reads)
        d_total = d_total - jnp.where(decays, load_turned(key_tile) * written, 0.0)
        read = read + spread_columns(own) * load_turned(key_tile)
        written = written + spread_columns(own) * load_turned(q_tile)
        d_key = written if not online else d_erased if r.write_key is not None else d_erased + written
        keys.store(m, {"q": read, "k": d_key, "write_key": written})

        parts = split(d_total)

        def add_later(total):
            for part in parts:
                multiply(total, part, memory.later.at[zero(m)])

        log_decay = begin_log_decay(jnp.minimum(m + 1, count - 1))  # on its way meanwhile
        (d_step,) = added(add_later, d_total + spread_rows(d_end))
        # Only the chunk's first log decay can be so low that it is clamped; or that all before it is forgotten anyway.
        is_flat = (spread_columns(column_numbers()) == 0) & (spread_rows(load_end("front", m)) < _SMALLEST)
        d_step = jnp.where(is_flat, 0.0, d_step)
        store_log_decay(m, by_token(d_step, "goes_on", m))
        scheduler.release("rows", m)
        return log_decay

    store_later()
    lax.fori_loop(0, count, step, begin_log_decay(jnp.int32(0)))
    keys.release_before(count)
    if not online:  # who does not wait for a barrier before must not do it here
        pl.when((count > 0) & (half == 0))(lambda: wait(memory.used))
    wait_for_stores(only_read=False)


def channel_gradients(
    kernel_shape: KernelShape, x: GradientArrays, wanted: Structs, *, num_key_stages: int, num_ctas: int
) -> dict[str, Array | None]:
    """Gradients of arguments, by value head, of all chunks that are not extreme.

    Args:
        kernel_shape: static facts.
        x: what the kernel reads.
        wanted: `gradient_structs`.
        num_key_stages: chunks whose queries and keys are in shared memory.
        num_ctas: at most; the number of processors.

    Returns:
        As in `bwd_dqkg`, but `d_log_decay` is whole, `[B, T, HV, K]` float32, and 0 where it is flat.
    """
    p, kinds = kernel_shape, 2 if kernel_shape.online else 1
    d_log_decay = jax.ShapeDtypeStruct((p.batch, p.length, p.value_heads, p.key_size), jnp.float32)
    outputs = {**wanted, "d_log_decay": d_log_decay}
    pairs, wide = matrix_buffer(kinds, 2, CHUNK, CHUNK), wide_buffer(2, CHUNK, CHUNK)
    buffers = {
        **({"pairs_or_wide": either_buffer(pairs, wide)} if p.online else {"pairs": pairs, "wide": wide}),
        "later": matrix_buffer(1, CHUNK, CHUNK),
        "own": number_buffer(CHUNK),
        "begun": barrier(2),
        "ready": barrier(kinds),  # all pairs are there
        "used": barrier(2),  # both have read them
    }
    # Of the states, or of a gate of one number a token.
    if not p.online or (x.erase is None and wanted["d_erase"] is not None):
        buffers["column_sums"] = sum_buffer(2, is_small=True)
    return call(
        _compute,
        "delta_channel_gradients",
        p,
        x,
        _token_rows(p, x),
        {name: getattr(x, name) for name in _ENDS},
        outputs,
        buffers,
        more={"log_decay": x.log_decay, "rests": x.rests, "d_rests": x.d_rests},
        num_key_stages=num_key_stages,
        num_ctas=num_ctas,
    )

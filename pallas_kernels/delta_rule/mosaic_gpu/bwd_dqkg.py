"""Last stage of the backward: gradients of queries, keys, erase gate and log decay; no chunk waits for another.

Given the state `S_0` before a chunk, the gradient `dS_C` of the state after it, the residuals R and `dW`:

    dP = tril(dO R^T)      dT = -tril(dW R^T, -1)
    dQ = dO S_0^T + dP K~      dE = -dW S_0^T + dT K~      dK~ = dP^T Q + dT^T E + R dS_C^T

each term weighted by the decay between its tokens (`pallas_kernels.delta_rule.triton.bwd_dqkg`, whose two
kernels this one replaces where decay and gates are one number a token; where the decay is one a channel,
`bwd_dqkg_channel` does).

Two warpgroups compute, with half of the key channels each (`bwd_tile_scheduler`). All channels need the pairs'
gradients: the first warpgroup makes dP, the second dT, and they exchange them in shared memory. A sum over key channels
leaves each warpgroup as its half's part. Gradients of q, k and k~ leave through the places of q, k and k~.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.common.decay import split_steps
from pallas_kernels.common.kernel_shape import CHUNK, KernelShape
from pallas_kernels.common.mosaic_gpu import (
    SIDE,
    added,
    arrive,
    awaited,
    barrier,
    column_numbers,
    fence_smem,
    load_column,
    load_matrix,
    load_row,
    matrix_buffer,
    multiply,
    number_buffer,
    row_numbers,
    spread_columns,
    spread_rows,
    wait,
    wait_for_stores,
    with_accumulators,
    zero,
    zeros,
)
from pallas_kernels.delta_rule.mosaic_gpu.bwd_tile_scheduler import (
    GradientArrays,
    KeyTiles,
    Structs,
    TileScheduler,
    call,
    diagonal,
    parts_struct,
    scaled_pairs,
)
from pallas_kernels.delta_rule.mosaic_gpu.pipeline import tokens

_RESTART = 256.0  # nats that a start of a document adds: pairs across it weigh nothing, and sums stay exact
_LINES = 4  # of numbers a token that a warpgroup hands on inside itself; a third set has the diagonal of dP


def _token_rows(kernel_shape: KernelShape, x: GradientArrays) -> dict[str, Array]:
    """Numbers a token that the kernel multiplies by, `[B, HV, T]` float32; one that is absent is 1.

    `coarse` and `fine` are a token's log decay in two parts (`split_steps`), which the kernel adds up;
    `erased` is `-exp(G)` times `ratio`.
    """
    rows = {}
    ratio = None if x.ratio is None else jnp.swapaxes(x.ratio, 1, 2)
    if ratio is not None:
        rows["ratio"] = ratio
    if x.log_decay is None or x.read_rows is None or x.written_rows is None:
        return rows if ratio is None else {**rows, "erased": -ratio}
    coarse, fine = split_steps(x.log_decay.astype(jnp.float32))
    rows["fine"] = jnp.swapaxes(fine, 1, 2)
    if x.resets is not None:
        coarse = coarse - _RESTART * x.resets.astype(jnp.float32)[:, :, None]
    rows["coarse"] = jnp.swapaxes(coarse, 1, 2)
    rows["read"], rows["written"] = x.read_rows, x.written_rows
    erased = x.read_rows * (-1 / kernel_shape.scale)
    return {**rows, "erased": erased if ratio is None else erased * ratio}


def _compute(r: Any, tiles: Any, memory: Any, scheduler: TileScheduler) -> None:
    """One warpgroup's half of the key channels of all chunks of a program."""
    p, half = scheduler.kernel_shape, lax.axis_index("warpgroup")
    has_decay = "coarse" in scheduler.rows
    keys = KeyTiles(r, tiles, scheduler, half)
    lines = memory.lines

    def pairs_of(m, which):
        return memory.pairs.at[zero(m), which]

    def sum_decay(m):
        """Adds up the log decay to each token. There is no cumulative sum."""
        is_before = spread_rows(row_numbers()) >= spread_columns(column_numbers())
        for j, name in enumerate(("coarse", "fine")):
            step = load_row(tiles.rows.at[scheduler.place("rows", m), scheduler.rows.index(name)])
            lines[half, j] = jnp.sum(jnp.where(is_before, spread_columns(step), 0.0), axis=1)

    def store_pairs(m, pairs):
        """Stores dP (first warpgroup) or dT, weighted by decay."""
        pairs = scaled_pairs(pairs, half, p.scale, scheduler.row(tiles, "ratio", m))
        rows, columns = row_numbers(), column_numbers()
        if has_decay:

            @pl.when(half == 0)
            def _():  # a token's score with itself has no decay, and is kept apart
                lines[2, 0] = diagonal(pairs)

            fence_smem()
            total, fine = (
                spread_rows(load_column(lines.at[half, j])) - spread_columns(load_row(lines.at[half, j]))
                for j in (0, 1)
            )
            is_before = spread_rows(rows) > spread_columns(columns)
            pairs = pairs * jnp.exp(jnp.where(is_before, total + fine, -jnp.inf))
        else:
            pairs = jnp.where(spread_rows(rows - half) >= spread_columns(columns), pairs, 0.0)
        pairs_of(m, half)[...] = pairs.astype(jnp.bfloat16)
        fence_smem()
        arrive(memory.ready)

    def far_products(m):
        """`dO S_0^T`, `dW S_0^T`, `R dS_C^T`, and parts of `S_0 * dS_C`, of which only the sum matters."""
        near, residuals = tiles.near.at[scheduler.place("near", m)], tiles.residuals.at[scheduler.place("near", m)]
        state = tiles.states.at[scheduler.place("states", m), half]
        d_state = tiles.d_states.at[scheduler.place("d_states", m), half]

        def kept_parts():
            parts = []
            for start in range(0, p.value_size, CHUNK):
                x, y = (load_matrix(t.at[pl.ds(start, CHUNK)]).astype(jnp.float32) for t in (state, d_state))
                parts.append(x * y)
            return jnp.sum(sum(parts[1:], parts[0]), axis=1)

        def body(pairs, read, erased, written):
            multiply(pairs, near.at[half], residuals)
            scheduler.wait("states", m)
            multiply(read, near.at[0], state)
            multiply(erased, near.at[1], state)
            keys.release_before(m)
            pl.when(m > 0)(lambda: wait(memory.used))
            store_pairs(m, awaited(pairs, running=2))
            scheduler.wait("d_states", m)
            multiply(written, residuals.T, d_state)
            parts = kept_parts() if has_decay else None
            return *(awaited(x) for x in (read, erased, written)), parts

        return with_accumulators(body, CHUNK, SIDE, SIDE, SIDE)

    def step(m):
        b, n, h = scheduler.at(m)
        if scheduler.rows:
            scheduler.wait("rows", m)
        kept = r.kept[b, h, n] if has_decay else None
        if has_decay:
            sum_decay(m)
        scheduler.wait("near", m)
        read, erased, written, parts = far_products(m)
        fence_smem()
        for name in ("near", "states", "d_states"):
            scheduler.release(name, m)
        if has_decay:
            read, written = (
                read * spread_rows(scheduler.row(tiles, "read", m)),
                written * spread_rows(scheduler.row(tiles, "written", m)),
            )
        else:
            read = read * p.scale
        erased = erased * spread_rows(scheduler.row(tiles, "erased", m)) if "erased" in scheduler.rows else -erased

        scheduler.wait("keys", m)
        q, k, key = keys.of(m)
        wait(memory.ready)

        def near_products(read, erased, d_key):
            multiply(read, pairs_of(m, 0), key)
            multiply(erased, pairs_of(m, 1), key)
            multiply(d_key, pairs_of(m, 0).T, q)
            multiply(d_key, pairs_of(m, 1).T, k)

        # The parts of the key's gradient stay apart where the decay's gradient needs them.
        d_key = zeros(CHUNK, SIDE) if has_decay else written
        read, erased, d_key = added(near_products, read, erased, d_key)
        own: Any = load_column(lines.at[2, 0]) if has_decay else None
        fence_smem()
        arrive(memory.used)

        if has_decay or r.d_erase is not None:
            d_erase = jnp.sum(erased * load_matrix(k).astype(jnp.float32), axis=1)
        if r.d_erase is not None:
            r.d_erase[half, b, h, tokens(n)] = d_erase
        if has_decay:
            key_value, q_value = load_matrix(key).astype(jnp.float32), load_matrix(q).astype(jnp.float32)
            of_state = parts * kept
            lines[half, 3] = jnp.sum(key_value * written, axis=1) + of_state
            of_key = jnp.sum(key_value * d_key, axis=1)
            lines[half, 2] = jnp.sum(q_value * read, axis=1) + d_erase - of_key + of_state
            d_key = d_key + written + spread_rows(own) * q_value
            read = read + spread_rows(own) * key_value
        keys.store(m, {"q": read, "k": erased if r.write_key is not None else erased + d_key, "write_key": d_key})
        if scheduler.rows:
            scheduler.release("rows", m)
        if has_decay:
            total, end = (spread_columns(load_row(lines.at[half, j])) for j in (2, 3))
            is_later = spread_columns(column_numbers()) >= spread_rows(row_numbers())
            # Every token of a row adds its part of the state's decay once, as `total` or as `end`.
            r.d_log_decay[half, b, h, tokens(n)] = jnp.sum(jnp.where(is_later, total, end), axis=1)

    count = scheduler.count
    lax.fori_loop(0, count, lambda m, _: step(m), None)
    keys.release_before(count)
    pl.when(count > 0)(lambda: wait(memory.used))
    wait_for_stores(only_read=False)


def bwd_dqkg(
    kernel_shape: KernelShape, x: GradientArrays, wanted: Structs, *, num_key_stages: int, num_ctas: int
) -> dict[str, Array | None]:
    """Gradients of arguments, by value head.

    Args:
        kernel_shape: static facts.
        x: what the kernel reads.
        wanted: `gradient_structs`.
        num_key_stages: chunks whose queries and keys are in shared memory.
        num_ctas: at most; the number of processors.

    Returns:
        What is wanted, and `d_log_decay`, also where it is flat: parts of each half of the key channels,
        `[2, B, HV, T]` float32; None without a decay.
    """
    p, rows = kernel_shape, _token_rows(kernel_shape, x)
    outputs = {**wanted, "d_log_decay": parts_struct(p) if x.log_decay is not None else None}
    buffers = {
        "pairs": matrix_buffer(1, 2, CHUNK, CHUNK),
        "lines": number_buffer(3, _LINES, CHUNK),
        "ready": barrier(2),  # both warpgroups' pairs are there
        "used": barrier(2),  # both have read them
    }
    return call(
        _compute,
        "delta_gradients",
        p,
        x,
        rows,
        {},
        outputs,
        buffers,
        more={"kept": x.kept},
        num_key_stages=num_key_stages,
        num_ctas=num_ctas,
    )

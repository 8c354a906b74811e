"""First stage under a channel-wise decay: everything of a chunk that does not need the state.

The equations and the results are those of `pallas_kernels.delta_rule.triton.wy`, the factors those of
`channel_decay` there. With m the chunk's middle row, and `Q' = q exp(G - G_m)`, `E' = erase k exp(G - G_m)`,
`K' = k~ exp(G_m - G)`:

    A = (I + tril(E' K'^T, -1))^-1    P = scale * tril(Q' K'^T)
    read = front Q'    erased = front E'    written = tail K'    front = exp(G_m)    tail = exp(G_C - G_m)

A warpgroup has a chunk for itself, and goes over its key channels in blocks of 64. Sums over tokens, of the log decay,
are products with matrices of -1, 0 and 1. Q' and E' are left operands of the pairs' products, in registers; K' goes
through shared memory, in the place of the log decay, which is read before, as is scratch of the inverse. The scaled
matrices leave through the tiles that they are made of; with one key, what is written leaves through a tile of its own,
or what is erased through that of an erase gate by channel.

Linear attention erases nothing: there P is the only matrix of pairs, and nothing is inverted. Its written keys leave
through the keys' tile, since nothing else is made of them.

What the kernel finds of an extreme chunk, but for `extreme`, `front`, `tail` and `kept`, is not a number; a kernel in
Triton replaces it.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.common.decay import LOG2_E, MAX_EXPONENT, MIN_LOG_DECAY
from pallas_kernels.common.kernel_shape import CHUNK, KernelShape, is_channel_wise
from pallas_kernels.common.mosaic_gpu import (
    SIDE,
    added,
    awaited,
    column_numbers,
    fence_smem,
    load_column,
    load_matrix,
    load_row,
    maximum,
    multiply,
    number_buffer,
    row_numbers,
    split,
    spread_columns,
    spread_rows,
    store,
    wait_for_stores,
    with_accumulators,
    zero,
    zeros,
)
from pallas_kernels.delta_rule.inputs import Inputs
from pallas_kernels.delta_rule.mosaic_gpu.bwd_tile_scheduler import diagonal
from pallas_kernels.delta_rule.mosaic_gpu.pipeline import run_rows, tokens
from pallas_kernels.delta_rule.mosaic_gpu.wy_tile_scheduler import (
    WYTileScheduler,
    call,
    pair_buffer,
    reduced,
    store_growth,
    store_inverse,
)

_MIDDLE = CHUNK // 2
_NUMBERS = ("front", "tail", "kept", "loss")
_SUMS = 8  # the fewest columns of a product


def _compute(r: Any, tiles: Any, memory: Any, scheduler: WYTileScheduler) -> None:
    """One warpgroup's chunks."""
    p = scheduler.kernel_shape
    sources = {"read": "q", "erased": "k", "written": "k" if not p.online else "written"}
    if r.write_key is not None:
        sources["written"] = "write_key"
    elif r.erase is not None:
        sources |= {"erased": "erase", "written": "k"}

    def numbers(m, name):
        """One of `_NUMBERS`, of all channels."""
        return memory.numbers.at[scheduler.own(m), _NUMBERS.index(name)]

    def row(name, m, load=load_column) -> Any:
        return scheduler.row(tiles, name, m, load)

    def by_token(x, name, m):
        token = row(name, m)
        return x if token is None else x * spread_rows(token)

    def matrix(name, slot):
        return load_matrix(getattr(tiles, name).at[slot]).astype(jnp.float32)

    def part_of(slot, i):
        """Shared memory for a matrix's two bfloat16 parts: where the block's log decay has been."""
        return tiles.log_decay_parts.at[slot, i]

    def store_parts(slot, x):
        for i, rounded in enumerate(split(x)):
            part_of(slot, i)[...] = rounded

    def decays(m, part, slot):
        """Binary exponent of `exp(G - G_m)`; stores what the channels' decay comes to, and its part of `numbers`."""
        step = by_token(jnp.maximum(matrix("log_decay", slot), MIN_LOG_DECAY), "goes_on", m)
        fence_smem()  # all is read before its parts come in its place
        store_parts(slot, step * LOG2_E)
        fence_smem()

        def body(exponent, sums):
            for i in (0, 1):
                multiply(exponent, memory.signs.at[zero(m)], part_of(slot, i))
                multiply(sums, part_of(slot, i).T, memory.ends.at[zero(m)].T)
            return awaited(exponent), awaited(sums)

        exponent, sums = with_accumulators(body, SIDE, _SUMS)
        column = spread_columns(column_numbers(_SUMS))
        before, after, to_middle = (jnp.sum(jnp.where(column == i, sums, 0.0), axis=1) for i in range(3))
        found = {
            "front": jnp.exp2(before),
            "tail": jnp.exp2(after),
            "kept": jnp.exp2(before + after) * scheduler.passes(tiles, m),
            "loss": jnp.maximum(-to_middle, -after),
        }
        for name, x in found.items():
            numbers(m, name).at[scheduler.channels(part)][...] = x
        fence_smem()
        return exponent

    def number(m, name, part):
        return spread_columns(load_row(numbers(m, name).at[scheduler.channels(part)]))

    def release_before(m, part):
        """Frees the block before this one, once the matrices that it holds have left."""

        def release():
            wait_for_stores()
            scheduler.release(*((m, part - 1) if part else (m - 1, scheduler.parts - 1)))

        release() if part else pl.when(m > 0)(release)

    def add_block(m, part, pairs):
        """Adds a block's pairs, of scores and of what is erased, and stores its scaled matrices."""
        b, n, h = scheduler.at(m)
        release_before(m, part)
        slot, channels = scheduler.wait(m, part), scheduler.channels(part)
        exponent = decays(m, part, slot)
        front, tail = number(m, "front", part), number(m, "tail", part)

        def leave(name, x, mask):
            """Puts a matrix in the tile through which it leaves; one after another, for few registers."""
            tile(name, slot)[...] = by_token(x, mask, m).astype(jnp.bfloat16)

        k = matrix("k", slot)
        written = (k if r.write_key is None else matrix("write_key", slot)) * jnp.exp2(-exponent)
        leave("written", written * tail, "reaches")
        store_parts(slot, written)
        reads = jnp.exp2(exponent)
        if p.online:
            erased = k * reads
            if r.erase is not None:
                erased = matrix("erase", slot) * erased
                if hasattr(tiles, "erase_parts"):
                    fence_smem()  # likewise
            erased = by_token(erased, "erase", m)
            leave("erased", erased * front, "sees")
        read = matrix("q", slot) * reads
        leave("read", read * front, "sees")
        if p.online:
            erased = erased.astype(jnp.bfloat16)
        high, low = split(read)
        fence_smem()
        for name in ("written", "erased", "read") if p.online else ("written", "read"):
            store(tile(name, slot), getattr(r, name).at[b, h, tokens(n), channels], last=name == "read")

        def body(scores, *erased_pairs):
            # Q' and K' go in two parts each: rounding them would double the error of the output.
            for total in erased_pairs:
                multiply(total, erased, part_of(slot, 0).T)
                multiply(total, erased, part_of(slot, 1).T)
            multiply(scores, high, part_of(slot, 0).T)
            multiply(scores, low, part_of(slot, 0).T)
            multiply(scores, high, part_of(slot, 1).T)

        return added(body, *pairs)

    def tile(name, slot):
        """The tile through which a scaled matrix leaves."""
        source = sources[name]
        if hasattr(tiles, f"{source}_parts"):
            return getattr(tiles, f"{source}_parts").at[slot, 0]
        return getattr(tiles, source).at[slot]

    def causal(m, pairs, *, strict):
        rows, columns = spread_rows(row_numbers(m)), spread_columns(column_numbers())
        pairs = jnp.where(rows > columns if strict else rows >= columns, pairs, 0.0)
        if "run" not in scheduler.rows:
            return pairs
        return jnp.where(spread_rows(row("run", m)) == spread_columns(row("run", m, load_row)), pairs, 0.0)

    def step(m, _):
        b, n, h = scheduler.at(m)
        scheduler.wait_for_rows(m)
        found = tuple(zeros(CHUNK, CHUNK) for _ in range(2 if p.online else 1))
        for part in range(scheduler.parts):
            found = add_block(m, part, found)
        scores, *erased_pairs = found
        pairs = memory.pairs.at[scheduler.own(m)]
        pairs[...] = (p.scale * causal(m, scores, strict=False)).astype(jnp.bfloat16)
        if p.online:
            own = diagonal(erased_pairs[0], m)
            lower = causal(m, erased_pairs[0], strict=True)
        fence_smem()
        store(pairs, r.scores.at[b, h, n])
        for name in ("front", "tail", "kept"):
            store(numbers(m, name), getattr(r, name).at[b, h, n], last=name == "kept")
        r.extreme[b, h, n] = (reduced(numbers(m, "loss"), maximum) > MAX_EXPONENT * LOG2_E).astype(jnp.int32)
        if p.online:
            store_growth(r, scheduler, m, own, numbers(m, "loss"))
        fence_smem()
        scheduler.release_rows(m)
        if p.online:
            last = scheduler.slot(m, scheduler.parts - 1)  # nobody fills it before the next chunk begins
            store_inverse(r, memory, scheduler, m, lower, tiles.log_decay_parts.at[last])
        return _

    lax.fori_loop(0, scheduler.count, step, jnp.int32(0))
    release_before(scheduler.count, 0)
    wait_for_stores(only_read=False)


def channel_factors(
    kernel_shape: KernelShape, inputs: Inputs, *, num_stages: int, num_ctas: int
) -> dict[str, Array | None]:
    """The first stage's results of all chunks that are not extreme, by the names of `WYFactors`.

    Args:
        kernel_shape: static facts.
        inputs: arguments, with a channel-wise decay.
        num_stages: blocks of 64 key channels whose tiles are in shared memory at once, for each of two warpgroups: all
            of a chunk's, or one.
        num_ctas: at most; the number of processors.
    """
    p, x = kernel_shape, inputs
    rows = run_rows(p, x.resets)
    if x.erase is not None and not is_channel_wise(x.erase):
        # By the copy engine: what the warpgroup that copies loads itself holds up the many tiles.
        rows["erase"] = jnp.swapaxes(x.erase.astype(jnp.float32), 1, 2)
    keys = {name: getattr(x, name) for name in ("q", "k", "write_key", "erase", "log_decay")}
    keys["erase"] = x.erase if is_channel_wise(x.erase) else None
    keys["log_decay"] = x.log_decay.astype(jnp.float32)  # type: ignore[union-attr]
    token = jnp.arange(CHUNK)
    is_early = token <= _MIDDLE
    signs = jnp.where(token <= token[:, None], jnp.where(is_early, 0, 1), jnp.where(is_early, -1, 0))
    ends = jnp.stack([is_early, ~is_early, is_early & (token > 0), *[token < 0] * (_SUMS - 3)])
    matrix, channels = p.per_head(p.chunks, CHUNK, CHUNK), p.per_head(p.length, p.key_size)
    numbers = p.per_head(p.chunks, p.key_size, dtype=jnp.float32)
    outputs = {
        "inverse": matrix if p.online else None,
        "scores": matrix,
        **dict.fromkeys(("read", "erased", "written"), channels),
        **dict.fromkeys(("front", "tail", "kept"), numbers),
        "growth": p.per_head(p.chunks, dtype=jnp.float32) if p.online and p.num_splits > 1 else None,
        "extreme": p.per_head(p.chunks, dtype=jnp.int32),
    }
    if not p.online:
        outputs["erased"] = None

    def buffers(num_compute_warpgroups):
        return {
            "pairs": pair_buffer(num_compute_warpgroups),
            "numbers": number_buffer(num_compute_warpgroups, len(_NUMBERS), p.key_size),
        }

    return call(
        _compute,
        "delta_channel_factors",
        p,
        keys,
        {},
        rows,
        {"signs": signs.astype(jnp.bfloat16), "ends": ends.astype(jnp.bfloat16)},
        outputs,
        buffers,
        num_compute_warpgroups=2,
        parts=p.key_size // SIDE,
        num_stages=num_stages,
        num_ctas=num_ctas,
        with_written=p.online and x.write_key is None and keys["erase"] is None,
    )

"""Gradients of causal softmax attention, in one kernel that adds up in a fixed order.

With `P = exp(scale Q K^T - L)` on the pairs that are seen, L the log sums of the softmax, `D = rowsum(dO * O)`:

    dV = P^T dO        dS = P * (dO V^T - D)        dK = scale dS^T Q        dQ = scale dS K

(FlashAttention, Dao et al., 2022, arXiv 2205.14135, algorithm 4.) A program has 128 keys of a head and goes over the
blocks of 128 queries that see them. Two warpgroups hold the gradients of 64 keys and values each; scores are held
transposed, keys by queries, so that P^T and dS^T are left operands straight from registers.

The gradient of a query is a sum over programs, in float32 in global memory. Its order is fixed: programs wait for their
turn at each block of queries, the one whose keys are latest first. So the same arrays give the same bits, always.
Waiting costs nothing: programs start from the latest keys on, each at the queries that no other has come to, and the
one before it stays a block ahead. A program waits only for programs of a lower number, which have started before it.
"""

import functools
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jaxtyping import Float

from pallas_kernels.common.decay import LOG2_E
from pallas_kernels.common.mosaic_gpu import (
    SIDE,
    added_in_turn,
    arrive,
    arrive_and_wait,
    awaited,
    barrier,
    begin_copy,
    column_numbers,
    fence_smem,
    launch,
    load_matrix,
    load_row,
    matrix_buffer,
    multiply,
    number_buffer,
    quotient,
    remainder,
    row_numbers,
    spread_columns,
    spread_rows,
    store,
    turns,
    unsupported_heads,
    use_registers,
    wait,
    wait_for_readers,
    wait_for_stores,
    wide_buffer,
    with_accumulators,
    zeros,
)
from pallas_kernels.common.platform import is_hopper
from pallas_kernels.common.refusal import refuse

BLOCK = 2 * SIDE
"""Keys of a program, and queries of a step."""
_STAGES = 2  # steps whose queries are in shared memory
_REGISTERS = 232, 24  # of a warpgroup that computes, and of one that copies


def unsupported_reason(q: Array, k: Array, v: Array) -> str | None:
    """Why the kernel can't serve a call, as a noun phrase, or None if it can.

    Args:
        q: queries `[B, T, H, K]`.
        k: keys `[B, T, HK, K]`.
        v: values `[B, T, HK, V]`.
    """
    if not is_hopper():
        return "this device (it runs on Hopper cards)"
    return _unsupported_arrays(q, k, v)


def _unsupported_arrays(q: Array, k: Array, v: Array) -> str | None:
    reason = unsupported_heads(q=q, k=k, v=v)
    if reason is None and q.shape[1] % BLOCK:
        return f"rows of {q.shape[1]} tokens (multiples of {BLOCK})"
    return reason


class _TileScheduler(NamedTuple):
    """A program's way over the blocks of queries that see its keys, head by head.

    Attributes:
        blocks: blocks of a row.
        heads: query heads of a key head.
        row: row of the batch.
        key_head: key head.
        block: the program's block of keys.
        seen: blocks of queries that see it.
    """

    blocks: int
    heads: int
    row: Any
    key_head: Any
    block: Any
    seen: Any

    @property
    def count(self) -> Any:
        """Steps."""
        return self.seen * self.heads

    @property
    def keys(self) -> Any:
        """The program's keys among the row's tokens."""
        return pl.ds(self.block * BLOCK, BLOCK)

    def at(self, m: Any) -> tuple[Any, Any, Any]:
        """Query head of the m-th step, its block of queries, and how many blocks that is after the keys' own."""
        if self.heads == 1:
            return self.key_head, self.block + m, m
        after = lax.rem(m, self.seen)
        return self.key_head * self.heads + lax.div(m, self.seen), self.block + after, after


def _blocks_that_see(block: Any, blocks: int, window: int | None) -> Any:
    """How many blocks of queries see a block of keys."""
    if window is None:
        return blocks - block
    return jnp.minimum(blocks - block, jnp.int32((BLOCK + window - 2) // BLOCK + 1))


def _copy(r: Any, tiles: Any, scheduler: _TileScheduler) -> None:
    """Copies keys and values, and each step's queries."""
    begin_copy(r.k.at[scheduler.row, scheduler.keys, scheduler.key_head], tiles.k, tiles.keys_there.at[0])
    begin_copy(r.v.at[scheduler.row, scheduler.keys, scheduler.key_head], tiles.v, tiles.keys_there.at[0])

    @pl.loop(0, scheduler.count)
    def _(m):
        stage = remainder(m, _STAGES)
        pl.when(m >= _STAGES)(functools.partial(wait, tiles.free.at[stage]))
        head, block, _ = scheduler.at(m)
        tokens, there = pl.ds(block * BLOCK, BLOCK), tiles.there.at[stage]
        for name in ("q", "d_out"):
            begin_copy(getattr(r, name).at[scheduler.row, tokens, head], getattr(tiles, name).at[stage], there)
        for name in ("log_sums", "shifts"):
            begin_copy(getattr(r, name).at[scheduler.row, head, tokens], getattr(tiles, name).at[stage], there)

    wait_for_readers(tiles.free, _STAGES, scheduler.count)


def _write(r: Any, tiles: Any, scheduler: _TileScheduler, order: Any) -> None:
    """Adds each step's gradient of queries to what programs of later keys have added."""

    @pl.loop(0, scheduler.count)
    def _(m):
        head, block, after = scheduler.at(m)
        wait(tiles.gradient_there.at[0])
        place = (scheduler.row * r.q.shape[2] + head) * scheduler.blocks + block
        halves = [
            (tiles.d_q.at[half], r.d_q.at[scheduler.row, pl.ds(block * BLOCK + half * SIDE, SIDE), head])
            for half in (0, 1)
        ]
        added_in_turn(halves, order, place, after, read=functools.partial(arrive, tiles.gradient_free.at[0]))


def _compute(r: Any, tiles: Any, scheduler: _TileScheduler, half: Any, scale: float, window: int | None) -> None:
    """The gradients of 64 keys and values, and of 64 queries of each step."""
    own = pl.ds(half * SIDE, SIDE)
    wait(tiles.keys_there.at[0])
    k, v = load_matrix(tiles.k.at[own]), load_matrix(tiles.v.at[own])

    def exponents(scores, stage, i, m):
        """`scale K Q^T - L` in base 2 `[64 keys, 64 queries]`, minus infinity where keys are not seen."""
        tokens = pl.ds(i * SIDE, SIDE)
        scaled = awaited(scores, running=1) * (scale * LOG2_E)
        x = scaled - spread_columns(load_row(tiles.log_sums.at[stage, tokens]))
        _, _, after = scheduler.at(m)
        query = spread_columns(column_numbers() + (after * BLOCK + (i - half) * SIDE))  # counted from the first key
        key = spread_rows(row_numbers(m))
        seen = query >= key
        if window is not None:
            seen = seen & (query - key < window)
        return jnp.where(seen, x, -jnp.inf)

    def body(d_k, d_v, scores, d_weights, d_q):
        @pl.loop(0, scheduler.count)
        def _(m):
            stage, place = remainder(m, _STAGES), remainder(m, 2)
            wait(tiles.there.at[stage])
            for i in (0, 1):
                tokens = pl.ds(i * SIDE, SIDE)
                q, d_out = tiles.q.at[stage, tokens], tiles.d_out.at[stage, tokens]
                scores[...] = zeros(SIDE, SIDE)
                multiply(scores, k, q.T)
                d_weights[...] = zeros(SIDE, SIDE)
                multiply(d_weights, v, d_out.T)
                weights = jnp.exp2(exponents(scores, stage, i, m))  # P^T
                multiply(d_v, weights.astype(jnp.bfloat16), d_out)
                shifts = spread_columns(load_row(tiles.shifts.at[stage, tokens]))
                d_scores = (weights * (awaited(d_weights, running=1) - shifts)).astype(jnp.bfloat16)  # dS^T
                tiles.d_scores[place, i, own] = d_scores
                multiply(d_k, d_scores, q)
            fence_smem()
            arrive_and_wait(tiles.both.at[0])
            d_q[...] = zeros(SIDE, SIDE)
            multiply(d_q, tiles.d_scores.at[place, half].T, tiles.k)
            total = awaited(d_q)
            arrive(tiles.free.at[stage])
            pl.when(m > 0)(functools.partial(wait, tiles.gradient_free.at[0]))
            tiles.d_q[half] = total
            fence_smem()
            arrive(tiles.gradient_there.at[0])

        arrive_and_wait(tiles.both.at[0])  # both have read K, in whose place its gradient leaves
        tiles.k[own] = (awaited(d_k) * scale).astype(jnp.bfloat16)
        tiles.v[own] = awaited(d_v).astype(jnp.bfloat16)
        fence_smem()
        rows = pl.ds(scheduler.block * BLOCK + half * SIDE, SIDE)
        store(tiles.k.at[own], r.d_k.at[scheduler.row, rows, scheduler.key_head], last=False)
        store(tiles.v.at[own], r.d_v.at[scheduler.row, rows, scheduler.key_head])
        wait_for_stores(only_read=False)
        wait(tiles.gradient_free.at[0])

    with_accumulators(body, *[SIDE] * 5)


def attention_gradients(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T HK K"],
    v: Float[Array, "B T HK V"],
    out: Float[Array, "B T H V"],
    log_sums: Float[Array, "B H T"],
    d_out: Float[Array, "B T H V"],
    *,
    scale: float,
    window: int | None = None,
) -> tuple[Float[Array, "B T H K"], Float[Array, "B T HK K"], Float[Array, "B T HK V"]]:
    """Gradients of `softmax(scale q k^T) v` over the tokens that each token sees; the same bits in every run.

    Args:
        q: queries, bfloat16.
        k: keys, likewise. Query head `j` uses key head `j // (H // HK)`.
        v: values, likewise.
        out: the attention's output, likewise.
        log_sums: log of the sum of `exp(scale q k^T)` over the keys that a query sees, float32.
        d_out: gradient with respect to the output, bfloat16.
        scale: factor on the scores.
        window: how many tokens each token sees, itself included; None is itself and all tokens before it.

    Returns:
        The gradients of queries, keys and values, bfloat16. Sums are in float32; weights and the gradients of scores
        are rounded to bfloat16 for products.

    Raises:
        NotImplementedError: the kernel does not serve these arrays.
    """
    refuse("attention_gradients", _unsupported_arrays(q, k, v), "mosaic")

    @jax.custom_batching.custom_vmap
    def run(q: Array, k: Array, v: Array, out: Array, log_sums: Array, d_out: Array) -> tuple[Array, Array, Array]:
        shifts = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=3).transpose(0, 2, 1)
        d_q, d_k, d_v = _call(q, k, v, d_out, log_sums * LOG2_E, shifts, scale, window)
        return (d_q * scale).astype(q.dtype), d_k, d_v

    @run.def_vmap
    def _(size: int, batched: list[bool], *arrays: Array) -> tuple[tuple[Array, ...], tuple[bool, ...]]:
        """More rows: programs of several calls in one would take each other's turns."""
        rows = [x if has else jnp.broadcast_to(x, (size, *x.shape)) for x, has in zip(arrays, batched)]
        results = run(*(x.reshape(-1, *x.shape[2:]) for x in rows))
        return tuple(x.reshape(size, -1, *x.shape[1:]) for x in results), (True, True, True)

    return run(q, k, v, out, log_sums, d_out)


# Lowered once for all layers: Pallas (jax 0.11) numbers what it lowers, and equal kernels would be compiled each.
@functools.partial(jax.jit, static_argnames=("scale", "window"), inline=True)
def _call(
    q: Array, k: Array, v: Array, d_out: Array, log_sums: Array, shifts: Array, scale: float, window: int | None
) -> tuple[Array, Array, Array]:
    """The kernel; `d_q` in float32, not yet times the scale. `log_sums` and `shifts` (D) are `[B, H, T]`."""
    batch, length, heads, channels = q.shape
    key_heads, blocks = k.shape[2], length // BLOCK
    memory = {
        "k": matrix_buffer(BLOCK, channels),
        "v": matrix_buffer(BLOCK, channels),
        "q": matrix_buffer(_STAGES, BLOCK, channels),
        "d_out": matrix_buffer(_STAGES, BLOCK, channels),
        "log_sums": number_buffer(_STAGES, BLOCK),
        "shifts": number_buffer(_STAGES, BLOCK),
        "d_scores": matrix_buffer(2, 2, BLOCK, SIDE),  # of two steps; the one may still be read as the next is stored
        "d_q": wide_buffer(2, SIDE, channels),
        "keys_there": barrier(2),
        "there": barrier(4, _STAGES),
        "free": barrier(2, _STAGES),
        "both": barrier(2),
        "gradient_there": barrier(2),
        "gradient_free": barrier(1),
    }

    def program(r: SimpleNamespace, tiles: SimpleNamespace) -> None:
        index, warpgroup = lax.axis_index("program"), lax.axis_index("warpgroup")
        head = quotient(index, blocks)
        block = (blocks - 1) - remainder(index, blocks)
        scheduler = _TileScheduler(
            blocks=blocks,
            heads=heads // key_heads,
            row=quotient(head, key_heads),
            key_head=remainder(head, key_heads),
            block=block,
            seen=_blocks_that_see(block, blocks, window),
        )
        order = turns(batch * heads * blocks)
        computing, copying = _REGISTERS

        @pl.when(warpgroup < 2)
        def _():
            use_registers(computing, more=True)
            _compute(r, tiles, scheduler, warpgroup, scale, window)

        @pl.when(warpgroup == 2)
        def _():
            use_registers(copying, more=False)
            _copy(r, tiles, scheduler)

        @pl.when(warpgroup == 3)
        def _():
            use_registers(copying, more=False)
            _write(r, tiles, scheduler, order)

    results = launch(
        program,
        "attention_gradients",
        {"q": q, "k": k, "v": v, "d_out": d_out, "log_sums": log_sums, "shifts": shifts},
        {
            "d_q": jax.ShapeDtypeStruct(q.shape, jnp.float32),
            "d_k": jax.ShapeDtypeStruct(k.shape, k.dtype),
            "d_v": jax.ShapeDtypeStruct(v.shape, v.dtype),
        },
        memory,
        grid={"program": batch * key_heads * blocks},
        warpgroups=4,
    )
    return results["d_q"], results["d_k"], results["d_v"]  # type: ignore[return-value]

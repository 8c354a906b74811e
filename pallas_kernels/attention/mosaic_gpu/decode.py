"""One token's attention to a ring of keys and values, which the copy engine brings: for many rows, at memory speed.

The keys of all heads of some slots lie in the ring as a matrix with a row for each slot and head, heads first. A
program has a row of the batch. It takes 64 rows of this matrix at a time, of `64 / H` slots, beside a matrix of queries
that repeats the H heads as often. So each of the 64 rows has a softmax of its own, over every `64 / H`-th slot:

    score_r = scale q_r . k_r      top_r = max score_r      total_r = sum 2^(score_r - top_r)      sums_r = sum ... v_r

with scores in base 2 (the online softmax, Milakov and Gimelshein, 2018, arXiv 1805.02867). Nothing is exchanged between
rows before the ring's end, where those of a head are added up.
"""

import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jaxtyping import Float, Int

from pallas_kernels.common.decay import LOG2_E
from pallas_kernels.common.mosaic_gpu import (
    SIDE,
    arrive,
    barrier,
    begin_copy,
    fence_smem,
    launch,
    load_column,
    load_flat,
    load_matrix,
    matrix_buffer,
    number_buffer,
    put,
    quotient,
    remainder,
    row_numbers,
    spread_rows,
    unsupported_heads,
    wait,
    wait_for_readers,
    zeros,
)
from pallas_kernels.common.platform import is_hopper
from pallas_kernels.common.refusal import refuse

_ROWS = 4 * SIDE  # of keys, and of values, that a step takes: copies of that size are the fastest
_STAGES = 3  # steps whose keys and values are in shared memory
_LOWEST = -1e30  # of scores: a finite number, so that a difference of two is one


def unsupported_reason(q: Array, key: Array, value: Array) -> str | None:
    """Why the kernel can't serve a call, as a noun phrase, or None if it can.

    Args:
        q: queries `[B, H, K]`.
        key: `[B, S, H, K]`.
        value: `[B, S, H, K]`.
    """
    if not is_hopper():
        return "this device (it runs on Hopper cards)"
    return _unsupported_arrays(q, key, value)


def _unsupported_arrays(q: Array, key: Array, value: Array) -> str | None:
    reason = unsupported_heads(q=q, key=key, value=value)
    if reason is not None:
        return reason
    (_, capacity, key_heads, _), heads = key.shape, q.shape[1]
    if key_heads != heads:
        return f"{heads} query heads with {key_heads} key heads (as many)"
    if heads < 8 or SIDE % heads:
        return f"{heads} heads (8, 16, 32 or 64)"
    if capacity * heads % _ROWS:
        return f"a ring of {capacity} slots (multiples of {_ROWS // heads})"
    return None


def _steps(r: Any, row: Any, capacity: int) -> Any:
    """How many steps a row takes, at least one."""
    filled = jnp.minimum(r.last[row] + 1, capacity)
    return quotient(filled * r.q.shape[1] + (_ROWS - 1), _ROWS)


def _copy(r: Any, tiles: Any, row: Any, capacity: int) -> None:
    """Copies each step's keys and values, and the queries as often as they are repeated."""
    heads = r.q.shape[1]

    def begin(m: Any, stage: Any) -> None:
        for name in ("key", "value"):
            source = getattr(r, name).at[row, pl.ds(m * _ROWS, _ROWS)]
            begin_copy(source, getattr(tiles, name).at[stage], tiles.there.at[stage])

    begin(0, 0)  # the first step's come before it is known how many there are
    for i in range(SIDE // heads):
        begin_copy(r.q.at[row], tiles.q.at[pl.ds(i * heads, heads)], tiles.q_there.at[0])
    steps = _steps(r, row, capacity)

    @pl.loop(1, steps)
    def _(m):
        stage = remainder(m, _STAGES)
        pl.when(m >= _STAGES)(lambda: wait(tiles.free.at[stage]))
        begin(m, stage)

    wait_for_readers(tiles.free, _STAGES, steps)


def _compute(r: Any, tiles: Any, row: Any, capacity: int, scale: float) -> None:
    """The softmax of each row of the matrices, and then that of each head."""
    heads, steps, seen = r.q.shape[1], _steps(r, row, capacity), r.seen[row]
    newest = remainder(r.last[row], capacity)
    wait(tiles.q_there.at[0])
    q = load_matrix(tiles.q).astype(jnp.float32) * (scale * LOG2_E)

    def step(m, carry):
        top, total, sums = carry  # [64], [64], [64, K]
        stage = remainder(m, _STAGES)
        wait(tiles.there.at[stage])
        scores, highest = [], top
        for i in range(_ROWS // SIDE):
            score = jnp.sum(q * load(tiles.key.at[stage], i), axis=1)
            age = newest - quotient(row_numbers(m) + (m * _ROWS + i * SIDE), heads)  # tokens since the slot's own
            is_seen = jnp.where(age < 0, age + capacity, age) < seen
            scores.append((is_seen, jnp.where(is_seen, score, _LOWEST)))
            highest = jnp.maximum(highest, scores[-1][1])
        kept = jnp.exp2(top - highest)
        total, sums = kept * total, spread_rows(kept) * sums
        for i, (is_seen, score) in enumerate(scores):
            weight = jnp.where(is_seen, jnp.exp2(score - highest), 0.0)
            total, sums = total + weight, sums + spread_rows(weight) * load(tiles.value.at[stage], i)
        fence_smem()
        arrive(tiles.free.at[stage])
        return highest, total, sums

    def load(matrices: Any, i: int) -> Array:
        return load_matrix(matrices.at[pl.ds(i * SIDE, SIDE)]).astype(jnp.float32)

    zero = row_numbers().astype(jnp.float32) * 0.0  # [64], spread over threads as rows are
    top, total, sums = lax.fori_loop(0, steps, step, (zero + _LOWEST, zero, zeros(SIDE, SIDE)))

    def over_residues(x: Array, buffer: Any, join: Any) -> Array:
        """`join` of the rows of a head, for each row."""
        put(buffer.at[pl.ds(0, SIDE)], x)
        put(buffer.at[pl.ds(SIDE, SIDE)], x)
        fence_smem()
        found = x
        for i in range(1, SIDE // heads):
            found = join(found, load_column(buffer.at[pl.ds(i * heads, SIDE)]))
        return found

    factor = jnp.exp2(top - over_residues(top, tiles.numbers.at[0], jnp.maximum))
    share = factor / over_residues(factor * total, tiles.numbers.at[1], jnp.add)
    put(tiles.sums, sums * spread_rows(share))
    fence_smem()
    out = load_flat(tiles.sums.at[pl.ds(0, heads)])
    for i in range(1, SIDE // heads):
        out = out + load_flat(tiles.sums.at[pl.ds(i * heads, heads)])
    put(r.out.at[row], out.astype(jnp.bfloat16))


def ring_attention(
    q: Float[Array, "B H K"],
    *,
    key: Float[Array, "B S H K"],
    value: Float[Array, "B S H K"],
    last: Int[Array, " B"],
    seen: Int[Array, " B"],
    scale: float,
) -> Float[Array, "B H K"]:
    """The attention of the newest token of each row to the latest tokens of a ring, itself among them.

    Token `n` of a row is in slot `n % S`.

    Args:
        q: its queries, bfloat16.
        key: keys of the ring, likewise.
        value: values of the ring, likewise.
        last: int32, the number of the newest token.
        seen: int32, how many tokens it sees, itself included: from 1 to S, and no more than there are.
        scale: factor on the scores.

    Returns:
        The output, bfloat16; scores and sums are in float32.

    Raises:
        NotImplementedError: the kernel does not serve these arrays.
    """
    refuse("ring_attention", _unsupported_arrays(q, key, value), "mosaic")
    return _call(q, key, value, last, seen, scale)


# Lowered once for all layers, as `attention_gradients` is.
@functools.partial(jax.jit, static_argnames="scale", inline=True)
def _call(q: Array, key: Array, value: Array, last: Array, seen: Array, scale: float) -> Array:
    (batch, heads, channels), capacity = q.shape, key.shape[1]
    rows = (batch, capacity * heads, channels)
    memory = {
        "q": matrix_buffer(SIDE, channels),
        "key": matrix_buffer(_STAGES, _ROWS, channels),
        "value": matrix_buffer(_STAGES, _ROWS, channels),
        "sums": number_buffer(SIDE, channels),
        "numbers": number_buffer(2, 2 * SIDE),
        "q_there": barrier(SIDE // heads),
        "there": barrier(2, _STAGES),
        "free": barrier(1, _STAGES),
    }

    def program(r: SimpleNamespace, tiles: SimpleNamespace) -> None:
        row, warpgroup = lax.axis_index("row"), lax.axis_index("warpgroup")

        @pl.when(warpgroup == 0)
        def _():
            _compute(r, tiles, row, capacity, scale)

        @pl.when(warpgroup == 1)
        def _():
            _copy(r, tiles, row, capacity)

    results = launch(
        program,
        "ring_attention",
        {"q": q, "key": key.reshape(rows), "value": value.reshape(rows), "last": last, "seen": seen},
        {"out": jax.ShapeDtypeStruct(q.shape, q.dtype)},
        memory,
        grid={"row": batch},
        warpgroups=2,
    )
    return results["out"]  # type: ignore[return-value]

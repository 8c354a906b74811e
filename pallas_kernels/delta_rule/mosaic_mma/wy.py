"""First stage, one program for each chunk of each value head: all of a chunk that does not need the state.

    A = (I + tril(b (k k^T) exp(G_r - G_s), -1))^-1    P = scale * tril((q k^T) exp(G_r - G_s))

The results are those of `pallas_kernels.delta_rule.triton.wy`. What is one number a token is found before, by XLA: the
cumulative log decay G, as a sum of multiples of 1/16 and of the rest, and the factors that follow from it.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.common.decay import split_steps
from pallas_kernels.common.kernel_shape import CHUNK, KernelShape
from pallas_kernels.common.mosaic_gpu import (
    SIDE,
    barrier,
    column_numbers,
    launch,
    load_column,
    load_row,
    matrix_buffer,
    number_buffer,
    quotient,
    row_numbers,
    spread_columns,
    spread_rows,
    zeros,
)
from pallas_kernels.common.mosaic_mma import (
    as_left,
    begin_copy,
    load_left,
    multiply,
    store_rows,
    sync_threads,
    wait_for_copies,
)
from pallas_kernels.delta_rule.inputs import Inputs

_LEVELS = range(1, CHUNK.bit_length() - 1)  # of the inverse
_LINES = ("total", "fine", "erase", "run")


def by_chunk(kernel_shape: KernelShape, rows: dict[str, Array | None], names: tuple[str, ...]) -> Array | None:
    """Numbers a token side by side, a chunk at a time, `[B, HV, N, 64 * len(names)]` float32; None without any.

    Args:
        kernel_shape: static facts.
        rows: `[B, HV, T]`, or None; the place of one that is None is filled with zeros.
        names: the rows' names, in the order in which they are stored.
    """
    p = kernel_shape
    if all(rows[name] is None for name in names):
        return None
    nothing = jnp.zeros((p.batch, p.value_heads, p.length), jnp.float32)
    found = [nothing if row is None else row.astype(jnp.float32) for row in (rows[name] for name in names)]
    stacked = jnp.stack(found, axis=2).reshape(p.batch, p.value_heads, len(names), p.chunks, CHUNK)
    return jnp.swapaxes(stacked, 2, 3).reshape(p.batch, p.value_heads, p.chunks, len(names) * CHUNK)


def token_rows(kernel_shape: KernelShape, inputs: Inputs) -> dict[str, Array | None]:
    """What is one number a token, `[B, HV, T]` float32, and a chunk's `kept` `[B, HV, N]`; None for what is absent.

    `total` and `fine` add up to G, `run` counts the starts of documents in a chunk; the others as in `WYFactors`.
    """
    p, x = kernel_shape, inputs
    chunked = (p.batch, p.value_heads, p.chunks, CHUNK)

    def of_tokens(rows):
        return rows.reshape(p.batch, p.value_heads, p.length)

    erase = None if x.erase is None else jnp.swapaxes(x.erase.astype(jnp.float32), 1, 2)
    rows: dict[str, Array | None] = dict.fromkeys(("total", "fine", "run", "read_rows", "written_rows", "kept"))
    rows |= {"erase": erase, "erased_rows": erase}
    if x.log_decay is None:  # then there are no documents, either (`make_inputs`)
        return rows
    steps = jnp.swapaxes(x.log_decay.astype(jnp.float32), 1, 2).reshape(chunked)
    total, fine = (jnp.cumsum(part, axis=3) for part in split_steps(steps))
    from_start = jnp.exp(total + fine)
    to_end = jnp.exp((total[..., -1:] - total) + (fine[..., -1:] - fine))
    if x.resets is not None:
        run = jnp.cumsum(x.resets.reshape(p.batch, 1, p.chunks, CHUNK), axis=3)
        rows["run"] = of_tokens(jnp.broadcast_to(run, chunked))
        from_start, to_end = jnp.where(run == 0, from_start, 0.0), jnp.where(run == run[..., -1:], to_end, 0.0)
    kept, from_start = from_start[..., -1], of_tokens(from_start)
    rows |= {"total": of_tokens(total), "fine": of_tokens(fine), "kept": kept}
    rows |= {"read_rows": p.scale * from_start, "written_rows": of_tokens(to_end)}
    return rows | {"erased_rows": from_start if erase is None else erase * from_start}


def flat_heads(x: Array) -> Array:
    """`[B, T, H, D]` as `[B, T, H * D]`: copies by threads take rows that lie apart, with no axis between."""
    return x.reshape(*x.shape[:2], -1)


def tokens(chunk: Any) -> Any:
    """A chunk's tokens."""
    return pl.ds(chunk * CHUNK, CHUNK)


def _weigh(pairs: Array, rows: Any, has_decay: bool, has_runs: bool) -> Array:
    """Pairs that are causal and of one document, times `exp(G_r - G_s)`; zero elsewhere."""

    def line(name, load):
        return load(rows.at[pl.ds(_LINES.index(name) * CHUNK, CHUNK)])

    def differences(name):
        return spread_rows(line(name, load_column)) - spread_columns(line(name, load_row))

    is_near = spread_rows(row_numbers()) >= spread_columns(column_numbers())
    if has_runs:
        is_near &= differences("run") == 0.0
    if not has_decay:
        return jnp.where(is_near, pairs, 0.0)
    return pairs * jnp.exp(jnp.where(is_near, differences("total") + differences("fine"), -jnp.inf))


def _inverse(lower: Array, negative: Any, halves: Any) -> Array:
    """`(I + lower)^-1`, by the halves of `triton.triangular_inverse`.

    Args:
        lower: strictly lower triangular, float32.
        negative: shared memory for what stays the same in all levels.
        halves: shared memory for a level's inverse.
    """
    apart = spread_rows(row_numbers()) ^ spread_columns(column_numbers())
    inverse = jnp.where(apart == 0, 1.0, jnp.where(apart == 1, -lower, 0.0))
    negative[...] = (-lower).astype(jnp.bfloat16)
    for level in _LEVELS:
        left = inverse.astype(jnp.bfloat16)
        sync_threads()  # the level before has read `halves`
        halves[...] = left
        sync_threads()
        product = multiply(zeros(CHUNK, CHUNK), as_left(left), negative)
        corners = multiply(zeros(CHUNK, CHUNK), as_left(product.astype(jnp.bfloat16)), halves)
        inverse = jnp.where(lax.shift_right_logical(apart, jnp.int32(level)) == 1, corners, inverse)
    return inverse


def _factors_kernel(
    r: Any, memory: Any, *, kernel_shape: KernelShape, has_decay: bool, has_erase: bool, has_runs: bool
):
    p = kernel_shape
    head, chunk, batch = (lax.axis_index(name) for name in ("head", "chunk", "batch"))
    key_head = quotient(head, p.value_heads // p.key_heads)
    arrived = [None] * 3 if memory.arrived is None else [memory.arrived.at[i] for i in range(3)]
    copied = 2
    for i, name in enumerate("qk"):
        source = getattr(r, name).at[batch, tokens(chunk), pl.ds(key_head * p.key_size, p.key_size)]
        begin_copy(source, getattr(memory, name), arrived[i])
    if r.rows is not None:
        copied = 3
        begin_copy(r.rows.at[batch, head, chunk], memory.rows, arrived[2])
    wait_for_copies(0, *arrived[:copied])
    scores = erased = zeros(CHUNK, CHUNK)
    for part in (pl.ds(start, SIDE) for start in range(0, p.key_size, SIDE)):
        key = memory.k.at[:, part].T
        scores = multiply(scores, load_left(memory.q.at[:, part]), key)
        erased = multiply(erased, load_left(memory.k.at[:, part]), key)
    scores, erased = (_weigh(x, memory.rows, has_decay, has_runs) for x in (scores, erased))
    memory.pairs[...] = (p.scale * scores).astype(jnp.bfloat16)
    if has_erase:
        erased = spread_rows(load_column(memory.rows.at[pl.ds(_LINES.index("erase") * CHUNK, CHUNK)])) * erased
    sync_threads()
    store_rows(memory.pairs, r.scores.at[batch, head, chunk])
    lower = jnp.where(spread_rows(row_numbers()) > spread_columns(column_numbers()), erased, 0.0)
    side = pl.ds(0, SIDE)  # queries and keys have been read
    inverse = _inverse(lower, memory.q.at[:, side], memory.k.at[:, side])
    memory.pairs[...] = inverse.astype(jnp.bfloat16)
    sync_threads()
    store_rows(memory.pairs, r.inverse.at[batch, head, chunk])


def wy_factors(kernel_shape: KernelShape, inputs: Inputs, *, by_threads: bool) -> dict[str, Array | None]:
    """The first stage's results of all chunks, by the names of `WYFactors`.

    Args:
        kernel_shape: static facts, of one split.
        inputs: arguments; the decay and the erase gate are one number a token, or absent.
        by_threads: whether threads copy to shared memory, or the copy engine does.
    """
    p, x = kernel_shape, inputs
    rows = token_rows(p, x)
    matrix = p.per_head(p.chunks, CHUNK, CHUNK)
    stacked = by_chunk(p, rows, _LINES)
    facts = {"has_decay": x.log_decay is not None, "has_erase": x.erase is not None, "has_runs": x.resets is not None}

    def program(r, memory):
        _factors_kernel(r, memory, kernel_shape=p, **facts)

    memory = {
        "q": matrix_buffer(CHUNK, p.key_size),
        "k": matrix_buffer(CHUNK, p.key_size),
        "rows": number_buffer(len(_LINES) * CHUNK),
        "pairs": matrix_buffer(CHUNK, CHUNK),
        "arrived": None if by_threads else barrier(1, 3),
    }
    results = launch(
        program,
        "delta_mma_factors",
        {"q": flat_heads(x.q), "k": flat_heads(x.k), "rows": stacked},
        {"inverse": matrix, "scores": matrix},
        memory,
        grid={"head": p.value_heads, "chunk": p.chunks, "batch": p.batch},
        warpgroups=1,
    )
    return results | {name: rows[name] for name in ("read_rows", "written_rows", "erased_rows", "kept")}

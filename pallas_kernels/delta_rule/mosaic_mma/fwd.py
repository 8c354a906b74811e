"""The pass over the chunks of a sequence, first to last, with the state in registers.

    R = A (Z - Ebar S_0)      O = Q_G S_0 + P R      S_C = exp(G_C) S_0 + K_tail^T R

A program owns one head and 64 value channels. All matrices but keys and queries are transposed, R^T is `[V, C]` and the
state `[V, K]`, so that what one product leaves in registers is the next one's left operand.

Only keys are read at both ends of a step: they have two places in shared memory. All else has one, which is filled
again as soon as it has been read, a whole step before it is needed.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.common.kernel_shape import CHUNK, KernelShape
from pallas_kernels.common.mosaic_gpu import (
    SIDE,
    barrier,
    launch,
    left_parts,
    load_row,
    load_state,
    matrix_buffer,
    number_buffer,
    quotient,
    remainder,
    scale_columns,
    zeros,
)
from pallas_kernels.common.mosaic_mma import (
    as_left,
    begin_copy,
    load_transposed,
    multiply,
    store_rows,
    store_transposed,
    sync_threads,
    wait_for_copies,
)
from pallas_kernels.delta_rule.inputs import Inputs
from pallas_kernels.delta_rule.mosaic_mma.wy import by_chunk, flat_heads, tokens
from pallas_kernels.delta_rule.triton.wy import WYFactors

_LINES = ("erased_rows", "written_rows", "read_rows", "write")
# Two barriers for each place, the second of use to what has two places.
_TILES = ("k", "rows", "q", "v", "inverse", "scores")


class _Tiles:
    """A program's tiles: where each comes from, where it goes, and what opens when it is there."""

    def __init__(self, r: Any, memory: Any, kernel_shape: KernelShape):
        self.r, self.memory, self.kernel_shape = r, memory, kernel_shape
        self.block, self.head, self.batch = (lax.axis_index(name) for name in ("block", "head", "batch"))
        self.names = [name for name in _TILES if getattr(r, name) is not None]

    def _source(self, name: str, chunk: Any) -> Any:
        p, ref = self.kernel_shape, getattr(self.r, name)
        if name in "qk":
            key_head = quotient(self.head, p.value_heads // p.key_heads)
            return ref.at[self.batch, tokens(chunk), pl.ds(key_head * p.key_size, p.key_size)]
        if name == "v":
            return ref.at[self.batch, tokens(chunk), pl.ds(self.head * p.value_size + self.block * SIDE, SIDE)]
        return ref.at[self.batch, self.head, chunk]

    def _arrived(self, name: str, slot: Any) -> Any:
        at = self.memory.arrived
        return None if at is None else at.at[2 * _TILES.index(name) + (slot if name in ("k", "rows") else 0)]

    def slot(self, name: str, chunk: Any) -> Any:
        """Where a chunk's tile is, or will be."""
        ref = getattr(self.memory, name)
        return ref.at[remainder(chunk, 2)] if name in ("k", "rows") else ref

    def begin(self, chunk: Any, *names: str) -> None:
        """Begins to copy tiles of a chunk, or of the last one if there are fewer."""
        last = jnp.minimum(chunk, self.kernel_shape.chunks - 1)
        for name in names:
            if name in self.names:
                arrived = self._arrived(name, remainder(chunk, 2))
                begin_copy(self._source(name, last), self.slot(name, chunk), arrived)

    def wait(self, chunk: Any, *names: str, later: tuple[str, ...]) -> None:
        """Waits for tiles of a chunk; `later` are those that were begun after them."""
        slot = remainder(chunk, 2)
        arrived = [self._arrived(name, slot) for name in names if name in self.names]
        wait_for_copies(sum(name in self.names for name in later), *arrived)


def _output_kernel(r: Any, memory: Any, *, kernel_shape: KernelShape, has: dict[str, bool]):
    p, tiles = kernel_shape, _Tiles(r, memory, kernel_shape)
    channels = pl.ds(tiles.block * SIDE, SIDE)

    def step(chunk, state):
        def row(name):
            lines = tiles.slot("rows", chunk)
            return load_row(lines.at[pl.ds(_LINES.index(name) * CHUNK, CHUNK)]) if has[name] else None

        key = tiles.slot("k", chunk)
        kept = None if r.kept is None else r.kept[tiles.batch, tiles.head, chunk]
        tiles.wait(chunk, "k", "rows", "q", "v", later=("inverse",))
        tiles.begin(chunk, "scores")
        tiles.begin(chunk + 1, "k", "rows")
        left = as_left(state.astype(jnp.bfloat16))
        recalled = multiply(zeros(SIDE, CHUNK), left, key.T)
        out = scale_columns(multiply(zeros(SIDE, CHUNK), left, memory.q.T), row("read_rows"))
        if not has["read_rows"]:
            out = p.scale * out
        values = scale_columns(load_transposed(memory.v), row("write"))
        new = values - scale_columns(recalled, row("erased_rows"))
        tiles.wait(chunk, "inverse", later=("scores", "k", "rows"))
        tiles.begin(chunk + 1, "q", "v")
        residual = zeros(SIDE, CHUNK)
        for part in left_parts(new, has["decay"]):
            residual = multiply(residual, as_left(part), memory.inverse.T)
        tiles.wait(chunk, "scores", later=("k", "rows", "q", "v"))
        tiles.begin(chunk + 1, "inverse")
        written = scale_columns(residual, row("written_rows")).astype(jnp.bfloat16)
        state = multiply(state if kept is None else kept * state, as_left(written), key)
        out = multiply(out, as_left(residual.astype(jnp.bfloat16)), memory.scores.T)
        sync_threads()  # the scores have been read; the next ones come only when the output has been, too
        store_transposed(memory.scores, out.astype(jnp.bfloat16))
        sync_threads()
        at = pl.ds(tiles.head * p.value_size + tiles.block * SIDE, SIDE)
        store_rows(memory.scores, r.out.at[tiles.batch, tokens(chunk), at])
        return state

    first = jnp.int32(0)
    tiles.begin(first, "k", "rows", "q", "v", "inverse")
    if r.initial_state is None:
        state = zeros(SIDE, p.key_size)
    else:
        state = load_state(r.initial_state.at[tiles.batch, tiles.head, channels])
    state = lax.fori_loop(0, p.chunks, step, state)
    # What was begun for a chunk after the last one still comes.
    tiles.wait(jnp.int32(p.chunks), "k", "rows", "q", "v", "inverse", later=())
    r.final_state[tiles.batch, tiles.head, channels] = state


def fwd_o(kernel_shape: KernelShape, inputs: Inputs, prepared: WYFactors, *, by_threads: bool) -> tuple[Array, Array]:
    """Output `[B, T, HV, V]` and final state `[B, HV, K, V]`.

    Args:
        kernel_shape: static facts, of one split.
        inputs: arguments; decay and gates are one number a token, or absent.
        prepared: the first stage's results.
        by_threads: whether threads copy to shared memory, or the copy engine does.
    """
    p, x = kernel_shape, inputs
    rows = {name: getattr(prepared, name) for name in ("erased_rows", "written_rows", "read_rows")}
    rows["write"] = None if x.write is None else jnp.swapaxes(x.write, 1, 2)
    has = {name: row is not None for name, row in rows.items()} | {"decay": prepared.kept is not None}
    initial = x.initial_state

    def program(r, memory):
        _output_kernel(r, memory, kernel_shape=p, has=has)

    memory = {
        "k": matrix_buffer(2, CHUNK, p.key_size),
        "rows": number_buffer(2, len(_LINES) * CHUNK),
        "q": matrix_buffer(CHUNK, p.key_size),
        "v": matrix_buffer(CHUNK, SIDE),
        "inverse": matrix_buffer(CHUNK, CHUNK),
        "scores": matrix_buffer(CHUNK, CHUNK),
        "arrived": None if by_threads else barrier(1, 2 * len(_TILES)),
    }
    results = launch(
        program,
        "delta_mma_output",
        {
            "k": flat_heads(x.k),
            "rows": by_chunk(p, rows, _LINES),
            "q": flat_heads(x.q),
            "v": flat_heads(x.v),
            "inverse": prepared.inverse,
            "scores": prepared.scores,
            "kept": prepared.kept,
            "initial_state": None if initial is None else jnp.swapaxes(initial.astype(jnp.float32), 2, 3),
        },
        {
            "out": jax.ShapeDtypeStruct((p.batch, p.length, p.value_heads * p.value_size), p.dtype),
            "final_state": p.per_head(p.value_size, p.key_size, dtype=jnp.float32),
        },
        memory,
        grid={"block": p.value_size // SIDE, "head": p.value_heads, "batch": p.batch},
        warpgroups=1,
    )
    out, final = results["out"], results["final_state"]
    return out.reshape(x.v.shape), jnp.swapaxes(final, 2, 3)  # type: ignore[union-attr,arg-type]

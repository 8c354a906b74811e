"""A warpgroup's chunks, the maps that pieces and chunks tell each other, and the program around them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.common.decay import LOG2_E
from pallas_kernels.common.mosaic_gpu import (
    WARPS,
    arrive,
    barrier,
    begin_copy,
    fence_smem,
    launch,
    number_buffer,
    put,
    remainder,
    row_buffer,
    use_registers,
    wait,
    wait_for_readers,
    wait_for_stores,
)
from pallas_kernels.common.mosaic_gpu_bands import (
    along_columns,
    along_rows,
    band_reciprocal,
    band_rows,
    begin_pieces,
    load_band,
    load_band_column,
    load_band_row,
    zero_band,
    zero_band_row,
)
from pallas_kernels.preconditioner.readouts import SpecialFunctions

CHANNELS = 128
PIECE = 8
"""Tokens of a warp in a row."""
TOKENS = WARPS * PIECE
"""Tokens of a chunk."""
TILE = WARPS, PIECE, CHANNELS
"""A chunk in shared memory."""
_REGISTERS = {2: (232, 40), 3: (160, 32), 4: (112, 32)}
"""Of a thread in warpgroups that compute and in the one that copies, by the number of those that compute."""
SPECIAL = SpecialFunctions(jnp.exp2, lax.log, band_reciprocal)


class Schedule(NamedTuple):
    """How a program works.

    Attributes:
        groups: warpgroups that compute.
        depth: chunks of each of them whose tiles have a place in shared memory; at least 2, as a place is given back
            in the middle of the next chunk.
    """

    groups: int
    depth: int

    @property
    def slots(self) -> int:
        """Chunks whose tiles have a place in shared memory. A place is always of chunks of the same warpgroup.

        A warpgroup that waits for a barrier must have waited for all of its openings before.
        """
        return self.groups * self.depth


class Gates(NamedTuple):
    """A token's numbers, `[4]` float32, one for each piece; None is 1.

    Attributes:
        decay: what the token leaves of A before it.
        gain: its weight.
    """

    decay: Array | None
    gain: Array | None


def times(number: Array | None, x: Array) -> Array:
    """A band times one number a row."""
    return x if number is None else along_rows(number) * x


def product(x: Array | None, y: Array | None) -> Array | None:
    """`x * y`; None is 1."""
    return y if x is None else x if y is None else x * y


class Turn(NamedTuple):
    """One warpgroup's place.

    Attributes:
        r: the kernel's arrays.
        m: its shared memory.
        schedule: how the program works.
        group: the warpgroup's number.
        from_end: whether chunks come from the last to the first.
    """

    r: Any
    m: Any
    schedule: Schedule
    group: Any
    from_end: bool

    @property
    def place(self) -> tuple[Any, Any]:
        """Row and head."""
        return lax.axis_index("row"), lax.axis_index("head")

    @property
    def chunks(self) -> int:
        """Chunks of the program."""
        return self.r.k.shape[1] // WARPS

    def gates(self, slot: Any) -> list[Gates]:
        """The gates of the tokens of a slot's chunk, of all pieces by their tokens."""

        def load(name: str, i: int) -> Array | None:
            buffer = getattr(self.m, name, None)
            return None if buffer is None else load_band_column(buffer.at[slot, :, i])

        return [Gates(load("decay", i), load("gain", i)) for i in range(PIECE)]

    def across(
        self, exchange: int, offset: Array, kept: Array | None, enters: Callable[[], Array], from_end: bool
    ) -> tuple[Array, Array]:
        """What enters each piece, `[4, 128]`, and what leaves the chunk, `[128]`.

        Args:
            exchange: number of the place in shared memory.
            offset: what each piece adds, `[4, 128]`.
            kept: what each piece leaves of what enters it, `[4]`; None is 1.
            enters: gives what enters the chunk, `[128]`; it waits where that is still to come.
            from_end: whether the last piece comes first.
        """
        maps, factors = self.m.maps.at[exchange, self.group], self.m.factors.at[exchange, self.group]
        put(maps, offset)
        if kept is not None:
            put(factors, kept)
        fence_smem()
        # What enters all pieces and what leaves the chunk are maps of what enters it, found before that has come.
        number = band_rows(WARPS)
        offset, kept_before = zero_band_row(WARPS), 1.0
        offsets, all_kept = zero_band(WARPS), None if kept is None else jnp.where(number >= 0, 1.0, 0.0)
        for piece in reversed(range(WARPS)) if from_end else range(WARPS):
            own = load_band_row(maps.at[piece], WARPS)
            if kept is None:
                offset = offset + own
            else:
                offset, kept_before = factors[piece] * offset + own, factors[piece] * kept_before
            follows = number < piece if from_end else number > piece
            offsets = jnp.where(along_rows(follows.astype(jnp.int32)) > 0, along_columns(offset, WARPS), offsets)
            if all_kept is not None:
                all_kept = jnp.where(follows, kept_before, all_kept)
        state = enters()
        return times(all_kept, along_columns(state, WARPS)) + offsets, kept_before * state + offset

    def enters(self) -> Array:
        """What the warpgroup before this one left, `[128]`."""
        wait(self.m.passed.at[self.group])
        return load_band_row(self.m.states.at[self.group], WARPS)

    def leaves(self, j: Any, state: Array, last: Any) -> None:
        """Passes on what the j-th chunk to be worked on leaves, or stores it in `last` if none comes after it."""

        @pl.when(j < self.chunks - 1)
        def _():
            following = remainder(self.group + 1, self.schedule.groups)
            put(self.m.states.at[following], state)
            arrive(self.m.passed.at[following])

        @pl.when(j == self.chunks - 1)
        def _():
            put(last, state)

    def loop(self, step: Any, carry: Any) -> Any:
        """`carry = step(j, n, slot, carry)` for the j-th chunk to be worked on, number n, of this warpgroup's."""
        groups, slots = self.schedule.groups, self.schedule.slots
        count = lax.div(self.chunks - self.group + (groups - 1), jnp.int32(groups))

        def body(i, carry):
            j = i * groups + self.group
            return step(j, self.chunks - 1 - j if self.from_end else j, remainder(j, slots), carry)

        carry = lax.fori_loop(0, count, body, carry)
        pl.when(count > 0)(lambda: self.release((count - 1) * groups + self.group))
        wait_for_stores(only_read=False)
        return carry

    def release_before(self, j: Any) -> None:
        """Frees the slot of this warpgroup's chunk before the j-th, once its results have left: late in a step."""
        groups = self.schedule.groups
        pl.when(j >= groups)(lambda: self.release(j - groups))

    def release(self, j: Any) -> None:
        """Frees the slot of the j-th chunk to be worked on."""
        wait_for_stores()
        arrive(self.m.free.at[remainder(j, self.schedule.slots)])

    def parameter(self) -> Any:
        """The readout's, of the program's head."""
        return None if self.r.parameter is None else self.r.parameter[self.place[1]]


def local_maps(keys: list[Array], gates: list[Gates]) -> tuple[list[Array], list[Array | None]]:
    """A after each token if nothing entered the piece, and what the piece leaves until then of what entered."""
    gram, kept, grams, passes = None, None, [], []
    for k, (decay, gain) in zip(keys, gates, strict=True):
        own = times(gain, k * k)
        gram = own if gram is None else times(decay, gram) + own
        kept = product(kept, decay)
        grams.append(gram)
        passes.append(kept)
    return grams, passes


def pieces(n: Any) -> Any:
    """The pieces of chunk n among the program's."""
    return pl.ds(n * WARPS, WARPS)


def load_tokens(tile: Any) -> list[Array]:
    """A chunk in float32, `[4, 128]` of all pieces for each of their tokens."""
    return [load_band(tile.at[:, i]).astype(jnp.float32) for i in range(PIECE)]


def run(
    compute: Callable[[Turn, Any], None],
    name: str,
    by_token: Mapping[str, Array | None],
    others: Mapping[str, Array | None],
    outputs_by_token: Mapping[str, Array | None],
    outputs: Mapping[str, jax.ShapeDtypeStruct | None],
    *,
    tiles: Sequence[str],
    enters: str,
    schedule: Schedule,
    from_end: bool,
    readout: Any,
) -> dict[str, Array | None]:
    """Runs `compute(turn, readout)` in each warpgroup but the one that copies.

    Args:
        compute: goes over a warpgroup's chunks.
        name: the kernel's name in profiles.
        by_token: arrays `[B, T, ...]`; the kernel has them as `[B, T / 8, 8, ...]`. None for an absent one.
        others: other arrays.
        outputs_by_token: arrays `[B, T, ...]` whose shapes and dtypes results have, by the results' names.
        outputs: shapes and dtypes of other results.
        tiles: the arrays, of those `[B, T, H, 128]` and of the others `starts`, `[B, H, T / 32, 128]`, whose tiles are
            copied.
        enters: the array `[B, H, 128]` that enters the first chunk to be worked on; None is zero.
        schedule: how a program works.
        from_end: whether chunks come from the last to the first.
        readout: of A.
    """

    def cut(x):
        return None if x is None else x.reshape(x.shape[0], -1, PIECE, *x.shape[2:])

    inputs = {key: cut(x) for key, x in by_token.items()} | dict(others)
    results = {key: jax.eval_shape(cut, x) for key, x in outputs_by_token.items()} | dict(outputs)
    copied = {key: x for key in tiles if (x := inputs[key]) is not None}
    groups, slots, exchanges = schedule.groups, schedule.slots, 2 if from_end else 1
    batch, count, _, heads, _ = copied["k"].shape
    chunks = count // WARPS
    has_decay = any(by_token[key] is not None for key in ("log_decay", "resets"))

    def buffer(key, x):
        return number_buffer(slots, CHANNELS) if key == "starts" else row_buffer(slots, *TILE, dtype=x.dtype)

    memory = {
        **{key: buffer(key, x) for key, x in copied.items()},
        "maps": number_buffer(exchanges, groups, WARPS, CHANNELS),
        "factors": number_buffer(exchanges, groups, WARPS),
        "states": number_buffer(groups, CHANNELS),
        "decay": number_buffer(slots, WARPS, PIECE) if has_decay else None,
        "gain": number_buffer(slots, WARPS, PIECE) if by_token["gain"] is not None else None,
        "full": barrier(len(copied) + 1, slots),
        "free": barrier(1, slots),
        "passed": barrier(1, groups),
    }

    memory = {key: x for key, x in memory.items() if x is not None}

    def copy(r, m):
        row, head = lax.axis_index("row"), lax.axis_index("head")
        first = getattr(r, enters)
        put(m.states.at[0], zero_band_row(WARPS) if first is None else load_band_row(first.at[row, head], WARPS))
        fence_smem()
        arrive(m.passed.at[0])

        def number(j):
            return chunks - 1 - j if from_end else j

        def begin_gates(j):
            n = number(jnp.minimum(j, chunks - 1))
            places = {"log_decay": (head,), "resets": (), "gain": (head,)}
            return {
                key: begin_pieces(getattr(r, key).at[(row, pieces(n), slice(None), *own)])
                for key, own in places.items()
                if getattr(r, key) is not None
            }

        def step(j, gates):
            n, slot = number(j), remainder(j, slots)
            pl.when(j >= slots)(lambda: wait(m.free.at[slot]))
            for key in copied:
                x = getattr(r, key)
                source = x.at[row, head, n] if key == "starts" else x.at[row, pieces(n), :, head]
                begin_copy(source, getattr(m, key).at[slot], m.full.at[slot])
            following = begin_gates(j + 1)
            decay = jnp.exp2(LOG2_E * gates["log_decay"].astype(jnp.float32)) if "log_decay" in gates else None
            decay = product(decay, (1 - gates["resets"]).astype(jnp.float32) if "resets" in gates else None)
            if decay is not None:
                put(m.decay.at[slot], decay)
            if "gain" in gates:
                put(m.gain.at[slot], gates["gain"].astype(jnp.float32))
            arrive(m.full.at[slot])
            return following

        lax.fori_loop(0, chunks, step, begin_gates(0))
        wait_for_readers(m.free, slots, jnp.int32(chunks))

    def program(r, m):
        warpgroup = lax.axis_index("warpgroup")
        computing, copying = _REGISTERS[groups]

        @pl.when(warpgroup < groups)
        def _():
            use_registers(computing, more=True)
            compute(Turn(r, m, schedule, warpgroup, from_end), readout)

        @pl.when(warpgroup == groups)
        def _():
            use_registers(copying, more=False)
            copy(r, m)

    grid = {"head": heads, "row": batch}
    found = launch(program, name, inputs, results, memory, grid=grid, warpgroups=groups + 1)
    joined = {key: x.reshape(batch, -1, *x.shape[3:]) for key in outputs_by_token if (x := found[key]) is not None}
    return found | joined

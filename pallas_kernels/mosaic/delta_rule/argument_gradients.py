"""Last stage of the backward: gradients of queries, keys, erase gate and log decay; no chunk waits for another.

Given the state `S_0` before a chunk, the gradient `dS_C` of the state after it, the residuals R and `dW`:

    dP = tril(dO R^T)      dT = -tril(dW R^T, -1)
    dQ = dO S_0^T + dP K~      dE = -dW S_0^T + dT K~      dK~ = dP^T Q + dT^T E + R dS_C^T

each term weighted by the decay between its tokens (`pallas_kernels.triton.delta_rule.argument_gradients`, whose two
kernels this one replaces where decay and gates are one number a token).

There are as many programs as processors. Each walks over all chunks in steps as wide as their number, so that copies
go on from chunk to chunk. Two warpgroups compute, with half of the key channels each, and a third copies. All channels
need the pairs' gradients: the first warpgroup makes dP, the second dT, and they exchange them in shared memory. A sum
over key channels leaves each warpgroup as its half's part.

Tiles come in sets with a barrier each, so that a tile's place is free as soon as it is read: `rows` (numbers a token),
`near` (dO, dW, R), `states`, `d_states`, `keys` (q, k, k~). Gradients of q, k and k~ leave through the places of q, k
and k~.
"""

from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.decay import split_steps
from pallas_kernels.mosaic.backend import (
    SIDE,
    added,
    arrive,
    awaited,
    barrier,
    begin_copy,
    column_numbers,
    launch,
    load_column,
    load_matrix,
    load_row,
    matrix_buffer,
    multiply,
    number_buffer,
    publish,
    quotient,
    remainder,
    row_numbers,
    spread_columns,
    spread_rows,
    store,
    use_registers,
    wait,
    wait_for_stores,
    with_accumulators,
    zeros,
)
from pallas_kernels.mosaic.delta_rule.operands import tokens
from pallas_kernels.problem import CHUNK, Problem

_SETS = ("near", "states", "d_states", "rows", "keys")  # in the order in which a chunk's tiles are freed
_KEYS = ("q", "k", "write_key")
_RESTART = 256.0  # nats that a start of a segment adds: pairs across it weigh nothing, and sums stay exact
_REGISTERS = 240, 24
_LINES = 4  # of numbers a token that a warpgroup hands on inside itself; a third set has the diagonal of dP


class GradientArrays(NamedTuple):
    """What the kernel reads. N is the number of chunks, C = 64.

    Attributes:
        q: `[B, T, H, K]`.
        k: `[B, T, H, K]`.
        write_key: likewise, or None.
        d_out: `[B, T, HV, V]`.
        d_values: `dW` as the reverse pass stores it, `[B, T, HV, V]`.
        states: before each chunk, transposed, `[B, HV, N, V, K]`.
        d_states: gradient of the state after each chunk, `[B, HV, N, V, K]`.
        residuals: R, transposed, `[B, HV, N, V, C]`.
        ratio: what turns `dW` as stored to the gradient of what reads, `[B, T, HV]` float32; None for 1.
        log_decay: `[B, T, HV]`, or None.
        starts: 1 at each token that starts a segment, `[B, T]`; None without.
        read_rows: `scale * exp(G)`, `[B, HV, T]` float32; None without decay.
        written_rows: `exp(G_C - G)` likewise.
        kept: `exp(G_C)`, `[B, HV, N]` likewise.
    """

    q: Array
    k: Array
    write_key: Array | None
    d_out: Array
    d_values: Array
    states: Array
    d_states: Array
    residuals: Array
    ratio: Array | None
    log_decay: Array | None
    starts: Array | None
    read_rows: Array | None
    written_rows: Array | None
    kept: Array | None


def _token_rows(problem: Problem, x: GradientArrays) -> dict[str, Array]:
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
    if x.starts is not None:
        coarse = coarse - _RESTART * x.starts.astype(jnp.float32)[:, :, None]
    rows["coarse"] = jnp.swapaxes(coarse, 1, 2)
    rows["read"], rows["written"] = x.read_rows, x.written_rows
    erased = x.read_rows * (-1 / problem.scale)
    return {**rows, "erased": erased if ratio is None else erased * ratio}


class _Walk(NamedTuple):
    """A program's way through all chunks.

    Attributes:
        problem: static facts.
        rows: names of the numbers a token, in the order in which they are stored.
        depths: places of each set of tiles.
        programs: number of programs.
        full: by set, barriers of its places: the tiles are there.
        free: by set, barriers of its places: the tiles have been read.
    """

    problem: Problem
    rows: tuple[str, ...]
    depths: dict[str, int]
    programs: int
    full: dict[str, Any]
    free: dict[str, Any]

    @property
    def chunks(self) -> int:
        """Chunks of all heads."""
        p = self.problem
        return p.batch * p.value_heads * p.chunks

    @property
    def count(self) -> Any:
        """Chunks of this program."""
        return quotient(self.chunks - lax.axis_index("program") + (self.programs - 1), self.programs)

    def at(self, m: Any) -> tuple[Any, Any, Any]:
        """Batch, chunk and value head of the program's m-th chunk. Heads are neighbours in memory."""
        i = lax.axis_index("program") + m * self.programs
        rest = quotient(i, self.problem.value_heads)
        chunks = self.problem.chunks
        return quotient(rest, chunks), remainder(rest, chunks), remainder(i, self.problem.value_heads)

    def place(self, name: str, m: Any) -> Any:
        """The place of a set of tiles that the m-th chunk takes."""
        # An expression of m even if there is one place: a constant keeps all its addresses in registers, which spills.
        depth = self.depths[name]
        return lax.shift_right_logical(m, jnp.int32(30)) if depth == 1 else remainder(m, depth)

    def wait(self, name: str, m: Any) -> None:
        """Waits for the m-th chunk's tiles."""
        wait(self.full[name].at[self.place(name, m)])

    def release(self, name: str, m: Any) -> None:
        """Lets their place be filled again."""
        arrive(self.free[name].at[self.place(name, m)])


def _copy(r: Any, tiles: Any, walk: _Walk) -> None:
    """Copies the tiles of all chunks, in the order in which their places become free."""
    p, count = walk.problem, walk.count

    def sources(name, m):
        """Pairs of a part of an array and the place that it is copied to."""
        b, n, h = walk.at(m)
        place = walk.place(name, m)
        if name == "rows":
            yield r.rows.at[b, h, n], tiles.rows.at[place]
        if name == "near":
            for j, x in enumerate((r.d_out, r.d_values)):
                yield x.at[b, tokens(n), h], tiles.near.at[place, j]
            yield r.residuals.at[b, h, n], tiles.residuals.at[place]
        for half in (0, 1):
            channels = pl.ds(half * SIDE, SIDE)
            if name in ("states", "d_states"):
                values = pl.ds(0, p.value_size)
                yield getattr(r, name).at[b, h, n, values, channels], getattr(tiles, name).at[place, half]
            if name == "keys":
                for key in _KEYS:
                    x = getattr(r, key)
                    if x is not None:
                        head = quotient(h, p.value_heads // x.shape[2])
                        yield x.at[b, tokens(n), head, channels], getattr(tiles, key).at[place, half]

    def fetch(name, m):
        for source, target in sources(name, m):
            begin_copy(source, target, walk.full[name].at[walk.place(name, m)])

    for m in range(max(walk.depths.values()) - 1):  # what need not wait for a place
        for name, depth in walk.depths.items():
            if m < depth - 1:

                @pl.when(m < count)
                def _(name=name, m=m):
                    fetch(name, jnp.int32(m))

    @pl.loop(0, count)
    def _(j):
        for name, depth in walk.depths.items():
            m = j + depth - 1

            @pl.when(m < count)
            def _(name=name, m=m):
                pl.when(j > 0)(lambda: wait(walk.free[name].at[walk.place(name, m)]))
                fetch(name, m)

    for name, depth in walk.depths.items():  # a program ends when nothing is on its way any more

        @pl.loop(jnp.maximum(count - depth, 0), count)
        def _(j, name=name):
            wait(walk.free[name].at[walk.place(name, j)])


def _compute(r: Any, tiles: Any, memory: Any, walk: _Walk) -> None:
    """One warpgroup's half of the key channels of all chunks of a program."""
    p, half = walk.problem, lax.axis_index("warpgroup")
    is_first = (half == 0).astype(jnp.float32)
    channels = pl.ds(half * SIDE, SIDE)
    has_decay = "coarse" in walk.rows
    through_tiles = [key for key in _KEYS if getattr(r, f"d_{key}") is not None]
    through_tiles = [key for key in through_tiles if getattr(r, f"d_{key}").dtype == jnp.bfloat16]
    lines = memory.lines

    def pairs_of(m, which):
        return memory.pairs.at[lax.shift_right_logical(m, jnp.int32(30)), which]  # as in `place`

    def row(name, m) -> Any:
        """One number a token, for a matrix whose rows are tokens; None for 1."""
        return load_column(tiles.rows.at[walk.place("rows", m), walk.rows.index(name)]) if name in walk.rows else None

    def sum_decay(m):
        """Adds up the log decay to each token. There is no cumulative sum."""
        is_before = spread_rows(row_numbers()) >= spread_columns(column_numbers())
        for j, name in enumerate(("coarse", "fine")):
            step = load_row(tiles.rows.at[walk.place("rows", m), walk.rows.index(name)])
            lines[half, j] = jnp.sum(jnp.where(is_before, spread_columns(step), 0.0), axis=1)

    def store_pairs(m, pairs):
        """Stores dP (first warpgroup) or dT, weighted by decay."""
        ratio = row("ratio", m)
        if ratio is None:
            pairs = pairs * jnp.where(half == 0, p.scale, -1.0)
        else:
            pairs = pairs * spread_rows(is_first * p.scale - (1.0 - is_first) * ratio)
        rows, columns = row_numbers(), column_numbers()
        if has_decay:

            @pl.when(half == 0)
            def _():  # a token's score with itself has no decay, and is kept apart
                own = jnp.where(spread_rows(rows) == spread_columns(columns), pairs, 0.0)
                lines[2, 0] = jnp.sum(own, axis=1)

            publish()
            total, fine = (
                spread_rows(load_column(lines.at[half, j])) - spread_columns(load_row(lines.at[half, j]))
                for j in (0, 1)
            )
            is_before = spread_rows(rows) > spread_columns(columns)
            pairs = pairs * jnp.exp(jnp.where(is_before, total + fine, -jnp.inf))
        else:
            pairs = jnp.where(spread_rows(rows - half) >= spread_columns(columns), pairs, 0.0)
        pairs_of(m, half)[...] = pairs.astype(jnp.bfloat16)
        publish()
        arrive(memory.ready)

    def far_products(m):
        """`dO S_0^T`, `dW S_0^T`, `R dS_C^T`, and parts of `S_0 * dS_C`, of which only the sum matters."""
        near, residuals = tiles.near.at[walk.place("near", m)], tiles.residuals.at[walk.place("near", m)]
        state = tiles.states.at[walk.place("states", m), half]
        d_state = tiles.d_states.at[walk.place("d_states", m), half]

        def kept_parts():
            parts = []
            for start in range(0, p.value_size, CHUNK):
                x, y = (load_matrix(t.at[pl.ds(start, CHUNK)]).astype(jnp.float32) for t in (state, d_state))
                parts.append(x * y)
            return jnp.sum(sum(parts[1:], parts[0]), axis=1)

        def body(pairs, read, erased, written):
            multiply(pairs, near.at[half], residuals)
            walk.wait("states", m)
            multiply(read, near.at[0], state)
            multiply(erased, near.at[1], state)
            if through_tiles:
                pl.when(m > 0)(lambda: release_keys(m - 1))
            pl.when(m > 0)(lambda: wait(memory.used))
            store_pairs(m, awaited(pairs, running=2))
            walk.wait("d_states", m)
            multiply(written, residuals.T, d_state)
            parts = kept_parts() if has_decay else None
            return *(awaited(x) for x in (read, erased, written)), parts

        return with_accumulators(body, CHUNK, SIDE, SIDE, SIDE)

    def release_keys(m):
        """After the gradients that leave through the keys' places have left."""
        wait_for_stores()
        walk.release("keys", m)

    def step(m):
        b, n, h = walk.at(m)
        if walk.rows:
            walk.wait("rows", m)
        kept = r.kept[b, h, n] if has_decay else None
        if has_decay:
            sum_decay(m)
        walk.wait("near", m)
        read, erased, written, parts = far_products(m)
        publish()
        for name in ("near", "states", "d_states"):
            walk.release(name, m)
        if has_decay:
            read, written = read * spread_rows(row("read", m)), written * spread_rows(row("written", m))
        else:
            read = read * p.scale
        erased = erased * spread_rows(row("erased", m)) if "erased" in walk.rows else -erased

        walk.wait("keys", m)
        q, k = (getattr(tiles, name).at[walk.place("keys", m), half] for name in ("q", "k"))
        key = k if r.write_key is None else tiles.write_key.at[walk.place("keys", m), half]
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
        publish()
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
        store_keys(m, {"q": read, "k": erased if r.write_key is not None else erased + d_key, "write_key": d_key})
        if walk.rows:
            walk.release("rows", m)
        if has_decay:
            total, end = (spread_columns(load_row(lines.at[half, j])) for j in (2, 3))
            is_later = spread_columns(column_numbers()) >= spread_rows(row_numbers())
            # Every token of a row adds its part of the state's decay once, as `total` or as `end`.
            r.d_log_decay[half, b, h, tokens(n)] = jnp.sum(jnp.where(is_later, total, end), axis=1)

    def store_keys(m, gradients):
        """Through places that are no longer read, or, in float32 by value head, directly."""
        b, n, h = walk.at(m)
        for key in _KEYS:
            target = getattr(r, f"d_{key}")
            if target is None:
                continue
            if key in through_tiles:
                getattr(tiles, key).at[walk.place("keys", m), half][...] = gradients[key].astype(jnp.bfloat16)
            else:
                target[b, tokens(n), h, channels] = gradients[key]
        publish()
        for key in through_tiles:
            target = getattr(r, f"d_{key}").at[b, tokens(n), h, channels]
            store(getattr(tiles, key).at[walk.place("keys", m), half], target, last=key == through_tiles[-1])
        if not through_tiles:
            walk.release("keys", m)

    count = walk.count
    lax.fori_loop(0, count, lambda m, _: step(m), None)
    if through_tiles:
        pl.when(count > 0)(lambda: release_keys(count - 1))
    pl.when(count > 0)(lambda: wait(memory.used))
    wait_for_stores(only_read=False)


def argument_gradients(
    problem: Problem, x: GradientArrays, *, with_erase: bool, write_key_dtype: Any, key_slots: int, programs: int
) -> dict[str, Array | None]:
    """Gradients of arguments, by value head.

    Args:
        problem: static facts.
        x: what the kernel reads.
        with_erase: whether the erase gate's gradient is wanted.
        write_key_dtype: of the write key's gradient; None is the write key's.
        key_slots: chunks whose queries and keys are in shared memory.
        programs: at most; the number of processors.

    Returns:
        `d_q`, `d_k` and `d_write_key`, `[B, T, HV, K]`, in float32 where value heads share a key head. `d_erase`, times
        the gate, and `d_log_decay`, also where it is flat: parts of each half of the key channels, `[2, B, HV, T]`
        float32. None where not wanted.
    """
    p, rows = problem, _token_rows(problem, x)
    names = tuple(rows)
    depths = {name: key_slots if name == "keys" else 2 if name == "rows" else 1 for name in _SETS}
    if not names:
        del depths["rows"]
    has_key = x.write_key is not None
    chunks = p.batch * p.value_heads * p.chunks
    programs = min(programs, chunks)
    by_chunk = (p.batch, p.value_heads, p.chunks, CHUNK)

    def gradient(like: Array | None, dtype: Any = None) -> jax.ShapeDtypeStruct | None:
        if like is None:
            return None
        dtype = (dtype or like.dtype) if like.shape[2] == p.value_heads else jnp.float32
        return jax.ShapeDtypeStruct((p.batch, p.length, p.value_heads, p.key_size), dtype)

    arrays = x._asdict()
    inputs = {name: arrays[name] for name in (*_KEYS, "d_out", "d_values", "states", "d_states", "residuals", "kept")}
    inputs["rows"] = jnp.stack([row.reshape(by_chunk) for row in rows.values()], axis=3) if rows else None
    parts = jax.ShapeDtypeStruct((2, p.batch, p.value_heads, p.length), jnp.float32)
    outputs = {
        "d_q": gradient(x.q),
        "d_k": gradient(x.k),
        "d_write_key": gradient(x.write_key, write_key_dtype),
        "d_erase": parts if with_erase else None,
        "d_log_decay": parts if x.log_decay is not None else None,
    }
    tiles = {
        "near": matrix_buffer(1, 2, CHUNK, p.value_size),
        "residuals": matrix_buffer(1, p.value_size, CHUNK),
        "states": matrix_buffer(1, 2, p.value_size, SIDE),
        "d_states": matrix_buffer(1, 2, p.value_size, SIDE),
        **{key: matrix_buffer(key_slots, 2, CHUNK, SIDE) for key in _KEYS[: 2 + has_key]},
        **({"rows": number_buffer(2, len(names), CHUNK)} if names else {}),
    }
    arrivals = {"near": 3, "states": 2, "d_states": 2, "rows": 1, "keys": 6 if has_key else 4}
    memory = {
        "tiles": tuple(tiles.values()),
        "full": tuple(barrier(arrivals[name], depth) for name, depth in depths.items()),
        "free": tuple(barrier(2, depth) for depth in depths.values()),
        "pairs": matrix_buffer(1, 2, CHUNK, CHUNK),
        "lines": number_buffer(3, _LINES, CHUNK),
        "ready": barrier(2),  # both warpgroups' pairs are there
        "used": barrier(2),  # both have read them
    }

    def program(r, memory):
        there = SimpleNamespace(**dict(zip(tiles, memory.tiles)))
        walk = _Walk(p, names, depths, programs, dict(zip(depths, memory.full)), dict(zip(depths, memory.free)))
        warpgroup = lax.axis_index("warpgroup")
        computing, copying = _REGISTERS

        @pl.when(warpgroup < 2)
        def _():
            use_registers(computing, more=True)
            _compute(r, there, memory, walk)

        @pl.when(warpgroup == 2)
        def _():
            use_registers(copying, more=False)
            _copy(r, there, walk)

    return launch(program, "delta_gradients", inputs, outputs, memory, grid={"program": programs}, warpgroups=3)

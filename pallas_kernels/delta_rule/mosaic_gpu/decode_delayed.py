"""One token whose write may wait: the copy engine brings the states, and takes them away once in `PERIOD` tokens.

Writes of up to three tokens wait beside a state S: token i decays it by D_i and adds `k_i u_i^T`. With the decay D_n of
the token at hand the state before its own write is

    P S + sum_i w_i u_i^T      P = D_n ... D_1      w_i = D_n ... D_(i+1) k_i

The token multiplies it by its query q and by its erasing key e, which both are x here:

    (P x)^T S + sum_i (w_i . x) u_i^T

So each state is multiplied by two vectors, and only the token that stores it adds it up. A program goes over states one
after another: one warpgroup makes their vectors, another one has them copied and multiplies them, and a third one makes
of these products the output and what the token writes. Sums are in another order than those of Triton's kernel, which
goes token by token.
"""

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.common.config import NUM_SMS
from pallas_kernels.common.mosaic_gpu import (
    WARPS,
    arrive,
    barrier,
    begin_copy,
    fence_smem,
    launch,
    load_channels,
    number_buffer,
    quotient,
    remainder,
    store,
    sum_buffer,
    total,
    wait,
    wait_for_readers,
    wait_for_stores,
)
from pallas_kernels.common.mosaic_gpu_bands import (
    BAND,
    along_columns,
    along_rows,
    band_sums,
    load_band,
    load_band_column,
    load_band_row,
    zero_band,
)
from pallas_kernels.delta_rule.delayed_state import PERIOD, DelayedState
from pallas_kernels.delta_rule.inputs import Inputs

CHANNELS = 128
"""Of keys, and of a block of values: each has a thread."""
_STAGES = 3  # states in shared memory
_MOST_PENDING = PERIOD - 1  # pending writes, at most
_DECAY = PERIOD  # the row of P, behind those of the keys that are written
_BANDS = [pl.ds(start, BAND) for start in range(0, CHANNELS, BAND)]


class _TileScheduler(NamedTuple):
    """A program's way over the states.

    Attributes:
        first: the program's first state.
        steps: how many it has, `NUM_SMS` apart.
        online: whether tokens erase.
    """

    first: Any
    steps: Any
    online: bool

    @property
    def readers(self) -> range:
        """Of the query, and of the erasing key."""
        return range(2 if self.online else 1)


class _Place(NamedTuple):
    """A row of the batch, a value head and a block of value channels."""

    row: Any
    head: Any
    values: Any


def _place(r: Any, scheduler: _TileScheduler, step: Any) -> _Place:
    """That of a step's state."""
    _, heads, _, value_size = r.state.shape
    blocks, item = value_size // CHANNELS, scheduler.first + step * NUM_SMS
    head, values = quotient(item, blocks), pl.ds(remainder(item, blocks) * CHANNELS, CHANNELS)
    return _Place(quotient(head, heads), remainder(head, heads), values)


def _shared(r: Any, head: Any, heads: int) -> Any:
    """The one of so many heads that a value head has."""
    return quotient(head, r.state.shape[1] // heads)


def _load(ref: Any, *index: Any) -> Any:
    """One number, or one a channel, in float32."""
    found = ref.at[index]
    return (load_channels(found) if found.shape else found[...]).astype(jnp.float32)


def _load_pending(r: Any, ref: Any, row: Any, head: Any, *channels: Any) -> list[Any]:
    """Each row of those that wait; where fewer do, the last of them again, which takes no time."""
    last = jnp.maximum(r.count[0] - 1, 0)
    return [_load(ref, row, head, jnp.minimum(i, last), *channels) for i in range(_MOST_PENDING)]


def _those_that_wait(r: Any, rows: list[Any], other: float) -> list[Any]:
    """The rows of pending writes; in place of the others what changes no state."""
    return [jnp.where(i < r.count[0], x, other) for i, x in enumerate(rows)]


def _ahead(r: Any, scheduler: _TileScheduler, load: Callable[..., Any], use: Callable[..., None]) -> None:
    """`use(step, place, loaded)` for each step, whose `loaded = load(r, place)` is begun two steps before."""

    def place(step: Any) -> _Place:
        return _place(r, scheduler, jnp.minimum(step, scheduler.steps - 1))

    def body(step: Any, loaded: tuple[Any, Any]) -> tuple[Any, Any]:
        following = load(r, place(step + 2))
        use(step, place(step), loaded[0])
        return loaded[1], following

    lax.fori_loop(0, scheduler.steps, body, (load(r, place(0)), load(r, place(1))))


def _load_keys(r: Any, at: _Place) -> dict[str, Any]:
    """What a state's vectors are made of."""
    row, head, _ = at
    by_head = {"q": r.q, "k": r.k, "write_key": r.write_key, "erase": r.erase, "log_decay": r.log_decay}
    found = {
        name: _load(ref, row, 0, _shared(r, head, ref.shape[2])) for name, ref in by_head.items() if ref is not None
    }
    found["keys"] = _load_pending(r, r.keys, row, _shared(r, head, r.keys.shape[1]))
    if r.decays is not None:
        found["decays"] = _load_pending(r, r.decays, row, head)
    return found


def _make_vectors(r: Any, m: Any, scheduler: _TileScheduler) -> None:
    """Puts into shared memory what states are multiplied by and added up from."""

    def make(step: Any, at: _Place, x: dict[str, Any]) -> None:
        stage, count = remainder(step, _STAGES), r.count[0]
        key = x.get("write_key", x["k"])
        keys, kept = _those_that_wait(r, x["keys"], 0.0), None
        readers = [x["q"], x["k"] * x["erase"] if "erase" in x else x["k"]][: len(scheduler.readers)]
        if "log_decay" in x:
            kept = decay = jnp.exp(x["log_decay"])
            decays = _those_that_wait(r, x["decays"], 1.0)
            for i in reversed(range(_MOST_PENDING)):
                keys[i], kept = kept * keys[i], kept * decays[i]
            r.decays[at.row, at.head, count] = decay
        pl.when(step >= _STAGES)(lambda: wait(m.used.at[stage]))
        for n, reader in enumerate(readers):
            m.readers[stage, n] = reader
            m.kept_readers[stage, n] = reader if kept is None else kept * reader
        for i, row in enumerate([*keys, key]):
            m.keys[stage, i] = row
        if kept is not None:
            m.keys[stage, _DECAY] = kept if kept.shape else key * 0.0 + kept
        fence_smem()
        arrive(m.made.at[stage])
        # All that share a row of keys store the same numbers in it. Others may load that row meanwhile, and do not use
        # it.
        r.keys[at.row, _shared(r, at.head, r.keys.shape[1]), count] = key.astype(r.keys.dtype)

    _ahead(r, scheduler, _load_keys, make)
    wait_for_readers(m.used, _STAGES, scheduler.steps)


def _multiply(r: Any, m: Any, scheduler: _TileScheduler) -> None:
    """Has the states copied and multiplies them; adds them up where they are stored."""
    is_stored = r.count[0] == _MOST_PENDING

    def begin(step: Any) -> None:
        """Has a step's state copied, if there is such a step."""
        at, stage = _place(r, scheduler, step), remainder(step, _STAGES)
        source = r.state.at[at.row, at.head, :, at.values]
        pl.when(step < scheduler.steps)(lambda: begin_copy(source, m.states.at[stage], m.there.at[stage]))

    def add_up(step: Any) -> None:
        at, stage = _place(r, scheduler, step), remainder(step, _STAGES)
        wait(m.written.at[stage])
        values = [along_columns(load_band_row(m.values.at[stage, i])) for i in range(PERIOD)]
        for band in _BANDS:
            state = load_band(m.states.at[stage, band])
            if r.decays is not None:
                state = along_rows(load_band_column(m.keys.at[stage, _DECAY, band])) * state
            for i, value in enumerate(values):
                state = state + along_rows(load_band_column(m.keys.at[stage, i, band])) * value
            m.states[stage, band] = state
        fence_smem()
        store(m.states.at[stage], r.state.at[at.row, at.head, :, at.values])
        wait_for_stores(1)  # that of the step before has been read
        pl.when(step > 0)(lambda: begin(step + (_STAGES - 1)))

    pl.loop(0, _STAGES)(begin)

    @pl.loop(0, scheduler.steps)
    def _(step):
        stage = remainder(step, _STAGES)
        wait(m.made.at[stage])
        wait(m.there.at[stage])
        sums = [zero_band() for _ in scheduler.readers]
        for band in _BANDS:
            state = load_band(m.states.at[stage, band])
            for n in scheduler.readers:
                sums[n] = sums[n] + along_rows(load_band_column(m.kept_readers.at[stage, n, band])) * state
        fence_smem()
        pl.when(jnp.logical_not(is_stored))(lambda: begin(step + _STAGES))
        for n in scheduler.readers:
            m.products[stage, n] = band_sums(sums[n], m.sums.at[n])
        fence_smem()
        arrive(m.multiplied.at[stage])
        pl.when(is_stored)(lambda: add_up(step))
        arrive(m.used.at[stage])

    wait_for_stores(only_read=False)


def _load_values(r: Any, at: _Place) -> dict[str, Any]:
    """The token's gated value, and what the tokens that wait wrote."""
    row, head, values = at
    value = _load(r.v, row, 0, head, values)
    if r.write is not None:
        value = value * _load(r.write, row, 0, head, *((values,) if len(r.write.shape) == 4 else ()))
    return {"value": value, "wrote": _load_pending(r, r.values, row, head, values)}


def _finish(r: Any, m: Any, scheduler: _TileScheduler, scale: float) -> None:
    """Makes the outputs and what the tokens write."""

    def finish(step: Any, at: _Place, x: dict[str, Any]) -> None:
        stage, value, wrote = remainder(step, _STAGES), x["value"], _those_that_wait(r, x["wrote"], 0.0)
        wait(m.made.at[stage])
        *keys, key = (load_channels(m.keys.at[stage, i]) for i in range(PERIOD))
        readers = [load_channels(m.readers.at[stage, n]) for n in scheduler.readers]
        dots = [[total(k * reader, m.parts.at[n, i]) for i, k in enumerate(keys)] for n, reader in enumerate(readers)]
        own = total(key * readers[0], m.parts.at[0, _MOST_PENDING])
        wait(m.multiplied.at[stage])
        products = [
            load_channels(m.products.at[stage, n]) + sum(dot * u for dot, u in zip(dots[n], wrote))
            for n in scheduler.readers
        ]
        if scheduler.online:
            value = value - products[1]
        r.out[at.row, 0, at.head, at.values] = (scale * (products[0] + own * value)).astype(r.out.dtype)
        r.values[at.row, at.head, r.count[0], at.values] = value
        for i, u in enumerate([*wrote, value]):
            m.values[stage, i] = u
        fence_smem()
        pl.when(r.count[0] == _MOST_PENDING)(lambda: arrive(m.written.at[stage]))
        arrive(m.used.at[stage])

    _ahead(r, scheduler, _load_values, finish)


def unsupported_sizes(key_size: int, value_size: int) -> str | None:
    """Why the kernel can't serve states of these sizes, as a noun phrase, or None if it can."""
    if key_size != CHANNELS or value_size % CHANNELS:
        return f"key size {key_size} with value size {value_size} ({CHANNELS} and a multiple of it)"
    return None


def delayed_token(token: Inputs, delayed: DelayedState, *, scale: float, online: bool) -> tuple[Array, DelayedState]:
    """The output `[B, 1, HV, V]` of a token, and the state after it.

    Args:
        token: one token without an initial state and documents; `unsupported_sizes` has no objection to K and V.
        delayed: the state before.
        scale: factor on the output.
        online: whether the token erases.
    """
    # Mapped over, calls are made one after another: each updates arrays in place.
    return jax.custom_batching.sequential_vmap(functools.partial(_call, scale=scale, online=online))(token, delayed)


# Lowered once for all layers, as `attention_gradients` is.
@functools.partial(jax.jit, static_argnames=("scale", "online"), inline=True)
def _call(token: Inputs, delayed: DelayedState, *, scale: float, online: bool) -> tuple[Array, DelayedState]:
    batch, heads, _, value_size = delayed.state.shape
    states = batch * heads * (value_size // CHANNELS)
    memory = {
        "states": number_buffer(_STAGES, CHANNELS, CHANNELS),
        "readers": number_buffer(_STAGES, 2, CHANNELS),
        "kept_readers": number_buffer(_STAGES, 2, CHANNELS),
        "keys": number_buffer(_STAGES, PERIOD + 1, CHANNELS),
        "products": number_buffer(_STAGES, 2, CHANNELS),
        "values": number_buffer(_STAGES, PERIOD, CHANNELS),
        "parts": number_buffer(2, PERIOD, WARPS),
        "sums": sum_buffer(2),
        "there": barrier(1, _STAGES),
        "made": barrier(1, _STAGES),
        "multiplied": barrier(1, _STAGES),
        "written": barrier(1, _STAGES),
        "used": barrier(2, _STAGES),
    }

    def program(r: SimpleNamespace, m: SimpleNamespace) -> None:
        first, warpgroup = lax.axis_index("program"), lax.axis_index("warpgroup")
        scheduler = _TileScheduler(first, quotient(states - first + (NUM_SMS - 1), NUM_SMS), online)
        pl.when(warpgroup == 0)(lambda: _multiply(r, m, scheduler))
        pl.when(warpgroup == 1)(lambda: _finish(r, m, scheduler, scale))
        pl.when(warpgroup == 2)(lambda: _make_vectors(r, m, scheduler))

    results = launch(
        program,
        "delta_decode_delayed",
        {**token._asdict(), "count": delayed.num_pending[None]},
        {"out": jax.ShapeDtypeStruct(token.v.shape, token.v.dtype)},
        memory,
        grid={"program": min(states, NUM_SMS)},
        warpgroups=3,
        updates={name: getattr(delayed, name) for name in ("state", "keys", "values", "decays")},
    )
    out = results.pop("out")
    return out, DelayedState(**results, num_pending=(delayed.num_pending + 1) % PERIOD)  # type: ignore[arg-type, return-value]

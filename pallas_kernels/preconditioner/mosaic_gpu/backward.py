"""The gradient, from the last token to the first; A comes from what the forward leaves before each chunk."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.common.mosaic_gpu import WARPS, fence_smem, put, store, wait
from pallas_kernels.common.mosaic_gpu_bands import load_band, load_band_row, zero_band
from pallas_kernels.preconditioner.mosaic_gpu.turns import (
    PIECE,
    SPECIAL,
    Schedule,
    Turn,
    load_tokens,
    local_maps,
    pieces,
    product,
    run,
    times,
)

SCHEDULE = Schedule(groups=3, depth=2)


def _backward(turn: Turn, readout: Any) -> None:
    r, m, (row, head) = turn.r, turn.m, turn.place
    parameter = turn.parameter()

    def step(j, n, slot, d_parameter):
        wait(m.full.at[slot])
        gates = turn.gates(slot)
        tile, d_out = m.k.at[slot], m.d_out.at[slot]
        keys = load_tokens(tile)
        grams, passes = local_maps(keys, gates)
        first, _ = turn.across(
            0, grams[-1], passes[-1], lambda: load_band_row(m.starts.at[slot], WARPS), from_end=False
        )
        grams = [times(kept, first) + gram for kept, gram in zip(passes, grams, strict=True)]
        # What enters a piece from its end is dA after its last token.
        d_gram: Any = None
        rest: Array | None = None
        d_grams: list[Array] = []
        rests: list[Array | None] = []
        d_keys: list[Any] = []
        for i in reversed(range(PIECE)):
            d = readout.gradients(
                None, grams[i], keys[i], parameter, load_band(d_out.at[:, i]).astype(jnp.float32), SPECIAL
            )
            if d.x is not None and d_out.dtype == jnp.float32:
                put(d_out.at[:, i], d.x)
            d_keys.insert(0, d.x)
            if d.parameter is not None:
                d_parameter = d_parameter + d.parameter
            d_gram = d.after if d_gram is None else d_gram + d.after
            d_grams.insert(0, d_gram)
            rests.insert(0, rest)
            d_gram, rest = times(gates[i].decay, d_gram), product(rest, gates[i].decay)
        start, state = turn.across(1, d_gram, rest, turn.enters, from_end=True)
        turn.leaves(j, state, r.d_initial_state.at[row, head])
        turn.release_before(j)
        # Keys and gates are loaded once more: there are no registers to keep them in.
        keys, gates = load_tokens(tile), turn.gates(slot)
        for i in range(PIECE):
            d_gram = times(rests[i], start) + d_grams[i]
            decay, gain = gates[i]
            at = row, pieces(n), i, head
            weighted = keys[i] * d_gram
            d_k = 2.0 * weighted if gain is None else times(2.0 * gain, weighted)
            if d_keys[i] is not None:
                d_k = d_k + (load_band(d_out.at[:, i]) if d_out.dtype == jnp.float32 else d_keys[i])
            if r.d_passed is not None:
                d_k = d_k + load_band(m.d_passed.at[slot, :, i]).astype(jnp.float32)
            put(tile.at[:, i], d_k.astype(tile.dtype))
            if r.d_gain is not None:
                put(r.d_gain.at[at], jnp.sum(keys[i] * weighted, axis=1).astype(r.d_gain.dtype))
            if r.d_log_decay is not None:
                before = first if i == 0 else grams[i - 1]
                total = jnp.sum(before * d_gram, axis=1)
                assert decay is not None
                put(r.d_log_decay.at[at], (total * decay).astype(r.d_log_decay.dtype))
        fence_smem()
        store(tile, r.d_k.at[row, pieces(n), :, head])
        return d_parameter

    d_parameter = turn.loop(step, zero_band(WARPS))
    if r.d_parameter is not None:
        put(r.d_parameter.at[row, head, turn.group], jnp.sum(d_parameter, axis=1))


def backward(
    inputs: Any,
    readout: Any,
    states: Array,
    d_out: Array,
    d_passed: Array | None,
    d_final_state: Array,
    *,
    schedule: Schedule = SCHEDULE,
) -> dict[str, Array | None]:
    """Gradients, by the names of `inputs` with `d_` before them.

    Args:
        inputs: as in `forward`.
        readout: of A.
        states: A before each chunk.
        d_out: gradient in `out`, bfloat16 or float32.
        d_passed: gradient in the keys that the call returns, bfloat16; None if it returns none.
        d_final_state: gradient in `final_state`.
        schedule: how a program works.
    """
    x = inputs
    batch, _, heads, channels = x.k.shape
    numbers = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    d_parameter = None if x.parameter is None else numbers((batch, heads, schedule.groups, WARPS))
    gates = {"log_decay": x.log_decay, "gain": x.gain}
    found = run(
        _backward,
        "gram_backward",
        {"k": x.k, **gates, "resets": x.resets, "d_out": d_out, "d_passed": d_passed},
        {"parameter": x.parameter, "starts": states, "d_final_state": d_final_state},
        {"d_k": x.k, "d_log_decay": x.log_decay, "d_gain": x.gain},
        {"d_initial_state": numbers((batch, heads, channels)), "d_parameter": d_parameter},
        tiles=("k", "d_out", "d_passed", "starts"),
        enters="d_final_state",
        schedule=schedule,
        from_end=True,
        readout=readout,
    )
    if found["d_parameter"] is not None:
        found["d_parameter"] = jnp.sum(found["d_parameter"], axis=(0, 2, 3))
    return found

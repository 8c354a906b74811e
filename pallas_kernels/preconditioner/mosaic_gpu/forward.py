"""A and its readout, from the first token to the last."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.common.mosaic_gpu import fence_smem, put, store, wait
from pallas_kernels.preconditioner.mosaic_gpu.turns import (
    SPECIAL,
    TOKENS,
    Schedule,
    Turn,
    load_tokens,
    local_maps,
    pieces,
    run,
    times,
)

SCHEDULE = Schedule(groups=4, depth=4)


def _forward(turn: Turn, readout: Any) -> None:
    r, m, (row, head) = turn.r, turn.m, turn.place
    parameter = turn.parameter()

    def step(j, n, slot, carry):
        wait(m.full.at[slot])
        gates = turn.gates(slot)
        tile = m.k.at[slot]
        keys = load_tokens(tile)
        grams, passes = local_maps(keys, gates)

        def enters():
            state = turn.enters()
            if r.states is not None:
                put(r.states.at[row, head, n], state)
            return state

        start, state = turn.across(0, grams[-1], passes[-1], enters, from_end=False)
        turn.leaves(j, state, r.final_state.at[row, head])
        turn.release_before(j)
        for i, k in enumerate(keys):
            gram = times(passes[i], start) + grams[i]
            put(tile.at[:, i], readout(None, gram, k, parameter, SPECIAL).astype(tile.dtype))
        fence_smem()
        store(tile, r.out.at[row, pieces(n), :, head])
        return carry

    turn.loop(step, jnp.int32(0))


def forward(inputs: Any, readout: Any, *, with_states: bool, schedule: Schedule = SCHEDULE) -> dict[str, Array | None]:
    """`out` `[B, T, H, 128]` bfloat16, `final_state` `[B, H, 128]`; A before each chunk, `states`, if asked for.

    Args:
        inputs: `GramInputs`, lengths padded to whole chunks.
        readout: of A.
        with_states: whether the backward follows.
        schedule: how a program works.
    """
    x = inputs
    batch, length, heads, channels = x.k.shape
    numbers = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    states = numbers((batch, heads, length // TOKENS, channels))
    return run(
        _forward,
        "gram_forward",
        {"k": x.k, "log_decay": x.log_decay, "gain": x.gain, "resets": x.resets},
        {"parameter": x.parameter, "initial_state": x.initial_state},
        {"out": x.k},
        {"final_state": numbers((batch, heads, channels)), "states": states if with_states else None},
        tiles=("k",),
        enters="initial_state",
        schedule=schedule,
        from_end=False,
        readout=readout,
    )

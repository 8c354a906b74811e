"""One token whose update may be delayed: the step of `decode`, which stores the state once in `PERIOD` tokens.

A program loads its part of the state, applies the pending updates, and then does what `decode` does. It computes the
same numbers in the same order, so that outputs and states have the same bits. The kernel in
`pallas_kernels.delta_rule.mosaic_gpu.decode_delayed` reads states faster and adds up in an order of its own.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.common.config import Launch
from pallas_kernels.common.triton.backend import Operand, call, whole
from pallas_kernels.common.triton.problem import Problem
from pallas_kernels.delta_rule.deferred_state import PERIOD, DeferredState
from pallas_kernels.delta_rule.inputs import Inputs
from pallas_kernels.delta_rule.triton.decode import decayed, load_token, token_operands, token_step, written
from pallas_kernels.delta_rule.triton.wy import load_wide


def _after_waiting(r) -> Array:
    """The program's part `[K, block of V]` of the state, with all writes that wait."""

    def rows(ref: Any) -> list[Any]:
        return [None if ref is None else load_wide(ref.at[i]) for i in range(PERIOD - 1)]

    # All are loaded and applied, those that mean nothing as what changes no state: a loop over those that wait would
    # wait for memory in every turn.
    keys, values, decays = rows(r.before_keys), rows(r.before_values), rows(r.before_decays)
    state, count = r.before_state[...], r.count[0]
    for i, (key, value, decay) in enumerate(zip(keys, values, decays)):
        waits = i < count
        state = decayed(state, None if decay is None else jnp.where(waits, decay, 1.0))
        state = written(state, jnp.where(waits, key, 0.0), jnp.where(waits, value, 0.0))
    return state


def _deferred_kernel(r, *, problem: Problem):
    token = load_token(r)
    state, write = token_step(r, token, _after_waiting(r), problem)
    count = r.count[0]
    # Every program that shares a row of keys or decays stores the same numbers in it. Others may load that row
    # meanwhile, and do not use it.
    r.keys[count] = write.key.astype(r.keys.dtype)
    r.values[count] = write.value
    if write.decay is not None:
        r.decays[count] = write.decay

    @pl.when(count == PERIOD - 1)
    def _():
        r.state[...] = state


def _settle_kernel(r):
    @pl.when(r.count[0] > 0)
    def _():
        r.state[...] = _after_waiting(r)


def _operands(deferred: DeferredState, width: int) -> dict[str, Operand | None]:
    """Where a program of a value block, head and row of the batch finds its part."""
    heads = deferred.state.shape[1]

    def rows(x: Array | None, block: int | None = None) -> Operand | None:
        if x is None:
            return None
        group = heads // x.shape[1]
        tail = (block or x.shape[3],) if x.ndim == 4 else ()

        def place(c, h, b):
            index = (b, h if group == 1 else lax.div(h, group), 0)
            return (*index, c if block else 0) if x.ndim == 4 else index

        return Operand(x, (None, None, PERIOD, *tail), place)

    key_size = deferred.state.shape[2]
    return {
        "state": Operand(deferred.state, (None, None, key_size, width), lambda c, h, b: (b, h, 0, c)),
        "keys": rows(deferred.keys),
        "values": rows(deferred.values, width),
        "decays": rows(deferred.decays),
    }


def delayed_token(problem: Problem, x: Inputs, deferred: DeferredState, launch: Launch) -> tuple[Array, DeferredState]:
    """Output `[B, 1, HV, V]` of a token and the state after it; see `pallas_kernels.delta_rule.delayed_update`."""
    width = min(launch.block, problem.value_size)
    arguments, out = token_operands(problem, x, width)
    before = _operands(deferred, width)
    updates = {name: operand for name, operand in before.items() if operand is not None}
    results = call(
        _deferred_kernel,
        "delta_decode_deferred",
        (problem.value_size // width, problem.value_heads, problem.batch),
        {**arguments, "count": whole(deferred.waiting[None]), "before_decays": before["decays"]},
        {"out": out, **before},
        launch,
        updates=updates,
        problem=problem,
    )
    after = DeferredState(
        results["state"],  # type: ignore[arg-type]
        results["keys"],  # type: ignore[arg-type]
        results["values"],  # type: ignore[arg-type]
        results["decays"],
        (deferred.waiting + 1) % PERIOD,
    )
    return results["out"], after  # type: ignore[return-value]


def flush(deferred: DeferredState, launch: Launch) -> Array:
    """The state with all pending updates, in place of the one that is given; float32."""
    batch, heads, _, value_size = deferred.state.shape
    width = min(launch.block, value_size)
    operands = _operands(deferred, width)
    state = operands.pop("state")
    assert state is not None
    results = call(
        _settle_kernel,
        "delta_settle",
        (value_size // width, heads, batch),
        {"count": whole(deferred.waiting[None]), **{f"before_{name}": x for name, x in operands.items()}},
        {"state": state},
        launch,
        updates={"state": state},
    )
    return results["state"]  # type: ignore[return-value]

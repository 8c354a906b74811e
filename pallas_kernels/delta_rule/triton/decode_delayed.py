"""One token whose update may be delayed: the step of `decode`, which stores the state once in `PERIOD` tokens.

A program loads its part of the state, applies the pending updates, and then does what `decode` does. It computes the
same numbers in the same order, so that outputs and states have the same bits. The kernel in
`pallas_kernels.delta_rule.mosaic_gpu.decode_delayed` reads states faster and adds up in an order of its own.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.common.config import KernelConfig
from pallas_kernels.common.triton.backend import Operand, call, whole
from pallas_kernels.common.triton.kernel_shape import KernelShape
from pallas_kernels.delta_rule.delayed_state import PERIOD, DelayedState
from pallas_kernels.delta_rule.inputs import Inputs
from pallas_kernels.delta_rule.triton.decode import decayed, load_token, token_operands, token_step, written
from pallas_kernels.delta_rule.triton.wy import load_wide


def _after_pending(r) -> Array:
    """The program's part `[K, block of V]` of the state, with all pending writes."""

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


def _delayed_kernel(r, *, kernel_shape: KernelShape):
    token = load_token(r)
    state, write = token_step(r, token, _after_pending(r), kernel_shape)
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
        r.state[...] = _after_pending(r)


def _operands(delayed: DelayedState, width: int) -> dict[str, Operand | None]:
    """Where a program of a value block, head and row of the batch finds its part."""
    heads = delayed.state.shape[1]

    def rows(x: Array | None, block: int | None = None) -> Operand | None:
        if x is None:
            return None
        group = heads // x.shape[1]
        tail = (block or x.shape[3],) if x.ndim == 4 else ()

        def place(c, h, b):
            index = (b, h if group == 1 else lax.div(h, group), 0)
            return (*index, c if block else 0) if x.ndim == 4 else index

        return Operand(x, (None, None, PERIOD, *tail), place)

    key_size = delayed.state.shape[2]
    return {
        "state": Operand(delayed.state, (None, None, key_size, width), lambda c, h, b: (b, h, 0, c)),
        "keys": rows(delayed.keys),
        "values": rows(delayed.values, width),
        "decays": rows(delayed.decays),
    }


def delayed_token(
    kernel_shape: KernelShape, x: Inputs, delayed: DelayedState, launch: KernelConfig
) -> tuple[Array, DelayedState]:
    """Output `[B, 1, HV, V]` of a token and the state after it; see `pallas_kernels.delta_rule.delayed_update`."""
    width = min(launch.block, kernel_shape.value_size)
    arguments, out = token_operands(kernel_shape, x, width)
    before = _operands(delayed, width)
    updates = {name: operand for name, operand in before.items() if operand is not None}
    results = call(
        _delayed_kernel,
        "delta_decode_delayed",
        (kernel_shape.value_size // width, kernel_shape.value_heads, kernel_shape.batch),
        {**arguments, "count": whole(delayed.num_pending[None]), "before_decays": before["decays"]},
        {"out": out, **before},
        launch,
        updates=updates,
        kernel_shape=kernel_shape,
    )
    after = DelayedState(
        results["state"],  # type: ignore[arg-type]
        results["keys"],  # type: ignore[arg-type]
        results["values"],  # type: ignore[arg-type]
        results["decays"],
        (delayed.num_pending + 1) % PERIOD,
    )
    return results["out"], after  # type: ignore[return-value]


def flush(delayed: DelayedState, launch: KernelConfig) -> Array:
    """The state with all pending updates, in place of the one that is given; float32."""
    batch, heads, _, value_size = delayed.state.shape
    width = min(launch.block, value_size)
    operands = _operands(delayed, width)
    state = operands.pop("state")
    assert state is not None
    results = call(
        _settle_kernel,
        "delta_flush",
        (value_size // width, heads, batch),
        {"count": whole(delayed.num_pending[None]), **{f"before_{name}": x for name, x in operands.items()}},
        {"state": state},
        launch,
        updates={"state": state},
    )
    return results["state"]  # type: ignore[return-value]

"""One token whose write may wait: the step of `decode`, which stores the state once in `PERIOD` tokens.

A program loads its part of the state, applies the writes that wait, and then does what `decode` does. It computes the
same numbers in the same order, so that outputs and states have the same bits. The kernel in
`pallas_kernels.delta_rule.mosaic_gpu.decode_delayed` reads states faster and adds up in an order of its own.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jaxtyping import Float

from pallas_kernels.common.config import Launch
from pallas_kernels.common.platform import is_hopper
from pallas_kernels.common.problem import CHUNK, next_power_of_two
from pallas_kernels.common.triton.backend import Operand, call, whole
from pallas_kernels.common.triton.problem import Problem
from pallas_kernels.common.vma import varying_axes
from pallas_kernels.delta_rule.api import unsupported
from pallas_kernels.delta_rule.deferred_state import PERIOD, DeferredState
from pallas_kernels.delta_rule.inputs import make_inputs, problem_of
from pallas_kernels.delta_rule.triton.decode import decayed, load_token, token_operands, token_step, written
from pallas_kernels.delta_rule.triton.wy import load_wide
from pallas_kernels.delta_rule.tuned_configs import choose_schedule


def deferral_unsupported(
    q: Array, k: Array, v: Array, erase: Array | None = None, log_decay: Array | None = None
) -> str | None:
    """Why writes of such tokens can't wait, as a noun phrase, or None if they can.

    Args:
        q: queries `[B, 1, H, K]`.
        k: keys `[B, 1, H, K]`.
        v: values `[B, 1, HV, V]`.
        erase: erase gate, or None.
        log_decay: log decay, or None.
    """
    if q.shape[1] != 1:
        return f"{q.shape[1]} tokens (a single one)"
    if any(next_power_of_two(size) != size for size in (q.shape[3], v.shape[3])):
        return f"key size {q.shape[3]} with value size {v.shape[3]} (powers of two, at least 16)"
    return unsupported(q, k, v, erase, log_decay, chunk_size=CHUNK)


def mosaic_deferral_unsupported(
    q: Array, k: Array, v: Array, erase: Array | None = None, log_decay: Array | None = None
) -> str | None:
    """Why such tokens can't have the kernel in Mosaic GPU, as a noun phrase, or None; arguments as above."""
    reason = deferral_unsupported(q, k, v, erase, log_decay)
    if reason is not None:
        return reason
    if not is_hopper():
        return "this device (it runs on Hopper cards)"
    if axes := varying_axes([x for x in (q, k, v, erase, log_decay) if x is not None]):
        return f"arrays that vary along {sorted(axes)} inside jax.shard_map"  # it updates arrays in place
    try:
        from pallas_kernels.delta_rule.mosaic_gpu.decode_delayed import unsupported_sizes
    except ImportError as error:
        return f"this jax: {error}"
    return unsupported_sizes(q.shape[3], v.shape[3])


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


def deferred_token(
    q: Float[Array, "B 1 H K"],
    k: Float[Array, "B 1 H K"],
    v: Float[Array, "B 1 HV V"],
    *,
    deferred: DeferredState,
    erase: Float[Array, "B 1 HV"] | Float[Array, "B 1 HV K"] | None = None,
    write: Float[Array, "B 1 HV"] | Float[Array, "B 1 HV V"] | None = None,
    write_key: Float[Array, "B 1 H K"] | Float[Array, "B 1 HV K"] | None = None,
    log_decay: Float[Array, "B 1 HV"] | Float[Array, "B 1 HV K"] | None = None,
    scale: float | None = None,
    online: bool = True,
    launch: Launch | None = None,
    backend: str = "triton",
) -> tuple[Float[Array, "B 1 HV V"], DeferredState]:
    """`gated_delta_rule` or `linear_attention` of one token, whose write waits beside the state.

    Args:
        q: queries, bfloat16 or float32; K and V are powers of two.
        k: read keys.
        v: values.
        deferred: the state, from `defer_writes` or an earlier token.
        erase: as for `gated_delta_rule`.
        write: likewise.
        write_key: likewise.
        log_decay: likewise; None where `deferred` has none.
        scale: likewise.
        online: False for `linear_attention`, whose keys are `k`.
        launch: how the kernel is compiled; None takes that of the device's schedule.
        backend: `"triton"` has the bits of the step that stores each time; `"mosaic"` is faster where
            `mosaic_deferral_unsupported` has no objection, and differs by float32 rounding.

    Returns:
        The output in `v`'s dtype, and the state after the token. No gradient is defined.

    Raises:
        NotImplementedError: `deferral_unsupported`, or `mosaic_deferral_unsupported` for that backend, has an
            objection, but for the device and `jax.shard_map`.
        ValueError: `backend` is neither.
    """
    if backend not in ("triton", "mosaic"):
        raise ValueError(f"deferred_token: backend is {backend!r}, expected 'triton' or 'mosaic'")
    reason = deferral_unsupported(q, k, v, erase, log_decay)
    if reason is not None:
        raise NotImplementedError(f"deferred_token: the Triton kernels do not support {reason}")
    x = make_inputs(q, k, v, write_key, erase, write, log_decay, None, None)
    if x.write_key is not None:
        x = x._replace(write_key=x.write_key.astype(x.k.dtype))
    problem = problem_of(Problem, x, online=online, scale=q.shape[-1] ** -0.5 if scale is None else float(scale))
    if backend == "mosaic":
        from pallas_kernels.delta_rule.mosaic_gpu import decode_delayed as mosaic

        if (reason := mosaic.unsupported_sizes(q.shape[3], v.shape[3])) is not None:
            raise NotImplementedError(f"deferred_token: the kernel in Mosaic GPU does not support {reason}")
        return mosaic.deferred_token(x, deferred, scale=problem.scale, online=online)
    launch = launch or choose_schedule(x, online).decode
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
    return results["out"].astype(v.dtype), after  # type: ignore[union-attr]


def settle_writes(deferred: DeferredState, launch: Launch | None = None) -> Float[Array, "B HV K V"]:
    """The state with all writes that wait, in place of the one that is given; float32."""
    launch = launch or Launch(num_warps=2, num_stages=1, block=32)
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

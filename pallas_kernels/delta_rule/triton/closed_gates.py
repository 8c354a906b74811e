"""Gradients that are exactly zero since a gate is: what the other stages leave of them is about 1e-10.

Stages divide by gates of one number a token, so they take a gate of 0 for 2^-32 (`common.decay.divisible`). Then a
token that writes nothing has a gradient of its value, and one that erases nothing has one of its key. This kernel
stores zeros there. It reads gates alone, and writes nothing where no gate is 0.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.common.config import KernelConfig
from pallas_kernels.common.kernel_shape import CHUNK, is_channel_wise
from pallas_kernels.common.triton.backend import Operand, call, iota, store_masked
from pallas_kernels.common.triton.kernel_shape import KernelShape

_LAUNCH = KernelConfig(num_warps=4, num_stages=1)


def _zero_kernel(r, *, closed_by: dict[str, tuple[str, ...]]):
    """Zero rows of each gradient where all of the gates that close it are 0."""
    for name, gates in closed_by.items():
        ref = getattr(r, name)
        shape = ref.shape
        is_closed = jnp.ones(shape[:1], bool)
        for gate in gates:
            is_closed &= getattr(r, gate)[...].astype(jnp.float32) == 0.0
        zeros = jnp.zeros(shape, jnp.float32)
        store_masked(ref, (iota(shape, 0), iota(shape, 1)), zeros, jnp.broadcast_to(is_closed[:, None], shape))


def zero_closed(
    kernel_shape: KernelShape,
    erase: Array | None,
    write: Array | None,
    d_v: Array,
    d_k: Array | None,
    d_write_key: Array | None,
) -> tuple[Array, Array | None, Array | None]:
    """The same gradients by value head, exactly zero where a gate of one number a token is exactly 0.

    A value counts by its write gate. What is read of the state, and so erased, counts by the erase gate. A token that
    neither erases nor writes leaves the state as it is, whatever its keys.

    Args:
        kernel_shape: static facts.
        erase: erase gate; None is 1.
        write: write gate; None is 1. If they are tied, the same array.
        d_v: gradient of the values, `[B, T, HV, V]`.
        d_k: of the read keys, `[B, T, HV, K]`, and of what they write where `d_write_key` is None.
        d_write_key: of the write keys, likewise, or None.
    """
    gates = {"erase": erase, "write": write}
    gates = {name: gate for name, gate in gates.items() if gate is not None and not is_channel_wise(gate)}
    closed_by: dict[str, tuple[str, ...]] = {}
    if "write" in gates:
        closed_by["d_v"] = ("write",)
    if "erase" in gates and d_k is not None and (d_write_key is not None or "write" in gates):
        closed_by["d_k"] = ("erase",) if d_write_key is not None else ("erase", "write")
    if len(gates) == 2 and d_write_key is not None:
        closed_by["d_write_key"] = ("erase", "write")
    given: dict[str, Any] = {"d_v": d_v, "d_k": d_k, "d_write_key": d_write_key}
    if not closed_by:
        return d_v, d_k, d_write_key
    # All that reads the stored values' gradient has then run, and the kernel can store in its place.
    ready = lax.optimization_barrier({name: x for name, x in given.items() if x is not None})

    # Programs do next to nothing, so that their number is what takes time.
    rows = next(rows for rows in (4 * CHUNK, 2 * CHUNK, CHUNK) if kernel_shape.length % rows == 0)

    def at(h, n, b):
        return b, n, h, 0

    def operand(x: Any) -> Any:
        return kernel_shape.of_token(x, rows, at)

    targets: dict[str, Operand] = {name: operand(ready[name]) for name in closed_by}
    results = call(
        _zero_kernel,
        "delta_zero_closed",
        (kernel_shape.value_heads, kernel_shape.length // rows, kernel_shape.batch),
        {name: operand(gate) for name, gate in gates.items()},
        targets,
        _LAUNCH,
        updates=targets,
        closed_by=closed_by,
    )
    found = {**given, **ready, **results}
    return found["d_v"], found["d_k"], found["d_write_key"]

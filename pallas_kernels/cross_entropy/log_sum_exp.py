"""`log sum exp` of rows in one pass over memory.

m = max(m, x)      s = s exp(m_before - m) + exp(x - m)      L = M + log sum s exp(m - M),  M = max m
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jaxtyping import Float

from pallas_kernels.common.config import KernelConfig
from pallas_kernels.common.kernel_shape import cdiv, next_power_of_two
from pallas_kernels.common.refusal import refuse
from pallas_kernels.common.triton.backend import (
    call,
    exp,
    interpreted,
    iota,
    load_masked,
    store_masked,
    unsupported_arrays,
    whole,
)

_LOWEST = -3e38  # finite: a difference of two infinite numbers is none


@dataclasses.dataclass(frozen=True)
class LogSumExpConfig:
    """How a call is cut.

    Attributes:
        columns: of a row that a program works on at once, a power of two.
        num_warps: of a program.
    """

    columns: int = 2048
    num_warps: int = 4


def log_sum_exp_kernel(r, *, size: int, columns: int):
    """One row."""
    row, column = pl.program_id(0), iota((columns,), 0)

    def step(i, state):
        largest, total = state
        at = i * columns + column
        mask = None if size % columns == 0 else at < size
        x = load_masked(r.x, (row, at), mask).astype(jnp.float32)
        if mask is not None:
            x = jnp.where(mask, x, -jnp.inf)
        new = jnp.maximum(largest, x)
        return new, total * exp(largest - new) + exp(x - new)

    start = jnp.full((columns,), _LOWEST, jnp.float32), jnp.zeros((columns,), jnp.float32)
    largest, total = lax.fori_loop(0, cdiv(size, columns), step, start)
    highest = jnp.max(largest)
    total = jnp.sum(total * exp(largest - highest))
    store_masked(r.y, (row,), highest + jnp.log(total), None)


def unsupported_reason(x: Array) -> str | None:
    """Why `log_sum_exp` can't serve a call, as a noun phrase, or None if it can."""
    if not x.size:
        return f"an array of shape {x.shape}"
    return unsupported_arrays(x=x)


def log_sum_exp(x: Float[Array, "*rows V"], *, config: LogSumExpConfig | None = None) -> Float[Array, "*rows"]:
    """`log(sum(exp(x)))` over the last axis, computed in float32.

    Args:
        x: bfloat16 or float32. A row that has +inf gives NaN, one of -inf alone -inf.
        config: how rows are cut.

    Returns:
        Float32.

    Raises:
        NotImplementedError: there is an `unsupported_reason`.
    """
    refuse("log_sum_exp", unsupported_reason(x))
    if config is None:
        config = LogSumExpConfig(columns=64) if interpreted() else LogSumExpConfig()
    flat = x.reshape(-1, x.shape[-1])
    rows, size = flat.shape
    y = jax.ShapeDtypeStruct((rows,), jnp.float32)
    result = call(
        log_sum_exp_kernel,
        "log_sum_exp",
        (rows,),
        {"x": whole(flat)},
        {"y": whole(y)},
        KernelConfig(num_warps=config.num_warps, num_stages=1),
        size=size,
        columns=min(config.columns, next_power_of_two(size)),
    )["y"]
    assert result is not None
    return result.reshape(x.shape[:-1])

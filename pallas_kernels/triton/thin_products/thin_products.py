"""Products of few rows with several matrices, in one launch."""

import dataclasses
import functools
import operator
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from pallas_kernels.problem import cdiv
from pallas_kernels.schedule import AMPLE_MEMORY, PROCESSORS, Launch
from pallas_kernels.triton.common.backend import (
    Operand,
    call,
    interpreted,
    shared_memory,
    unsupported_arrays,
    whole,
)
from pallas_kernels.triton.thin_products.kernels import Cut, thin_products_kernel
from pallas_kernels.varying import vary_alike

MAX_THIN_ROWS = 256
_MAX_KERNELS = 8
_PROGRAMS = 96  # enough to reach every processor of a large card, nearly


@dataclasses.dataclass(frozen=True)
class ThinSchedule:
    """How a call is cut into programs.

    Attributes:
        block_rows: rows of a program, a power of two of at least 16.
        block_columns: columns of a program, likewise.
        block_inner: of a step of its loop, likewise.
        num_warps: of a program.
        num_stages: depth of the pipeline that loads ahead.
        splits: parts of the inner axis, for calls with one result.
    """

    block_rows: int = 16
    block_columns: int = 32
    block_inner: int = 128
    num_warps: int = 4
    num_stages: int = 4
    splits: int = 1


def choose_thin_schedule(rows: int, inner: int, columns: Sequence[int], is_gated: bool = False) -> ThinSchedule:
    """The schedule for a call.

    Args:
        rows: M.
        inner: K.
        columns: N of each matrix.
        is_gated: whether two matrices give one result.
    """
    if interpreted():
        return ThinSchedule(block_rows=16, block_columns=16, block_inner=16)
    block_rows = min(64, max(16, 1 << (rows - 1).bit_length()))
    block_inner = 128 if block_rows <= 32 else 64
    tiles = cdiv(rows, block_rows)
    if block_rows == 64 and is_gated:
        # As many as run at once: three programs of three stages share a processor, two of four.
        return ThinSchedule(64, 64, 64, num_stages=4 if tiles * cdiv(columns[0], 64) <= 2 * PROCESSORS else 3)
    if block_rows == 64 and len(columns) == 1:
        return (_of_short_axis if inner <= 2048 else _of_long_axis)(tiles, inner, columns[0])
    if is_gated or len(columns) == 1:
        width = 64 if block_rows > 16 else 32
        programs, steps = tiles * cdiv(columns[0], width), cdiv(inner, block_inner)
        wanted = max(1, min((352 if block_rows == 16 else 264) // programs, steps // 2))
        return ThinSchedule(block_rows, width, block_inner, splits=_splits(wanted, steps))
    if block_rows == 64 and tiles == 1:
        return ThinSchedule(64, 32, 128)
    widths = [64, 32, 16] if block_rows > 16 else [32, 16]
    width = next((n for n in widths if tiles * sum(cdiv(c, n) for c in columns) >= _PROGRAMS), 16)
    return ThinSchedule(block_rows, width, block_inner)


def _of_short_axis(tiles: int, inner: int, columns: int) -> ThinSchedule:
    """One result of 33 rows or more: adding up parts of so short an inner axis would take longer than it saves."""
    if shared_memory() < AMPLE_MEMORY:
        return ThinSchedule(64, 32, 128, num_stages=3)
    if tiles * cdiv(columns, 32) > PROCESSORS:  # not all at once
        return ThinSchedule(64, 64, 128)
    return ThinSchedule(64, 32, 128, num_stages=4 if inner <= 1024 else 5)


def _of_long_axis(tiles: int, inner: int, columns: int) -> ThinSchedule:
    """One result of 33 rows or more, as at most four sums: more would take longer to add up than they save."""
    width = 128 if 4 * tiles * cdiv(columns, 128) >= PROCESSORS else 64
    wanted, steps = min(4, max(1, 2 * PROCESSORS // (tiles * cdiv(columns, width)))), cdiv(inner, 64)
    return ThinSchedule(64, width, 64, splits=_splits(wanted, steps))


def _splits(most: int, steps: int) -> int:
    """The largest divisor of `steps` that is at most `most`."""
    return max(n for n in range(1, most + 1) if steps % n == 0)


def thin_unsupported(x: Array, *kernels: Array) -> str | None:
    """Why `thin_products` can't serve a call, as a noun phrase, or None if it can.

    Args:
        x: rows `[M, K]`.
        *kernels: matrices `[K, N]`.
    """
    if x.shape[0] > MAX_THIN_ROWS:
        return f"{x.shape[0]} rows (at most {MAX_THIN_ROWS})"
    if len(kernels) > _MAX_KERNELS:
        return f"{len(kernels)} matrices (at most {_MAX_KERNELS})"
    if any(kernel.dtype != x.dtype for kernel in kernels):
        return "matrices of another dtype than the rows"
    return unsupported_arrays(x=x)


def thin_products(
    x: Float[Array, "M K"],
    kernels: Sequence[Float[Array, "K _"]],
    *,
    is_gated: bool = False,
    added: Float[Array, "M _"] | None = None,
    schedule: ThinSchedule | None = None,
) -> tuple[Float[Array, "M _"], ...]:
    """`x @ W` for each of some matrices, accumulated in float32; it has no derivative.

    Args:
        x: rows, bfloat16 or float32, at most 256.
        kernels: matrices in `x`'s dtype, at most 8; each has its own N.
        is_gated: of two matrices of one shape, `silu(x W_0) * (x W_1)` is the only result.
        added: of one matrix, the result is `added + x @ W`; in `x`'s dtype.
        schedule: how the call is cut into programs.

    Returns:
        The results in `x`'s dtype, each rounded once.

    Raises:
        NotImplementedError: `thin_unsupported` has an objection.
    """
    reason = thin_unsupported(x, *kernels)
    if reason is not None:
        raise NotImplementedError(f"thin_products: the Triton kernels do not support {reason}")
    (rows, inner), columns = x.shape, tuple(kernel.shape[1] for kernel in kernels)
    s = schedule or choose_thin_schedule(rows, inner, columns, is_gated)
    if s.splits > 1 and not is_gated and len(kernels) > 1:
        raise ValueError(f"thin_products: schedule.splits is {s.splits}, expected 1 with {len(kernels)} results")
    cut = Cut(rows, inner, columns, s.block_rows, s.block_columns, s.block_inner, is_gated, s.splits)
    x, kernels, added = vary_alike((x, tuple(kernels), added))
    inputs: dict[str, Operand | None] = {"x": whole(x)}
    inputs |= {f"kernel_{i}": whole(kernel) for i, kernel in enumerate(kernels)}
    grid = (cdiv(rows, s.block_rows), sum(cut.blocks), s.splits)
    launch = Launch(num_warps=s.num_warps, num_stages=s.num_stages)

    def run(inputs: dict[str, Operand | None], results: list[jax.ShapeDtypeStruct]) -> list[Array]:
        outputs = {f"y_{i}": whole(y) for i, y in enumerate(results)}
        return list(call(thin_products_kernel, "thin_products", grid, inputs, outputs, launch, cut=cut).values())  # type: ignore[arg-type]

    if s.splits == 1:
        results = [jax.ShapeDtypeStruct((rows, n), x.dtype) for n in (columns[:1] if is_gated else columns)]
        return tuple(run(inputs | {"added": whole(added)}, results))
    parts = run(inputs | {"added": None}, [jax.ShapeDtypeStruct((s.splits, rows, n), jnp.float32) for n in columns])
    first, *second = (functools.reduce(operator.add, part) for part in parts)  # one loop for XLA, in a fixed order
    if second:
        first = jax.nn.silu(first) * second[0]
    return ((first if added is None else first + added.astype(jnp.float32)).astype(x.dtype),)

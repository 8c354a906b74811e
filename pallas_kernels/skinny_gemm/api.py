"""Products of few rows with several matrices, in one launch."""

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from pallas_kernels.common.config import AMPLE_MEMORY, NUM_SMS, KernelConfig
from pallas_kernels.common.kernel_shape import cdiv
from pallas_kernels.common.refusal import refuse
from pallas_kernels.common.triton.backend import call, interpreted, shared_memory, unsupported_arrays, whole
from pallas_kernels.common.vma import pvary_together
from pallas_kernels.skinny_gemm.columns import KernelColumns
from pallas_kernels.skinny_gemm.triton import Cut, skinny_matmuls_kernel

MAX_ROWS = 512
_MAX_KERNELS = 8
_PROGRAMS = 96  # enough to reach every processor of a large card, nearly


@dataclasses.dataclass(frozen=True)
class SkinnyGemmConfig:
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


class Epilogue(NamedTuple):
    """What a result y is before it is stored, computed in float32 from y rounded to `x`'s dtype.

    `bound * sigmoid(y)`, or with the other two `-exp(log_rate) * softplus(y + bias)`.

    Attributes:
        bound: factor of the sigmoid.
        log_rate: `[R]`, each of `N / R` consecutive columns, bfloat16 or float32; None is a sigmoid.
        bias: `[N]`, likewise; None is a sigmoid.
    """

    bound: float = 1.0
    log_rate: Array | None = None
    bias: Array | None = None


def choose_config(rows: int, inner: int, columns: Sequence[int], is_gated: bool = False) -> SkinnyGemmConfig:
    """The schedule for a call.

    Args:
        rows: M.
        inner: K.
        columns: N of each matrix.
        is_gated: whether two matrices give one result.
    """
    if interpreted():
        return SkinnyGemmConfig(block_rows=16, block_columns=16, block_inner=16)
    block_rows = min(64, max(16, 1 << (rows - 1).bit_length()))
    block_inner = 128 if block_rows <= 32 else 64
    tiles = cdiv(rows, block_rows)
    if block_rows == 64 and is_gated:
        # As many as run at once: three programs of three stages share a processor, two of four.
        return SkinnyGemmConfig(64, 64, 64, num_stages=4 if tiles * cdiv(columns[0], 64) <= 2 * NUM_SMS else 3)
    if block_rows == 64 and len(columns) == 1:
        return (_of_short_axis if inner <= 2048 else _of_long_axis)(tiles, inner, columns[0])
    if is_gated or len(columns) == 1:
        width = 64 if block_rows > 16 else 32
        programs, steps = tiles * cdiv(columns[0], width), cdiv(inner, block_inner)
        wanted = max(1, min((352 if block_rows == 16 else 264) // programs, steps // 2))
        return SkinnyGemmConfig(block_rows, width, block_inner, splits=_splits(wanted, steps))
    if inner <= 128:  # the second maps of low rank: a program has one step
        return SkinnyGemmConfig(64 if rows > 64 else 16, 32, 128, num_stages=2)
    if block_rows == 64 and tiles == 1:
        return SkinnyGemmConfig(64, 32, 128)
    widths = [64, 32, 16] if block_rows > 16 else [32, 16]

    def programs_of(width: int) -> int:
        return tiles * sum(cdiv(n, width) for n in columns)

    width = next((n for n in widths if programs_of(n) >= _PROGRAMS), 16)
    if block_rows == width == 64 and shared_memory() >= AMPLE_MEMORY:
        if programs_of(64) <= 2 * NUM_SMS:  # all at once, though two of this depth fill a processor
            return SkinnyGemmConfig(64, 64, 128, num_stages=3)
        if programs_of(64) > 3 * NUM_SMS:  # not all at once
            return SkinnyGemmConfig(128, 64, 64)
    return SkinnyGemmConfig(block_rows, width, block_inner)


def _of_short_axis(tiles: int, inner: int, columns: int) -> SkinnyGemmConfig:
    """One result of 33 rows or more: adding up parts of so short an inner axis would take longer than it saves."""
    if shared_memory() < AMPLE_MEMORY:
        return SkinnyGemmConfig(64, 32, 128, num_stages=3)
    if tiles * cdiv(columns, 32) > NUM_SMS:  # not all at once
        return SkinnyGemmConfig(64, 64, 128)
    return SkinnyGemmConfig(64, 32, 128, num_stages=4 if inner <= 1024 else 5)


def _of_long_axis(tiles: int, inner: int, columns: int) -> SkinnyGemmConfig:
    """One result of 33 rows or more, as at most four sums: more would take longer to add up than they save."""
    width = 128 if 4 * tiles * cdiv(columns, 128) >= NUM_SMS else 64
    wanted, steps = min(4, max(1, 2 * NUM_SMS // (tiles * cdiv(columns, width)))), cdiv(inner, 64)
    return SkinnyGemmConfig(64, width, 64, splits=_splits(wanted, steps))


def _splits(most: int, steps: int) -> int:
    """The largest divisor of `steps` that is at most `most`."""
    return max(n for n in range(1, most + 1) if steps % n == 0)


def unsupported_reason(x: Array, *kernels: Array | KernelColumns) -> str | None:
    """Why `skinny_matmuls` can't serve a call, as a noun phrase, or None if it can.

    Args:
        x: rows `[M, K]`.
        *kernels: matrices `[K, N]`, or columns of matrices.
    """
    if x.shape[0] > MAX_ROWS:
        return f"{x.shape[0]} rows (at most {MAX_ROWS})"
    if len(kernels) > _MAX_KERNELS:
        return f"{len(kernels)} matrices (at most {_MAX_KERNELS})"
    if any(kernel.dtype != x.dtype for kernel in kernels):
        return "matrices of another dtype than the rows"
    return unsupported_arrays(x=x)


def skinny_matmuls(
    x: Float[Array, "M K"] | Sequence[Float[Array, "M _"]],
    kernels: Sequence[Float[Array, "_ _"] | KernelColumns],
    *,
    is_gated: bool = False,
    added: Float[Array, "M _"] | None = None,
    epilogues: Sequence[Epilogue | None] | None = None,
    config: SkinnyGemmConfig | None = None,
) -> tuple[Float[Array, "M _"], ...]:
    """`x @ W` for each of some matrices, accumulated in float32; it has no derivative.

    Args:
        x: rows, bfloat16 or float32, at most 512; or those of each matrix, of one dtype and number.
        kernels: matrices in `x`'s dtype, or columns of one, at most 8; each has its own N, and the K of its rows.
        is_gated: of two matrices of one shape, `silu(x W_0) * (x W_1)` is the only result.
        added: of one matrix, the result is `added + x @ W`; in `x`'s dtype.
        epilogues: of each result, what it ends as, or None for the product itself; neither gated nor added to.
        config: how the call is cut into programs.

    Returns:
        The results in `x`'s dtype, each rounded once; those with an epilogue in float32.

    Raises:
        NotImplementedError: there is an `unsupported_reason`.
        ValueError: arguments do not go together.
    """
    xs = list(x) if isinstance(x, Sequence) else [x]
    which = tuple(range(len(xs))) if isinstance(x, Sequence) else (0,) * len(kernels)
    epilogues = [None] * len(kernels) if epilogues is None else list(epilogues)
    _check([xs[n] for n in which], kernels, epilogues, is_gated or added is not None)
    columns = tuple(kernel.shape[1] for kernel in kernels)
    has_epilogue = any(epilogue is not None for epilogue in epilogues)
    s = config or choose_config(len(xs[0]), max(kernel.shape[0] for kernel in kernels), columns, is_gated)
    if has_epilogue and config is None:
        s = dataclasses.replace(s, splits=1)
    if s.splits > 1 and (has_epilogue or (len(kernels) > 1 and not is_gated)):
        what = "an epilogue" if len(kernels) == 1 else f"{len(kernels)} results"
        raise ValueError(f"skinny_matmuls: config.splits is {s.splits}, expected 1 with {what}")
    if s.splits == 1:
        return tuple(_launch(xs, which, kernels, epilogues, added, is_gated, s))
    parts = _launch(xs, which, kernels, epilogues, None, is_gated, s)
    first, *second = (functools.reduce(operator.add, part) for part in parts)  # one loop for XLA, in a fixed order
    if second:
        first = jax.nn.silu(first) * second[0]
    return ((first if added is None else first + added.astype(jnp.float32)).astype(xs[0].dtype),)


def num_partials(rows: int, inner: int, columns: int) -> int:
    """Parts of the inner axis that one product is summed in: `skinny_matmul_partials` gives these, if more than one."""
    return choose_config(rows, inner, (columns,)).splits


def skinny_matmul_partials(
    x: Float[Array, "M K"], kernel: Float[Array, "K N"], *, config: SkinnyGemmConfig | None = None
) -> Float[Array, "S M N"]:
    """`x @ W` as sums over S parts of the inner axis, float32, for what adds them up; it has no derivative.

    Args:
        x: rows, bfloat16 or float32, at most 512.
        kernel: a matrix in `x`'s dtype.
        config: how the call is cut into programs, with `splits` above 1.

    Returns:
        The parts, `num_partials` of them where no schedule is given.

    Raises:
        NotImplementedError: there is an `unsupported_reason`.
        ValueError: arguments do not go together, or the schedule has one part.
    """
    _check([x], [kernel], [None], False)
    s = config or choose_config(len(x), len(kernel), (kernel.shape[1],))
    if s.splits == 1:
        raise ValueError("skinny_matmul_partials: config.splits is 1, expected above 1: see num_partials")
    return _launch([x], (0,), [kernel], [None], None, False, s)[0]


def _launch(
    xs: Sequence[Array],
    which: tuple[int, ...],
    kernels: Sequence[Array | KernelColumns],
    epilogues: Sequence[Epilogue | None],
    added: Array | None,
    is_gated: bool,
    s: SkinnyGemmConfig,
) -> list[Array]:
    """What the kernel gives: results, or with several `splits` the parts of each product, `[splits, M, N]` float32."""
    rows, dtype = xs[0].shape[0], xs[0].dtype
    parts = [
        kernel if isinstance(kernel, KernelColumns) else KernelColumns(kernel, 0, kernel.shape[1]) for kernel in kernels
    ]
    inner, columns = (tuple(kernel.shape[axis] for kernel in kernels) for axis in (0, 1))
    bounds = tuple(
        epilogue.bound if epilogue is not None and epilogue.log_rate is None else None for epilogue in epilogues
    )
    blocks = (s.block_rows, s.block_columns, s.block_inner)
    firsts = tuple(part.first for part in parts)
    cut = Cut(rows, inner, columns, firsts, which, bounds, *blocks, is_gated=is_gated, splits=s.splits)
    arrays: dict[str, Array | None] = {"added": added, **{f"x_{n}": own for n, own in enumerate(xs)}}
    for i, (part, epilogue) in enumerate(zip(parts, epilogues)):
        log_rate, bias = (None, None) if epilogue is None else (epilogue.log_rate, epilogue.bias)
        arrays |= {f"kernel_{i}": part.whole, f"log_rate_{i}": log_rate, f"bias_{i}": bias}
    if s.splits == 1:
        dtypes = [dtype if epilogue is None else jnp.float32 for epilogue in epilogues]
        results = [jax.ShapeDtypeStruct((rows, n), d) for n, d in zip(columns[:1] if is_gated else columns, dtypes)]
    else:
        results = [jax.ShapeDtypeStruct((s.splits, rows, n), jnp.float32) for n in columns]
    found = call(
        skinny_matmuls_kernel,
        "skinny_matmuls",
        (cdiv(rows, s.block_rows), sum(cut.blocks), s.splits),
        {name: whole(array) for name, array in pvary_together(arrays).items()},
        {f"y_{i}": whole(y) for i, y in enumerate(results)},
        KernelConfig(num_warps=s.num_warps, num_stages=s.num_stages),
        cut=cut,
    )
    return list(found.values())  # type: ignore[arg-type]


def _check(
    xs: Sequence[Array],
    kernels: Sequence[Array | KernelColumns],
    epilogues: Sequence[Epilogue | None],
    is_combined: bool,
) -> None:
    """Raises what `skinny_matmuls` raises for wrong arrays."""
    if not len(xs) == len(kernels) == len(epilogues):
        raise ValueError(
            f"skinny_matmuls: {len(xs)} inputs and {len(epilogues)} epilogues, expected {len(kernels)}, one of each "
            "kernel"
        )
    for i, (x, kernel, epilogue) in enumerate(zip(xs, kernels, epilogues)):
        reason = unsupported_reason(x, *kernels)
        if epilogue is not None and reason is None:
            reason = unsupported_arrays(log_rate=epilogue.log_rate, bias=epilogue.bias)
        refuse("skinny_matmuls", reason)
        if x.shape != (len(xs[0]), kernel.shape[0]):
            raise ValueError(
                f"skinny_matmuls: x of kernel {i} has shape {x.shape}, expected {(len(xs[0]), kernel.shape[0])}"
            )
        if epilogue is not None and is_combined:
            raise ValueError("skinny_matmuls: epilogues is given with is_gated or added, expected None")
        if epilogue is None or (epilogue.log_rate is None and epilogue.bias is None):
            continue
        n, rates, biases = (
            kernel.shape[1],
            *(None if v is None else v.shape for v in (epilogue.log_rate, epilogue.bias)),
        )
        if biases != (n,) or rates is None or len(rates) != 1 or n % max(rates[0], 1):
            raise ValueError(
                f"skinny_matmuls: epilogue {i} has log_rate of shape {rates} and bias of shape {biases}, expected [R], "
                f"a divisor of {n}, and [{n}]"
            )

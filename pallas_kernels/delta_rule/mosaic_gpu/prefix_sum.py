"""Prefix sums over a chunk's tokens: over the rows of each warp by shuffles, then those of the warps before it."""

from collections.abc import Callable, Sequence
from typing import Any

from jax import Array
from jax import numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import vector

from pallas_kernels.common.kernel_shape import CHUNK
from pallas_kernels.common.mosaic_gpu import WARPS, fence_smem, interpreted, row_numbers
from pallas_kernels.common.mosaic_gpu_bands import BAND

_ROWS = plgpu.Layout.WGMMA.reduce(1)


def prefix_sums(m: Any, parts: Sequence[Array], in_warp: Any, join: Callable[[], None] = fence_smem) -> list[Array]:
    """Inclusive prefix sums of numbers `[C]` float32, one for each row.

    Args:
        m: the loop's variable, see `row_numbers`.
        parts: the numbers, of each sum that is wanted.
        in_warp: shared memory for as many float32 numbers; the warps' own sums are left there.
        join: waits for all threads of the warpgroup.
    """
    found = [sums_by_warp(x) for x in parts]
    for i, x in enumerate(found):
        in_warp.at[pl.ds(i * CHUNK, CHUNK)][...] = x
    join()
    rows = row_numbers(m)
    for i, x in enumerate(found):
        for last in range(BAND - 1, CHUNK - 1, BAND):  # of each warp but the last
            x = x + jnp.where(rows > last, in_warp[i * CHUNK + last], 0.0)
        found[i] = x
    return found


def sums_by_warp(x: Array) -> Array:
    """Inclusive prefix sums within each warp's 16 rows of one number for each row, `[C]` float32."""
    if interpreted():
        return jnp.cumsum(x.reshape(WARPS, -1), axis=1).reshape(x.shape)

    @plgpu.inline_mgpu(arg_types=(_ROWS,), return_type=plgpu.ShapeDtypeStruct(x.shape, jnp.float32, layout=_ROWS))
    def scan(_, rows):
        singles = rows.registers.flatten()
        numbers = [vector.extract(x, [], ir.DenseI64ArrayAttr.get([0])) for x in singles]
        number = ir.F32Type.get()
        found = mgpu.utils.inline_ptx(warp_scan(), *numbers, result_types=[number] * len(numbers), convergent=True)
        shaped = rows.registers.copy()
        shaped.flat[:] = [vector.from_elements(singles[0].type, [x]) for x in found]
        return mgpu.FragmentedArray(_registers=shaped, _layout=rows.layout, _is_signed=None)

    return scan(x)


def warp_scan() -> str:
    """Machine code (PTX) of it: threads `4 g` to `4 g + 3` of a warp hold the numbers of rows `g` and `g + 8`."""
    lines = [
        ".reg .pred before;",
        ".reg .b32 lane;",
        ".reg .f32 upper, lower, other;",
        "mov.u32 lane, %laneid;",
        "mov.f32 upper, $2;",
        "mov.f32 lower, $3;",
    ]
    for lanes in (4, 8, 16):
        lines.append(f"setp.ge.u32 before, lane, {lanes};")
        for half in ("upper", "lower"):
            lines.append(f"shfl.sync.up.b32 other, {half}, {lanes}, 0, 0xffffffff;")
            lines.append(f"@before add.f32 {half}, {half}, other;")
    lines += [
        "shfl.sync.idx.b32 other, upper, 31, 31, 0xffffffff;",  # the sum of rows 0 to 7
        "mov.f32 $0, upper;",
        "add.f32 $1, lower, other;",
    ]
    return "{\n" + "\n".join(lines) + "\n}"

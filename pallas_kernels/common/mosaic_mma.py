"""Matrix products and copies in Mosaic GPU for cards without wgmma: `mma.sync` from registers, `cp.async`.

A program is one warpgroup, each of whose four warps holds 16 rows of a matrix of 64. A product has its left operand in
registers, the right one comes from shared memory, the same for all warps. Before Hopper threads copy to shared memory
themselves, 16 bytes at a time (`cp.async`), and wait for all but so many copies. From Hopper on Pallas has no such
copies: the copy engine takes their place (consumer Blackwell has it, without wgmma), and a barrier opens for each.

`pallas_kernels.common.mosaic_gpu` has what does not depend on that: layouts, loads, buffers and launches.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common.mosaic_gpu import fence_smem, interpreted, put, wait

_LEFT, _RIGHT, _TOTAL = (
    layout(jnp.bfloat16) for layout in (plgpu.Layout.MMA_LHS, plgpu.Layout.MMA_RHS, plgpu.Layout.MMA_ACC)
)
_SWIZZLE = 128


def threads_copy() -> bool:
    """Whether threads copy to shared memory, as on a card before Hopper and where kernels are interpreted."""
    return interpreted() or mgpu.utils.get_arch().major < 9


def begin_copy(source: Any, target: Any, arrived: Any) -> None:
    """Begins to copy from global to shared memory.

    Args:
        source: a contiguous row, or a matrix whose rows lie apart, with no other axis between.
        target: in shared memory.
        arrived: the barrier that opens when all is there; None where threads copy.
    """
    if arrived is None:
        plgpu.copy_gmem_to_smem(source, target, oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS)
    else:
        plgpu.copy_gmem_to_smem(source, target, arrived)


def wait_for_copies(running: int, *arrived: Any) -> None:
    """Waits until copies have ended and all threads are here: what they have read may then be copied over.

    Args:
        running: copies begun later than those that are awaited; a number known when the kernel is compiled.
        *arrived: barriers of those that are awaited; None each where threads copy.
    """
    if arrived[0] is None:
        plgpu.wait_gmem_to_smem(running)
        return
    for barrier in arrived:
        wait(barrier)
    fence_smem()


def sync_threads() -> None:
    """Waits until all threads are here: what they have stored to shared memory is there for the others to read."""
    if interpreted():
        return

    @plgpu.inline_mgpu()
    def all_threads(_):
        mgpu.utils.warpgroup_barrier()

    all_threads()


def load_left(ref: Any) -> Array:
    """A bfloat16 matrix of 64 rows from shared memory, as products take it on the left."""
    return plgpu.load(ref, layout=_LEFT)


def as_left(x: Array) -> Array:
    """A product's bfloat16 result, as another product takes it on the left; the same registers in another order."""
    if interpreted():
        return x

    @plgpu.inline_mgpu(arg_types=(_TOTAL,), return_type=plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=_LEFT))
    def reorder(_, matrix):
        left = _LEFT.to_mgpu()
        registers = matrix.registers.reshape(left.registers_shape(matrix.shape))
        return mgpu.FragmentedArray(_registers=registers, _layout=left, _is_signed=None)

    return reorder(x)


def multiply(total: Array, left: Array, right: Any) -> Array:
    """`total + left @ right`.

    Args:
        total: float32 `[64, N]`.
        left: bfloat16 `[64, K]`, from `load_left` or `as_left`.
        right: bfloat16 `[K, N]` in shared memory, or the transpose of one that lies there as `[N, K]`.
    """
    return plgpu.mma(total, left, plgpu.load(right, layout=_RIGHT))


def load_transposed(ref: Any) -> Array:
    """The transpose of a bfloat16 matrix in shared memory, in float32, spread as a product's result."""
    return plgpu.load(ref.T, layout=_TOTAL).astype(jnp.float32)


def store_transposed(ref: Any, x: Array) -> None:
    """Stores the transpose of a bfloat16 matrix in shared memory."""
    ref.T[...] = plgpu.layout_cast(x, plgpu.Layout.WGMMA_TRANSPOSED)


def store_rows(buffer: Any, target: Any) -> None:
    """Stores a bfloat16 matrix from shared memory to global memory, 16 bytes of a row to a thread."""
    layout = plgpu.Layout.SMEM_GMEM_COPY(buffer.shape, jnp.bfloat16, _SWIZZLE)
    put(target, plgpu.load(buffer, layout=layout))

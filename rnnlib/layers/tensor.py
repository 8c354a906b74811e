"""Tensor parallelism: each device has some of the heads, channels or rows of a table, and sums go over all devices.

A layer that is built within `tensor_shards(n)`, or within `shard_map` over n devices of the axis "tensor", is one of n
equal shards. Its parameters have the whole layer's names. Some of them are split into n parts along one axis, and the
i-th device has the i-th part. Inputs and outputs are whole.

All devices compute the same loss. Within `jax.shard_map(check_vma=False)` each device differentiates its own copy, and
gets a part of the gradient. So each device divides the loss by n, and the gradients of parameters that are whole on
every device are summed over the axis.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from flax import nnx
from jax import Array, lax
from jax.sharding import AbstractMesh, AxisType, get_abstract_mesh, use_abstract_mesh

TENSOR = "tensor"
"""The mesh axis over which layers are sharded."""

_NO_MESH = AbstractMesh((), ())


@contextlib.contextmanager
def tensor_shards(count: int) -> Iterator[None]:
    """Layers that are built within are one of `count` shards, for use within `shard_map` over the axis "tensor".

    Layers ask JAX's own mesh, which within such a `shard_map` has the axis already. Elsewhere it is set here, for
    shapes as `nnx.eval_shape` finds them: arrays on such an axis are within a `shard_map` only.
    """
    if current_tp_size() == count:
        yield
        return
    device = get_abstract_mesh().abstract_device
    alone = AbstractMesh((count,), (TENSOR,), axis_types=(AxisType.Manual,), abstract_device=device)
    with use_abstract_mesh(_NO_MESH), use_abstract_mesh(alone):  # JAX refuses a mesh of another size within one
        yield


def current_tp_size() -> int:
    """The number of devices that a layer is sharded over if it is built now; 1 outside of `tensor_shards`."""
    mesh = get_abstract_mesh()
    return mesh.shape[TENSOR] if TENSOR in mesh.manual_axes else 1


def shard_size(size: int, what: str) -> int:
    """A device's part of `size`.

    Args:
        size: of the whole.
        what: that size's name, and the flag that sets it, for the message.

    Raises:
        ValueError: the size does not divide evenly.
    """
    count = current_tp_size()
    if size % count:
        raise ValueError(f"mesh.tensor={count}: does not divide {what}, {size}; expected a divisor of it")
    return size // count


def sum_over_shards(x: Array, tp_size: int) -> Array:
    """The sum of all shards' `x`, on each device."""
    return x if tp_size == 1 else lax.psum(x, TENSOR)


def first_of_shard(size: int, tp_size: int) -> Array | int:
    """The number of the first of this device's `size` heads, channels or rows."""
    return 0 if tp_size == 1 else lax.axis_index(TENSOR) * size


class RowParallelLinear(nnx.Linear):
    """A linear map whose input channels are sharded: each device multiplies its own, and the products are summed."""

    def __call__(self, inputs: Array, out_sharding: Any = None) -> Array:
        """Maps this device's `[..., F / n]` to the whole `[..., D]`."""
        bias = None if self.bias is None else self.bias[...]
        inputs, kernel, bias = self.promote_dtype((inputs, self.kernel[...], bias), dtype=self.dtype)
        dimensions = (((inputs.ndim - 1,), (0,)), ((), ()))
        y = lax.psum(self.dot_general(inputs, kernel, dimensions, precision=self.precision), TENSOR)
        return y if bias is None else y + bias


def row_parallel_linear(tp_size: int) -> type[nnx.Linear]:
    """The class of a linear map whose input channels are sharded over `tp_size` devices."""
    return nnx.Linear if tp_size == 1 else RowParallelLinear


def sharded_axis(whole: tuple[int, ...], shard: tuple[int, ...], count: int) -> int | None:
    """The axis along which an array is sharded over `count` devices, by the shapes; None if it is replicated.

    Raises:
        ValueError: They are of different arrays.
    """
    if whole == shard:
        return None
    differing = [i for i, (n, m) in enumerate(zip(whole, shard)) if n != m]
    axis = differing[0] if differing else 0
    expected = (*whole[:axis], whole[axis] // count, *whole[axis + 1 :]) if whole else ()
    if shard != expected:
        raise ValueError(f"a shard has shape {shard}, expected an axis of {whole} over {count}")
    return axis

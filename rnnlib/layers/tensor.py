"""Layers shared out over devices: each has some of the heads, channels or rows of a table, and sums go over all.

A layer that is built within `tensor_shares(n)` is one of n equal shares. Its parameters have the whole layer's names.
Some of them are split into n parts along one axis, and the i-th device has the i-th part. Inputs and outputs are whole.

All devices compute the same loss. Within `jax.shard_map(check_vma=False)` each device differentiates its own copy, and
gets a part of the gradient. So each device divides the loss by n, and the gradients of parameters that are whole on
every device are summed over the axis.
"""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

from flax import nnx
from jax import Array, lax

TENSOR = "tensor"
"""The mesh axis over which layers are shared out."""

_SHARES: contextvars.ContextVar[int] = contextvars.ContextVar("tensor_shares", default=1)


@contextlib.contextmanager
def tensor_shares(count: int) -> Iterator[None]:
    """Layers that are built within are one of `count` shares, for use within `shard_map` over the axis "tensor"."""
    token = _SHARES.set(count)
    try:
        yield
    finally:
        _SHARES.reset(token)


def current_shares() -> int:
    """How many devices share a layer that is built now; 1 outside of `tensor_shares`."""
    return _SHARES.get()


def share_of(size: int, what: str) -> int:
    """A device's part of `size`.

    Args:
        size: of the whole.
        what: that size's name, and the flag that sets it, for the message.

    Raises:
        ValueError: the size does not divide evenly.
    """
    count = current_shares()
    if size % count:
        raise ValueError(f"mesh.tensor={count}: does not divide {what}, {size}; expected a divisor of it")
    return size // count


def sum_over_shares(x: Array, shares: int) -> Array:
    """The sum of all shares' `x`, on each device."""
    return x if shares == 1 else lax.psum(x, TENSOR)


def first_of_share(size: int, shares: int) -> Array | int:
    """The number of the first of this device's `size` heads, channels or rows."""
    return 0 if shares == 1 else lax.axis_index(TENSOR) * size


class SummedLinear(nnx.Linear):
    """A linear map whose inputs are shared out over devices: each multiplies its own, and the products are summed."""

    def __call__(self, inputs: Array, out_sharding: Any = None) -> Array:
        """Maps this device's `[..., F / n]` to the whole `[..., D]`."""
        bias = None if self.bias is None else self.bias[...]
        inputs, kernel, bias = self.promote_dtype((inputs, self.kernel[...], bias), dtype=self.dtype)
        dimensions = (((inputs.ndim - 1,), (0,)), ((), ()))
        y = lax.psum(self.dot_general(inputs, kernel, dimensions, precision=self.precision), TENSOR)
        return y if bias is None else y + bias


def linear_of_shares(shares: int) -> type[nnx.Linear]:
    """The class of a linear map whose input channels `shares` devices share out: it sums over them."""
    return nnx.Linear if shares == 1 else SummedLinear


def shared_axis(whole: tuple[int, ...], share: tuple[int, ...], count: int) -> int | None:
    """The axis along which one of `count` devices has a share of an array, by their shapes; None where it has all.

    Raises:
        ValueError: They are of different arrays.
    """
    if whole == share:
        return None
    differing = [i for i, (n, m) in enumerate(zip(whole, share)) if n != m]
    axis = differing[0] if differing else 0
    expected = (*whole[:axis], whole[axis] // count, *whole[axis + 1 :]) if whole else ()
    if share != expected:
        raise ValueError(f"a share has shape {share}, expected an axis of {whole} over {count}")
    return axis

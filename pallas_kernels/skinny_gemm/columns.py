"""Columns of a matrix, which a matmul reads where they are."""

import dataclasses
import functools
from typing import Any

import jax
from jax import Array
from jaxtyping import Float


@functools.partial(jax.tree_util.register_dataclass, data_fields=("whole",), meta_fields=("first", "size"))
@dataclasses.dataclass(frozen=True)
class KernelColumns:
    """Some columns of a matrix, which a matmul reads where they are.

    Attributes:
        whole: the matrix `[K, _]`.
        first: its first column that counts.
        size: how many columns count.
    """

    whole: Float[Array, "K _"]
    first: int
    size: int

    @property
    def shape(self) -> tuple[int, int]:
        """`[K, N]`."""
        return self.whole.shape[0], self.size

    @property
    def dtype(self) -> Any:
        """The matrix's."""
        return self.whole.dtype

    def array(self) -> Float[Array, "K N"]:
        """The columns as an array of their own."""
        return self.whole[:, self.first : self.first + self.size]

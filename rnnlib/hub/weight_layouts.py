"""Layouts: conversions between the arrays of a published file and those of a model, which hold the same numbers.

A layout converts in both directions. Writing arrays and reading them back gives the same arrays bit by bit. The shapes
of the file's arrays follow from the shapes of the model's.
"""

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array


@dataclasses.dataclass(frozen=True)
class Layout(abc.ABC):
    """A conversion between arrays of a file and arrays of a model, by reordering numbers."""

    @abc.abstractmethod
    def read(self, arrays: Sequence[Array], like: Sequence[Any], part: Any) -> list[Array]:
        """The model's arrays from the file's.

        Args:
            arrays: the file's arrays, in the row's order.
            like: shapes of the model's arrays, in the row's order.
            part: the block that the arrays belong to, without values; the whole model for arrays outside of blocks.
        """

    @abc.abstractmethod
    def write(self, arrays: Sequence[Array], part: Any) -> list[Array]:
        """The file's arrays from the model's; arguments as in `read`."""


class OneToOne(Layout):
    """A layout that converts one array of the file to one array of the model."""

    @abc.abstractmethod
    def read_one(self, array: Array, like: Any) -> Array:
        """The model's array."""

    @abc.abstractmethod
    def write_one(self, array: Array) -> Array:
        """The file's array."""

    def read(self, arrays: Sequence[Array], like: Sequence[Any], part: Any) -> list[Array]:
        """Each array converted by itself."""
        return [self.read_one(array, shape) for array, shape in zip(arrays, like, strict=True)]

    def write(self, arrays: Sequence[Array], part: Any) -> list[Array]:
        """Each array converted by itself."""
        return [self.write_one(array) for array in arrays]


class Same(OneToOne):
    """No change."""

    def read_one(self, array: Array, like: Any) -> Array:
        """The array."""
        return array

    def write_one(self, array: Array) -> Array:
        """The array."""
        return array


class Transposed(OneToOne):
    """The last two axes change places: PyTorch's `[out, in]` of a linear map is `[in, out]` here."""

    def read_one(self, array: Array, like: Any) -> Array:
        """`[..., in, out]`."""
        return jnp.swapaxes(array, -1, -2)

    def write_one(self, array: Array) -> Array:
        """`[..., out, in]`."""
        return jnp.swapaxes(array, -1, -2)


class Filter(OneToOne):
    """PyTorch's depthwise filter `[C, 1, W]` is `[W, C]` here. In both, the last tap applies to the current token."""

    def read_one(self, array: Array, like: Any) -> Array:
        """`[W, C]`."""
        return array[:, 0].T

    def write_one(self, array: Array) -> Array:
        """`[C, 1, W]`."""
        return array.T[:, None]


@dataclasses.dataclass(frozen=True)
class Reshaped(OneToOne):
    """The file's array has another shape.

    Attributes:
        shape: the shape in the file; one axis may be -1, as in `reshape`.
    """

    shape: tuple[int, ...]

    def read_one(self, array: Array, like: Any) -> Array:
        """The array in the model's shape."""
        return array.reshape(like.shape)

    def write_one(self, array: Array) -> Array:
        """The array in the file's shape."""
        return array.reshape(self.shape)


@dataclasses.dataclass(frozen=True)
class Joined(Layout):
    """One array of the file is several of the model, concatenated along its first axis.

    Attributes:
        each: the layout of each of the model's arrays.
    """

    each: OneToOne

    def read(self, arrays: Sequence[Array], like: Sequence[Any], part: Any) -> list[Array]:
        """The model's arrays, split from the file's."""
        pieces = [jax.eval_shape(self.each.write_one, shape).shape[0] for shape in like]
        ends = [sum(pieces[: i + 1]) for i in range(len(pieces))]
        starts = [0, *ends[:-1]]
        return [self.each.read_one(arrays[0][a:b], shape) for a, b, shape in zip(starts, ends, like)]

    def write(self, arrays: Sequence[Array], part: Any) -> list[Array]:
        """The file's array, concatenated from the model's."""
        return [jnp.concatenate([self.each.write_one(array) for array in arrays])]


@dataclasses.dataclass(frozen=True)
class Interleaved(Layout):
    """One array of the file is several of the model, interleaved by head along its first axis.

    It has the first head's rows of each of the model's arrays, then the second head's rows of each, and so on.

    Attributes:
        each: the layout of each of the model's arrays.
        heads: the field of the mixer's `MixerShape` with the number of heads, `"key_heads"` or `"value_heads"`.
    """

    each: OneToOne
    heads: str

    def read(self, arrays: Sequence[Array], like: Sequence[Any], part: Any) -> list[Array]:
        """The model's arrays, each gathered from all heads."""
        heads = getattr(part.mixer.shape, self.heads)
        rows = [jax.eval_shape(self.each.write_one, shape).shape[0] // heads for shape in like]
        ends = [sum(rows[: i + 1]) for i in range(len(rows))]
        array = arrays[0].reshape(heads, ends[-1], *arrays[0].shape[1:])
        pieces = [array[:, end - count : end] for end, count in zip(ends, rows)]
        flat = [piece.reshape(-1, *piece.shape[2:]) for piece in pieces]
        return [self.each.read_one(piece, shape) for piece, shape in zip(flat, like)]

    def write(self, arrays: Sequence[Array], part: Any) -> list[Array]:
        """The file's array, with all heads concatenated."""
        heads = getattr(part.mixer.shape, self.heads)
        written = [self.each.write_one(array) for array in arrays]
        pieces = [array.reshape(heads, array.shape[0] // heads, *array.shape[1:]) for array in written]
        joined = jnp.concatenate(pieces, axis=1)
        return [joined.reshape(-1, *joined.shape[2:])]


@dataclasses.dataclass(frozen=True)
class PairsApart(Layout):
    """Rotated channels at the end of latent attention's rows are in other pairs.

    In the file channels `2 i` and `2 i + 1` of these are rotated together; in the model, channels `i` and `i + R / 2`.

    Attributes:
        each: the layout of the array.
        by_head: whether each head has rotated channels, at the end of its rows; else the whole array has.
    """

    each: OneToOne
    by_head: bool

    def read(self, arrays: Sequence[Array], like: Sequence[Any], part: Any) -> list[Array]:
        """The model's array, first the even channels, then the odd ones."""
        size = part.mixer.shared_size
        order = [*range(0, size, 2), *range(1, size, 2)]
        return [self.each.read_one(self._reordered(arrays[0], order, part), like[0])]

    def write(self, arrays: Sequence[Array], part: Any) -> list[Array]:
        """The file's array, even and odd channels in turn."""
        half = part.mixer.shared_size // 2
        order = [channel for i in range(half) for channel in (i, half + i)]
        return [self._reordered(self.each.write_one(arrays[0]), order, part)]

    def _reordered(self, array: Array, order: Sequence[int], part: Any) -> Array:
        heads = part.mixer.shape.value_heads if self.by_head else 1
        rows = array.reshape(heads, array.shape[0] // heads, *array.shape[1:])
        kept = rows.shape[1] - len(order)
        places = jnp.asarray([*range(kept), *(kept + channel for channel in order)])
        return jnp.take(rows, places, axis=1).reshape(array.shape)


@dataclasses.dataclass(frozen=True)
class StepsFirst(Layout):
    """Rows of several steps a token: step by step, then head by head in the file; the other way round in the model.

    Attributes:
        each: the layout of the array.
    """

    each: OneToOne

    def read(self, arrays: Sequence[Array], like: Sequence[Any], part: Any) -> list[Array]:
        """The model's array, a head's steps next to each other."""
        steps = part.mixer.config.steps
        return [self.each.read_one(self._swapped(arrays[0], steps, self._heads(part)), like[0])]

    def write(self, arrays: Sequence[Array], part: Any) -> list[Array]:
        """The file's array, a step's heads next to each other."""
        steps = part.mixer.config.steps
        return [self._swapped(self.each.write_one(arrays[0]), self._heads(part), steps)]

    @staticmethod
    def _heads(part: Any) -> int:
        return part.mixer.shape.value_heads

    @staticmethod
    def _swapped(array: Array, outer: int, inner: int) -> Array:
        rows = array.reshape(outer, inner, -1, *array.shape[1:])
        return jnp.swapaxes(rows, 0, 1).reshape(array.shape)


@dataclasses.dataclass(frozen=True)
class EqualParts(Layout):
    """The file has the concatenation of the model's arrays, split again into as many parts of equal size.

    The last part may be shorter.

    Attributes:
        each: the layout of each of the model's arrays.
    """

    each: OneToOne

    def read(self, arrays: Sequence[Array], like: Sequence[Any], part: Any) -> list[Array]:
        """The parts concatenated, and split where the model's arrays end."""
        return Joined(self.each).read([jnp.concatenate(arrays)], like, part)

    def write(self, arrays: Sequence[Array], part: Any) -> list[Array]:
        """The parts of equal size."""
        joined = Joined(self.each).write(arrays, part)[0]
        size = -(-joined.shape[0] // len(arrays))
        return [joined[i * size : (i + 1) * size] for i in range(len(arrays))]


@dataclasses.dataclass(frozen=True)
class Stacked(Layout):
    """Several arrays of the file are one of the model, stacked along a new first axis.

    Attributes:
        each: the layout of each entry along that axis.
    """

    each: OneToOne

    def read(self, arrays: Sequence[Array], like: Sequence[Any], part: Any) -> list[Array]:
        """The stacked array."""
        entry = jax.ShapeDtypeStruct(like[0].shape[1:], like[0].dtype)
        return [jnp.stack([self.each.read_one(array, entry) for array in arrays])]

    def write(self, arrays: Sequence[Array], part: Any) -> list[Array]:
        """The entries of the stacked array."""
        return [self.each.write_one(entry) for entry in arrays[0]]


@dataclasses.dataclass(frozen=True)
class SplitRows(Layout):
    """Several arrays of the file are the rows of one of the model.

    Attributes:
        shape: of each of the file's arrays; one axis may be -1, as in `reshape`.
    """

    shape: tuple[int, ...]

    def read(self, arrays: Sequence[Array], like: Sequence[Any], part: Any) -> list[Array]:
        """The rows as one array."""
        return [jnp.stack([array.reshape(like[0].shape[1:]) for array in arrays])]

    def write(self, arrays: Sequence[Array], part: Any) -> list[Array]:
        """The rows."""
        return [entry.reshape(self.shape) for entry in arrays[0]]


class JoinedExperts(Layout):
    """One array `[E, 2 F, D]` of the file is two arrays `[E, D, F]` of the model, transposed and concatenated."""

    def read(self, arrays: Sequence[Array], like: Sequence[Any], part: Any) -> list[Array]:
        """The two halves."""
        return [jnp.swapaxes(half, 1, 2) for half in jnp.split(arrays[0], 2, axis=1)]

    def write(self, arrays: Sequence[Array], part: Any) -> list[Array]:
        """The concatenation."""
        return [jnp.concatenate([jnp.swapaxes(array, 1, 2) for array in arrays], axis=1)]


SAME = Same()
TRANSPOSED = Transposed()
FILTER = Filter()

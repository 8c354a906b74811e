"""Programs that go over listed places of a grid, where one for each place would mostly find nothing to do."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jax import Array, lax
from jax.experimental import pallas as pl


class Window:
    """A part of an array in memory as a reference of its own, which can be loaded, stored and taken parts of.

    Attributes:
        shape: the part's.
        dtype: the array's.
    """

    def __init__(self, ref: Any, index: tuple[Any, ...]):
        """Of each axis `index` has a number, or a first index and a size."""
        self._ref, self._index = ref, index
        self.shape = tuple(i[1] for i in index if isinstance(i, tuple))
        self.dtype = ref.dtype

    @property
    def at(self) -> "_Parts":
        """Windows of parts: `window.at[index]`."""
        return _Parts(self)

    @property
    def ref(self) -> Any:
        """Pallas' reference to the part."""
        return self._ref.at[tuple(pl.ds(*i) if isinstance(i, tuple) else i for i in self._index)]

    def __getitem__(self, part: Any) -> Array:
        return self.at[part].ref[...]

    def __setitem__(self, part: Any, value: Array) -> None:
        self.at[part].ref[...] = value


@dataclass(frozen=True)
class _Parts:
    window: Window

    def __getitem__(self, part: Any) -> Window:
        """The window of a part: a number, `pl.ds` or a full slice of each axis, or an ellipsis."""
        left = [] if part is Ellipsis else list(part if isinstance(part, tuple) else (part,))
        index = []
        for i in self.window._index:
            j = left.pop(0) if isinstance(i, tuple) and left else slice(None)
            if not isinstance(i, tuple) or isinstance(j, slice):
                index.append(i)
            elif isinstance(j, pl.Slice):
                index.append((i[0] + j.start, j.size))
            else:
                index.append(i[0] + j)
        return Window(self.window._ref, tuple(index))


@dataclass(frozen=True)
class Visits:
    """Places of a grid that programs go over, and these alone.

    Attributes:
        listed: how many are listed, then their numbers, `[1 + N]` int32 or longer.
        parts: places of the grid that each of the listed has.
        place: from a number and a part to indices of the grid.
        most: places that may be listed, with their parts.
        programs: how many there are, each of which takes every so manieth place; None for one a place. A program that
            loops keeps addresses and masks of its whole body in registers, which spills in those of many registers.
    """

    listed: Array
    parts: int
    place: Callable[[Any, Any], tuple[Any, ...]]
    most: int
    programs: int | None = None

    @property
    def grid(self) -> tuple[int]:
        """That of the programs."""
        return (self.most if self.programs is None else min(self.programs, self.most),)

    def walk(self, listed: Any, visit: Callable[[tuple[Any, ...]], None]) -> None:
        """A program's places, one after another.

        Args:
            listed: reference to the array.
            visit: from indices of the grid.
        """
        first, count, (stride,) = pl.program_id(0), self.parts * listed[0], self.grid

        def step(i, _):
            number = first + i * stride
            visit(self.place(listed[1 + lax.div(number, self.parts)], lax.rem(number, self.parts)))
            return _

        if self.programs is None:
            pl.when(first < count)(lambda: step(0, None))
        else:
            lax.fori_loop(0, lax.div(count - 1 - first + stride, stride), step, None)


def windows(refs: Sequence[Any], operands: Sequence[Any], at: tuple[Any, ...]) -> list[Window]:
    """What a program at these indices of the grid sees of whole arrays, by their operands (`backend.Operand`)."""

    def window(ref, operand):
        index = zip(operand.place(*at), operand.block)
        return Window(ref, tuple(i if size is None else (i * size, size) for i, size in index))

    return [window(ref, operand) for ref, operand in zip(refs, operands)]

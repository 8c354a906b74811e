"""The input projection of a mixer: one kernel with named columns, and what the mixer's parts read of its product."""

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from pallas_kernels.common.platform import platform
from pallas_kernels.common.vma import pvary_together
from rnnlib.layers.base import MixerShape
from rnnlib.layers.linear import LowRank, can_join, is_plain, rows_by_matrix
from rnnlib.ops.sharding import is_split
from rnnlib.ops.skinny_gemm import (
    Epilogue,
    KernelColumns,
    linear_product,
    row_product,
    skinny_kernel_supports,
    skinny_matmuls,
)

_MATMULS_OF_A_LAUNCH = 8
_NARROW = 512  # Most columns that share a kernel with queries, keys and values: they are copied out of the product.
_MULTIPLE = 64  # A shared kernel has a multiple of so many columns, so that rows begin where large loads may.


class ColumnReader:
    """A part of a mixer that reads columns of its input projection.

    The part builds the maps of its columns, since it knows their sizes, and gives them away: the mixer's
    `InputProjection` takes them over, and calls the part with a `ProjectedInput`.
    """

    def read_columns(self, **maps: nnx.Linear | LowRank) -> None:
        """Says by name which maps of the mixer's input the part reads, as `MixerShape.project` makes them."""
        self.maps = nnx.Dict(maps)

    def take_maps(self) -> dict[str, Any]:
        """The maps of `read_columns` by name, and those of parts within, which then no longer have them."""
        own = getattr(self, "maps", None)
        if own is not None:
            del self.maps
        return columns_of(*self._parts_within()) | ({} if own is None else dict(own.items()))

    def epilogues(self) -> Mapping[str, Epilogue]:
        """Functions of columns, by name, that a matmul of few rows computes in its own kernel.

        The part finds the result as `inputs.epilogue(name)`. That is None for many rows: the part then computes it from
        `inputs[name]`. Those of parts within are taken over.
        """
        return epilogues_of(*self._parts_within())

    def _parts_within(self) -> list["ColumnReader"]:
        return [part for part in vars(self).values() if isinstance(part, ColumnReader)]


def with_prefix(prefix: str, entries: Mapping[str, Any]) -> dict[str, Any]:
    """Maps or epilogues of a part within a part, which reads them from `inputs.under(prefix)`."""
    return {prefix + name: entry for name, entry in entries.items()}


def columns_of(*parts: Any) -> dict[str, Any]:
    """The maps of parts, which they give away, by the names of their columns.

    Raises:
        ValueError: two parts name the same column.
    """
    maps: dict[str, Any] = {}
    for part in parts:
        own = part.take_maps() if isinstance(part, ColumnReader) else {}
        for name in own.keys() & maps.keys():
            raise ValueError(f"{type(part).__name__}: column {name!r} is another part's, expected a name of its own")
        maps |= own
    return maps


def shared_columns(first: Sequence[str], maps: Mapping[str, Any]) -> list[str]:
    """Columns that share a matmul: the `first` ones, whose order counts, and all narrow ones.

    A bias is added to a column of its own. Several narrow columns share one without `first` too: the gradients of their
    input, as wide as the input each, then are one and not a sum.
    """
    if any(maps[name].bias is not None for name in first):
        return []
    rest = [name for name in maps if name not in first]
    inner = {name: maps[name].down if isinstance(maps[name], LowRank) else maps[name] for name in rest}
    return [*first, *(name for name, own in inner.items() if own.bias is None and own.out_features <= _NARROW)]


def epilogues_of(*parts: Any) -> dict[str, Epilogue]:
    """The epilogues of parts, by the names of their columns."""
    return {name: e for part in parts if isinstance(part, ColumnReader) for name, e in part.epilogues().items()}


class InputProjection(nnx.Module):
    """The maps of a mixer's input, each known by the name of its columns.

    The columns in `kernel` `[D, N]` are one matmul. The metadata `columns` of that variable has the name, the first
    column and the number of each; the columns after the last are zeros, and nothing reads them. A column that is not in
    `kernel` has a map of its own: the attribute of its name, which any module that maps `[..., D]` to `[..., F]` may
    replace. `separate` takes a column out of the kernel.

    Attributes:
        shape: the mixer's sizes.
        names: of all columns.
        shared: names of the columns that share a matmul, in its order. `name.down` is the first map of a low rank.
        kernel: of the columns that are not separate; None without any.
        dot_general: what multiplies by the kernel, as that of `nnx.Linear`.
    """

    def __init__(
        self,
        shape: MixerShape,
        maps: Mapping[str, nnx.Linear | LowRank],
        *,
        shared: Sequence[str] = (),
        stores_shared: bool = True,
    ):
        """Takes maps over.

        Args:
            shape: the mixer's sizes.
            maps: of the input, by the names of their columns.
            shared: names of those that share a matmul, in the order of their columns.
            stores_shared: whether they share a kernel too. If not, their kernels are put together in each call for
                which that is faster.
        """
        self.shape = shape
        self.names = tuple(maps)
        for name, own in maps.items():
            setattr(self, name, own)
        self.shared = tuple(f"{name}.down" if isinstance(maps[name], LowRank) else name for name in shared)
        self.kernel: nnx.Param | None = nnx.data(None)
        self.dot_general: Any = linear_product
        if stores_shared and shape.tp_size == 1:  # a device's part of a shared kernel would be no set of heads
            self.fuse()

    def fuse(self) -> None:
        """Stores the columns of `shared` in one kernel, where their maps are still matmuls and nothing else."""
        kernels = self._stored()
        for key in self.shared:
            if key not in kernels and is_plain(self._map(key)):
                kernels[key] = self._map(key).kernel[...]
                self._set_map(key, None)
        self._store({key: kernels[key] for key in self.shared if key in kernels})

    def separate(self, *names: str) -> None:
        """Gives columns maps of their own, with the same values; without names, all columns."""
        kernels = self._stored()
        for key in [key for key in kernels if not names or key.removesuffix(".down") in names]:
            kernel = kernels.pop(key)
            own = self.shape.linear(*kernel.shape, rngs=nnx.Rngs(0), kernel_init=lambda *_, kernel=kernel: kernel)
            own.dot_general = self.dot_general
            self._set_map(key, own)
        self._store(kernels)

    @property
    def columns(self) -> tuple[tuple[str, int, int], ...]:
        """Of each column in `kernel`: its name, its first column, and how many there are."""
        return () if self.kernel is None else self.kernel.get_metadata()["columns"]

    def __call__(
        self, x: Float[Array, "*batch D"], epilogues: Mapping[str, Epilogue] | None = None
    ) -> "ProjectedInput":
        """Projects a mixer's input.

        Args:
            x: the input.
            epilogues: of columns by name, as the parts' `ColumnReader.epilogues`.
        """
        if x.size and skinny_kernel_supports(x, ()):
            return self._few_rows(x, {} if epilogues is None else epilogues)
        kernel, places = self._shared_kernel(x)
        if kernel is None:
            return ProjectedInput(x, self)
        given = x
        if self.kernel is None:
            # A product of narrow columns, which XLA would put into that of a wide one, and copy both out of it.
            given = jax.lax.optimization_barrier(x)
        columns = _slices
        if self.dot_general is not linear_product:
            fused = self.dot_general(given.astype(self.shape.dtype), kernel.astype(self.shape.dtype), rows_by_matrix(x))
        elif platform() == "gpu" and x.dtype == self.shape.dtype == jnp.bfloat16:
            fused = _matmul_of_stored(*pvary_together((given, kernel)))
            columns = _slices if self.kernel is not None else _narrow_slices
        else:
            fused = row_product(given.astype(self.shape.dtype), kernel.astype(self.shape.dtype))
        return ProjectedInput(x, self, columns(fused, places), fused=fused, places=places)

    def matmul(self, key: str, x: Float[Array, "*batch D"]) -> Float[Array, "*batch F"]:
        """One column of an input by itself; `name.down` is the first map of a low rank."""
        own = self._map(key)
        if own is not None:
            return own(x)
        x, kernel = nnx.nn.dtypes.promote_dtype((x, self._stored()[key]), dtype=self.shape.dtype)
        return self.dot_general(x, kernel, rows_by_matrix(x))

    def _few_rows(self, x: Array, epilogues: Mapping[str, Epilogue]) -> "ProjectedInput":
        """The projection of few rows: all first maps in one launch, and the second maps of low ranks in another."""
        first: list[_Matmul] = []
        if self.kernel is not None and x.dtype == self.shape.dtype:
            kernel = self.kernel[...].astype(x.dtype)
            first += [_Matmul(key, x, KernelColumns(kernel, *place)) for key, *place in self.columns]
        for name in self.names:
            key = f"{name}.down" if type(self._map(name)) is LowRank else name
            own = self._map(key)
            if is_plain(own) and own.dtype == x.dtype and own.in_features == x.shape[-1]:
                first.append(_Matmul(key, x, own.kernel[...].astype(x.dtype)))
        products, found = _launch(first, epilogues, x=x)
        raised = []
        for name in self.names:
            if (inner := products.get(f"{name}.down")) is None:
                continue
            up = self._map(f"{name}.up")
            if type(up) is nnx.Linear and up.dtype == x.dtype and up.in_features == inner.shape[-1]:
                raised.append(_Matmul(name, inner, up.kernel[...].astype(x.dtype), up.bias is not None))
        of_raised = _launch(raised, epilogues)
        return ProjectedInput(x, self, products | of_raised[0], found | of_raised[1])

    def _shared_kernel(self, x: Array) -> tuple[Array | None, tuple[tuple[str, int, int], ...]]:
        """The kernel of the columns that share a matmul, and their places; None where each map is called by itself."""
        if self.kernel is not None:
            return self.kernel[...], self.columns
        maps = {key: self._map(key) for key in self.shared}
        is_faster = platform() == "gpu" and x.dtype == self.shape.dtype == jnp.bfloat16
        if len(maps) < 2 or not is_faster or not can_join(x, list(maps.values())):
            return None, ()
        return _side_by_side({key: own.kernel[...] for key, own in maps.items()})

    def _stored(self) -> dict[str, Array]:
        """The kernel of each column in `kernel`."""
        return {} if self.kernel is None else _slices(self.kernel[...], self.columns)

    def _store(self, kernels: Mapping[str, Array]) -> None:
        kernel, columns = _side_by_side(kernels) if kernels else (None, ())
        self.kernel = nnx.data(None if kernel is None else nnx.Param(kernel, columns=columns))

    def _map(self, key: str) -> Any:
        """The map of a column, or the first map of a low rank."""
        name, _, part = key.partition(".")
        own = getattr(self, name)
        return getattr(own, part, None) if part else own

    def _set_map(self, key: str, own: nnx.Linear | None) -> None:
        name, _, part = key.partition(".")
        owner = getattr(self, name) if part else self
        setattr(owner, part or name, nnx.data(own))


def with_separate_columns(model: nnx.Module) -> nnx.Module:
    """The model, with a map for each column of its input projections.

    Tensor parallelism splits each of them by heads, as it cannot split a kernel of several.
    """
    graphdef, state = nnx.split(model)

    def separated(state: Any) -> Any:
        copy: Any = nnx.merge(graphdef, state)
        for _, module in nnx.iter_modules(copy):
            if isinstance(module, InputProjection):
                module.separate()
        return copy

    is_abstract = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(state))
    return nnx.eval_shape(separated, state) if is_abstract else separated(state)


@dataclasses.dataclass(frozen=True, eq=False)
class ProjectedInput:
    """A mixer's input and its projection, as the mixer's parts read it: `inputs["decay"]` is the column of this name.

    Attributes:
        x: the input itself `[B, T, D]`, for a part with maps of its own.
        projection: whose maps compute a column that is not among the products.
        products: of columns by name, without their biases. `name.down` is the product of a low rank's first map.
        epilogues: what a matmul of few rows has made of columns in its own kernel, float32.
        fused: the columns of the shared kernel as one array, for an operator that reads them in place; None without.
        places: of these columns: name, first column and number of each.
        prefix: of the names that a part within a part reads.
    """

    x: Float[Array, "B T D"]
    projection: InputProjection
    products: dict[str, Array] = dataclasses.field(default_factory=dict)
    epilogues: dict[str, Array] = dataclasses.field(default_factory=dict)
    fused: Float[Array, "B T N"] | None = None
    places: tuple[tuple[str, int, int], ...] = ()
    prefix: str = ""

    def __getitem__(self, name: str) -> Float[Array, "B T F"]:
        """A column `[B, T, F]`, in the compute dtype."""
        y, bias = self.product_and_bias(name)
        return y if bias is None else y + bias.astype(y.dtype)

    def product_and_bias(self, name: str) -> tuple[Float[Array, "B T F"], Float[Array, " F"] | None]:
        """A column without its bias, and the bias; None where it has none, or a module of your own adds it."""
        key = self.prefix + name
        own: Any = getattr(self.projection, key)
        last = own.up if type(own) is LowRank else own
        if key in self.products:
            return self.products[key], None if last is None or last.bias is None else last.bias[...]
        if own is None:  # no product: the matmul may have computed the column's epilogue alone
            return self.projection.matmul(key, self.x), None
        given = self.x
        if type(own) is LowRank:
            inner = self.products.get(f"{key}.down")
            given = self.projection.matmul(f"{key}.down", self.x) if inner is None else inner
        if type(last) is not nnx.Linear or last.bias is None:
            return last(given), None
        given, kernel = last.promote_dtype((given, last.kernel[...]), dtype=last.dtype)
        return last.dot_general(given, kernel, rows_by_matrix(given)), last.bias[...]

    def epilogue(self, name: str) -> Float[Array, "B T F"] | None:
        """The function of a column that the part asked for, float32; None where no kernel has computed it."""
        return self.epilogues.get(self.prefix + name)

    def under(self, prefix: str) -> "ProjectedInput":
        """The same for a part within a part, whose columns have the prefix."""
        return dataclasses.replace(self, prefix=self.prefix + prefix)

    def after(self, first: int, rest: Float[Array, "B T R"]) -> "ProjectedInput":
        """The same after an operator that has read the `first` columns of `fused`, and has given the `rest`."""
        places = tuple((key, start - first, size) for key, start, size in self.places if start >= first)
        return dataclasses.replace(self, products=_slices(rest, places), fused=None, places=())


@dataclasses.dataclass(frozen=True, eq=False)
class _Matmul:
    """A matmul of a launch: of a column, by what input and kernel, and whether a bias is still to be added."""

    key: str
    x: Array
    kernel: Array | KernelColumns
    has_bias: bool = False


def _launch(
    wanted: Sequence[_Matmul], epilogues: Mapping[str, Epilogue], *, x: Array | None = None
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Products and epilogues of columns, in as few launches as possible, where the kernel serves.

    Args:
        wanted: matmuls.
        epilogues: of columns by name.
        x: the mixer's input, if that is what all of them multiply. Its inner axis is so long that the programs of a
            single matmul share it, which none with an epilogue can: such a matmul is left to the column's map.
    """
    products: dict[str, Array] = {}
    found: dict[str, Array] = {}
    for some in itertools.batched(wanted, _MATMULS_OF_A_LAUNCH):
        own = [None if one.has_bias else epilogues.get(one.key) for one in some]
        own = [None if any(map(is_split, jax.tree.leaves(epilogue))) else epilogue for epilogue in own]
        is_left = len(some) == 1 and (own[0] is None or x is not None)
        if is_left and not isinstance(some[0].kernel, KernelColumns):
            continue
        if not all(skinny_kernel_supports(one.x, (one.kernel,)) for one in some):
            continue
        given = [one.x for one in some] if x is None else x
        results = skinny_matmuls(given, [one.kernel for one in some], epilogues=own)
        for one, epilogue, y in zip(some, own, results):
            (products if epilogue is None else found)[one.key] = y
    return products, found


def _side_by_side(kernels: Mapping[str, Array]) -> tuple[Array, tuple[tuple[str, int, int], ...]]:
    """Kernels as one, filled up with zeros, and the name, the first column and the number of columns of each."""
    ends = list(itertools.accumulate(kernel.shape[1] for kernel in kernels.values()))
    places = tuple((key, end - kernel.shape[1], kernel.shape[1]) for end, (key, kernel) in zip(ends, kernels.items()))
    one = next(iter(kernels.values()))
    zeros = jnp.zeros((one.shape[0], -ends[-1] % _MULTIPLE), one.dtype)
    return jnp.concatenate([*kernels.values(), zeros], axis=1), places


def _slices(array: Array, places: Sequence[tuple[str, int, int]]) -> dict[str, Array]:
    """Columns by name."""
    return {key: array[..., first : first + size] for key, first, size in places}


@jax.custom_vjp
def _matmul_of_stored(x: Array, kernel: Array) -> Array:
    """`x @ kernel` in `x`'s dtype; the kernel's gradient is not rounded to it."""
    return _rounded_matmul(x, kernel)


def _rounded_matmul(x: Array, kernel: Array) -> Array:
    return row_product(x, kernel.astype(x.dtype), preferred_element_type=x.dtype)


def _matmul_forward(x: Array, kernel: Array) -> tuple[Array, tuple[Array, Array]]:
    # The matmul itself and not the function above, in which policies of `jax.checkpoint` would not see it.
    return _rounded_matmul(x, kernel), (x, kernel)


def _matmul_backward(residuals: tuple[Array, Array], d_y: Array) -> tuple[Array, Array]:
    x, kernel = residuals
    d_x = row_product(d_y, kernel.astype(x.dtype).T, preferred_element_type=x.dtype)
    rows = tuple(range(x.ndim - 1))
    return d_x, jax.lax.dot_general(x, d_y, ((rows, rows), ((), ())), preferred_element_type=kernel.dtype)


_matmul_of_stored.defvjp(_matmul_forward, _matmul_backward)


def _narrow_slices(array: Array, places: Sequence[tuple[str, int, int]]) -> dict[str, Array]:
    """`_slices` of all columns in their order, whose gradients are arrays of their own before they are put together.

    XLA would compute each of them anew for every column that the sum of all has.
    """
    return dict(zip((key for key, _, _ in places), _in_order(tuple(size for _, _, size in places), array)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _in_order(sizes: tuple[int, ...], array: Array) -> tuple[Array, ...]:
    """The first columns, the next ones, and so on, by their numbers; those after the last are left out."""
    ends = itertools.accumulate(sizes)
    return tuple(array[..., end - size : end] for size, end in zip(sizes, ends))


def _in_order_forward(sizes: tuple[int, ...], array: Array) -> tuple[tuple[Array, ...], int]:
    return _in_order(sizes, array), array.shape[-1]


def _in_order_backward(sizes: tuple[int, ...], columns: int, gradients: tuple[Array, ...]) -> tuple[Array]:
    together = jnp.concatenate(jax.lax.optimization_barrier(gradients), axis=-1)
    return (jnp.pad(together, [(0, 0)] * (together.ndim - 1) + [(0, columns - sum(sizes))]),)


_in_order.defvjp(_in_order_forward, _in_order_backward)

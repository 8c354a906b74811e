"""Everything that is particular to Pallas on its Mosaic GPU backend; no other module here imports that backend.

A program's warpgroups share its shared memory and its barriers. One or two of them bring tiles there and take results
away, the others compute: a barrier says that a tile is there, another that it has been read and may be overwritten.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir

from pallas_kernels.common.kernel_shape import CHUNK
from pallas_kernels.common.platform import platform
from pallas_kernels.common.vma import vary_along, varying_axes

SIDE = 64
"""Rows of a matrix that one warpgroup holds."""

_MATRIX = plgpu.Layout.WGMMA
_ROWS, _COLUMNS = _MATRIX.reduce(1), _MATRIX.reduce(0)
_THREADS = 128  # of a warpgroup
WARPS = 4
"""Warps of a warpgroup, each of which has a number in what `maximum` and `total` pass on."""
_REDUCTION = 512  # float32 numbers that one warpgroup's sum over rows passes between its warps


def quotient(x: Any, n: int) -> Any:
    """`x // n` in the dtype of `x`, which is not negative."""
    return lax.div(x, jnp.asarray(n, x.dtype))


def remainder(x: Any, n: int) -> Any:
    """`x % n` likewise."""
    return lax.rem(x, jnp.asarray(n, x.dtype))


MATRIX_TRANSFORMS: tuple[Any, ...] = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))  # type: ignore[abstract]
"""How a bfloat16 matrix lies in shared memory."""


def matrix_buffer(*shape: int) -> Any:
    """Shared memory for a bfloat16 matrix that the copy engine or a product takes; the last axis is of 64 or 128."""
    return plgpu.SMEM(shape, jnp.bfloat16, transforms=MATRIX_TRANSFORMS)


def halved_buffer(*shape: int) -> Any:
    """Shared memory for a bfloat16 matrix that products take, and whose blocks of 32 columns are stored apart."""
    transforms = plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(64)  # type: ignore[abstract]
    return plgpu.SMEM(shape, jnp.bfloat16, transforms=transforms)


def wide_buffer(*shape: int) -> Any:
    """Shared memory for a float32 matrix that the copy engine takes; the last axis is of 64 or 128."""
    transforms = plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128)  # type: ignore[abstract]
    return plgpu.SMEM(shape, jnp.float32, transforms=transforms)


def either_buffer(*buffers: Any, by_group: bool = False) -> Any:
    """Shared memory for one of several buffers at a time: a reference that is taken apart into one for each.

    `by_group`: each warpgroup has a part of its own. The interpreter, which takes accesses of two warpgroups for a race
    wherever they are, then has memory for all.
    """
    return buffers if by_group and interpreted() else plgpu.RefUnion(*buffers)


def plain_buffer(*shape: int) -> Any:
    """Shared memory for an int16 matrix, row by row."""
    return plgpu.SMEM(shape, jnp.int16)


def number_buffer(*shape: int) -> Any:
    """Shared memory for float32 numbers."""
    return plgpu.SMEM(shape, jnp.float32)


def row_buffer(*shape: int, dtype: Any) -> Any:
    """Shared memory for rows that lie one after another, as the copy engine finds them."""
    return plgpu.SMEM(shape, dtype)


def barrier(arrivals: int, count: int = 1) -> Any:
    """Barriers, each of which opens when so many have arrived."""
    return plgpu.Barrier(num_arrivals=arrivals, num_barriers=count)


def wait(at: Any) -> None:
    """Waits until a barrier opens."""
    plgpu.barrier_wait(at)


def arrive(at: Any) -> None:
    """Arrives at a barrier, for this warpgroup."""
    plgpu.barrier_arrive(at)


def arrive_and_wait(at: Any) -> None:
    """Arrives at a barrier and waits until it opens: until all that it counts have come here."""
    arrive(at)
    wait(at)


def wait_for_readers(free: Any, slots: int, steps: Any) -> None:
    """Waits until the last steps' slots have been read: a program ends when nothing is on its way any more."""

    @pl.loop(jnp.maximum(steps - slots, 0), steps)
    def _(step):
        wait(free.at[remainder(step, slots)])


def begin_copy(source: Any, target: Any, at: Any) -> None:
    """Begins to copy from global to shared memory, and arrives at a barrier when all is there."""
    plgpu.copy_gmem_to_smem(source, target, at)


def use_registers(count: int, *, more: bool) -> None:
    """Sets a warpgroup's registers of a thread, to more or to fewer than it has.

    More are waited for until others have given them back, of those that the program starts with: 168 for each of three
    warpgroups, 128 of four, 96 of five. What asks for more than these in all waits for ever.
    """
    plgpu.set_max_registers(count, action="increase" if more else "decrease")


def sum_buffer(groups: int, *, is_small: bool = False) -> Any:
    """Shared memory for `column_sums` of each warpgroup; half of it, for twice the rounds, if `is_small`."""
    return number_buffer(groups, _REDUCTION // 2 if is_small else _REDUCTION)


def maximum_buffer(groups: int) -> Any:
    """Shared memory for `maximum` or `total` of each warpgroup, the one that copies too."""
    return number_buffer(groups + 1, WARPS)


def unsupported_heads(**arrays: Array) -> str | None:
    """Why heads can't be the rows of bfloat16 matrices of 64 columns, as a noun phrase, or None if they can."""
    for name, x in arrays.items():
        if x.dtype != jnp.bfloat16:
            return f"{name} of dtype {x.dtype} (only bfloat16)"
        if x.shape[-1] != SIDE:
            return f"{name} of {x.shape[-1]} channels (only {SIDE})"
    return None


def interpreted() -> bool:
    """Whether kernels run interpreted, as they do in tests where there is no GPU."""
    return platform() == "cpu"


def launch(
    program: Callable[[Any, Any], None],
    name: str,
    inputs: Mapping[str, Array | None],
    outputs: Mapping[str, jax.ShapeDtypeStruct | None],
    memory: Mapping[str, Any],
    *,
    grid: dict[str, int],
    warpgroups: int,
    updates: Mapping[str, Array | None] | None = None,
) -> dict[str, Array | None]:
    """Runs `program(refs, memory)` on a grid.

    Args:
        program: what each warpgroup runs. `refs` is a namespace of what `inputs` and `outputs` name, None for an absent
            array; `memory` is one of the program's shared memory and barriers.
        name: the kernel's name in profiles.
        inputs: arrays in global memory; None is passed on as None.
        outputs: likewise; None is not written.
        memory: shared memory and barriers of a program, or tuples of them.
        grid: number of programs along each axis, by the axis' name; the first varies fastest.
        warpgroups: of a program; the axis `warpgroup` tells them apart.
        updates: arrays that the program reads and writes in place: what it does not write stays. A call with them can't
            be mapped over.

    Returns:
        The outputs and updated arrays by name, None where none was asked for.
    """
    updates = updates or {}
    given = {key: array for key, array in inputs.items() if array is not None}
    changed = {key: jax.new_ref(array) for key, array in updates.items() if array is not None}
    wanted = {key: struct for key, struct in outputs.items() if struct is not None}
    absent = dict.fromkeys([*inputs, *updates, *outputs])

    def body(*arrays):
        refs = SimpleNamespace(**{**absent, **dict(zip([*given, *changed, *wanted], arrays))})

        def scoped(*scratch):
            program(refs, SimpleNamespace(**dict(zip(memory, scratch))))

        pl.run_scoped(scoped, *memory.values(), collective_axes="warpgroup")

    body.__name__ = body.__qualname__ = name
    threads: dict[str, Any] = {
        "grid": tuple(grid.values()),
        "grid_names": tuple(grid),
        "num_threads": warpgroups,
        "thread_name": "warpgroup",
    }
    options: dict[str, Any] = {
        # Barriers around loads and stores are set by hand.
        "compiler_params": plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        "interpret": plgpu.InterpretGPUParams(detect_races=True) if interpreted() else False,
    }
    # Kernels count in 32 bits, whatever the program around them does.
    with jax.enable_x64(False):
        if changed:  # `plgpu.kernel` takes no references
            kernel = pl.kernel(body, list(wanted.values()), mesh=plgpu.Mesh(**threads), name=name, **options)
        else:
            kernel = plgpu.kernel(body, out_type=list(wanted.values()), **threads, **options)
        results = kernel(*given.values(), *changed.values())
    # Pallas gives no types of `jax.shard_map` to what such a kernel returns.
    varying = varying_axes(list(given.values()))
    found = {key: vary_along(varying, x) for key, x in zip(wanted, results)}
    return {**dict.fromkeys([*updates, *outputs]), **found, **{key: jax.freeze(ref) for key, ref in changed.items()}}


def load_matrix(ref: Any) -> Array:
    """A matrix of 64 rows from shared memory, spread over a warpgroup as products hold theirs."""
    return plgpu.load(ref, layout=_MATRIX)


def load_plain(ref: Any) -> Array:
    """A matrix of 64 rows that lies row by row in shared memory, or begins to come from global memory, likewise."""
    return plgpu.load(ref, layout=_MATRIX, optimized=False)


def load_turned(ref: Any) -> Array:
    """The transpose of a matrix of 64 columns in shared memory, in float32."""
    if ref.dtype == jnp.bfloat16:
        return load_matrix(ref.T).astype(jnp.float32)
    return plgpu.layout_cast(plgpu.load(ref.T, layout=plgpu.Layout.WGMMA_TRANSPOSED), _MATRIX)


def store_turned(ref: Any, x: Array) -> None:
    """Stores the transpose of a float32 matrix in shared memory, rounded where that holds bfloat16."""
    if ref.dtype == jnp.bfloat16:
        ref.T[...] = x.astype(jnp.bfloat16)
    else:
        store_across(ref, x)


def load_flat(ref: Any) -> Array:
    """A float32 matrix whose rows lie one after another in shared memory, four numbers of it to a thread in turn."""
    return plgpu.load(ref, layout=plgpu.Layout.WG_STRIDED(ref.shape, vec_size=4), optimized=False)


def load_state(ref: Any) -> Array:
    """A float32 matrix of 64 rows from global memory."""
    # Inside `jax.shard_map` a loaded value's type names the axes that it varies along; a kernel's other values have no
    # such types, and the carry of a loop must keep its own. The product has none, and compiles to nothing.
    return plgpu.load(ref, layout=_MATRIX, optimized=False) * 1.0


def begin_across(ref: Any) -> Array:
    """Begins to load the transpose of a float32 matrix `[64, 64]` in global memory; `turned` waits for it."""
    return plgpu.load(ref.T, layout=plgpu.Layout.WGMMA_TRANSPOSED, optimized=False) * 1.0  # as in `load_state`


def turned(x: Array) -> Array:
    """What `begin_across` loads, spread over a warpgroup as products hold theirs."""
    return plgpu.layout_cast(x, _MATRIX)


def load_across(ref: Any) -> Array:
    """The transpose of a float32 matrix `[64, 64]` in global memory, whose columns lie side by side there."""
    return turned(begin_across(ref))


def store_across(ref: Any, x: Array) -> None:
    """Stores the transpose of a float32 matrix there, or in shared memory."""
    ref.T[...] = plgpu.layout_cast(x, plgpu.Layout.WGMMA_TRANSPOSED)


def put(ref: Any, x: Array) -> None:
    """Stores an array of which a warp has no whole sectors of memory, or whose threads meet in banks of shared memory.

    Up to jax 0.11 `ref[...] = x` does so, too; since then it refuses.
    """
    if (unaligned := getattr(plgpu, "store", None)) is None:
        ref[...] = x
    else:
        unaligned(ref, x, optimized=False)


def load_channels(ref: Any) -> Array:
    """One float32 number for each of 128 or 256 channels, each held by one thread."""
    width = ref.shape[-1] // _THREADS
    return plgpu.load(ref, layout=plgpu.Layout.WG_STRIDED(ref.shape, vec_size=width), optimized=False)


def maximum(x: Array, buffer: Any) -> Array:
    """The largest of what `load_channels` has loaded; `buffer` is this warpgroup's part of `maximum_buffer`."""
    return jnp.max(x) if interpreted() else _reduced(x, buffer, "max")


def total(x: Array, buffer: Any) -> Array:
    """The sum of what `load_channels` has loaded, in a fixed order; `buffer` likewise."""
    return jnp.sum(x) if interpreted() else _reduced(x, buffer, "add")


def _reduced(x: Array, buffer: Any, operation: str) -> Array:
    # As in `column_sums`: Pallas' own reduction can't be done by several warpgroups.
    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WG_STRIDED(x.shape, vec_size=x.shape[0] // _THREADS), plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct((), jnp.float32, layout=plgpu.Layout.WG_SPLAT),
    )
    def reduce(_, row, scratch):
        return row.reduce(operation, 0, scratch)

    return reduce(x, buffer)


def unit_rows(first: Any, size: int) -> Array:
    """Rows `first` to `first + 64` of the unit matrix of a size, float32; zero where `first` is beyond it."""

    def indices(axis):
        return plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, (SIDE, size), axis), _MATRIX)

    return jnp.where(indices(0) + first == indices(1), 1.0, 0.0)


def zeros(*shape: int) -> Array:
    """A float32 matrix of 64 rows of zeros."""
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), _MATRIX)


def load_row(ref: Any) -> Array:
    """One number for each column of a matrix, from shared memory."""
    return plgpu.load(ref, layout=_COLUMNS)


def begin_column(ref: Any) -> Array:
    """Begins to load one number for each row of a matrix from global memory, where they may lie apart."""
    return plgpu.load(ref, layout=_ROWS, optimized=False)


def load_column(ref: Any) -> Array:
    """One number for each row of a matrix, from shared memory."""
    return plgpu.load(ref, layout=_ROWS)


def row_numbers(m: Any = None) -> Array:
    """The rows' numbers, `[C]` int32. A matrix of them, made at once, would keep 32 numbers a thread in registers.

    As an expression of `m`, a loop's variable below 2^30, if there is one: masks that are constants are made before the
    loop, and kept in registers bit by bit.
    """
    rows = plgpu.broadcasted_iota(jnp.int32, (CHUNK,), 0, layout=_ROWS)
    return rows if m is None else rows + zero(m)


def zero(m: Any) -> Any:
    """0 as an expression of m, which is less than 2^30: a constant keeps all addresses in registers, which spills."""
    return lax.shift_right_logical(m, jnp.int32(30))


def column_numbers(count: int = CHUNK) -> Array:
    """The columns' numbers, `[C]` int32, or so many of them."""
    return plgpu.broadcasted_iota(jnp.int32, (count,), 0, layout=_COLUMNS)


def spread_rows(x: Array) -> Array:
    """A matrix `[C, 64]` whose rows have one number each."""
    return lax.broadcast_in_dim(x, (CHUNK, SIDE), [0])


def spread_columns(x: Array) -> Array:
    """A matrix of 64 rows whose columns have one number each."""
    return lax.broadcast_in_dim(x, (CHUNK, *x.shape), [1])


def scale_columns(x: Array, row: Array | None) -> Array:
    """`x` times one number a column; None is 1."""
    return x if row is None else x * lax.broadcast_in_dim(row, x.shape, [1])


def split(x: Array, *, rounds: bool = True) -> tuple[Array, Array]:
    """`x` as a sum of two bfloat16 values, off by at most 2^-17 of it; 2^-16 where the first is not rounded but cut."""
    # Rounded as an integer: a conversion whose result is also wanted in float32 is done for one number at a time, at a
    # quarter of the pace.
    bits = lax.bitcast_convert_type(x, jnp.int32)
    if rounds:
        bits = bits + jnp.int32(1 << 15)
    high = lax.bitcast_convert_type(bits & jnp.int32(-(1 << 16)), jnp.float32)
    return high.astype(jnp.bfloat16), (x - high).astype(jnp.bfloat16)


def left_parts(x: Array, is_exact: bool, *, rounds: bool = True) -> tuple[Array, ...]:
    """What products take of float32 `x` as their left operand: it rounded or, with `is_exact`, `split`."""
    return split(x, rounds=rounds) if is_exact else (x.astype(jnp.bfloat16),)


def multiply(total: Any, left: Any, right: Any) -> None:
    """Begins to add `left @ right` to an accumulator: bfloat16 matrices, the right one in shared memory."""
    plgpu.wgmma(total, left, right)


def awaited(total: Any, running: int = 0) -> Array:
    """An accumulator's value, once all but the `running` latest products have ended."""
    return plgpu.wgmma_accumulator_load(total, wait_n=running)


def with_accumulators(body: Callable[..., Any], *columns: int) -> Any:
    """What `body` makes of float32 accumulators `[64, columns]`, which are zero at first."""
    return pl.run_scoped(body, *(plgpu.ACC((SIDE, n), jnp.float32) for n in columns))


def added(body: Callable[..., None], *starts: Array) -> tuple[Array, ...]:
    """Matrices and what `body` multiplies into accumulators that begin with them."""
    results = pl.run_state(lambda accumulators: body(*accumulators))(tuple(plgpu.ACC.init(x) for x in starts))
    return tuple(results)


def column_sums(x: Array, buffer: Any) -> Array:
    """The sum of each column of `x` `[64, C]`, in a fixed order; `buffer` is this warpgroup's part of `sum_buffer`."""
    return sums_over_rows(x, buffer, _MATRIX)


def sums_over_rows(x: Array, buffer: Any, layout: Any) -> Array:
    """The sum of each column of `x`, which has this layout, in a fixed order; `buffer` as for `column_sums`."""
    if interpreted():
        return jnp.sum(x, axis=0)

    # Pallas' own sum has one buffer for all warpgroups of a program, which would write over each other's.
    @plgpu.inline_mgpu(
        arg_types=(layout, plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct(x.shape[1:], jnp.float32, layout=layout.reduce(0)),
    )
    def reduce(_, matrix, scratch):
        return matrix.reduce("add", 0, scratch)

    return reduce(x, buffer)


def fence_smem() -> None:
    """Ends this warpgroup's stores to shared memory, and its reads of tiles, for the copy engine to go on."""
    plgpu.commit_smem()


def meet() -> None:
    """Waits for all threads of the warpgroup, for what they have put into shared memory and take from it themselves.

    Unlike `fence_smem` it waits for no load that is on its way, and neither products nor the copy engine may take it.
    """
    if interpreted():
        return

    @plgpu.inline_mgpu()
    def join(_):
        utils = mgpu.utils
        threads = utils.c(_THREADS, ir.IntegerType.get_signless(32))
        utils.nvvm.barrier(barrier_id=utils.warpgroup_barrier_idx(sync=False), number_of_threads=threads)

    join()


def store(buffer: Any, target: Any, *, last: bool = True) -> None:
    """Begins to copy a buffer to global memory; `last` of what is awaited together."""
    plgpu.copy_smem_to_gmem(buffer, target, commit_group=last)


def turns(places: int) -> Any:
    """A count for each place, 0 at first, of the programs that have had their turn there; None where interpreted."""
    return None if interpreted() else pl.get_global(plgpu.SemaphoreType.REGULAR((places,)))


def added_in_turn(
    copies: Sequence[tuple[Any, Any]], order: Any, place: Any, turn: Any, *, read: Callable[[], None]
) -> None:
    """Copies buffers to global memory in the first turn at a place, and adds them to it in later ones, in their order.

    Interpreted programs run one after another, in the order of their numbers.

    Args:
        copies: pairs of a buffer and its target.
        order: what `turns` returns.
        place: the targets' place among its counts.
        turn: how many programs come before this one there.
        read: called once the buffers have been read.
    """
    if order is not None:
        at = order.at[place]
        pl.when(turn > 0)(lambda: plgpu.semaphore_wait(at, turn, decrement=False, memory_scope="gpu"))
    for buffer, target in copies:
        pl.when(turn == 0)(functools.partial(plgpu.copy_smem_to_gmem, buffer, target))
        pl.when(turn > 0)(functools.partial(plgpu.copy_smem_to_gmem, buffer, target, reduction_op="add"))
    wait_for_stores()
    read()
    wait_for_stores(only_read=False)
    if order is not None:
        plgpu.semaphore_signal(at, 1, memory_scope="gpu")


def wait_for_stores(running: int = 0, *, only_read: bool = True) -> None:
    """Waits until buffers may be written again or, without `only_read`, until all has arrived.

    All but those of the `running` latest copies that are awaited together.
    """
    plgpu.wait_smem_to_gmem(running, wait_read_only=only_read)

"""Everything that is particular to Pallas on its Triton backend; no other module here imports that backend.

Kernels are functions of one namespace of references, in which an absent optional operand is None. `call` runs them: on
an NVIDIA GPU through Triton, on a CPU interpreted. Both are chosen by the device that the call is traced for.
"""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, overload

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.common.config import KernelConfig
from pallas_kernels.common.decay import LOG2_E
from pallas_kernels.common.platform import HOPPER, card_words, platform
from pallas_kernels.common.triton.visits import Visits, Window, windows
from pallas_kernels.common.vma import varying_axes

# The Triton backend is deprecated upstream in favour of Mosaic GPU, whose kernels would stand beside these.
warnings.filterwarnings("ignore", message="The Pallas Triton backend is deprecated", category=DeprecationWarning)

Place = Callable[..., tuple[Any, ...]]


@dataclass(frozen=True)
class Operand:
    """An array in memory with the part of it that each program sees.

    Attributes:
        array: the array, or its shape and dtype for an output.
        block: block shape; None for an axis of which a program sees one index.
        place: from the grid's indices to the block's index along each axis.
    """

    array: Array | jax.ShapeDtypeStruct
    block: tuple[int | None, ...]
    place: Place

    @property
    def spec(self) -> pl.BlockSpec:
        """The operand's `BlockSpec`."""
        return pl.BlockSpec(self.block, self.place)


@overload
def whole(x: None) -> None: ...
@overload
def whole(x: Array | jax.ShapeDtypeStruct) -> Operand: ...
def whole(x: Array | jax.ShapeDtypeStruct | None) -> Operand | None:
    """All of an array, which every program sees."""
    return None if x is None else Operand(x, x.shape, lambda *program: (0,) * len(x.shape))


def unsupported_arrays(**arrays: Array | jax.ShapeDtypeStruct | None) -> str | None:
    """Why no kernel here can serve a call on these arrays, as a noun phrase, or None: the platform or a dtype."""
    if platform() not in ("gpu", "cpu"):
        return f"platform {platform()!r} (it runs on NVIDIA GPUs and, interpreted, on CPUs)"
    for name, x in arrays.items():
        if x is not None and not all(isinstance(size, int) for size in x.shape):
            return f"symbolic sizes, as in {name} of shape {x.shape} (a kernel is compiled for numbers)"
        if x is not None and x.dtype not in (jnp.bfloat16, jnp.float32):
            return f"{name} of dtype {x.dtype} (only bfloat16 and float32)"
    return None


def interpreted() -> bool:
    """Whether kernels run interpreted, as they do where there is no GPU."""
    return platform() == "cpu"


_SHARED_MEMORY = {
    **dict.fromkeys(("A100", "A800", "A30"), 163 * 1024),
    **dict.fromkeys((*HOPPER, "B200", "GB200", "B300", "GB300"), 227 * 1024),
}
_LEAST_SHARED_MEMORY = 99 * 1024


def shared_memory() -> int:
    """Bytes of shared memory that one program can have on the device that is being traced for.

    A device at hand says so itself. One that is only described has a name alone: cards for data centres are known by
    it, and any other counts as having the 99 KiB that all since Ampere have.
    """
    if jax.sharding.get_abstract_mesh().abstract_device is None:
        found = getattr(jax.devices()[0], "shared_memory_per_block_optin", None)
        if found is not None:
            return found
    return next((_SHARED_MEMORY[word] for word in card_words() if word in _SHARED_MEMORY), _LEAST_SHARED_MEMORY)


def call(
    kernel: Callable[..., None],
    name: str,
    grid: tuple[int, ...],
    inputs: Mapping[str, Operand | None],
    outputs: Mapping[str, Operand | None],
    launch: KernelConfig,
    *,
    updates: Mapping[str, Operand] | None = None,
    visits: Visits | None = None,
    **static: Any,
) -> dict[str, Array | None]:
    """Runs `kernel(namespace, **static)` over `grid`.

    Args:
        kernel: reads and writes the references in its namespace, named as `inputs` and `outputs` are.
        name: the kernel's name in profiles.
        grid: number of programs along up to three axes; the first varies fastest.
        inputs: operands; None is passed on as None.
        outputs: likewise; None is not written.
        launch: compilation parameters; the namespace has its `is_lean` too.
        updates: outputs that exist already, by the names of `outputs`: what the kernel does not write stays.
        visits: which places of the grid the kernel runs at; None for all. The namespace has the indices as `visit`, and
            windows (`visits.Window`) for references.
        **static: passed to the kernel.

    Returns:
        The outputs by name, None where none was asked for.
    """
    updates = updates or {}
    given = {f"before_{key}": operand for key, operand in updates.items()}
    given |= {key: operand for key, operand in inputs.items() if operand is not None}
    wanted = {key: operand for key, operand in outputs.items() if operand is not None}
    absent = dict.fromkeys([*inputs, *outputs])

    def run(refs, visit):
        found = absent | dict(zip([*given, *wanted], refs))
        kernel(SimpleNamespace(**found, is_lean=launch.is_lean, visit=visit), **static)

    def body(*refs):
        if visits is None:
            run(refs, None)
            return
        operands = [*given.values(), *wanted.values()]
        visits.walk(refs[0], lambda at: run(windows(refs[1:], operands, at), at))

    before = [] if visits is None else [whole(visits.listed)]

    def specs(operands):
        return [operand.spec if visits is None else pl.BlockSpec() for operand in operands]

    body.__name__ = body.__qualname__ = name
    varying = varying_axes([operand.array for operand in given.values()])
    # JAX's interpreter of kernels has no such types, and asks for `check_vma=False`.
    varies = None if interpreted() else jax.sharding.ManualAxisType(varying=varying)
    # Kernels count in 32 bits, whatever the program around them does.
    with jax.enable_x64(False):
        results = pl.pallas_call(
            body,
            name=name,
            grid=grid if visits is None else visits.grid,
            in_specs=specs([*before, *given.values()]),
            out_specs=specs(wanted.values()),
            out_shape=[
                jax.ShapeDtypeStruct(operand.array.shape, operand.array.dtype, manual_axis_type=varies)
                for operand in wanted.values()
            ],
            input_output_aliases={n: list(wanted).index(key) for n, key in enumerate(updates, len(before))},
            interpret=interpreted(),
            compiler_params=None
            if interpreted()
            else plt.CompilerParams(num_warps=launch.num_warps, num_stages=launch.num_stages),
        )(*(operand.array for operand in [*before, *given.values()]))
    return {**dict.fromkeys(outputs), **dict(zip(wanted, results))}


def _dot(a: Array, b: Array, contract: tuple[int, int], precise: bool | None) -> Array:
    """A product of two matrices in float32; `precise` (default: as the inputs ask) keeps float32 inputs' accuracy."""
    precision = None
    if a.dtype == jnp.float32 and not interpreted():
        presets = lax.DotAlgorithmPreset
        precision = presets.TF32_TF32_F32 if precise is False else presets.TF32_TF32_F32_X3
    dimensions = (((contract[0],), (contract[1],)), ((), ()))
    if interpreted():
        # The same products, exactly. XLA for CPUs has none of two bfloat16 matrices with a float32 result.
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=jnp.float32)


def dot(a: Array, b: Array, precise: bool | None = None) -> Array:
    """`a @ b`, accumulated in float32. Float32 operands are split in three tf32 products unless `precise` is False."""
    return _dot(a, b, (1, 0), precise)


def dot_nt(a: Array, b: Array, precise: bool | None = None) -> Array:
    """`a @ b.T`, accumulated in float32."""
    return _dot(a, b, (1, 1), precise)


def dot_tn(a: Array, b: Array, precise: bool | None = None) -> Array:
    """`a.T @ b`, accumulated in float32."""
    return _dot(a, b, (0, 0), precise)


def dot_tt(a: Array, b: Array, precise: bool | None = None) -> Array:
    """`a.T @ b.T`, accumulated in float32."""
    return _dot(a, b, (0, 1), precise)


def rounded(x: Array, dtype: Any) -> Array:
    """Float32 `x` in `dtype`, rounded to it even if it is cast back."""
    # XLA takes a cast there and back, which is what remains when interpreted, for no change of the value.
    return (lax.reduce_precision(x, 8, 7) if interpreted() and dtype == jnp.bfloat16 else x).astype(dtype)


def split(x: Array) -> tuple[Array, Array]:
    """`x` as a sum of two bfloat16 values."""
    high = rounded(x, jnp.bfloat16)
    return high, (x - high.astype(jnp.float32)).astype(jnp.bfloat16)


def dot_halves(a: Array, b: Array, dims: tuple[int, int] = (1, 0)) -> Array:
    """A product of float32 with bfloat16, on either side: the float32 matrix goes in two parts, unrounded."""
    if a.dtype == b.dtype:
        return _dot(a, b, dims, None)
    if a.dtype == jnp.float32:
        high, low = split(a)
        return _dot(high, b, dims, None) + _dot(low, b, dims, None)
    high, low = split(b)
    return _dot(a, high, dims, None) + _dot(a, low, dims, None)


def _assembly(text: str, constraints: str, *args: Array, dtype: Any, pack: int = 1) -> Array:
    """PTX for each element of the arguments, or for `pack` of them; the result has their shape."""
    shape = jax.ShapeDtypeStruct(args[0].shape, dtype)
    (result,) = plt.elementwise_inline_asm(
        text, args=[*args], constraints=constraints, pack=pack, result_shape_dtypes=[shape]
    )
    return result


def _approximate(instruction: str, x: Array) -> Array:
    return _assembly(f"{instruction}.approx.ftz.f32 $0, $1;", "=f,f", x, dtype=jnp.float32)


def exp2(x: Array) -> Array:
    """`2 ** x` of float32 by the special function alone, within 2e-7 of its value."""
    return jnp.exp2(x) if interpreted() or not x.shape else _approximate("ex2", x)


def exp(x: Array) -> Array:
    """`e ** x` of float32, within 2e-7 where `x <= 0`."""
    return exp2(x * LOG2_E)


def log2(x: Array) -> Array:
    """The binary logarithm of normal positive float32 numbers by the special function alone, within 3e-7."""
    return jnp.log2(x) if interpreted() or not x.shape else _approximate("lg2", x)


def reciprocal(x: Array) -> Array:
    """`1 / x` of float32 by the special function alone, within 1.2e-7 of its value."""
    return 1.0 / x if interpreted() or not x.shape else _approximate("rcp", x)


def cosine(x: Array) -> Array:
    """The cosine of float32 numbers of at most pi, in radians, by the special function alone, within 1e-6."""
    return jnp.cos(x) if interpreted() or not x.shape else _approximate("cos", x)


def sine(x: Array) -> Array:
    """The sine of float32 numbers of at most pi, in radians, by the special function alone, within 1e-6."""
    return jnp.sin(x) if interpreted() or not x.shape else _approximate("sin", x)


def multiply_add(x: Array, y: Array, z: Array) -> Array:
    """`x * y + z` of float32 arrays of shapes that broadcast, by one instruction, rounded once.

    XLA compiles Triton's kernels without contraction: a product and a sum stay two instructions. This one costs the
    compiler its freedom to choose layouts and an order, so that it pays in long chains alone: convolutions and norms
    took up to a third longer with it.
    """
    shape = jnp.broadcast_shapes(x.shape, y.shape, z.shape)
    if interpreted() or not shape:
        return x * y + z
    operands = (jnp.broadcast_to(a, shape) for a in (x, y, z))
    return _assembly("fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", *operands, dtype=jnp.float32)


def product(x: Array, y: Array) -> Array:
    """`x * y`, rounded before anything is added to it: as Triton's kernels have it, interpreted too."""
    return lax.optimization_barrier(x * y) if interpreted() else x * y


def sigmoid(x: Array) -> Array:
    """`1 / (1 + e ** -x)` of float32 by special functions."""
    return reciprocal(1.0 + exp2(x * -LOG2_E))


def load_tile(ref, index, is_lean: bool) -> Array:
    """`ref[index]`, a tile that only matrix products read, all of which end in the step of the loop that loads it.

    Triton's pipeline copies such tiles ahead. For a tile that nothing but products reads it takes one buffer more than
    the stages need, in case a product still runs when the next copy begins. That does not happen here. A lean launch
    saves the buffer: the tile gets a second reader, a store under a condition that is never true. Triton cannot tell
    that it is never true; LLVM can, and removes the store.
    """
    tile = ref[index]
    if interpreted() or not is_lean:
        return tile
    bits = lax.bitcast_convert_type(tile, jnp.int16 if tile.dtype.itemsize == 2 else jnp.int32)
    is_never = (bits.astype(jnp.int32) | 1) == 0
    nowhere = (jnp.zeros(tile.shape, jnp.int32),) * len(ref.shape)
    plt.store(ref.at[nowhere], jnp.zeros(tile.shape, ref.dtype), mask=is_never)
    return tile


def spread_like(x: Array, product: Array) -> Array:
    """`x` `[C, 1]` or `[1, C]` float32 broadcast to a matrix whose elements lie in the same threads as `product`'s.

    Without this Triton computes the matrix in another layout and converts it, which goes through shared memory.
    """
    x = jnp.broadcast_to(x, product.shape)
    if interpreted():
        return x
    # A move of `x`; `product`, which it does not use, gives the result its layout.
    return _assembly("mov.b32 $0, $1;", "=f,f,f", x, product, dtype=jnp.float32)


def rounded_product(x: Array, y: Array) -> Array:
    """`x.astype(bfloat16) * y` for float32 and bfloat16 of one shape, two elements an instruction."""
    if interpreted():
        return x.astype(jnp.bfloat16) * y
    # `x * y - 0`, which rounds once and keeps signs: cards before Hopper have no product of bfloat16 without a sum.
    text = "{ .reg .b32 t, z; mov.b32 z, 0x80008000; cvt.rn.bf16x2.f32 t, $2, $1; fma.rn.bf16x2 $0, t, $3, z; }"
    return _assembly(text, "=r,f,f,r", x, y, dtype=jnp.bfloat16, pack=2)


def load_again(ref) -> Array:
    """A reference's value, loaded once more: the compiler does not keep an earlier load in registers instead."""
    return ref[...] if interpreted() else plt.load(ref.ref if isinstance(ref, Window) else ref, volatile=True)


def load_rows(ref, start, size: int, limit, other: float) -> Array:
    """Rows `start` to `start + size` (a power of two) of `[N, ...]`; `other` from row `limit` on."""
    index = start + lax.broadcasted_iota(jnp.int32, (size, *ref.shape[1:]), 0)
    if isinstance(start, int):  # a slice must lie within the array where its start is static
        start = start + lax.min(pl.program_id(0), 0)
    return plt.load(ref.at[pl.ds(start, size)], mask=index < limit, other=other)


def load_masked(ref, index: tuple[Any, ...], mask: Array | None) -> Array:
    """What `ref` has at `index` (numbers and arrays of them); zero where `mask` is false."""
    return plt.load(ref.at[index], mask=mask, other=None if mask is None else jnp.zeros((), ref.dtype))


def store_masked(ref, index: tuple[Any, ...], value: Array, mask: Array | None) -> None:
    """Stores `value`, in `ref`'s dtype, where `mask` is true."""
    plt.store(ref.at[index], value.astype(ref.dtype), mask=mask)


def iota(shape: tuple[int, ...], axis: int) -> Array:
    """Indices along `axis`, int32."""
    return lax.broadcasted_iota(jnp.int32, shape, axis)

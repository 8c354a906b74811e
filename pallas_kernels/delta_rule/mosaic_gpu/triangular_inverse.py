"""Inverse of a unit lower triangular matrix `[64, 64]`, spread over a warpgroup as products hold theirs.

`pallas_kernels.delta_rule.triton.triangular_inverse` has the equation: the inverse of `2^(l+1)` rows follows from those
of its halves by two products, level by level. A warp holds 16 rows, so that the blocks of 16 on the diagonal are each
one warp's own. Up to there products are the warp's (`mma.sync`), and nothing leaves its registers; the last two levels'
are the warpgroup's, with the inverses of their blocks in shared memory.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import vector

from pallas_kernels.common.kernel_shape import CHUNK
from pallas_kernels.common.mosaic_gpu import (
    added,
    column_numbers,
    fence_smem,
    interpreted,
    multiply,
    spread_columns,
    spread_rows,
    zeros,
)

_WARP_LEVELS = range(1, 4)  # to blocks of 16
_LEVELS = range(4, 6)
_TILES, _HALVES, _PAIR = CHUNK // 8, 2, 2
"""A thread's numbers: of each 8 columns, of a row of its warp's 16 and of the one 8 below, two neighbours."""


def _apart(rows: Array, level: int) -> Array:
    """Numbers of the blocks of `2^level` rows that rows and columns are in, differing in bits."""
    row, column = (lax.shift_right_logical(x, jnp.int32(level)) for x in (rows, column_numbers()))
    return spread_rows(row) ^ spread_columns(column)


def unit_lower_inverse(
    lower: Array, rows: Array, fixed: Any, halves: tuple[Any, Any], before_second: Callable[[], None]
) -> Array:
    """`(I + L)^-1` for a strictly lower triangular matrix.

    Args:
        lower: `[C, C]` float32, zero on and above the diagonal.
        rows: the rows' numbers, `[C]`.
        fixed: shared memory for a bfloat16 matrix `[C, C]`, which no product reads any more.
        halves: two more of them. No product reads the second when this returns.
        before_second: is called before the second is written to.

    Returns:
        `[C, C]` float32.
    """
    fixed[...] = (-lower).astype(jnp.bfloat16)
    inverse = _inverse_of_blocks(lower, rows)
    for level, own in zip(_LEVELS, halves):
        known = inverse.astype(jnp.bfloat16)
        if level == _LEVELS[-1]:
            before_second()
        own[...] = known
        fence_smem()
        (right,) = added(lambda total, known=known: multiply(total, known, fixed), zeros(CHUNK, CHUNK))
        right = right.astype(jnp.bfloat16)
        (corners,) = added(lambda total, right=right, own=own: multiply(total, right, own), zeros(CHUNK, CHUNK))
        inverse = jnp.where(_apart(rows, level) == 1, corners, inverse)
    return inverse


def _inverse_of_blocks(lower: Array, rows: Array) -> Array:
    """The inverses of the blocks of 16 on the diagonal, zero elsewhere."""
    if interpreted():
        return _interpreted_inverse_of_blocks(lower, rows)
    layout = plgpu.Layout.WGMMA

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=plgpu.ShapeDtypeStruct(lower.shape, jnp.float32, layout=layout))
    def inverse(_, matrix):
        registers = matrix.registers.flatten()  # pairs, by column and half
        numbers = [vector.extract(x, [], ir.DenseI64ArrayAttr.get([i])) for x in registers for i in range(_PAIR)]
        number = ir.F32Type.get()
        found = mgpu.utils.inline_ptx(_ptx(), *numbers, result_types=[number] * len(numbers), convergent=True)
        pairs = [vector.from_elements(registers[0].type, found[i : i + _PAIR]) for i in range(0, len(found), _PAIR)]
        shaped = matrix.registers.copy()
        shaped.flat[:] = pairs
        return mgpu.FragmentedArray(_registers=shaped, _layout=matrix.layout, _is_signed=None)

    return inverse(lower)


def _interpreted_inverse_of_blocks(lower: Array, rows: Array) -> Array:
    apart = _apart(rows, 0)
    negative = (-lower).astype(jnp.bfloat16)
    inverse = jnp.where(apart == 0, 1.0, jnp.where(apart == 1, -lower, 0.0))
    for level in _WARP_LEVELS:
        known = inverse.astype(jnp.bfloat16)
        right = jnp.dot(known, negative, preferred_element_type=jnp.float32).astype(jnp.bfloat16)
        corners = jnp.dot(right, known, preferred_element_type=jnp.float32)
        inverse = jnp.where(_apart(rows, level) == 1, corners, inverse)
    return inverse


def _ptx() -> str:
    """The same as machine code: a thread's 32 numbers of `lower`, to as many of the inverse.

    A warp's block of 16 has blocks of 8: `x0` and `x3` on the diagonal, `x2` below it; the one above is zero. Thread
    `4 g + t` holds two neighbours of a block of 8, of row `g` and columns `2 t` and `2 t + 1`. `n0`, `n2`, `n3` are
    those of `-lower`. A product `[16, 16] @ [16, 8]` takes blocks of 8 as a pair of bfloat16 numbers each, those on the
    right transposed (`movmatrix`). Up to blocks of 8 it has both of the diagonal at once: `diag(a0, a3) @ [b0; b1]`.
    """
    count = _TILES * _HALVES * _PAIR
    out, given = (lambda i: f"${i}"), (lambda i: f"${count + i}")

    def at(tile, half, i):
        return (tile * _HALVES + half) * _PAIR + i

    blocks = {0: (0, 0), 2: (0, 1), 3: (1, 1)}  # column and half
    lines = [
        ".reg .pred own1, own2, own3, mine, is0, is1, joins2, joins4;",
        ".reg .b32 i, g, t, q, z;",
        ".reg .f32 u, d<4>, r<4>, zero;",
        ".reg .b32 a0, a3, b0, b1, s0, s2, s3;",
        *(f".reg .f32 n{b}_{e}, x{b}_{e};" for b in blocks for e in range(_PAIR)),
        "mov.b32 z, 0;",
        "mov.f32 zero, 0f00000000;",
        "mov.u32 i, %tid.x;",
        "shr.u32 q, i, 5;",
        "and.b32 q, q, 3;",  # the warp
        *(f"setp.eq.u32 own{w}, q, {w};" for w in (1, 2, 3)),
        "setp.eq.u32 mine, q, 0;",
        # Row and first column differ by q; the second column by q ^ 1.
        "shr.u32 g, i, 2;",
        "and.b32 g, g, 7;",
        "shl.b32 t, i, 1;",
        "and.b32 t, t, 6;",
        "xor.b32 q, g, t;",
        "setp.eq.u32 is0, q, 0;",
        "setp.eq.u32 is1, q, 1;",
        "shr.u32 q, q, 1;",
        "setp.eq.u32 joins2, q, 1;",
        "shr.u32 q, q, 1;",
        "setp.eq.u32 joins4, q, 1;",
    ]

    def product(into, left, right):
        registers = ", ".join(f"{into}{i}" for i in range(4))
        lines.append(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
            f"{{{registers}}}, {{{', '.join(left)}}}, {{{', '.join(right)}}}, {{zero, zero, zero, zero}};"
        )

    def rounded(into, first, second):
        lines.append(f"cvt.rn.bf16x2.f32 {into}, {second}, {first};")

    def transposed(into, x):
        lines.append(f"movmatrix.sync.aligned.m8n8.trans.b16 {into}, {x};")

    for b, (column, half) in blocks.items():
        for e in range(_PAIR):
            lines.append(f"mov.f32 u, {given(at(column, half, e))};")
            lines.extend(f"selp.f32 u, {given(at(2 * w + column, half, e))}, u, own{w};" for w in (1, 2, 3))
            lines.append(f"neg.f32 n{b}_{e}, u;")
        rounded(f"s{b}", f"n{b}_0", f"n{b}_1")
        transposed(f"s{b}", f"s{b}")
    for b in (0, 3):
        for e, (one, other) in enumerate((("is0", "is1"), ("is1", "is0"))):
            lines.append(f"selp.f32 u, n{b}_{e}, zero, {other};")
            lines.append(f"selp.f32 x{b}_{e}, 0f3F800000, u, {one};")
    for is_corner in ("joins2", "joins4"):
        for b in (0, 3):
            rounded(f"a{b}", f"x{b}_0", f"x{b}_1")
        transposed("b0", "a0")
        transposed("b1", "a3")
        product("r", ("a0", "z", "z", "a3"), ("s0", "s3"))
        rounded("a0", "r0", "r1")
        rounded("a3", "r2", "r3")
        product("d", ("a0", "z", "z", "a3"), ("b0", "b1"))
        for b, first in ((0, 0), (3, 2)):
            lines.extend(f"selp.f32 x{b}_{e}, d{first + e}, x{b}_{e}, {is_corner};" for e in range(_PAIR))
    for b in (0, 3):
        rounded(f"a{b}", f"x{b}_0", f"x{b}_1")
    transposed("b0", "a0")
    product("r", ("z", "z", "z", "a3"), ("z", "s2"))
    rounded("a0", "r2", "r3")
    product("d", ("z", "a0", "z", "z"), ("b0", "z"))
    lines.extend(f"mov.f32 x2_{e}, d{2 + e};" for e in range(_PAIR))
    for w in range(4):
        own = "mine" if w == 0 else f"own{w}"
        for b, (column, half) in blocks.items():
            lines.extend(f"selp.f32 {out(at(2 * w + column, half, e))}, x{b}_{e}, zero, {own};" for e in range(_PAIR))
        lines.extend(f"mov.f32 {out(at(2 * w + 1, 0, e))}, zero;" for e in range(_PAIR))
    return "{\n" + "\n".join(lines) + "\n}"

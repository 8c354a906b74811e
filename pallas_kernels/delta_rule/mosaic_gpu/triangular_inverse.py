"""Inverse of a unit lower triangular matrix `[64, 64]`, spread over a warpgroup as products hold theirs.

`pallas_kernels.delta_rule.triton.triangular_inverse` has the equation: the inverse of `2^(l+1)` rows follows from those
of its halves by two products, level by level. A warp holds 16 rows, and all products are a warp's own (`mma.sync`).
Up to blocks of 16 nothing leaves its registers. For the last two levels each warp makes its own rows, and finds the
inverses of the rows above, and what is inverted of the rows beside, in shared memory.

A block of 16 is four blocks of 8 there, one after another, in the order in which a product takes them: upper left,
lower left, upper right, lower right. As pairs of bfloat16 numbers a thread holds each as one register.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import vector

from pallas_kernels.common.kernel_shape import CHUNK
from pallas_kernels.common.mosaic_gpu import MATRIX_TRANSFORMS, column_numbers, interpreted, spread_columns, spread_rows

_TILES, _HALVES, _PAIR = CHUNK // 8, 2, 2
"""A thread's numbers: of each 8 columns, of a row of its warp's 16 and of the one 8 below, two neighbours."""
_BLOCK = 512
"""Bytes of a block of 16."""
_CORNERS = 4 * _BLOCK
"""Where the blocks left of the diagonal begin, behind those on it."""


def unit_lower_inverse(lower: Array, rows: Array, negative: Any, inverses: Any) -> Array:
    """`(I + L)^-1` for a strictly lower triangular matrix.

    Args:
        lower: `[C, C]` float32; what it has on and above the diagonal does not count.
        rows: the rows' numbers, `[C]`.
        negative: shared memory of a bfloat16 matrix `[C, C]`, for blocks of `-L`; this warpgroup's alone.
        inverses: likewise, for blocks of the inverse. Both may be used again behind the next barrier.

    Returns:
        `[C, C]` bfloat16.
    """
    if interpreted():
        return _interpreted_inverse(lower, rows)
    layout, ref = plgpu.Layout.WGMMA, plgpu.RefType(MATRIX_TRANSFORMS)

    @plgpu.inline_mgpu(
        arg_types=(layout, ref, ref),
        return_type=plgpu.ShapeDtypeStruct(lower.shape, jnp.bfloat16, layout=layout),
    )
    def inverse(_, matrix, negative, inverses):
        word, number = ir.IntegerType.get_signless(32), ir.F32Type.get()
        pair = ir.VectorType.get((_PAIR,), ir.BF16Type.get())
        assert matrix.registers.flat[0].type == ir.VectorType.get((_PAIR,), number)
        numbers = [
            vector.extract(x, [], ir.DenseI64ArrayAttr.get([i])) for x in matrix.registers.flat for i in range(_PAIR)
        ]
        at = [mgpu.utils.memref_ptr(x) for x in (negative, inverses)]

        def run(code, given, results):
            return mgpu.utils.inline_ptx(
                code, *given, *at, result_types=[word] * results, convergent=True, has_side_effects=True
            )

        blocks = run(invert_blocks(), numbers, 3)
        mgpu.utils.warpgroup_barrier()
        corners = run(join_pairs(), blocks, 12)
        mgpu.utils.warpgroup_barrier()
        found = run(join_halves(), [*blocks, *corners], _TILES * _HALVES)
        shaped = matrix.registers.copy()
        shaped.flat[:] = [mgpu.utils.bitcast(x, pair) for x in found]
        return mgpu.FragmentedArray(_registers=shaped, _layout=matrix.layout, _is_signed=None)

    return inverse(lower, negative, inverses)


def _interpreted_inverse(lower: Array, rows: Array) -> Array:
    lower = jnp.where(spread_rows(rows) > spread_columns(column_numbers()), lower, 0.0)

    def apart(level):
        """Numbers of the blocks of `2^level` rows that rows and columns are in, differing in bits."""
        row, column = (lax.shift_right_logical(x, jnp.int32(level)) for x in (rows, column_numbers()))
        return spread_rows(row) ^ spread_columns(column)

    negative = (-lower).astype(jnp.bfloat16)
    inverse = jnp.where(apart(0) == 0, 1.0, jnp.where(apart(0) == 1, -lower, 0.0))
    for level in range(1, 6):
        known = inverse.astype(jnp.bfloat16)
        right = jnp.dot(known, negative, preferred_element_type=jnp.float32).astype(jnp.bfloat16)
        corners = jnp.dot(right, known, preferred_element_type=jnp.float32)
        inverse = jnp.where(apart(level) == 1, corners, inverse)
    return inverse.astype(jnp.bfloat16)


class _Code:
    """Lines of machine code (PTX) that all warps of a warpgroup run.

    Its operands are so many results, so many numbers or pairs that are given, and then the addresses of what is in
    shared memory of `-L` and of the inverse.
    """

    def __init__(self, results: int, given: int):
        self.lines: list[str] = []
        self._results, self._given = results, given
        self.emit(
            ".reg .pred own1, own2, own3, is0, is1, below0, below1, joins2, joins4, odd, high;",
            ".reg .b32 i, g, t, q, z, w, lane, at, minus, found;",
            ".reg .f32 u, zero;",
            "mov.b32 z, 0;",
            "mov.f32 zero, 0f00000000;",
            "mov.u32 i, %tid.x;",
            "shr.u32 w, i, 5;",
            "and.b32 w, w, 3;",  # the warp
            "and.b32 lane, i, 31;",
            "shl.b32 lane, lane, 4;",  # a row of 8 numbers of a block is a thread's to bring, or to take
            f"add.u32 minus, {self.given(given)}, lane;",
            f"add.u32 found, {self.given(given + 1)}, lane;",
        )

    def emit(self, *lines: str) -> None:
        """Appends lines."""
        self.lines.extend(lines)

    def result(self, i: int) -> str:
        """Name of the i-th result."""
        return f"${i}"

    def given(self, i: int) -> str:
        """Name of the i-th of what is given."""
        return f"${self._results + i}"

    def words(self, *names: str) -> None:
        """Declares registers, of a pair of bfloat16 numbers each."""
        self.emit(f".reg .b32 {', '.join(names)};")

    def rounded(self, into: str, first: str, second: str) -> None:
        """Two float32 numbers as a pair of bfloat16 numbers."""
        self.emit(f"cvt.rn.bf16x2.f32 {into}, {second}, {first};")

    def product(self, into: str, left: Sequence[str], right: Sequence[str], start: str | None = None) -> None:
        """`[16, 16] @ [16, 8]` into `into0` to `into3`, added to `start0` to `start3`."""
        registers = ", ".join(f"{into}{i}" for i in range(4))
        added = ", ".join(["zero"] * 4 if start is None else [f"{start}{i}" for i in range(4)])
        self.emit(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
            f"{{{registers}}}, {{{', '.join(left)}}}, {{{', '.join(right)}}}, {{{added}}};"
        )

    def store(self, base: str, offset: int, block: Sequence[str]) -> None:
        """Stores a block of 16 of each warp."""
        self.emit(f"stmatrix.sync.aligned.m8n8.x4.shared.b16 [{base}+{offset}], {{{', '.join(block)}}};")

    def load(self, into: str, base: str, offset: int) -> tuple[tuple[str, str], tuple[str, str]]:
        """Loads a block of 16 as right operands, one for each of its halves of columns."""
        names = [f"{into}{i}" for i in range(4)]
        self.words(*names)
        self.emit(f"ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {{{', '.join(names)}}}, [{base}+{offset}];")
        return (names[0], names[1]), (names[2], names[3])

    def block_at(self, into: str, base: str, number: str) -> None:
        """The address of a block of 16."""
        self.emit(f"mad.lo.u32 {into}, {number}, {_BLOCK}, {base};")

    def choose(self, into: Sequence[str], one: Sequence[str], other: Sequence[str], where: str) -> None:
        """Pairs of one block where a predicate holds, of another elsewhere."""
        self.emit(*(f"selp.b32 {x}, {a}, {b}, {where};" for x, a, b in zip(into, one, other, strict=True)))

    def text(self) -> str:
        """All lines, with names of their own."""
        return "{\n" + "\n".join(self.lines) + "\n}"


def invert_blocks() -> str:
    """From a thread's 32 numbers of `lower` to its pairs of the inverse of its warp's block on the diagonal.

    A warp's block of 16 has blocks of 8: `x0` and `x3` on the diagonal, `x2` below it; the one above is zero. Thread
    `4 g + t` holds two neighbours of a block of 8, of row `g` and columns `2 t` and `2 t + 1`. `n0`, `n2`, `n3` are
    those of `-L`. A product `[16, 16] @ [16, 8]` takes blocks of 8 as a pair of bfloat16 numbers each, those on the
    right transposed (`movmatrix`). Up to blocks of 8 it has both of the diagonal at once: `diag(a0, a3) @ [b0; b1]`.
    What is left of the diagonal, and the inverse, goes to shared memory.
    """
    code = _Code(3, _TILES * _HALVES * _PAIR)
    emit, rounded, product = code.emit, code.rounded, code.product

    def at(tile, half, i):
        return code.given((tile * _HALVES + half) * _PAIR + i)

    blocks = {0: (0, 0), 2: (0, 1), 3: (1, 1)}  # column and half
    emit(
        ".reg .f32 d<4>, r<4>;",
        ".reg .b32 a0, a2, a3, b0, b1, s0, s2, s3;",
        *(f".reg .f32 n{b}_{e}, x{b}_{e};" for b in blocks for e in range(_PAIR)),
        *(f"setp.eq.u32 own{w}, w, {w};" for w in (1, 2, 3)),
        # Row and first column differ by q; the second column by q ^ 1.
        "shr.u32 g, i, 2;",
        "and.b32 g, g, 7;",
        "shl.b32 t, i, 1;",
        "and.b32 t, t, 6;",
        "add.u32 q, t, 1;",
        "setp.ge.u32 below0, g, q;",
        "add.u32 q, t, 2;",
        "setp.ge.u32 below1, g, q;",
        "xor.b32 q, g, t;",
        "setp.eq.u32 is0, q, 0;",
        "setp.eq.u32 is1, q, 1;",
        "shr.u32 q, q, 1;",
        "setp.eq.u32 joins2, q, 1;",
        "shr.u32 q, q, 1;",
        "setp.eq.u32 joins4, q, 1;",
    )
    # Blocks (w, 0) to (w, 2) of -L.
    emit("mul.lo.u32 q, w, 3;")
    code.block_at("at", "minus", "q")
    for column in range(3):
        names = [f"l{column}_{i}" for i in range(4)]
        code.words(*names)
        for name, (tile, half) in zip(names, [(0, 0), (0, 1), (1, 0), (1, 1)]):
            rounded(name, *(at(2 * column + tile, half, e) for e in range(_PAIR)))
            emit(f"xor.b32 {name}, {name}, 0x80008000;")
        code.store("at", column * _BLOCK, names)

    def transposed(into, x):
        emit(f"movmatrix.sync.aligned.m8n8.trans.b16 {into}, {x};")

    for b, (column, half) in blocks.items():
        for e in range(_PAIR):
            emit(f"mov.f32 u, {at(column, half, e)};")
            emit(*(f"selp.f32 u, {at(2 * w + column, half, e)}, u, own{w};" for w in (1, 2, 3)))
            emit(f"neg.f32 n{b}_{e}, u;")
            if b != 2:
                emit(f"selp.f32 n{b}_{e}, n{b}_{e}, zero, below{e};")
        rounded(f"s{b}", f"n{b}_0", f"n{b}_1")
        transposed(f"s{b}", f"s{b}")
    for b in (0, 3):
        for e, (one, other) in enumerate((("is0", "is1"), ("is1", "is0"))):
            emit(f"selp.f32 u, n{b}_{e}, zero, {other};")
            emit(f"selp.f32 x{b}_{e}, 0f3F800000, u, {one};")
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
            emit(*(f"selp.f32 x{b}_{e}, d{first + e}, x{b}_{e}, {is_corner};" for e in range(_PAIR)))
    for b in (0, 3):
        rounded(f"a{b}", f"x{b}_0", f"x{b}_1")
    transposed("b0", "a0")
    product("r", ("z", "z", "z", "a3"), ("z", "s2"))
    rounded("a2", "r2", "r3")
    product("d", ("z", "a2", "z", "z"), ("b0", "z"))
    rounded("a2", "d2", "d3")
    code.block_at("at", "found", "w")
    code.store("at", 0, ["a0", "a2", "z", "a3"])
    emit(*(f"mov.b32 {code.result(i)}, {x};" for i, x in enumerate(("a0", "a2", "a3"))))
    return code.text()


def _on_diagonal(code: _Code) -> list[str]:
    """The warp's block of 16 of the inverse, from the pairs of `invert_blocks`; its upper right is zero."""
    return [code.given(0), code.given(1), "z", code.given(2)]


def _rounded_blocks(code: _Code, into: Sequence[str], products: Sequence[str]) -> None:
    """Products `[16, 8]`, rounded: two of them are a block of 16 as a left operand."""
    for i, x in enumerate(products):
        for half in range(2):
            code.rounded(into[2 * i + half], f"{x}{2 * half}", f"{x}{2 * half + 1}")


def join_pairs() -> str:
    """From the pairs of `invert_blocks` to those of the corner of blocks of 32, and to a product for blocks of 64.

    The corner of the second block of a pair, `C = (X N) Y`, is found by the odd warps, from their own block X, from N,
    what is left of it in `-L`, and from the first block Y. Then warps 2 and 3 multiply their rows of the inverse of
    32 by their part of `-L`: four pairs of C, then eight of the product.
    """
    code = _Code(12, 3)
    x = _on_diagonal(code)
    code.emit(".reg .f32 r<4>, s<4>, d<4>, e<4>;", "and.b32 q, w, 1;", "setp.eq.u32 odd, q, 1;", "sub.u32 q, w, q;")
    code.words(*(f"{name}{i}" for name in "cfhk" for i in range(4)))
    code.emit("mad.lo.u32 t, w, 3, q;")
    code.block_at("at", "minus", "t")
    left = code.load("n", "at", 0)
    code.block_at("at", "found", "q")
    above = code.load("y", "at", 0)
    beside = {
        (row, column): code.load(f"l{row}{column}_", "minus", ((2 + row) * 3 + column) * _BLOCK)
        for row in range(2)
        for column in range(2)
    }
    k, c = [f"k{i}" for i in range(4)], [f"c{i}" for i in range(4)]
    code.product("r", x, left[0])
    code.product("s", x, left[1])
    _rounded_blocks(code, k, "rs")
    code.product("d", k, above[0])
    code.product("e", k, above[1])
    _rounded_blocks(code, c, "de")
    code.block_at("at", "found", "w")
    code.store("at", _CORNERS, c)
    first, second = [f"f{i}" for i in range(4)], [f"h{i}" for i in range(4)]
    code.choose(first, c, x, "odd")
    code.choose(second, x, ["z"] * 4, "odd")
    words = [f"v{i}" for i in range(8)]
    code.words(*words)
    for column in range(2):
        for half in range(2):
            code.product("r", first, beside[0, column][half])
            code.product("s", second, beside[1, column][half], "r")
            _rounded_blocks(code, words[4 * column + 2 * half :][:2], "s")
    code.emit(*(f"mov.b32 {code.result(i)}, {name};" for i, name in enumerate([*c, *words])))
    return code.text()


def join_halves() -> str:
    """From the pairs of `invert_blocks` and `join_pairs` to all of the inverse."""
    code = _Code(_TILES * _HALVES, 3 + 12)
    x, c = _on_diagonal(code), [code.given(3 + i) for i in range(4)]
    rows = [[code.given(7 + 4 * block + i) for i in range(4)] for block in range(2)]
    code.emit(".reg .f32 r<4>, s<4>;", "and.b32 q, w, 1;", "setp.eq.u32 odd, q, 1;", "setp.ge.u32 high, w, 2;")
    corner, second = code.load("y", "found", _CORNERS + _BLOCK), code.load("x", "found", _BLOCK)
    first = code.load("n", "found", 0)
    own, beside, words = ([f"{name}{i}" for i in range(n)] for name, n in (("f", 4), ("h", 4), ("v", 8)))
    code.words(*own, *beside, *words)
    code.choose(own, c, x, "odd")
    code.choose(beside, x, ["z"] * 4, "odd")
    for half in range(2):
        code.product("r", rows[0], first[half])
        code.product("s", rows[1], corner[half], "r")
        _rounded_blocks(code, words[2 * half :][:2], "s")
        code.product("s", rows[1], second[half])
        _rounded_blocks(code, words[4 + 2 * half :][:2], "s")
    # A thread's pairs go by columns, then by halves of rows: so do a block's registers, as products take them.
    names = [code.result(i) for i in range(_TILES * _HALVES)]
    code.choose(names[:8], words, [*own, *beside], "high")
    code.choose(names[8:], [*own, *beside], ["z"] * 8, "high")
    return code.text()

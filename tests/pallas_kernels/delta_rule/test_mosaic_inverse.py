"""The inverse in Mosaic GPU: what warps do for themselves, as machine code, on an emulated warpgroup."""

import re

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.common.kernel_shape import CHUNK
from pallas_kernels.delta_rule.mosaic_gpu import triangular_inverse

WARPS, LANES = 4, 32
LANE = np.arange(WARPS * LANES) % LANES
ROW, COLUMN = LANE // 4, LANE % 4 * 2  # of a thread's pair of numbers in a block of 8


def bfloat16(x):
    return np.asarray(jnp.asarray(x, jnp.bfloat16).astype(jnp.float32))


def blocks(pairs):
    """The warps' blocks `[warps, 8, 8]` of pairs `[threads, 2]`."""
    found = np.zeros((WARPS, 8, 8), np.float32)
    for thread, (row, column) in enumerate(zip(ROW, COLUMN)):
        found[thread // LANES, row, column : column + 2] = pairs[thread]
    return found


def pairs(found):
    return np.stack([found[i // LANES, ROW[i], COLUMN[i] : COLUMN[i] + 2] for i in range(WARPS * LANES)])


class Warpgroup:
    """Runs the few instructions that the code has; registers hold a number, or a pair of rounded ones, a thread."""

    def __init__(self, given):
        self.registers = {f"${len(given) + i}": x for i, x in enumerate(given)}
        self.registers["%tid.x"] = (
            np.arange(WARPS * LANES) + 3 * WARPS * LANES
        )  # of some other warpgroup than the first

    def value(self, name):
        if name.startswith("0f"):
            return np.frombuffer(bytes.fromhex(name[2:])[::-1], np.float32)[0]
        return int(name) if name.isdigit() else self.registers[name]

    def run(self, code):
        for line in code.strip("{}\n").split("\n"):
            name, _, rest = line.rstrip(";").partition(" ")
            if name != ".reg":
                into, *operands = re.findall(r"\{[^}]*\}|[^,\s]+", rest)
                found = getattr(self, name.split(".")[0])(name, *map(self.operand, operands))
                names = into.strip("{}").split(", ")
                self.registers.update(zip(names, found if into.startswith("{") else [found]))

    def operand(self, name):
        return [self.value(x) for x in name.strip("{}").split(", ")] if name.startswith("{") else self.value(name)

    def mov(self, name, x):
        return np.zeros((WARPS * LANES, 2), np.float32) if name == "mov.b32" else np.broadcast_to(x, (WARPS * LANES,))

    def shr(self, name, x, n):
        return x >> n

    def shl(self, name, x, n):
        return x << n

    def xor(self, name, x, y):
        return x ^ y

    def setp(self, name, x, y):
        return x == y

    def selp(self, name, x, y, where):
        return np.where(where, x, y).astype(np.float32)

    def neg(self, name, x):
        return -x

    def cvt(self, name, second, first):
        return bfloat16(np.stack([first, second], 1))

    def movmatrix(self, name, x):
        return pairs(blocks(x).swapaxes(1, 2))

    def mma(self, name, left, right, total):
        a0, a1, a2, a3 = map(blocks, left)
        left = np.block([[a0, a2], [a1, a3]])
        right = np.concatenate([blocks(x).swapaxes(1, 2) for x in right], 1)
        found = left @ right
        (d0, d1), (d2, d3) = (pairs(x).T for x in (found[:, :8], found[:, 8:]))
        return d0, d1, d2, d3


setattr(Warpgroup, "and", lambda self, name, x, y: x & y)


def inverse_by_levels(lower):
    """The same levels with the same roundings; blocks of 16 only."""
    apart = np.arange(CHUNK)[:, None] ^ np.arange(CHUNK)
    inverse = np.where(apart == 0, 1, np.where(apart == 1, -lower, 0)).astype(np.float32)
    for level in (1, 2, 3):
        known = bfloat16(inverse)
        corners = bfloat16(known @ bfloat16(-lower)) @ known
        inverse = np.where(apart >> level == 1, corners, inverse)
    return inverse


@pytest.mark.parametrize("size", [0.3, 1.0])
def test_the_warps_machine_code_inverts_their_blocks(size):
    lower = np.tril(np.random.default_rng(0).normal(size=(CHUNK, CHUNK)) * size, -1).astype(np.float32)
    warp = np.arange(WARPS * LANES) // LANES
    places = [
        (16 * warp + 8 * half + ROW, 8 * tile + COLUMN + i) for tile in range(8) for half in range(2) for i in range(2)
    ]
    warpgroup = Warpgroup([lower[place] for place in places])
    warpgroup.run(triangular_inverse._ptx())
    found = np.full_like(lower, np.nan)
    for i, place in enumerate(places):
        found[place] = warpgroup.registers[f"${i}"]
    np.testing.assert_allclose(found, inverse_by_levels(lower), rtol=1e-5, atol=1e-6)
    in_block = np.arange(CHUNK)[:, None] // 16 == np.arange(CHUNK) // 16
    exact = np.where(in_block, np.linalg.inv(np.eye(CHUNK) + np.where(in_block, lower, 0)), 0)
    assert np.linalg.norm(found - exact) < 8e-3 * np.linalg.norm(exact)

"""What warps of Mosaic GPU's first stage do for themselves, as machine code, on an emulated warpgroup."""

import re

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.common.kernel_shape import CHUNK
from pallas_kernels.delta_rule.mosaic_gpu import prefix_sum, triangular_inverse

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
    """Runs the few instructions that the code has; registers hold a number, or a pair of rounded ones, a thread.

    Threads run in step, so that barriers are not missed. Blocks of 8 in shared memory are known by their address.
    """

    def __init__(self):
        self.shared = {}

    def run(self, code, results, given):
        """The numbers, or pairs, that code makes of what is given: others, and addresses."""
        self.registers = {f"${results + i}": x for i, x in enumerate(given)}
        # Of some other warpgroup than the first.
        self.registers |= {"%tid.x": np.arange(WARPS * LANES) + 3 * WARPS * LANES, "%laneid": LANE}
        for line in code.strip("{}\n").split("\n"):
            where, _, line = line[1:].partition(" ") if line.startswith("@") else ("", "", line)
            name, _, rest = line.rstrip(";").partition(" ")
            if name != ".reg":
                into, *operands = re.findall(r"\{[^}]*\}|\[[^]]*\]|[^,\s]+", rest)
                if name.startswith("stmatrix"):
                    self.stmatrix(into, self.operand(operands[0]))
                    continue
                found = getattr(self, name.split(".")[0])(name, *map(self.operand, operands))
                if where:
                    found = np.where(self.value(where), found, self.value(into))
                names = into.strip("{}").split(", ")
                self.registers.update(zip(names, found if into.startswith("{") else [found]))
        return [self.registers[f"${i}"] for i in range(results)]

    def value(self, name):
        if name.startswith("0f"):
            return np.frombuffer(bytes.fromhex(name[2:])[::-1], np.float32)[0]
        return int(name, 0) if name[0].isdigit() else self.registers[name]

    def rows_at(self, address):
        """Addresses of the rows of four blocks of 8, `[warps, 4, 8]`."""
        base, _, offset = address.strip("[]").partition("+")
        rows = (self.registers[base] + int(offset)).reshape(WARPS, 4, 8)
        assert np.all(np.diff(rows, axis=2) == 16) and np.all(rows[:, :, 0] % 128 == 0)
        return rows

    def stmatrix(self, address, words):
        for i, x in enumerate(words):
            for warp, block in enumerate(blocks(x)):
                self.shared[self.rows_at(address)[warp, i, 0]] = block

    def ldmatrix(self, name, address):
        assert ".trans." in name
        nothing = np.full((8, 8), np.nan, np.float32)  # what no warp has stored, and none may use
        rows = self.rows_at(address)[:, :, 0]
        return [pairs(np.stack([self.shared.get(at, nothing) for at in rows[:, i]]).swapaxes(1, 2)) for i in range(4)]

    def operand(self, name):
        if name.startswith("["):
            return name
        return [self.value(x) for x in name.strip("{}").split(", ")] if name.startswith("{") else self.value(name)

    def mov(self, name, x):
        if name == "mov.b32":
            return x if np.ndim(x) == 2 else np.zeros((WARPS * LANES, 2), np.float32)
        return np.broadcast_to(x, (WARPS * LANES,))

    def shfl(self, name, x, n, bound, mask):
        assert mask == 0xFFFFFFFF and bound == (0 if ".up." in name else LANES - 1)
        source = np.maximum(LANE - n, 0) if ".up." in name else n
        return x.reshape(WARPS, LANES)[np.arange(WARPS * LANES) // LANES, source]

    def shr(self, name, x, n):
        return x >> n

    def shl(self, name, x, n):
        return x << n

    def xor(self, name, x, y):
        return -x if np.ndim(x) == 2 and y == 0x80008000 else x ^ y

    def add(self, name, x, y):
        return x + y

    def sub(self, name, x, y):
        return x - y

    def mul(self, name, x, y):
        return x * y

    def mad(self, name, x, y, z):
        return x * y + z

    def setp(self, name, x, y):
        return x >= y if ".ge." in name else x == y

    def selp(self, name, x, y, where):
        return np.where(where[:, None] if np.ndim(x) == 2 else where, x, y).astype(np.float32)

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
        found = left @ right + np.block(
            [[blocks(np.stack(np.broadcast_arrays(*total[i : i + 2], LANE)[:2], 1))] for i in (0, 2)]
        )
        (d0, d1), (d2, d3) = (pairs(x).T for x in (found[:, :8], found[:, 8:]))
        return d0, d1, d2, d3


setattr(Warpgroup, "and", lambda self, name, x, y: x & y)


def inverse_by_levels(lower):
    """The same levels with the same roundings."""
    apart = np.arange(CHUNK)[:, None] ^ np.arange(CHUNK)
    inverse = np.where(apart == 0, 1, np.where(apart == 1, -lower, 0)).astype(np.float32)
    for level in range(1, 6):
        known = bfloat16(inverse)
        corners = bfloat16(known @ bfloat16(-lower)) @ known
        inverse = np.where(apart >> level == 1, corners, inverse)
    return bfloat16(inverse)


@pytest.mark.filterwarnings("ignore:invalid value")  # of blocks that are dropped
@pytest.mark.parametrize("size", [0.1, 0.3])
def test_the_warps_machine_code_inverts(size):
    lower = np.tril(np.random.default_rng(0).normal(size=(CHUNK, CHUNK)) * size, -1).astype(np.float32)
    warp = np.arange(WARPS * LANES) // LANES
    places = [
        (16 * warp + 8 * half + ROW, 8 * tile + COLUMN + i) for tile in range(8) for half in range(2) for i in range(2)
    ]
    at = [np.full(WARPS * LANES, base) for base in (1 << 20, 1 << 21)]
    warpgroup = Warpgroup()
    given = lower + np.triu(np.full_like(lower, np.inf))  # as strong decays leave it there, where it does not count
    blocks = warpgroup.run(triangular_inverse.invert_blocks(), 3, [*(given[place] for place in places), *at])
    corners = warpgroup.run(triangular_inverse.join_pairs(), 12, [*blocks, *at])
    words = warpgroup.run(triangular_inverse.join_halves(), 16, [*blocks, *corners, *at])
    assert max(warpgroup.shared) - (1 << 21) < CHUNK * CHUNK * 2
    found = np.full_like(lower, np.nan)
    for i, place in enumerate(places):
        found[place] = words[i // 2][:, i % 2]
    np.testing.assert_allclose(found, inverse_by_levels(lower), rtol=1e-2, atol=1e-6)
    assert np.linalg.norm(found - inverse_by_levels(lower)) < 5e-4 * np.linalg.norm(found)  # a tie rounds either way
    exact = np.linalg.inv(np.eye(CHUNK) + lower)
    assert np.linalg.norm(found - exact) < 1.5e-2 * np.linalg.norm(exact)


def test_the_warps_machine_code_adds_up():
    numbers = np.random.default_rng(0).normal(size=(WARPS, 2, 8)).astype(np.float32)
    held = [numbers[np.arange(WARPS * LANES) // LANES, half, ROW] for half in range(2)]
    found = Warpgroup().run(prefix_sum.warp_scan(), 2, held)
    expected = np.cumsum(numbers.reshape(WARPS, 16), axis=1).reshape(numbers.shape)
    for half in range(2):
        of_threads = expected[np.arange(WARPS * LANES) // LANES, half, ROW]
        np.testing.assert_allclose(found[half], of_threads, rtol=1e-5, atol=1e-5)

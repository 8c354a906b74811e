"""The list of extreme chunks, and programs that go over such a list."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.common.config import KernelConfig
from pallas_kernels.common.triton.backend import Operand, call
from pallas_kernels.common.triton.visits import Visits
from pallas_kernels.delta_rule.triton import extreme_chunks
from pallas_kernels.delta_rule.triton.extreme_chunks import list_extreme


@pytest.mark.parametrize(("shape", "block"), [((1, 1, 1), 4096), ((1, 1, 3), 4096), ((2, 3, 37), 16), ((1, 2, 64), 32)])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_marked_chunks_are_listed_in_order(shape, block, share, monkeypatch):
    monkeypatch.setattr(extreme_chunks, "_MARKS", block)
    marks = (np.random.default_rng(0).random(shape) < share).astype(np.int32)
    expected = np.flatnonzero(marks)
    count, *places = np.asarray(list_extreme(jnp.asarray(marks)))
    assert count == len(expected)
    np.testing.assert_array_equal(places[:count], expected)


@pytest.mark.parametrize("programs", [None, 3, 100])
@pytest.mark.parametrize("listed", [[], [2], [4, 0, 3]])
def test_a_visited_place_sees_its_part_of_arrays_and_no_other_changes(listed, programs):
    """Of a `[5, 4, 8]` array each number has two parts of four channels; one token of each part is doubled."""
    x = jnp.asarray(np.random.default_rng(1).normal(size=(5, 4, 8)), jnp.float32)

    def kernel(r):
        assert r.out.shape == (4, 4) and r.out.at[1, :].shape == (4,)
        r.out[1, :] = 2.0 * r.x.at[1, :][...]
        r.out[3, :] = r.x[3, :] + r.visit[0].astype(jnp.float32)

    def operand(array):
        return Operand(array, (None, 4, 4), lambda number, part: (number, 0, part))

    padded = jnp.asarray([len(listed), *listed, *[0] * (5 - len(listed))], jnp.int32)
    visits = Visits(padded, 2, lambda number, part: (number, part), most=10, programs=programs)
    options = {"updates": {"out": operand(x)}, "visits": visits}
    struct = jax.ShapeDtypeStruct(x.shape, x.dtype)
    found = call(kernel, "double", (5, 2), {"x": operand(x)}, {"out": operand(struct)}, KernelConfig(), **options)
    expected = np.array(x)
    for number in listed:
        expected[number, 1] *= 2
        expected[number, 3] += number
    np.testing.assert_array_equal(found["out"], expected)

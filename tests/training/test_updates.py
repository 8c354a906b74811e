"""An update that is left out leaves everything as it was, and on a GPU several arrays share a kernel."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments.kernel_benchmarks.offline.compiling import missing_packages
from rnnlib.training import optimizer as training_optimizer
from rnnlib.training.optimizer import where_finite
from tests.described_card import output_of
from tests.training import on_described_card

SHAPES = [(3,), (2, 3), (3,), (), (2, 3), (3,), (3,), (5, 1), (3,), ()]


def some_parameters(seed):
    rng = np.random.default_rng(seed)
    dtypes = [jnp.float32, jnp.bfloat16]
    arrays = [jnp.asarray(rng.standard_normal(shape), dtypes[i % 2]) for i, shape in enumerate(SHAPES)]
    return {"blocks": [{"a": x} for x in arrays[:7]], "rest": arrays[7:]}


@pytest.mark.parametrize("numbers", [0, 6, 7, 10**6])
@pytest.mark.parametrize("name", ["cpu", "gpu"])
@pytest.mark.parametrize("finite", [True, False])
def test_parameters_and_moments_are_the_new_ones_where_numbers_are_finite(name, numbers, finite, monkeypatch):
    monkeypatch.setattr(training_optimizer, "platform", lambda: name)
    monkeypatch.setattr(training_optimizer, "NUMBERS_OF_A_KERNEL", numbers)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    old = some_parameters(0)
    state = optimizer.init(old)
    gradients = some_parameters(1)
    if not finite:
        gradients["rest"][0] = gradients["rest"][0] * jnp.nan
    changes, after = optimizer.update(gradients, state, old)
    new = optax.apply_updates(old, changes)
    for changed, before in ((new, old), (after, state)):
        found = jax.jit(lambda *x: where_finite(*x))(jnp.bool_(finite), changed, before, old)
        expected = changed if finite else before
        assert jax.tree.structure(found) == jax.tree.structure(expected)
        for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            assert x.dtype == y.dtype
            np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(y, np.float32))


@pytest.mark.parametrize(
    ("numbers", "rows"),
    [
        (0, []),  # each array alone
        (6, [(2, 1), (2, 2), (2, 3)]),  # twice two of three numbers, and two single ones
        (10**6, [(5, 1), (2, 2), (2, 3)]),
    ],
)
def test_arrays_of_one_shape_share_a_row_up_to_so_many_numbers(numbers, rows, monkeypatch):
    monkeypatch.setattr(training_optimizer, "platform", lambda: "gpu")
    monkeypatch.setattr(training_optimizer, "NUMBERS_OF_A_KERNEL", numbers)
    parameters = some_parameters(0)
    text = jax.jit(lambda *x: where_finite(*x)).lower(jnp.bool_(True), parameters, parameters, parameters).as_text()
    found = re.findall(r"dense<\[([a-z, ]*)\]> : tensor<\d+xi1>", text)
    assert sorted((row.count("true"), row.count("false")) for row in found) == sorted(rows)


@pytest.mark.skipif(missing_packages() is not None, reason=str(missing_packages()))
def test_a_card_runs_few_kernels_for_many_small_arrays():
    counts = json.loads(output_of(on_described_card.__name__).splitlines()[-1])
    assert counts["apart"] >= 3 * on_described_card.LAYERS
    # Of the 15 matrices five share a kernel; of the small arrays as many as XLA's limit of operands allows, 12 or 13.
    others = counts["apart"] - 3 * on_described_card.LAYERS
    assert counts["together"] - others <= 3 + 2 * 2, counts

"""What the solver statistics say of systems whose behaviour is known."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rnnlib.analysis.ridge_solvers import (
    CHEBYSHEV_AS_PRINTED,
    chebyshev_weights,
    conjugate_gradient_divisors,
    random_systems,
    recovered_iterates,
    residual_history,
)
from rnnlib.ops.ridge_solve import LinearSolver

STEPS = 30


@functools.cache
def systems():
    return random_systems(batch=1, length=64, heads=2, size=32, ridge=0.05, log_decay=-0.01)


def test_systems_are_the_layers():
    s = systems()
    k = np.asarray(s.k)[0, 0, 1]
    gram = sum(np.exp(-0.01 * (19 - i)) * np.outer(k[i], k[i]) for i in range(20))
    norm = np.asarray(s.norm)
    assert norm[0, 0, 1, 19, 0] == pytest.approx(np.linalg.norm(gram))
    np.testing.assert_allclose(s.ridge, 0.05 * norm)
    with jax.enable_x64(True):
        images = np.asarray(jax.jit(s.product(LinearSolver()))(jnp.broadcast_to(s.q[..., :1, :], s.q.shape)))
    np.testing.assert_allclose(images[0, 0, 1, 19], gram @ np.asarray(s.q)[0, 0, 1, 0], atol=1e-12)
    np.testing.assert_allclose(np.linalg.norm(s.q, axis=-1), 1)


def test_residuals_fall_as_far_as_the_arithmetic_lets_them():
    chebyshev = {
        name: residual_history(systems(), LinearSolver(), STEPS, name)
        for name in ("float64", "float32", "bfloat16 products")
    }
    exact = chebyshev["float64"].largest
    assert exact.shape == (STEPS + 1,)
    kappa = 21.0
    rate = (np.sqrt(kappa) - 1) / (np.sqrt(kappa) + 1)
    assert np.all(exact <= 2 * rate ** np.arange(1, STEPS + 2) * 1.001)
    np.testing.assert_allclose(chebyshev["float32"].largest[:15], exact[:15], rtol=1e-3)
    assert 1e-4 < chebyshev["bfloat16 products"].largest[-1] < 0.1
    assert chebyshev["bfloat16 products"].median[-1] < chebyshev["bfloat16 products"].largest[-1]
    # Without the ridge the residual stays: that is what the ridge costs.
    assert 0.01 < chebyshev["float64"].median_bare[-1] < 1


def test_printed_and_incremental_chebyshev_are_the_same_iteration():
    printed = residual_history(systems(), CHEBYSHEV_AS_PRINTED, STEPS, "float64")
    increments = residual_history(systems(), LinearSolver(), STEPS, "float64")
    np.testing.assert_allclose(printed.largest, increments.largest, rtol=1e-6)
    with pytest.raises(ValueError, match="solver is 'chebyshev', expected a LinearSolver or 'chebyshev as printed'"):
        residual_history(systems(), "chebyshev", STEPS, "float64")


def test_chebyshev_is_undone_with_known_loss_and_conjugate_gradients_are_not():
    """Undoing multiplies rounding errors by `(sqrt(kappa) + 1) / (sqrt(kappa) - 1)` an iteration, 1.56 here."""
    count = 16
    divisors = conjugate_gradient_divisors(systems(), count, "float32")
    assert divisors.smallest.min() < 1e-3 and divisors.largest.max() > 1
    errors = {
        method: recovered_iterates(systems(), method, count, "float32")
        for method in ("chebyshev", "chebyshev, weights reversed", "conjugate_gradient")
    }
    assert all(error.shape == (count + 1,) and error[-1] == 0 for error in errors.values())
    loss = 1.56**count
    assert 6e-8 < errors["chebyshev"].max() < 30 * 6e-8 * loss
    assert errors["chebyshev, weights reversed"].max() > 3 * errors["chebyshev"].max()
    assert not errors["conjugate_gradient"].max() < 0.5
    assert recovered_iterates(systems(), "chebyshev", count, "float64").max() < 30 * 1e-16 * loss


@pytest.mark.parametrize("kappa", [1.0, 11.0, 1001.0])
def test_chebyshev_s_weights_fall_to_their_limit(kappa):
    """The recurrence of algorithm 1, written out; its limit is a fixed point of it, and above 1 (lemma 4)."""
    rho_squared = ((kappa - 1) / (kappa + 1)) ** 2
    found = chebyshev_weights(kappa, 200)
    expected = [2.0]
    for _ in range(200):
        expected.append(4 / (4 - rho_squared * expected[-1]))
    np.testing.assert_allclose(found.weights, expected, rtol=1e-13)
    assert found.limit == pytest.approx(4 / (4 - rho_squared * found.limit), rel=1e-13)
    assert found.limit >= 1 and np.all(np.diff(found.weights) <= 1e-12)
    assert found.weights[-1] == pytest.approx(found.limit, rel=1e-4)


def test_bad_values_are_named():
    with pytest.raises(ValueError, match=r"condition_number is 0\.5, expected at least 1"):
        chebyshev_weights(0.5, 10)
    with pytest.raises(ValueError, match="length is 100, expected a multiple of 64"):
        random_systems(batch=1, length=100, heads=1, size=4)
    with pytest.raises(ValueError, match=r"ridge is 0\.0, expected a positive number"):
        random_systems(batch=1, length=64, heads=1, size=4, ridge=0.0)
    with pytest.raises(ValueError, match="arithmetic is 'float16', expected one of"):
        residual_history(systems(), LinearSolver(), 1, "float16")

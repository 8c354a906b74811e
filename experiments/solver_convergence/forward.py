"""Residuals of the forward pass, and the iterations run backwards (figures 1a, 5 and 8)."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from experiments.solver_convergence.config import SOLVERS, SolverConvergenceConfig
from rnnlib.analysis.ridge_solvers import (
    RidgeSystems,
    conjugate_gradient_divisors,
    random_systems,
    recovered_iterates,
    residual_history,
)
from rnnlib.ops.ridge_solve.reverse import weight_schedule
from rnnlib.ops.ridge_solve.solvers import limit_weight

CONDITION_NUMBERS = tuple(float(x) for x in np.geomspace(2, 1000, 40))
REVERSED = ("Chebyshev", "Chebyshev, weights reversed", "conjugate gradients")
_METHODS = dict(zip(REVERSED, ("chebyshev", "chebyshev, weights reversed", "conjugate_gradient")))


def systems(config: SolverConvergenceConfig, ridge: float) -> RidgeSystems:
    """The paper's data: keys and queries uniform on the sphere, no decay."""
    return random_systems(
        batch=config.batch,
        length=config.length,
        heads=config.heads,
        size=config.size,
        ridge=ridge,
        seed=config.seed,
    )


def residuals(config: SolverConvergenceConfig) -> dict[str, Any]:
    """Largest and median residual norm after each iteration, by arithmetic and solver."""
    data = systems(config, config.ridge)
    curves: dict[str, Any] = {}
    for arithmetic in ("float32", "bfloat16 products"):
        for label, solver in SOLVERS.items():
            history = residual_history(data, solver, config.iterations, arithmetic)
            curves.setdefault(arithmetic, {})[label] = {
                "largest": history.largest.tolist(),
                "median": history.median.tolist(),
            }
    return curves


def strengths(config: SolverConvergenceConfig) -> dict[str, Any]:
    """Chebyshev's residuals for several ridges, with the ridge and without."""
    curves = {}
    for ridge in config.ridges:
        history = residual_history(systems(config, ridge), SOLVERS["Chebyshev"], config.iterations, "float32")
        curves[str(ridge)] = {"largest": history.largest.tolist(), "bare": history.median_bare.tolist()}
    return curves


def backwards(config: SolverConvergenceConfig) -> dict[str, Any]:
    """Divisors of the reversed iterations, and how well they recover the iterates."""
    data = systems(config, config.ridge)
    kappa = np.asarray(CONDITION_NUMBERS)
    contraction = jnp.asarray(((kappa - 1) / (kappa + 1)) ** 2)
    measured = np.asarray(weight_schedule(contraction, config.reversed_iterations))
    divisors = conjugate_gradient_divisors(data, config.reversed_iterations, "float32")
    recovered = {
        arithmetic: {
            label: recovered_iterates(data, method, config.reversed_iterations, arithmetic).tolist()
            for label, method in _METHODS.items()
        }
        for arithmetic in ("float64", "float32")
    }
    return {
        "condition_number": list(CONDITION_NUMBERS),
        "chebyshev_lower_bound": np.asarray(limit_weight(contraction) - 1).tolist(),
        "chebyshev_smallest": (measured[1:].min(axis=0) - 1).tolist(),
        "chebyshev_largest": (measured[1:].max(axis=0) - 1).tolist(),
        "conjugate_gradient_smallest": divisors.smallest.tolist(),
        "conjugate_gradient_largest": divisors.largest.tolist(),
        "recovered": recovered,
    }

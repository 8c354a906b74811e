"""The lemmas of Gated KalmaNet, and how its gradients and iterations converge."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rnnlib import ops
from rnnlib.ops.ridge_solve import LinearSolver
from rnnlib.ops.ridge_solve.reverse import weight_schedule
from rnnlib.ops.ridge_solve.solvers import iterate, limit_weight
from tests.ops.ridge import Call, assert_close, relative_error, run
from tests.ops.test_ridge_solve import dense


@pytest.mark.parametrize("method", ["chebyshev", "gradient_descent", "nesterov", "conjugate_gradient"])
def test_lemma_2(x64, method):
    """The implicit gradient of q is the exact one of the iterations, after however few; not for conjugate gradients."""
    arguments = Call().arguments(jnp.float64)
    d_x, _ = Call().cotangents(jnp.float64)

    def gradient(q, differentiation):
        solver = LinearSolver(method, differentiation)

        def solve(q):
            return ops.ridge_solve(**(arguments | {"q": q}), iterations=6, solver=solver, implementation="chunked")[0]

        return jax.vjp(solve, q)[1](d_x)[0]

    both = jax.jit(lambda q: (gradient(q, "implicit"), gradient(q, "unrolled")))(arguments["q"])
    error = relative_error(*both)
    if method == "conjugate_gradient":
        assert error > 1e-3
    else:
        assert error < 1e-6


def test_reversed_iterations_are_unrolled_ones(x64):
    """Appendix C.1: the exact gradient in everything, from the last two iterates."""
    call = Call(iterations=12, by_channel=True)
    arguments = call.arguments(jnp.float64)
    unrolled, backwards = (
        run(dataclasses.replace(call, solver=LinearSolver("chebyshev", differentiation)), "chunked", arguments)
        for differentiation in ("unrolled", "reversed")
    )
    assert_close(backwards, unrolled, 1e-9)


@pytest.fixture(scope="module")
def converged():
    """A solve with its exact solutions and gradients, its arguments, and its cotangents, in float64."""
    with jax.enable_x64(True):
        call = Call(solver=LinearSolver("exact", "unrolled"))
        arguments = call.arguments(jnp.float64)
        return arguments, run(call, "scan", arguments), [np.asarray(x) for x in call.cotangents(jnp.float64)]


def test_lemma_1_and_the_decays_gradient(x64, converged):
    """Equations 6 to 9 and 30 by token, against autodiff through Cholesky and against chunks.

    `dH_t = -dq_t x_t^T - w_t H_t / 2` (lemma 1's sign; equation 25 prints the other), `D_i = sum_{t >= i} M_it dH_t`,
    `dk_i = (D_i + D_i^T) k_i`, and for the log decay `<D_i, gamma_i H_{i-1}>`.
    """
    arguments, exact, (d_x, d_final) = converged
    a = {name: np.asarray(x, np.float64) for name, x in arguments.items()}
    x, grams = dense(arguments, adaptive=True)
    batch, length, heads, size = x.shape
    d_q, d_k, d_log_decay = np.zeros_like(x), np.zeros_like(x), np.zeros(x.shape[:3])
    for b in range(batch):
        for h in range(heads):
            total = d_final[b, h]  # D_i with its sum over later tokens, run backwards as equations 8 and 9
            for i in reversed(range(length)):
                gram, norm = grams[b, i, h], np.linalg.norm(grams[b, i, h])
                matrix = gram + a["ridge"][h] * norm * np.eye(size)
                d_q[b, i, h] = np.linalg.solve(matrix, d_x[b, i, h])
                w = 2 * a["ridge"][h] * (x[b, i, h] @ d_q[b, i, h]) / norm
                total = total - np.outer(d_q[b, i, h], x[b, i, h]) - w * gram / 2
                d_k[b, i, h] = (total + total.T) @ a["k"][b, i, h]
                before = a["initial_gram"][b, h] if i == 0 else grams[b, i - 1, h]
                starts = i > 0 and a["segment_ids"][b, i] != a["segment_ids"][b, i - 1]
                decay = 0.0 if starts else np.exp(a["log_decay"][b, i, h])
                d_log_decay[b, i, h] = np.sum(total * decay * before)
                total = decay * total
    expected = {"x": x, "d_q": d_q, "d_k": d_k, "d_log_decay": d_log_decay}
    assert_close({name: exact[name] for name in expected}, expected, 1e-10)
    actual = run(Call(iterations=48), "chunked", arguments)
    assert_close({name: actual[name] for name in expected}, expected, 1e-6)


def test_implicit_gradients_converge_with_the_iterations(x64, converged):
    """Their error falls like the solution's, by `(sqrt(kappa) - 1) / (sqrt(kappa) + 1)` an iteration or faster."""
    arguments, exact, _ = converged
    kappa = 1 + 1 / float(arguments["ridge"].min())
    rate = (np.sqrt(kappa) - 1) / (np.sqrt(kappa) + 1)
    counts = (6, 20, 48)
    by_count = [run(Call(iterations=count), "chunked", arguments) for count in counts]
    for name in ("x", "d_q", "d_k", "d_log_decay", "d_ridge", "d_initial_gram"):
        errors = [relative_error(result[name], exact[name]) for result in by_count]
        for (i, first), (j, later) in zip(zip(counts, errors), zip(counts[1:], errors[1:])):
            assert later < 4 * rate ** (j - i) * first, (name, errors)
        assert errors[-1] < 1e-6


_weights = jax.jit(lambda contraction: weight_schedule(contraction, 60))


@given(ratio=st.floats(1.001, 1e6), iterations=st.integers(1, 60))
def test_lemmas_3_and_4(ratio, iterations):
    """Weights fall from 2 to a limit above 1, at the stated rate, and no division in them is by less than 2."""
    with jax.enable_x64(True):
        contraction = jnp.full((1,), ((ratio - 1) / (ratio + 1)) ** 2)
        limit = float(limit_weight(contraction)[0])
        weights = np.asarray(_weights(contraction))[: iterations + 1, 0]
    assert weights[0] == 2 and limit > 1 and np.all(np.diff(weights) <= 0) and weights[-1] >= limit * (1 - 1e-12)
    divisors = 4 - float(contraction[0]) * weights
    assert np.all((divisors >= 2) & (divisors <= 4))
    rate = (ratio - 1) / (ratio + 1) * (np.sqrt(ratio) - 1) / (np.sqrt(ratio) + 1)
    gaps = rate ** np.arange(iterations + 1) * (2 - limit)
    # limit_weight is (1 - sqrt(1 - rho^2)) / rho^2 rearranged; near ratio 1 the printed form cancels.
    assert np.all(weights - limit <= gaps + 1e-12)
    if ratio > 1.1:
        rho2 = float(contraction[0])
        np.testing.assert_allclose(limit, 2 * (1 - np.sqrt(1 - rho2)) / rho2, rtol=1e-6)


@pytest.fixture(scope="module")
def system():
    """A matrix with eigenvalues spread over `[mu, L]`, as its bare part, ridge, norm, and a right-hand side."""
    rng = np.random.default_rng(0)
    basis, _ = np.linalg.qr(rng.standard_normal((20, 20)))
    values = np.cos(np.linspace(0, np.pi, 20)) / 2 + 0.5  # from 0 to 1, the bounds included
    return basis @ np.diag(values) @ basis.T, np.array([0.02]), np.array([1.0]), rng.standard_normal(20)


def residuals(system, method, counts):
    solver = method if isinstance(method, LinearSolver) else LinearSolver(method)
    with jax.enable_x64(True):
        gram, ridge, norm, b = (jnp.asarray(x) for x in system)
        matrix = gram + ridge * jnp.eye(20)
        solutions = [iterate(solver, lambda x: gram @ x, b, ridge, norm, count)[0] for count in counts]
        return [float(jnp.linalg.norm(b - matrix @ x)) for x in solutions], matrix, b


def test_chebyshev_reaches_its_optimal_bound(system):
    """After r iterations the residual is the start's times a Chebyshev polynomial: none does better."""
    counts = (0, 1, 2, 5, 15, 30)
    norms, matrix, b = residuals(system, "chebyshev", counts)
    values, vectors = np.linalg.eigh(np.asarray(matrix))
    middle, half = (1.02 + 0.02) / 2, (1.02 - 0.02) / 2
    for count, norm in zip(counts, norms):
        polynomial = np.polynomial.chebyshev.Chebyshev.basis(count + 1)
        factor = polynomial((middle - values) / half) / polynomial(middle / half)
        np.testing.assert_allclose(norm, np.linalg.norm(factor * (vectors.T @ np.asarray(b))), rtol=1e-8)


def test_rates_of_the_other_methods(system):
    """Gradient descent and Nesterov contract as known; conjugate gradients end after as many steps as dimensions."""
    start = np.linalg.norm(system[3])
    kappa = 51.0
    (descent,), _, _ = residuals(system, "gradient_descent", (100,))
    assert descent <= ((kappa - 1) / (kappa + 1)) ** 101 * start * (1 + 1e-9)
    nesterov, _, _ = residuals(system, "nesterov", (40, 80))
    rate = 1 - 2 / np.sqrt(3 * kappa + 1)
    assert nesterov[1] < 3 * rate**40 * nesterov[0] and nesterov[1] < descent
    (conjugate,), _, _ = residuals(system, "conjugate_gradient", (20,))
    assert conjugate < 1e-9 * start
    # Flash-linear-attention's divisors keep it from getting there.
    (stopped,), _, _ = residuals(system, LinearSolver("conjugate_gradient", epsilon=1e-5), (40,))
    assert 1e-4 < stopped < 1e-2
    (chebyshev,), _, _ = residuals(system, "chebyshev", (40,))
    assert chebyshev < nesterov[0]

"""How the iterations behind a ridge solve converge, and whether they run backwards (Gated KalmaNet, figures 1, 5, 8).

The systems are those of the layer: one for each token of random sequences, `(H_t + lambda_t) x_t = q_t`. The iterations
run in an arithmetic of choice; what they reach is measured in float64.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from rnnlib.ops import chunk
from rnnlib.ops.ridge_solve import LinearSolver
from rnnlib.ops.ridge_solve import gram as grams
from rnnlib.ops.ridge_solve.inputs import norm_from_square
from rnnlib.ops.ridge_solve.reverse import undo_step, weight_schedule
from rnnlib.ops.ridge_solve.solvers import Product, chebyshev_coefficients, iteration, limit_weight, next_weight

CHUNK = 64
CHEBYSHEV_AS_PRINTED = "chebyshev as printed"
ARITHMETICS = ("float64", "float32", "bfloat16 products", "bfloat16")


class RidgeSystems(NamedTuple):
    """The systems of all tokens; no `H_t` is formed but those at the starts of chunks.

    Attributes:
        q: right-hand sides `[N, B, H, C, K]`, by chunk.
        k: keys, likewise.
        decay: decays in each chunk.
        states: Gram matrices at the chunks' starts `[N, B, H, K, K]`.
        norm: `||H_t||_F`, `[N, B, H, C, 1]`.
        ridge: `lambda_t`, likewise.
    """

    q: Array
    k: Array
    decay: grams.Decays
    states: Array
    norm: Array
    ridge: Array

    def product(self, solver: LinearSolver) -> Product:
        """The function `x -> H_t x_t` in the solver's precision."""
        return grams.gram_product(solver, self.k, self.decay, self.states)

    def cast(self, dtype: Any) -> "RidgeSystems":
        """The same systems in another dtype."""
        return jax.tree.map(lambda x: x.astype(dtype), self)


def random_systems(
    *, batch: int, length: int, heads: int, size: int, ridge: float = 0.02, log_decay: float = 0.0, seed: int = 0
) -> RidgeSystems:
    """Systems of random queries and keys of unit length, with an adaptive ridge, in float64 (appendix D of the paper).

    Args:
        batch: sequences B.
        length: tokens T of each, a multiple of 64.
        heads: H.
        size: channels K.
        ridge: `lambda_t / ||H_t||_F`.
        log_decay: of every token; 0 is the paper's.
        seed: of the random numbers.

    Raises:
        ValueError: `length` is not a multiple of 64, or `ridge` not positive.
    """
    if length < CHUNK or length % CHUNK:
        raise ValueError(f"random_systems: length is {length}, expected a multiple of {CHUNK}")
    if not ridge > 0:
        raise ValueError(f"random_systems: ridge is {ridge}, expected a positive number")
    rng = np.random.default_rng(seed)
    shape = (length // CHUNK, batch, heads, CHUNK, size)
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in rng.standard_normal((2, *shape)))
    with jax.enable_x64(True):
        return _assemble(jnp.asarray(q), jnp.asarray(k), jnp.full(shape[:-1], log_decay), jnp.asarray(ridge))


@jax.jit
def _assemble(q: Array, k: Array, log_decay: Array, ridge: Array) -> RidgeSystems:
    decay = grams.decays(jnp.maximum(log_decay, chunk.LOG_ZERO))
    initial = chunk.zero_state((*q.shape[1:3], q.shape[-1], q.shape[-1]), q.dtype)
    states, _ = grams.chunk_states(k, decay, initial)
    norm = norm_from_square(grams.square_norms(k, decay, states))[..., None]
    return RidgeSystems(q, k, decay, states, norm, ridge * norm)


class ResidualHistory(NamedTuple):
    """Residuals after each iteration, `[iterations + 1]`; the first entries are those of the start.

    Attributes:
        largest: of `||(H + lambda) x - q||`, over all systems.
        median: likewise.
        median_bare: median of `||H x - q||`, which the ridge keeps from vanishing.
    """

    largest: np.ndarray
    median: np.ndarray
    median_bare: np.ndarray


def residual_history(
    systems: RidgeSystems, solver: LinearSolver | str, iterations: int, arithmetic: str
) -> ResidualHistory:
    """Runs a solver and measures each iterate's residual in float64; right-hand sides have norm 1.

    Args:
        systems: in float64.
        solver: an iterative method, or `CHEBYSHEV_AS_PRINTED`: the paper's algorithm 1 in place of its increments.
        iterations: how many.
        arithmetic: of `ARITHMETICS`. `"bfloat16 products"` rounds the factors of `H x` to bfloat16 and keeps iterates
            in float32, as kernels do; `"bfloat16"` also rounds all that the iteration carries.
    """
    with jax.enable_x64(True):
        return ResidualHistory(*map(np.asarray, _residuals(systems, solver, iterations, arithmetic)))


def _chebyshev_as_printed(product: Product, b: Array, ridge: Array, norm: Array) -> tuple[Any, Any]:
    """Algorithm 1 as the paper has it: the residual is computed anew from each iterate."""
    step, contraction = chebyshev_coefficients(ridge, norm)

    def iterate(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        x, previous, weight = carry
        weight = next_weight(weight, contraction)
        descended = x - step * weight * (product(x) + ridge * x - b)
        return descended + (weight - 1) * (x - previous), x, weight

    return (step * b, jnp.zeros_like(b), jnp.full_like(step, 2)), iterate


def _run(systems: RidgeSystems, solver: LinearSolver | str, arithmetic: str) -> tuple[Any, Any]:
    """The iteration's start and step in an arithmetic."""
    if arithmetic not in ARITHMETICS:
        raise ValueError(f"residual_history: arithmetic is {arithmetic!r}, expected one of {ARITHMETICS}")
    rounded = arithmetic.startswith("bfloat16")
    s = systems.cast(jnp.float64 if arithmetic == "float64" else jnp.float32)
    product_dtype = jnp.bfloat16 if rounded else None
    if isinstance(solver, str):
        if solver != CHEBYSHEV_AS_PRINTED:
            raise ValueError(
                f"residual_history: solver is {solver!r}, expected a LinearSolver or {CHEBYSHEV_AS_PRINTED!r}"
            )
        start, step = _chebyshev_as_printed(s.product(LinearSolver(product_dtype=product_dtype)), s.q, s.ridge, s.norm)
    else:
        solver = dataclasses.replace(solver, product_dtype=product_dtype)
        start, step = iteration(solver, s.product(solver), s.q, s.ridge, s.norm)

    def carried(carry: Any) -> Any:
        if arithmetic != "bfloat16":
            return carry
        return jax.tree.map(lambda x: jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7), carry)

    return carried(start), lambda carry: carried(step(carry))


@functools.partial(jax.jit, static_argnames=("solver", "iterations", "arithmetic"))
def _residuals(
    systems: RidgeSystems, solver: LinearSolver | str, iterations: int, arithmetic: str
) -> tuple[Array, Array, Array]:
    start, step = _run(systems, solver, arithmetic)
    product = systems.product(LinearSolver())

    def measure(carry: Any, _: None) -> tuple[Any, tuple[Array, Array, Array]]:
        x = carry[0].astype(jnp.float64)
        bare = product(x) - systems.q
        norms = jnp.linalg.norm(bare + systems.ridge * x, axis=-1)
        return step(carry), (jnp.max(norms), jnp.median(norms), jnp.median(jnp.linalg.norm(bare, axis=-1)))

    return jax.lax.scan(measure, start, None, length=iterations + 1)[1]


class ChebyshevWeights(NamedTuple):
    """The weights of Chebyshev's iteration (Gated KalmaNet, algorithm 1 and lemmas 3 and 4).

    Attributes:
        weights: `omega_0 = 2, omega_1, ...`, `[iterations + 1]`, float64.
        limit: the fixed point that they fall to.
    """

    weights: np.ndarray
    limit: float


def chebyshev_weights(condition_number: float, iterations: int) -> ChebyshevWeights:
    """The weights for systems with a given ratio of the largest eigenvalue to the smallest.

    Undoing iteration i divides by `omega_i - 1` (figure 5a).

    Args:
        condition_number: kappa, at least 1.
        iterations: how many.

    Raises:
        ValueError: `condition_number` is less than 1.
    """
    if not condition_number >= 1:
        raise ValueError(f"chebyshev_weights: condition_number is {condition_number}, expected at least 1")
    with jax.enable_x64(True):
        contraction = jnp.full((1,), ((condition_number - 1) / (condition_number + 1)) ** 2, jnp.float64)
        weights = np.asarray(weight_schedule(contraction, iterations))[:, 0]
        return ChebyshevWeights(weights, float(limit_weight(contraction)[0]))


class Divisors(NamedTuple):
    """What running conjugate gradients backwards divides by, over all systems, after each iteration, `[iterations]`.

    Attributes:
        smallest: of `beta_i`, zeros left out.
        largest: likewise.
    """

    smallest: np.ndarray
    largest: np.ndarray


def conjugate_gradient_divisors(systems: RidgeSystems, iterations: int, arithmetic: str) -> Divisors:
    """The extremes of `beta_i = ||r_i||^2 / ||r_{i-1}||^2`: undoing a step divides by it (figure 5b).

    Args:
        systems: in float64.
        iterations: how many.
        arithmetic: of `ARITHMETICS`.
    """
    with jax.enable_x64(True):
        return Divisors(*map(np.asarray, _ratios(systems, iterations, arithmetic)))


@functools.partial(jax.jit, static_argnames=("iterations", "arithmetic"))
def _ratios(systems: RidgeSystems, iterations: int, arithmetic: str) -> tuple[Array, Array]:
    start, step = _run(systems, LinearSolver("conjugate_gradient"), arithmetic)

    def measure(carry: Any, _: None) -> tuple[Any, tuple[Array, Array]]:
        carry = step(carry)
        return carry, (jnp.min(jnp.where(carry.ratio > 0, carry.ratio, jnp.inf)), jnp.max(carry.ratio))

    return jax.lax.scan(measure, start, None, length=iterations)[1]


def recovered_iterates(systems: RidgeSystems, method: str, iterations: int, arithmetic: str) -> np.ndarray:
    """Runs an iteration forwards, then backwards from its end, and compares: what appendix C.1 rests on.

    Args:
        systems: in float64.
        method: `"chebyshev"`, `"chebyshev, weights reversed"` (equation 57 in place of the schedule run forwards
            again) or `"conjugate_gradient"`.
        iterations: how many there and back.
        arithmetic: of `ARITHMETICS`.

    Returns:
        `[iterations + 1]`: the largest error over all systems of the iterate recovered for each index, relative to the
        norm of the iterate itself. The last entries are 0: they are given.
    """
    with jax.enable_x64(True):
        return np.asarray(_recover(systems, method, iterations, arithmetic))


@functools.partial(jax.jit, static_argnames=("method", "iterations", "arithmetic"))
def _recover(systems: RidgeSystems, method: str, iterations: int, arithmetic: str) -> Array:
    solver = LinearSolver(method.split(",")[0])
    start, step = _run(systems, solver, arithmetic)
    end, before = jax.lax.scan(lambda carry, _: (step(carry), carry), start, None, length=iterations)
    visited = jnp.concatenate([before[0], end[0][None]])  # [iterations + 1, ...]
    s = systems.cast(visited.dtype)
    product = s.product(LinearSolver(product_dtype=jnp.bfloat16 if arithmetic.startswith("bfloat16") else None))

    def matrix_product(x: Array) -> Array:
        return product(x) + s.ridge * x

    undo = _undo_conjugate_gradient if method == "conjugate_gradient" else _undo_chebyshev
    recovered = undo(s, matrix_product, before, end, iterations, method.endswith("reversed"))
    difference = jnp.linalg.norm((recovered - visited).astype(jnp.float64), axis=-1)
    return jnp.max(difference / jnp.linalg.norm(end[0].astype(jnp.float64), axis=-1), axis=(1, 2, 3, 4))


def _undo_conjugate_gradient(
    systems: RidgeSystems, matrix_product: Product, before: Any, end: Any, iterations: int, reversed_weights: bool
) -> Array:
    """All iterates from the last; the ratios `beta_i`, one number each, are taken as stored."""

    def undo(carry: tuple[Array, Array, Array], ratio: Array) -> tuple[tuple[Array, Array, Array], Array]:
        x, residual, direction = carry
        square = jnp.sum(jnp.square(residual), axis=-1, keepdims=True) / ratio
        earlier_direction = (direction - residual) / ratio
        image = matrix_product(earlier_direction)
        length = square / jnp.sum(earlier_direction * image, axis=-1, keepdims=True)
        undone = (x - length * earlier_direction, residual + length * image, earlier_direction)
        # Where the system had been solved already, the iteration did nothing.
        x, residual, direction = (jnp.where(ratio > 0, one, other) for one, other in zip(undone, carry))
        return (x, residual, direction), x

    ratios = jnp.concatenate([before.ratio[1:], end.ratio[None]])
    _, recovered = jax.lax.scan(undo, (end.x, end.residual, end.direction), ratios, reverse=True)
    return jnp.concatenate([recovered, end.x[None]])


def _undo_chebyshev(
    systems: RidgeSystems, matrix_product: Product, before: Any, end: Any, iterations: int, reversed_weights: bool
) -> Array:
    """All iterates from the last two."""
    coefficients = chebyshev_coefficients(systems.ridge, systems.norm)
    weights = weight_schedule(coefficients.contraction, iterations)
    if reversed_weights:

        def earlier_weight(weight: Array, _: None) -> tuple[Array, Array]:
            return 4 / coefficients.contraction * (1 - 1 / weight), weight

        weights = jax.lax.scan(earlier_weight, weights[-1], None, length=iterations + 1)[1][::-1]

    def undo(carry: tuple[Array, Array], weight: Array) -> tuple[tuple[Array, Array], Array]:
        x, previous = carry
        earlier = undo_step(matrix_product, systems.q, coefficients.step, weight, x, previous).earlier
        return (previous, earlier), earlier

    # Undoing step i gives iterate i - 2; step 1 would give the zero before the start.
    _, recovered = jax.lax.scan(undo, (end.x, end.previous), weights[2:], reverse=True)
    return jnp.concatenate([recovered, end.previous[None], end.x[None]])

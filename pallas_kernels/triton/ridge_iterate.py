"""The iterations: one program solves the 64 systems of one chunk of one head, with all iterates in registers.

    H_t x_t = from_start_t H_0 x_t + sum_{s <= t} exp(G_t - G_s) (k_s . x_t) k_s

is a product with the state at the chunk's start and two with the chunk's keys, with the scores masked in between. All
methods carry the last increment and the residual `b - A x`, and multiply the increment: rounding then errs by a share
of what changes, which shrinks, and the product is accumulated onto the residual, in the residual's own registers.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.triton.backend import Operand, call, dot, dot_nt
from pallas_kernels.triton.decay import CHUNK
from pallas_kernels.triton.pairs import weigh_pairs
from pallas_kernels.triton.problem import Problem
from pallas_kernels.triton.ridge_problem import Method, RidgeInputs, RidgeSchedule, Rows, loaded_decay, rows_of_chunk
from pallas_kernels.triton.ridge_products import Parts, load_parts, multiply, parts

# As in the operator's definition: a Gram matrix of this norm or less counts as zero.
NORM_FLOOR = 1e-10


class System(NamedTuple):
    """The systems of one chunk.

    Attributes:
        keys: `[C, K]`.
        state: Gram matrix at the chunk's start, `[K, K]`.
        decay: of the chunk.
        from_start: `[C]` or None.
        ridge: what is added to the diagonal, `[C, 1]` or `[C, K]`.
        lower: bound on the eigenvalues, `[C, 1]`.
        upper: likewise.
    """

    keys: Parts
    state: Parts
    decay: Any
    from_start: Array | None
    ridge: Array
    lower: Array
    upper: Array


def total(x: Array) -> Array:
    """The sum of a matrix, one axis at a time: the backend does not lower both at once."""
    return jnp.sum(jnp.sum(x, axis=1), axis=0)


def pair_decays(decay) -> Array:
    """Decay from token s, left out, to token t, `[C (t), C (s)]`; zero unless `s <= t` in one segment."""
    return weigh_pairs(jnp.ones((CHUNK, CHUNK), jnp.float32), decay, strict=False)


def norms(keys: Parts, state: Parts, square: Array, decay, from_start: Array | None, precision: str) -> Array:
    """Frobenius norms of the chunk's Gram matrices, `[C]`, by three terms (Gated KalmaNet, section 4.2.1).

    Args:
        keys: `[C, K]`.
        state: Gram matrix at the chunk's start, `[K, K]`.
        square: its squared norm.
        decay: of the chunk.
        from_start: `[C]` or None.
        precision: of the products.
    """
    pairs = pair_decays(decay)
    forms = jnp.sum(multiply(dot, keys, state, precision) * keys.value, axis=1)
    products = jnp.square(multiply(dot_nt, keys, keys, precision))
    third = jnp.sum(multiply(dot, parts(pairs, precision), parts(products, precision), precision) * pairs, axis=1)
    first, second = square, 2.0 * jnp.sum(pairs * forms[None, :], axis=1)
    if from_start is not None:
        first, second = from_start * from_start * first, from_start * second
    square = first + second + third
    is_positive = square > NORM_FLOOR**2
    return jnp.where(is_positive, jnp.sqrt(jnp.where(is_positive, square, 1.0)), 0.0)


def _subtract_product(system: System, pairs: Array, x: Array, onto: Array, precision: str) -> Array:
    """`onto - H x`, `[C, K]`."""
    factor = parts(x, precision)
    scores = multiply(dot_nt, factor, system.keys, precision) * -pairs
    far = -x if system.from_start is None else x * -system.from_start[:, None]
    onto = multiply(dot, parts(far, precision), system.state, precision, onto)
    return multiply(dot, parts(scores, precision), system.keys, precision, onto)


def _iterate_stationary(system: System, method: Method, b: Array, holds_pairs: bool) -> Array:
    """Chebyshev's iteration, gradient descent, and the accelerated one of Nesterov: other coefficients, one loop.

        r <- r - A d        d <- m d + s r        x <- x + d

    from `d = x = s_0 b`, `r = b`, with `d` the increment and `r` the residual. Chebyshev's weights `w` give
    `m = w - 1`, `s = w s_0` (Gated KalmaNet, algorithm 1).
    """
    step = 2.0 / (system.upper + system.lower)
    name = method.name
    contraction = jnp.square((system.upper - system.lower) / (system.upper + system.lower))
    fixed = pair_decays(system.decay) if holds_pairs else None
    if name == "nesterov":
        root = jnp.sqrt(3.0 * system.upper / system.lower + 1.0)
        short, momentum = 4.0 / (3.0 * system.upper + system.lower), (root - 2.0) / (root + 2.0)

    def body(n, carry):
        x, increment, residual, weight = carry
        pairs = fixed
        if pairs is None:
            decay = system.decay
            if decay.total is not None:  # depends on the iteration by nothing but its name, so it is not kept
                decay = decay._replace(total=decay.total + 0.0 * weight[:, 0])
            pairs = pair_decays(decay)
        before = residual
        residual = _subtract_product(system, pairs, increment, residual - system.ridge * increment, method.precision)
        if name == "chebyshev":
            weight = 1.0 / (1.0 - contraction * weight * 0.25)
            increment = (weight - 1.0) * increment + (step * weight) * residual
        elif name == "gradient_descent":
            increment = step * residual
        else:
            m = jnp.where(n == 0, 0.0, momentum)
            increment = m * increment + short * (residual + m * (residual - before))
        return x + increment, increment, residual, weight

    start = step * b
    return lax.fori_loop(0, method.iterations, body, (start, start, b, jnp.full_like(step, 2.0)))[0]


def _iterate_conjugate(system: System, method: Method, b: Array) -> Array:
    """Conjugate gradients from zero; a system whose residual has vanished stays where it is."""
    pairs = pair_decays(system.decay)
    square = jnp.sum(b * b, axis=1, keepdims=True)
    floor = square * jnp.finfo(jnp.float32).eps ** 2

    def body(_, carry):
        x, residual, direction, square = carry
        is_live = square > floor

        def quotient(numerator, denominator):
            return jnp.where(is_live, numerator / (jnp.where(is_live, denominator, 1.0) + method.epsilon), 0.0)

        image = _subtract_product(system, pairs, direction, -system.ridge * direction, method.precision)  # -A d
        length = quotient(square, -jnp.sum(direction * image, axis=1, keepdims=True))
        x = x + length * direction
        residual = residual + length * image
        after = jnp.sum(residual * residual, axis=1, keepdims=True)
        direction = jnp.where(is_live, residual + quotient(after, square) * direction, direction)
        return x, residual, direction, after

    return lax.fori_loop(0, method.iterations, body, (jnp.zeros_like(b), b, b, square))[0]


def _solve_kernel(r, *, method: Method, holds_pairs: bool):
    keys = parts(r.k[...], method.precision)
    state = load_parts(r.high, r.low)
    decay = loaded_decay(r)
    from_start = None if r.from_start is None else r.from_start[...]
    if r.given_norm is None:
        norm = norms(keys, state, jnp.sum(r.squares[...]), decay, from_start, method.precision)
        r.norm[...] = norm
    else:
        norm = r.given_norm[...]
    strength = r.ridge[...]  # a number or [K]
    by_channel = strength.ndim == 1
    strength = strength[None, :] if by_channel else jnp.full((1, 1), strength)
    b = r.b[...].astype(jnp.float32)
    column = norm[:, None]
    if method.adaptive:
        ridge = jnp.where(column > 0.0, strength * column, 1.0)
        b = jnp.where(column > 0.0, b, 0.0)
    else:
        ridge = jnp.broadcast_to(strength, (CHUNK, strength.shape[1]))
    lower = jnp.min(ridge, axis=1, keepdims=True)
    upper = column + jnp.max(ridge, axis=1, keepdims=True)
    system = System(keys, state, decay, from_start, ridge, lower, upper)
    if method.name == "conjugate_gradient":
        x = _iterate_conjugate(system, method, b)
    else:
        x = _iterate_stationary(system, method, b, holds_pairs)
    r.x[...] = x.astype(r.x.dtype)
    if r.solution is not None:
        d_ridge = -x * r.solution[...].astype(jnp.float32)  # of what is added to the diagonal
        given = d_ridge * column if method.adaptive else d_ridge
        r.d_ridge[...] = jnp.sum(given, axis=0) if by_channel else total(given)
        if method.adaptive:
            _store_weights(r, jnp.sum(d_ridge * strength, axis=1), norm, decay, from_start)


def _store_weights(r, d_norm: Array, norm: Array, decay, from_start: Array | None) -> None:
    """With what weights keys and starting state enter the gradient by the norms, whose own is `d_norm` `[C]`.

    As `d||H||_F = <H, dH> / ||H||_F`, the gradient of `H_t` is `weight_t H_t / 2`, where `H_t` is itself made of keys
    and state: the nested recurrence of Gated KalmaNet, equations 9, 10 and 34.
    """
    weight = jnp.where(norm > 0.0, 2.0 * d_norm / jnp.where(norm > 0.0, norm, 1.0), 0.0)
    seen = weight if from_start is None else weight * from_start
    r.weight[...] = weight
    r.key_weight[...] = jnp.sum(pair_decays(decay) * seen[:, None], axis=0)
    r.start_weight[...] = jnp.sum(seen if from_start is None else seen * from_start, axis=0)


class Solved(NamedTuple):
    """Results of `solve_chunks`.

    Attributes:
        x: solutions `[B, T, H, K]`.
        norm: Frobenius norms `[B, H, T]` float32; None if they were given.
        d_ridge: gradient of the ridge by chunk, `[B, H, N]` or `[B, H, N, K]`; None but in the backward.
        weight: `2 dL/d||H_t|| / ||H_t||`, `[B, H, T]`; None but in the backward, and unless the ridge is adaptive.
        key_weight: the weight with which each key enters the gradient by its chunk's norms, `[B, H, T]`; likewise.
        start_weight: the same of the state at the chunk's start, `[B, H, N]`; likewise.
    """

    x: Array
    norm: Array | None = None
    d_ridge: Array | None = None
    weight: Array | None = None
    key_weight: Array | None = None
    start_weight: Array | None = None


def solve_chunks(
    problem: Problem,
    method: Method,
    inputs: RidgeInputs,
    rows: Rows,
    states: Parts,
    schedule: RidgeSchedule,
    *,
    b: Array,
    squares: Array | None = None,
    norm: Array | None = None,
    solution: Array | None = None,
) -> Solved:
    """Solves `(H_t + Diag(ridge_t)) x_t = b_t`.

    Args:
        problem: static facts.
        method: how.
        inputs: keys and ridge.
        rows: decays.
        states: Gram matrices at the chunks' starts.
        schedule: compilation.
        b: `[B, T, H, K]`.
        squares: squared norms of the rows of `states`, `[B, H, N, K]`, unless the norms are known.
        norm: `[B, H, T]`, where it is known.
        solution: in the backward, where `b` is the gradient of this solution.
    """
    p = problem

    def at(h, n, batch):
        return batch, n, h, 0

    def token(x):
        return p.of_token(x, CHUNK, at)

    def of_state(x):
        return p.of_head(x, (None, p.key_size, p.key_size), lambda h, n, b: (b, h, n, 0, 0))

    row = p.of_head(p.per_head(p.length, dtype=jnp.float32), (CHUNK,), lambda h, n, b: (b, h, n))
    width = inputs.ridge.shape[1]
    backward = solution is not None
    weights = row if backward and method.adaptive else None
    by_chunk = chunk_number(p.per_head(p.chunks, dtype=jnp.float32))
    tail = () if width == 1 else (width,)
    d_ridge = p.of_head(
        p.per_head(p.chunks, *tail, dtype=jnp.float32), (None, *tail), lambda h, n, b: (b, h, n, 0)[: 3 + len(tail)]
    )
    results = call(
        _solve_kernel,
        f"ridge_{method.name}",
        p.chunk_grid,
        {
            "b": token(b),
            "k": token(inputs.k),
            "high": of_state(states.high),
            "low": of_state(states.low),
            "ridge": _ridge_operand(inputs.ridge),
            "squares": p.of_head(squares, (None, p.key_size), lambda h, n, b: (b, h, n, 0)),
            "given_norm": None if norm is None else p.of_head(norm, (CHUNK,), lambda h, n, b: (b, h, n)),
            "solution": token(solution),
            **rows_of_chunk(p, rows, ("total", "fine", "runs", "from_start")),
        },
        {
            "x": token(jax.ShapeDtypeStruct(b.shape, b.dtype)),
            "norm": row if norm is None else None,
            "d_ridge": d_ridge if backward else None,
            "weight": weights,
            "key_weight": weights,
            "start_weight": None if weights is None else by_chunk,
        },
        schedule.solve,
        method=method,
        holds_pairs=schedule.holds_pairs,
    )
    return Solved(**{name: results[name] for name in Solved._fields})  # type: ignore[arg-type]


def chunk_number(x) -> Operand | None:
    """A chunk's number of `[B, H, N]`, for kernels of one program a chunk."""
    return None if x is None else Operand(x, (None, None, None), lambda h, n, b: (b, h, n))


def _ridge_operand(ridge: Array) -> Operand:
    if ridge.shape[1] == 1:
        return Operand(ridge[:, 0], (None,), lambda h, n, b: (h,))
    return Operand(ridge, (None, ridge.shape[1]), lambda h, n, b: (h, 0))

"""The iterations: one program solves the 64 systems of one chunk of one head, with all iterates in registers.

    H_t x_t = from_start_t H_0 x_t + sum_{s <= t} exp(G_t - G_s) (k_s . x_t) k_s

is a product with the state at the chunk's start and two with the chunk's keys, with the scores masked in between. All
methods carry the last increment and the residual `b - A x`, and multiply the increment: rounding then errs by a share
of what changes, which shrinks, and the product is accumulated onto the residual, in the residual's own registers.

Three float32 iterates and a product's operands are more than the registers hold. So where products are of bfloat16, the
solution, which no product takes, is added up in float16 (see `Solution`).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.triton.backend import Operand, barrier, call, dot, dot_nt
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
        ridge: what is added to the diagonal, `[C, 1]` or `[C, K]`; for conjugate gradients also `[K]`.
        lower: bound on the eigenvalues, `[C, 1]`, for the methods that need one.
        upper: likewise.
        contraction: the square of `(upper - lower) / (upper + lower)`, `[C, 1]`, or `[1, 1]` where all tokens share it.
    """

    keys: Parts
    state: Parts
    decay: Any
    from_start: Array | None
    ridge: Array
    lower: Any = None
    upper: Any = None
    contraction: Any = None


def pair_decays(decay) -> Array:
    """Decay from token s, left out, to token t, `[C (t), C (s)]`; zero unless `s <= t` in one segment."""
    return weigh_pairs(jnp.ones((CHUNK, CHUNK), jnp.float32), decay, strict=False)


def _held_pairs(system: "System", precision: str) -> Array:
    """The same for the iterations, in registers all along: half of them where products are of bfloat16 anyway."""
    pairs = pair_decays(system.decay)
    return pairs.astype(jnp.bfloat16) if precision == "bfloat16" else pairs


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


class Solution(NamedTuple):
    """A solution while it is added up, in units in which float16 holds it.

    Its least bound is that of the right-hand side over the least eigenvalue, the ridge. In this unit no element is
    above the square root of the number of channels, and none that matters is denormal. Float16 keeps 11 bits: after
    the first, large increments the leading part goes to the output's memory, and the rest is added to from there on.

    Attributes:
        unit: what the solution is multiplied by, `[C, 1]`; None where it is float32 as it is.
        dtype: of the sum.
    """

    unit: Array | None
    dtype: Any

    @classmethod
    def of(cls, b: Array, lower: Array, precision: str) -> "Solution":
        """That for a right-hand side `[C, K]`, with a bound `[C, 1]` on the eigenvalues from below."""
        if precision != "bfloat16":
            return cls(None, jnp.float32)
        most = jnp.max(jnp.abs(b), axis=1, keepdims=True)
        return cls(lower / jnp.where(most > 0.0, most, 1.0), jnp.float16)

    def scaled(self, x: Array) -> Array:
        """`x` in this unit."""
        return x if self.unit is None else x * self.unit

    def value(self, x: Array) -> Array:
        """The inverse, in float32."""
        x = x.astype(jnp.float32)
        return x if self.unit is None else x / self.unit

    def iterate(self, body: Callable, carry: tuple, iterations: int, out: Any) -> Array:
        """The first of `carry`, the solution, after `iterations` of `body`; `out` is the memory it is meant for."""
        first = iterations // 4
        if self.unit is None or first == 0:
            return self.value(lax.fori_loop(0, iterations, body, carry)[0])
        x, *others = lax.fori_loop(0, first, body, carry)
        x = self.value(x)
        leading = x.astype(out.dtype)
        out[...] = leading
        rest = self.scaled(x - leading.astype(jnp.float32)).astype(self.dtype)
        rest = lax.fori_loop(first, iterations, body, (rest, *others))[0]
        barrier()
        return self.value(rest) + out[...].astype(jnp.float32)


def _add_product(system: System, pairs: Array, x: Array, onto: Array, precision: str) -> Array:
    """`onto + H x`, `[C, K]`."""
    factor = far = parts(x, precision)
    scores = multiply(dot_nt, factor, system.keys, precision).astype(pairs.dtype) * pairs
    if system.from_start is not None and precision == "bfloat16":
        far = Parts(factor.high * system.from_start.astype(jnp.bfloat16)[:, None])
    elif system.from_start is not None:
        far = parts(x * system.from_start[:, None], precision)
    onto = multiply(dot, far, system.state, precision, onto)
    return multiply(dot, parts(scores, precision), system.keys, precision, onto)


def _iterate_stationary(system: System, method: Method, b: Array, out: Any) -> Array:
    """Chebyshev's iteration, gradient descent, and the accelerated one of Nesterov: other coefficients, one loop.

        r <- r + A d        d <- m d - s r        x <- x - d

    from `x = -d = s_0 b`, `r = b`, with `-d` the increment and `r` the residual. Chebyshev's weights `w` give
    `m = w - 1`, `s = w s_0` (Gated KalmaNet, algorithm 1).
    """
    step = 2.0 / (system.upper + system.lower)
    name = method.name
    pairs = _held_pairs(system, method.precision)
    solution = Solution.of(b, system.lower, method.precision)
    b = solution.scaled(b)  # and so all iterates
    if name == "nesterov":
        root = jnp.sqrt(3.0 * system.upper / system.lower + 1.0)
        short, momentum = 4.0 / (3.0 * system.upper + system.lower), (root - 2.0) / (root + 2.0)

    def body(n, carry):
        x, decrement, residual, weight = carry
        before = residual
        residual = _add_product(system, pairs, decrement, residual + system.ridge * decrement, method.precision)
        if name == "chebyshev":
            weight = 1.0 / (1.0 - system.contraction * weight * 0.25)
            decrement = (weight - 1.0) * decrement - (step * weight) * residual
        elif name == "gradient_descent":
            decrement = -step * residual
        else:
            m = jnp.where(n == 0, 0.0, momentum)
            decrement = m * decrement - short * (residual + m * (residual - before))
        return x - decrement.astype(x.dtype), decrement, residual, weight

    start = step * b
    carry = start.astype(solution.dtype), -start, b, jnp.full_like(system.contraction, 2.0)
    return solution.iterate(body, carry, method.iterations, out)


def _iterate_conjugate(system: System, method: Method, b: Array, out: Any) -> Array:
    """Conjugate gradients from zero; a system whose residual has vanished stays where it is.

    A ridge by channel takes a register for each channel that a thread has, and registers are what is short. So it goes
    round the loop with one channel a thread, and is spread when it is used. The minimum hides from the compiler that it
    stays the same, and need not be spread but once.
    """
    pairs = _held_pairs(system, method.precision)
    solution = Solution.of(b, system.lower, method.precision)
    square = jnp.sum(b * b, axis=1, keepdims=True)
    floor = square * jnp.finfo(jnp.float32).eps ** 2

    def body(_, carry):
        x, residual, direction, square, spread = carry
        is_live = square > floor

        def quotient(numerator, denominator):
            return jnp.where(is_live, numerator / (jnp.where(is_live, denominator, 1.0) + method.epsilon), 0.0)

        ridge = system.ridge if spread is None else spread[None, :]
        image = _add_product(system, pairs, direction, ridge * direction, method.precision)
        length = quotient(square, jnp.sum(direction * image, axis=1, keepdims=True))
        x = x + (solution.scaled(length) * direction).astype(x.dtype)
        residual = residual - length * image
        after = jnp.sum(residual * residual, axis=1, keepdims=True)
        direction = jnp.where(is_live, residual + quotient(after, square) * direction, direction)
        return x, residual, direction, after, None if spread is None else jnp.minimum(spread, greatest)

    by_channel, greatest = system.ridge if system.ridge.ndim == 1 else None, jnp.max(system.ridge)
    carry = jnp.zeros_like(b, solution.dtype), b, b, square, by_channel
    return solution.iterate(body, carry, method.iterations, out)


def _solve_kernel(r, *, method: Method):
    # Right-hand sides first: what rearranges them in shared memory is free again before keys and state are there.
    b = r.b[...].astype(jnp.float32)
    strength = load_strength(r.ridge)
    decay = loaded_decay(r)
    from_start = None if r.from_start is None else r.from_start[...]
    keys = parts(r.k[...], method.precision)
    state = load_parts(r.high, r.low)
    norm = None
    if r.given_norm is not None:
        norm = r.given_norm[...]
    elif method.needs_norm:
        norm = norms(keys, state, jnp.sum(r.squares[...]), decay, from_start, method.precision)
        r.norm[...] = norm
    if norm is not None and method.adaptive:
        column = norm[:, None]
        ridge = jnp.where(column > 0.0, strength * column, 1.0)
        b = jnp.where(column > 0.0, b, 0.0)
    else:
        ridge = jnp.broadcast_to(strength, (CHUNK, strength.shape[1]))
    if norm is None or method.name == "conjugate_gradient":
        if not method.adaptive and strength.shape[1] > 1:
            ridge = r.ridge[...]
        lower = jnp.min(ridge if ridge.ndim == 2 else strength, axis=-1, keepdims=True)
        x = _iterate_conjugate(System(keys, state, decay, from_start, ridge, lower), method, b, r.x)
    else:
        lower = jnp.min(ridge, axis=1, keepdims=True)
        upper = norm[:, None] + jnp.max(ridge, axis=1, keepdims=True)
        # An adaptive ridge makes all tokens' systems equally well conditioned.
        least = jnp.min(strength, axis=1, keepdims=True) if method.adaptive else lower
        greatest = 1.0 + jnp.max(strength, axis=1, keepdims=True) if method.adaptive else upper
        contraction = jnp.square((greatest - least) / (greatest + least))
        system = System(keys, state, decay, from_start, ridge, lower, upper, contraction)
        x = _iterate_stationary(system, method, b, r.x)
    r.x[...] = x.astype(r.x.dtype)


def load_strength(ref) -> Array:
    """The ridge's strength, `[1, 1]` or `[1, K]`, from a number or `[K]`."""
    strength = ref[...]
    return strength[None, :] if strength.ndim == 1 else jnp.full((1, 1), strength)


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
) -> tuple[Array, Array | None]:
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

    Returns:
        Solutions `[B, T, H, K]`, and the Frobenius norms `[B, H, T]` float32, None where the method needs none.
    """
    p = problem

    def at(h, n, batch):
        return batch, n, h, 0

    def token(x):
        return p.of_token(x, CHUNK, at)

    def of_state(x):
        return p.of_head(x, (None, p.key_size, p.key_size), lambda h, n, b: (b, h, n, 0, 0))

    row = p.of_head(p.per_head(p.length, dtype=jnp.float32), (CHUNK,), lambda h, n, b: (b, h, n))
    finds_norm = norm is None and method.needs_norm
    results = call(
        _solve_kernel,
        f"ridge_{method.name}",
        p.chunk_grid,
        {
            "b": token(b),
            "k": token(inputs.k),
            "high": of_state(states.high),
            "low": of_state(states.low),
            "ridge": strength_operand(inputs.ridge),
            "squares": p.of_head(squares if finds_norm else None, (None, p.key_size), lambda h, n, b: (b, h, n, 0)),
            "given_norm": None if norm is None else p.of_head(norm, (CHUNK,), lambda h, n, b: (b, h, n)),
            **rows_of_chunk(p, rows, ("total", "fine", "runs", "from_start")),
        },
        {
            "x": token(jax.ShapeDtypeStruct(b.shape, b.dtype)),
            "norm": row if finds_norm else None,
        },
        schedule.solve,
        method=method,
    )
    return results["x"], results["norm"] if finds_norm else norm  # type: ignore[return-value]


def strength_operand(ridge: Array) -> Operand:
    """A head's ridge, for kernels of one program a chunk."""
    if ridge.shape[1] == 1:
        return Operand(ridge[:, 0], (None,), lambda h, n, b: (h,))
    return Operand(ridge, (None, ridge.shape[1]), lambda h, n, b: (h, 0))

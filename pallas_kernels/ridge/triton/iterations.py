"""The iterations: one program solves the 64 systems of one chunk of one head, with all iterates in registers.

    H_t x_t = from_start_t H_0 x_t + sum_{s <= t} exp(G_t - G_s) (k_s . x_t) k_s

is a product with the state at the chunk's start and two with the chunk's keys, with the scores masked in between. All
methods carry the last increment and the residual `b - A x`, and multiply the increment. The rounding error is then
relative to the increment, which shrinks, and the product is accumulated in the residual's own registers.

Three float32 iterates and a product's operands do not fit into registers. So with bfloat16 products, the solution is
accumulated in float16, since it is no operand of a product.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.common.kernel_shape import CHUNK
from pallas_kernels.common.triton.backend import Operand, call, dot, dot_nt, rounded_product
from pallas_kernels.common.triton.decay_rows import Rows, loaded_decay, rows_of_chunk
from pallas_kernels.common.triton.kernel_shape import KernelShape
from pallas_kernels.common.triton.pairs import weigh_pairs
from pallas_kernels.ridge.config import (
    LEAST_RIDGE,
    MOST_CONDITION,
    MOST_NORM,
    Method,
    RidgeConfig,
    RidgeInputs,
)
from pallas_kernels.ridge.triton.products import Parts, load_parts, multiply, parts

# A Gram matrix with a norm up to this floor counts as zero, as in the operator's definition.
NORM_FLOOR = 1e-10


_SHORT = {"bfloat16": jnp.bfloat16, "float16": jnp.float16}
"""Precisions in which a product's factors have 16 bits, and their dtype."""


class System(NamedTuple):
    """The systems of one chunk.

    Attributes:
        keys: `[C, K]`.
        state: Gram matrix at the chunk's start, `[K, K]`.
        pairs: decay between tokens, see `pair_decays`, as the iterations hold it in registers.
        from_start: decay from the chunk's start, `[C]` or None.
        ridge: what is added to the diagonal, `[C or 1, 1]` or `[C or 1, K]`; for conjugate gradients also `[K]`.
    """

    keys: Parts
    state: Parts
    pairs: Array
    from_start: Array | None
    ridge: Array


def pair_decays(decay) -> Array:
    """Decay from token s, left out, to token t, `[C (t), C (s)]`; zero unless `s <= t` in one segment."""
    return weigh_pairs(jnp.ones((CHUNK, CHUNK), jnp.float32), decay, strict=False)


def _system(keys: Parts, state: Parts, decay, from_start, ridge: Array, precision: str, step: Any = None) -> System:
    """The systems of a chunk. A `step` `[C, 1]` multiplies products with the Gram matrices, but not the ridge.

    The pairs' decays stay in registers. With products of 16 bits they have as many, in half the registers.
    """
    pairs = pair_decays(decay)
    if step is not None:
        pairs, from_start = pairs * step, step[:, 0] if from_start is None else from_start * step[:, 0]
    return System(keys, state, pairs.astype(_SHORT.get(precision, jnp.float32)), from_start, ridge)


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


def _power_of_two(x: Array) -> Array:
    """The greatest power of two that is at most `x`, a normal positive number."""
    return lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.int32) & 0x7F800000, jnp.float32)


def _size(b: Array) -> Array:
    """A power of two about the largest magnitude in each row of `b` `[C, K]`, `[C, 1]`: dividing by it is exact."""
    most = jnp.max(jnp.abs(b), axis=1, keepdims=True)
    return _power_of_two(jnp.where(most > 0.0, jnp.clip(most, 1e-30, 1e30), 1.0))


def _float16_scale(b: Array, condition: Array) -> Array:
    """A power of two, `[C, 1]`, that brings solutions for `b` `[C, K]` of systems below two into float16's range.

    No element of the solution times this is above twice the square root of the number of channels.
    """
    return _power_of_two(1.0 / condition) / _size(b)


def _add_product(system: System, x: Array, onto: Array, precision: str, factor: Any = None) -> Array:
    """`onto + H (factor x)`, `[C, K]`, with a factor `[C or 1, 1]` or none."""
    from_start = None if system.from_start is None else system.from_start[:, None]
    if precision == "bfloat16" and factor is not None:  # factors in bfloat16 too: two of them at a time
        rows = x.astype(jnp.bfloat16) * factor.astype(jnp.bfloat16)
        far = Parts(rows if from_start is None else rows * from_start.astype(jnp.bfloat16))
        scores = rounded_product(multiply(dot_nt, Parts(rows), system.keys, precision), system.pairs)
    else:
        scores = multiply(dot_nt, parts(x, precision), system.keys, precision).astype(system.pairs.dtype) * system.pairs
        if factor is not None:
            scores, from_start = scores * factor, factor if from_start is None else from_start * factor
        far = parts(x if from_start is None else x * from_start, precision)
    onto = multiply(dot, far, system.state, precision, onto)
    return multiply(dot, parts(scores, precision), system.keys, precision, onto)


def _iterate_stationary(system: System, method: Method, b: Array, condition: Array) -> Array:
    """Chebyshev's iteration, gradient descent and Nesterov's accelerated descent: one loop, different coefficients.

        x <- x - s e        r <- r + s A e        e <- c e - r

    where `-s e` is the increment and `r` the residual, starting at `x = 0`, `-s e = b`, `r = b`. The systems are scaled
    so that the bounds on their extreme eigenvalues have a mean of one. The coefficients then depend only on
    `condition`, `[C or 1, 1]`. For Chebyshev's weights `w`, `s` is `w` and `c` is the last weight times `(w - 1) / w`
    (Gated KalmaNet, algorithm 1).

    With bfloat16 products, the solution is accumulated in float16, whose 11 bits add 1e-3 to an error of 2e-3.
    """
    name, rounds = method.name, method.precision == "bfloat16"
    contraction = jnp.square((condition - 1.0) / (condition + 1.0))
    root = jnp.sqrt(3.0 * condition + 1.0)
    short, momentum = 2.0 * (condition + 1.0) / (3.0 * condition + 1.0), (root - 2.0) / (root + 2.0)
    scale = _float16_scale(b, condition) if rounds else None
    b = b if scale is None else b * scale

    def size(weight):
        s = short if name == "nesterov" else weight
        return _leading_half(s) if rounds else s

    def body(n, carry):
        x, direction, residual, weight = carry
        s, before = size(weight), residual
        x = x - s.astype(x.dtype) * direction.astype(x.dtype)
        residual = _add_product(system, direction, residual + (system.ridge * s) * direction, method.precision, s)
        if name == "chebyshev":
            inverse = 1.0 - contraction * weight * 0.25
            direction = (weight * (1.0 - inverse)) * direction - residual
            weight = 1.0 / inverse
        elif name == "gradient_descent":
            direction = -residual
        else:
            m = jnp.where(n == 0, 0.0, momentum)
            direction = m * direction - (residual + m * (residual - before))
        return x, direction, residual, weight

    weight = jnp.full_like(condition, 2.0 if name == "chebyshev" else 1.0)
    carry = jnp.zeros_like(b, jnp.float32 if scale is None else jnp.float16), -b / size(weight), b, weight
    x, direction, _, weight = lax.fori_loop(0, method.iterations, body, carry)
    x = x.astype(jnp.float32) - size(weight) * direction
    return x if scale is None else x * (1.0 / scale)


def _leading_half(x: Array) -> Array:
    """The bfloat16 number next to `x` towards zero."""
    return lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.int32) & -65536, jnp.float32)


def _iterate_conjugate(
    system: System, method: Method, b: Array, precision: str, tolerance: Array | None = None
) -> Array:
    """Conjugate gradients from zero, in units of `b`'s size; a system whose residual has vanished stays where it is.

    The method squares `b`. Cotangents that decayed over many tokens are so small that their squares would be lost in
    float32, and quotients would be infinite: hence the units.

    With a tolerance nothing is left to do when no system's residual is above it. NaN counts as above.

    With float16 products, directions are float16 numbers. They are rounded before a step's length is found, so that
    what is added to the solution is what was multiplied: the rounding costs no accuracy.

    A ridge by channel would take a register for each channel of a thread, and registers are short. So the loop carries
    the ridge with one channel a thread, and broadcasts it in each iteration. Without the minimum in the carry the
    compiler would see that the ridge never changes, and broadcast it once, before the loop.

    Args:
        system: of the chunk.
        method: number of iterations and epsilon.
        b: right-hand sides `[C, K]`.
        precision: of the products.
        tolerance: of the residual's norm relative to the right-hand side's, `[C, 1]`; None is float32's precision, at
            which a loop that may end early would take a tenth longer.
    """
    size = _size(b)
    unit = 1.0 / size
    b = b * unit
    square = jnp.sum(b * b, axis=1, keepdims=True)
    least = jnp.finfo(jnp.float32).eps
    floor = square * (least**2 if tolerance is None else jnp.square(jnp.maximum(tolerance, least)))
    dtype = jnp.float16 if precision == "float16" else jnp.float32

    def is_any_live(square):
        return jnp.max(jnp.where(square <= floor, 0, 1)[:, 0]) > 0

    def iteration(carry):
        x, residual, direction, square, spread = carry
        is_live = square > floor

        def quotient(numerator, denominator):
            divisor = jnp.where(is_live, denominator, 1.0)
            if method.epsilon:
                divisor = divisor + method.epsilon * unit * unit
            return jnp.where(is_live, numerator / divisor, 0.0)

        ridge = system.ridge if spread is None else spread[None, :]
        image = _image(system, direction, ridge, precision)
        length = quotient(square, jnp.sum(direction.astype(jnp.float32) * image, axis=1, keepdims=True))
        x = x + length * direction.astype(jnp.float32)
        residual = residual - length * image
        after = jnp.sum(residual * residual, axis=1, keepdims=True)
        following = residual + quotient(after, square) * direction.astype(jnp.float32)
        direction = jnp.where(is_live, following.astype(dtype), direction)
        return x, residual, direction, after, None if spread is None else jnp.minimum(spread, greatest)

    def step(_, carry):
        if tolerance is None:
            return iteration(carry)
        return lax.cond(is_any_live(carry[3]), iteration, lambda carry: carry, carry)

    by_channel, greatest = system.ridge if system.ridge.ndim == 1 else None, jnp.max(system.ridge)
    start = jnp.zeros_like(b), b, b.astype(dtype), square, by_channel
    return lax.fori_loop(0, method.iterations, step, start)[0] * size


def _image(system: System, x: Array, ridge: Array, precision: str) -> Array:
    """`(H + ridge) x`, `[C, K]`."""
    if precision != "float16":
        return _add_product(system, x, ridge * x, precision)
    far = multiply(dot, Parts(x), system.state, precision)  # the decay follows, so that both products share a factor
    far = far if system.from_start is None else far * system.from_start[:, None]
    scores = multiply(dot_nt, Parts(x), system.keys, precision).astype(jnp.float16) * system.pairs
    return multiply(dot, Parts(scores), system.keys, precision, far + ridge * x.astype(jnp.float32))


def _mild_kernel(r, *, method: Method):
    """Conjugate gradients with a constant ridge and products in float16, if all of a chunk's systems allow them."""
    decay = loaded_decay(r)
    from_start = None if r.from_start is None else r.from_start[...]
    square = jnp.sum(r.squares[...])
    if r.given_norm is None:
        norm = norms(Parts(r.k[...]), Parts(r.high[...]), square, decay, from_start, "bfloat16")
        r.norm[...] = norm
    else:
        norm = r.given_norm[...]
    ridge = r.ridge[...]
    least, greatest = jnp.min(ridge), jnp.max(ridge)
    condition = (norm + greatest) / least
    is_mild = (jnp.max(condition) <= MOST_CONDITION) & (least >= LEAST_RIDGE)
    is_mild = is_mild & (jnp.max(norm) <= MOST_NORM) & (square <= MOST_NORM**2)
    r.is_mild[...] = is_mild.astype(jnp.int32)

    @pl.when(is_mild)
    def solve():
        b = r.b[...].astype(jnp.float32)
        keys = parts(r.k[...], "float16")
        state = Parts(r.high[...].astype(jnp.float16) + r.low[...].astype(jnp.float16))
        by_token = ridge if ridge.ndim else jnp.full((CHUNK, 1), ridge)
        system = _system(keys, state, decay, from_start, by_token, "float16")
        tolerance = 2.0**-12 / condition[:, None]  # the error of a solution is at most this times the condition number
        r.x[...] = _iterate_conjugate(system, method, b, "float16", tolerance).astype(r.x.dtype)


def _solve_kernel(r, *, method: Method):
    if r.is_mild is None:
        _solve(r, method)
    else:
        pl.when(r.is_mild[...] == 0)(lambda: _solve(r, method))


def _solve(r, method: Method) -> None:
    # Right-hand sides are loaded first: the shared memory that converts their layout is free again before keys come.
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
        system = _system(keys, state, decay, from_start, ridge, method.precision)
        x = _iterate_conjugate(system, method, b, method.precision)
    else:
        least, greatest = jnp.min(ridge, axis=1, keepdims=True), norm[:, None] + jnp.max(ridge, axis=1, keepdims=True)
        step = 2.0 / (greatest + least)
        if method.adaptive:  # all systems are alike in units of their norms
            least, greatest = jnp.min(strength, axis=1, keepdims=True), 1.0 + jnp.max(strength, axis=1, keepdims=True)
            ridge = strength * (2.0 / (greatest + least))
        else:
            ridge = ridge * step
        system = _system(keys, state, decay, from_start, ridge, method.precision, step)
        x = _iterate_stationary(system, method, b * step, greatest / least)
    r.x[...] = x.astype(r.x.dtype)


def load_strength(ref) -> Array:
    """The ridge's strength, `[1, 1]` or `[1, K]`, from a number or `[K]`."""
    strength = ref[...]
    return strength[None, :] if strength.ndim == 1 else jnp.full((1, 1), strength)


def solve_chunks(
    kernel_shape: KernelShape,
    method: Method,
    inputs: RidgeInputs,
    rows: Rows,
    states: Parts,
    config: RidgeConfig,
    *,
    b: Array,
    squares: Array | None = None,
    norm: Array | None = None,
) -> tuple[Array, Array | None]:
    """Solves `(H_t + Diag(ridge_t)) x_t = b_t`.

    Args:
        kernel_shape: static facts.
        method: how.
        inputs: keys and ridge.
        rows: decays.
        states: Gram matrices at the chunks' starts.
        config: compilation.
        b: `[B, T, H, K]`.
        squares: squared norms of the rows of `states`, `[B, H, N, K]`; not read where the norms are known and
            `method` is not mixed.
        norm: `[B, H, T]`, where it is known.

    Returns:
        Solutions `[B, T, H, K]`, and the Frobenius norms `[B, H, T]` float32, None where the method needs none.
    """
    p = kernel_shape

    def at(h, n, batch):
        return batch, n, h, 0

    def token(x):
        return p.of_token(x, CHUNK, at)

    def of_state(x):
        return p.of_head(x, (None, p.key_size, p.key_size), lambda h, n, b: (b, h, n, 0, 0))

    row = p.of_head(p.per_head(p.length, dtype=jnp.float32), (CHUNK,), lambda h, n, b: (b, h, n))
    finds_norm = norm is None and method.needs_norm
    operands: dict[str, Operand | None] = {
        "b": token(b),
        "k": token(inputs.k),
        "high": of_state(states.high),
        "low": of_state(states.low),
        "ridge": strength_operand(inputs.ridge),
        "squares": p.of_head(squares, (None, p.key_size), lambda h, n, b: (b, h, n, 0)),
        "given_norm": None if norm is None else p.of_head(norm, (CHUNK,), lambda h, n, b: (b, h, n)),
        **rows_of_chunk(p, rows, ("total", "fine", "runs", "from_start")),
    }
    x = token(jax.ShapeDtypeStruct(b.shape, b.dtype))
    if not method.mixed:
        operands["is_mild"] = None
        operands["squares"] = operands["squares"] if finds_norm else None
        outputs = {"x": x, "norm": row if finds_norm else None}
        results = call(
            _solve_kernel, f"ridge_{method.name}", p.chunk_grid, operands, outputs, config.solve, method=method
        )
        return results["x"], results["norm"] if finds_norm else norm  # type: ignore[return-value]
    of_chunk = p.of_head(p.per_head(p.chunks, dtype=jnp.int32), (None,), lambda h, n, b: (b, h, n))
    outputs = {"x": x, "norm": row if finds_norm else None, "is_mild": of_chunk}
    found = call(
        _mild_kernel, f"ridge_{method.name}_mild", p.chunk_grid, operands, outputs, config.solve_mild, method=method
    )
    norm = found["norm"] if finds_norm else norm
    is_mild = p.of_head(found["is_mild"], (None,), lambda h, n, b: (b, h, n))
    found = call(
        _solve_kernel,
        f"ridge_{method.name}",
        p.chunk_grid,
        {**operands, "squares": None, "given_norm": None, "is_mild": is_mild},
        {"x": x},
        config.solve,
        updates={"x": token(found["x"])},
        method=dataclasses.replace(method, mixed=False),
    )
    return found["x"], norm  # type: ignore[return-value]


def strength_operand(ridge: Array) -> Operand:
    """A head's ridge, for kernels of one program a chunk."""
    if ridge.shape[1] == 1:
        return Operand(ridge[:, 0], (None,), lambda h, n, b: (h,))
    return Operand(ridge, (None, ridge.shape[1]), lambda h, n, b: (h, 0))

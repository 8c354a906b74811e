"""The ridge solve through Triton kernels, differentiable by implicit differentiation in chunks."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from pallas_kernels.common.kernel_shape import CHUNK, next_power_of_two, resets_of
from pallas_kernels.common.platform import platform
from pallas_kernels.common.refusal import refuse
from pallas_kernels.common.triton.backend import interpreted, shared_memory, unsupported_arrays
from pallas_kernels.common.vma import batch_alike, pvary_together
from pallas_kernels.ridge.config import (
    METHODS,
    PRECISIONS,
    Method,
    RidgeConfig,
    RidgeInputs,
    choose_config,
    ridge_problem,
    ridge_rows,
)
from pallas_kernels.ridge.triton.bwd_dh import bwd_dh
from pallas_kernels.ridge.triton.bwd_dqkg import StateSums, bwd_dqkg
from pallas_kernels.ridge.triton.gram_states import gram_states
from pallas_kernels.ridge.triton.iterations import solve_chunks

_MAX_CHANNELS = 128
_SPLIT_MEMORY = 128 * 1024
"""Bytes of shared memory that two parts of every factor take with 128 channels."""


def unsupported_reason(
    q: Array,
    k: Array,
    *,
    solver: str = "chebyshev",
    precision: str | None = None,
    adaptive: bool = True,
    chunk_size: int = CHUNK,
) -> str | None:
    """Why the kernels here can't serve a call of `ridge_solve`, as a noun phrase, or None if they can.

    Args:
        q: queries `[B, T, H, K]`.
        k: keys `[B, T, H, K]`.
        solver: name of the method.
        precision: of the products.
        adaptive: whether the ridge is relative, which decides what a precision of None is.
        chunk_size: tokens in a chunk.
    """
    reason = unsupported_arrays(q=q, k=k)
    if reason is not None:
        return reason
    if solver not in METHODS:
        return f"solver {solver!r} (only {', '.join(METHODS)})"
    if precision not in (None, *PRECISIONS):
        return f"products in {precision!r} (only {', '.join(PRECISIONS)})"
    if chunk_size != CHUNK:
        return f"chunk_size {chunk_size} (only {CHUNK})"
    if q.shape[3] > _MAX_CHANNELS:
        return f"key size {q.shape[3]} (at most {_MAX_CHANNELS}: the iterates of a chunk stay in registers)"
    if precision == "mixed" and (solver != "conjugate_gradient" or adaptive):
        return "products in 'mixed' precision but for conjugate gradients with a constant ridge"
    if platform() != "cpu" and q.shape[3] > 64 and shared_memory() < _SPLIT_MEMORY:
        precision = precision or _default_precision(k, adaptive, solver)
        if precision != "bfloat16":
            return f"key size {q.shape[3]} with products in {precision!r} (at most 64: shared memory is too small)"
    return None


def ridge_solve(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    ridge: Float[Array, "H 1"] | Float[Array, "H K"],
    *,
    adaptive: bool = True,
    log_decay: Float[Array, "B T H"] | None = None,
    iterations: int = 30,
    solver: str = "chebyshev",
    epsilon: float = 0.0,
    precision: str | None = None,
    initial_gram: Float[Array, "B H K K"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    chunk_size: int = CHUNK,
    config: RidgeConfig | None = None,
) -> tuple[Float[Array, "B T H K"], Float[Array, "B H K K"]]:
    r"""Solves `(H_t + lambda_t) x_t = q_t` for the Gram matrices `H_t` of the past keys, in chunks of 64 tokens.

        H_t = exp(log_decay_t) H_{t-1} + k_t k_t^T        lambda_t = ridge * ||H_t||_F  (adaptive)  or  ridge

    Only the `H_t` at the chunks' starts are formed. The gradient is that of the equation's solution, by one more solve
    (Gated KalmaNet, table 1 and equations 6 to 10). Runs are bit-identical.

    Args:
        q: right-hand sides, bfloat16 or float32.
        k: keys.
        ridge: strength of the regularisation, positive, a number for each head or for each of its channels.
        adaptive: whether the ridge is relative to the Gram matrix's Frobenius norm. At a norm of 1e-10 or less the
            solution is zero.
        log_decay: natural logarithm of the decay, `<= 0`, -inf included; None is no decay.
        iterations: of the solver.
        solver: `"chebyshev"`, `"conjugate_gradient"`, `"gradient_descent"` or `"nesterov"`.
        epsilon: added to both divisors of conjugate gradients.
        precision: of the factors of products, which are accumulated in float32: `"bfloat16"`; `"split"`, two parts of
            bfloat16 each, together 16 bits; `"tf32"`, 11 bits; `"float32"`, three products of tf32. For bfloat16
            inputs, None is bfloat16 if the ridge is adaptive. If it is constant, None is mixed for conjugate gradients
            and split for other methods. For other inputs, None is float32 up to a key size of 64, and split above,
            where float32 does not fit. Bfloat16, in which states are stored too, suits condition numbers of about a
            hundred, which an adaptive ridge ensures. A constant ridge does not bound the condition number: the norm
            grows with every key that repeats. At larger condition numbers, conjugate gradients in bfloat16 diverge.
            `"mixed"`, for conjugate gradients with a constant ridge, takes float16 (11 bits) in each chunk whose
            condition numbers are at most 256, and split in the others. A solve in float16 ends before `iterations`
            where the residuals bound all of the chunk's errors by 2^-12.
        initial_gram: the Gram matrix before the first token; its symmetric part is used; None is zero.
        segment_ids: the Gram matrix restarts where the id changes; the first token continues `initial_gram`.
        chunk_size: only 64.
        config: how the call is cut into programs; None is a measured choice.

    Returns:
        Solutions in `q`'s dtype and the final Gram matrix in float32.

    Raises:
        NotImplementedError: there is an `unsupported_reason`.
    """
    method = _method(
        q,
        k,
        adaptive=adaptive,
        iterations=iterations,
        solver=solver,
        epsilon=epsilon,
        precision=precision,
        chunk_size=chunk_size,
    )
    inputs = _padded_inputs(q, k, ridge, log_decay, initial_gram, segment_ids)
    x, gram = _solve(method, config or choose_config(ridge_problem(inputs), method.precision), inputs)
    size = q.shape[3]
    return x[:, : q.shape[1], :, :size].astype(q.dtype), gram[:, :, :size, :size]


def ridge_solve_vjp(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    ridge: Float[Array, "H 1"] | Float[Array, "H K"],
    *,
    log_decay: Float[Array, "B T H"] | None = None,
    initial_gram: Float[Array, "B H K K"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    config: RidgeConfig | None = None,
    **options: Any,
) -> tuple[tuple[Array, Array], Array | None, Callable[..., dict[str, Array | None]]]:
    """`jax.vjp` of `ridge_solve`, by parts: what the solve gives apart from what is cheap to find again.

    Args:
        q: as of `ridge_solve`, like all others.
        k: likewise.
        ridge: likewise.
        log_decay: likewise.
        initial_gram: likewise.
        segment_ids: likewise.
        config: likewise.
        **options: the other arguments of `ridge_solve`.

    Returns:
        The results, the Gram matrices' norms `[B, H, T]` (None where the method needs none), and a pull-back. That is a
        pytree, and takes the results, the norms and the results' cotangents. It gives gradients by argument.
    """
    method = _method(q, k, **options)
    resets = _padded_resets(q, segment_ids)

    def padded(given: dict[str, Any]) -> RidgeInputs:
        return _padded_inputs(**given, segment_ids=segment_ids)._replace(resets=None)

    given = {"q": q, "k": k, "ridge": ridge, "log_decay": log_decay, "initial_gram": initial_gram}
    inputs, pull_inputs = jax.vjp(padded, given)
    config = config or choose_config(ridge_problem(inputs), method.precision)
    (x, gram), (inputs, _, norm, kept) = _forward(method, config, inputs._replace(resets=resets))
    (length, size), like = (q.shape[1], q.shape[3]), jax.ShapeDtypeStruct(x.shape, x.dtype)

    def pull_back(pull_inputs, inputs, kept, results, norm, cotangents):
        (x, d_x), d_gram = (_pad_to(array, like) for array in (results[0], cotangents[0])), cotangents[1]
        d_gram = _pad_to(d_gram, jax.ShapeDtypeStruct((*d_gram.shape[:2], like.shape[3], like.shape[3]), d_gram.dtype))
        (gradients,) = _backward(method, config, (inputs, x, norm, kept), (d_x, d_gram))
        return pull_inputs(gradients)[0]

    results = x[:, :length, :, :size].astype(q.dtype), gram[:, :, :size, :size]
    return results, norm, jax.tree_util.Partial(pull_back, pull_inputs, inputs, kept)


def _method(
    q: Array,
    k: Array,
    *,
    adaptive: bool = True,
    iterations: int = 30,
    solver: str = "chebyshev",
    epsilon: float = 0.0,
    precision: str | None = None,
    chunk_size: int = CHUNK,
) -> Method:
    """How a call is solved.

    Raises:
        NotImplementedError: there is an `unsupported_reason`.
    """
    options: dict[str, Any] = {"solver": solver, "precision": precision, "adaptive": adaptive}
    refuse("ridge_solve", unsupported_reason(q, k, chunk_size=chunk_size, **options))
    if precision is None:
        precision = _default_precision(jax.ShapeDtypeStruct(k.shape, jnp.result_type(q, k)), adaptive, solver)
    mixed = precision == "mixed"
    return Method(solver, iterations, adaptive, float(epsilon), "split" if mixed else precision, mixed)


def _pad_to(x: Array, like: jax.ShapeDtypeStruct) -> Array:
    """`x` in a dtype, with zeros behind its axes up to a shape."""
    widths = [(0, size - own) for own, size in zip(x.shape, like.shape, strict=True)]
    return jnp.pad(x.astype(like.dtype), widths) if any(width for _, width in widths) else x.astype(like.dtype)


def _default_precision(k: Array | jax.ShapeDtypeStruct, adaptive: bool, solver: str) -> str:
    if k.dtype == jnp.bfloat16:
        return "bfloat16" if adaptive else "mixed" if solver == "conjugate_gradient" else "split"
    return "float32" if interpreted() or k.shape[3] <= 64 else "split"


def _padded_resets(q: Array, segment_ids: Array | None) -> Array | None:
    """Marks of the tokens that start a document, in whole chunks; None without documents."""
    resets = resets_of(segment_ids)
    return None if resets is None else jnp.pad(resets, ((0, 0), (0, -q.shape[1] % CHUNK)))


def _padded_inputs(q, k, ridge, log_decay, initial_gram, segment_ids) -> RidgeInputs:
    """Brings arguments to dtypes that kernels load, and pads tokens to chunks and channels to a power of two."""
    dtype = jnp.result_type(q, k)
    length, size = q.shape[1], q.shape[3]
    resets = _padded_resets(q, segment_ids)
    if resets is not None and log_decay is None:
        log_decay = jnp.zeros(q.shape[:3], jnp.float32)
    tokens, channels = -length % CHUNK, next_power_of_two(size) - size

    def padded(x, dtype, *widths):
        return _pad_to(x, jax.ShapeDtypeStruct([n + width for n, width in zip(x.shape, widths)], dtype))

    gram = None
    if initial_gram is not None:
        gram = initial_gram.astype(jnp.float32)
        gram = padded(0.5 * (gram + jnp.swapaxes(gram, -1, -2)), jnp.float32, 0, 0, channels, channels)
    if ridge.shape[1] > 1 and channels:  # eigenvalue bounds depend on every channel of the ridge: repeat the last
        ridge = jnp.pad(ridge, ((0, 0), (0, channels)), mode="edge")
    inputs = RidgeInputs(
        q=padded(q, dtype, 0, tokens, 0, channels),
        k=padded(k, dtype, 0, tokens, 0, channels),
        ridge=ridge.astype(jnp.float32),
        log_decay=None if log_decay is None else padded(log_decay, jnp.float32, 0, tokens, 0),
        initial_gram=gram,
        resets=resets,
    )
    return pvary_together(inputs)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _solve(method: Method, config: RidgeConfig, inputs: RidgeInputs) -> tuple[Array, Array]:
    """Solutions and final Gram matrix of padded inputs; the backward keeps keys, solutions, norms and states."""
    return _forward(method, config, inputs)[0]


def _forward(method: Method, config: RidgeConfig, inputs: RidgeInputs) -> tuple[tuple[Array, Array], Any]:
    kernel_shape = ridge_problem(inputs)
    rows = ridge_rows(kernel_shape, inputs)
    states, final, squares = gram_states(kernel_shape, method, inputs, rows, config)
    x, norm = solve_chunks(kernel_shape, method, inputs, rows, states, config, b=inputs.q, squares=squares)
    kept = (rows, states, squares) if config.keeps_states else None
    return batch_alike(inputs, (x, final)), (inputs._replace(q=None), x, norm, kept)  # type: ignore[arg-type]


def _backward(
    method: Method, config: RidgeConfig, residuals: Any, cotangents: tuple[Array, Array]
) -> tuple[RidgeInputs]:
    inputs, x, norm, kept = residuals
    d_x, d_final = cotangents
    kernel_shape = ridge_problem(inputs)
    if kept is None:
        rows = ridge_rows(kernel_shape, inputs)
        states, _, squares = gram_states(kernel_shape, method, inputs, rows, config)
    else:
        rows, states, squares = kept
    d_q, _ = solve_chunks(kernel_shape, method, inputs, rows, states, config, b=d_x, squares=squares, norm=norm)
    d_final = d_final + jnp.swapaxes(d_final, -1, -2)
    by_norm, d_ends, d_initial, products = bwd_dh(
        kernel_shape, method, inputs, rows, states, x, norm, d_q, d_final, config
    )
    sums = StateSums(squares, products)
    d_k, d_log_decay = bwd_dqkg(kernel_shape, method, inputs, rows, states, d_ends, sums, x, d_q, by_norm, config)
    d_ridge = jnp.sum(by_norm.ridge, axis=(0, 2)).reshape(inputs.ridge.shape)
    return (RidgeInputs(d_q, d_k, d_ridge, d_log_decay, d_initial, None),)


_solve.defvjp(_forward, _backward)

"""The ridge solve in chunks: matrix products in XLA, on any device; only the `H_t` at chunk boundaries are formed."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.common.vma import batch_alike, pvary_together
from rnnlib.ops import chunk
from rnnlib.ops.arguments import accumulation_dtype, matmul_precision, resets_of
from rnnlib.ops.chunk_blocks import in_blocks
from rnnlib.ops.ridge_solve import gram as grams
from rnnlib.ops.ridge_solve import solvers
from rnnlib.ops.ridge_solve.inputs import (
    RidgeInputs,
    SolveOptions,
    effective_ridge,
    norm_from_square,
    solvable,
    symmetric,
)
from rnnlib.ops.ridge_solve.reverse import reverse_chebyshev


class Chunks(NamedTuple):
    """The arguments of the solve in chunks, in the accumulation dtype.

    Attributes:
        q: `[N, B, H, C, K]`.
        k: `[N, B, H, C, K]`.
        ridge: `[1 or B, 1 or H, 1, 1 or K]`.
        log_decay: `[N, B, H, C]`, or `[1, 1, 1, C]` where there is none; finite.
        initial: `[B, H, K, K]`, symmetric.
    """

    q: Array
    k: Array
    ridge: Array
    log_decay: Array
    initial: Array


class _Tokens(NamedTuple):
    """What blocks of chunks share out, `[B, T, H, ...]`."""

    q: Array
    k: Array
    log_decay: Array | None


class _State(NamedTuple):
    """What blocks of chunks pass on.

    Attributes:
        gram: `[B, H, K, K]`, symmetric.
        ridge: as it was given, `[1 or B, 1 or H, 1, 1 or K]`.
    """

    gram: Array
    ridge: Array


class _Prepared(NamedTuple):
    """Quantities that the solve and its gradient share; they do not depend on `q`."""

    decay: grams.Decays
    states: Array  # [N, B, H, K, K]
    final: Array  # [B, H, K, K]
    norm: Array  # [N, B, H, C, 1]
    ridge: Array  # lambda, the term added to the diagonal, [N, B, H, C, 1 or K]


def _prepare(options: SolveOptions, chunks: Chunks) -> _Prepared:
    decay = grams.decays(chunks.log_decay)
    states, final = grams.chunk_states(chunks.k, decay, chunks.initial)
    norm = norm_from_square(grams.square_norms(chunks.k, decay, states))[..., None]
    return _Prepared(decay, states, final, norm, effective_ridge(chunks.ridge, norm, options.adaptive))


def _solve(options: SolveOptions, k: Array, p: _Prepared, b: Array) -> Any:
    """The last carry for right-hand sides `b` `[N, B, H, C, K]`; the carry's first entry is the solution."""
    product = grams.gram_product(options.solver, k, p.decay, p.states)
    b = solvable(b, p.norm, options.adaptive)
    return solvers.iterate(options.solver, product, b, p.ridge, p.norm, options.iterations)


def _unrolled(options: SolveOptions, precision: str, chunks: Chunks) -> tuple[Array, Array]:
    with jax.default_matmul_precision(precision):
        prepared = _prepare(options, chunks)
        return _solve(options, chunks.k, prepared, chunks.q)[0], prepared.final


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _with_backward(options: SolveOptions, precision: str, chunks: Chunks) -> tuple[Array, Array]:
    """Solutions `[N, B, H, C, K]` and final Gram; the backward keeps the solutions and recomputes the rest."""
    return batch_alike(chunks, _unrolled(options, precision, chunks))


def _forward(options, precision, chunks):
    with jax.default_matmul_precision(precision):
        prepared = _prepare(options, chunks)
        carry = _solve(options, chunks.k, prepared, chunks.q)
    is_reversed = options.solver.differentiation == "reversed"
    kept = (chunks.q, carry.x, carry.previous) if is_reversed else (carry[0],)
    return batch_alike(chunks, (carry[0], prepared.final)), (chunks._replace(q=None), kept)


def _backward(options, precision, saved, cotangents):
    chunks, kept = saved
    d_x, d_final = cotangents
    d_final = jax.lax.optimization_barrier(d_final)  # often zeros: see `chunk.zero_state`
    with jax.default_matmul_precision(precision):
        p = _prepare(options, chunks)
        if options.solver.differentiation == "reversed":
            product = grams.gram_product(options.solver, chunks.k, p.decay, p.states)
            q, *iterates = kept
            result = reverse_chebyshev(
                product,
                functools.partial(grams.outer_gradients, chunks.k, p.decay, p.states),
                solvable(q, p.norm, options.adaptive),
                p.ridge,
                p.norm,
                tuple(iterates),
                solvable(d_x, p.norm, options.adaptive),
                options.iterations,
            )
            d_q, inside, d_ridge, d_norm = result
            d_q = solvable(d_q, p.norm, options.adaptive)
        else:
            (x,) = kept
            d_q = _solve(options, chunks.k, p, d_x)[0]
            inside = grams.outer_gradients(chunks.k, p.decay, p.states, -d_q, x)
            d_ridge, d_norm = -d_q * x, jnp.zeros_like(p.norm)

        # From the gradient of lambda to those of the ridge and the norm: lambda is ridge * norm, or ridge.
        if options.adaptive:
            d_norm = d_norm + jnp.sum(d_ridge * chunks.ridge, axis=-1, keepdims=True)
            d_given = d_ridge * p.norm
        else:
            d_given = d_ridge
        weight = jnp.where(p.norm > 0, 2 * d_norm / jnp.where(p.norm > 0, p.norm, 1), 0)[..., 0]
        inside = jax.tree.map(jnp.add, inside, grams.norm_gradients(chunks.k, p.decay, p.states, weight))
        d_k, d_decay, d_initial = grams.finish_gradients(chunks.k, p.decay, p.states, inside, d_final)
        d_log_decay = jnp.zeros_like(chunks.log_decay)
        if chunks.log_decay.shape[:3] == chunks.k.shape[:3]:
            (d_log_decay,) = jax.vjp(grams.decays, chunks.log_decay)[1](d_decay)
    return (Chunks(d_q, d_k, _sum_to_shape(d_given, chunks.ridge.shape), d_log_decay, d_initial),)


def _sum_to_shape(x: Array, shape: tuple[int, ...]) -> Array:
    """Sums `x` over leading axes that `shape` lacks and over axes of 1 in it."""
    leading = x.ndim - len(shape)
    ones = tuple(leading + axis for axis, size in enumerate(shape) if size == 1)
    return jnp.sum(x, axis=(*range(leading), *ones)).reshape(shape)


_with_backward.defvjp(_forward, _backward)


@functools.partial(jax.jit, static_argnames=("options", "chunk_size"), inline=True)
def ridge_solve_chunked(
    inputs: RidgeInputs,
    initial_gram: Array | None,
    segment_ids: Array | None,
    *,
    options: SolveOptions,
    chunk_size: int,
) -> tuple[Array, Array]:
    """Evaluates the ridge solve chunk by chunk; arguments and results as `ridge_solve_scan`.

    Args:
        inputs: arguments by token, and the ridge.
        initial_gram: None (zero) or `[B, H, K, K]`.
        segment_ids: None or `[B, T]`.
        options: of the solve; the method is not `"exact"`.
        chunk_size: tokens in a chunk; shorter sequences use a smaller one.
    """
    dtype = accumulation_dtype(*inputs, initial_gram)
    batch, length, heads, key_size = inputs.q.shape
    size = chunk.chunk_length(length, chunk_size)
    precision = matmul_precision(*inputs)
    run = _unrolled if options.solver.differentiation == "unrolled" else _with_backward

    def split(x: Array) -> Array:
        """`[B, T, H, X]` to `[N, B, H, C, X]`."""
        return chunk.split_chunks(x[..., None, :].astype(dtype), size)[:, :, :, 0]

    def evaluate(tokens: _Tokens, resets: Array | None, state: _State) -> tuple[Array, _State]:
        shape = tokens.q.shape[:3]
        log_decay = None if tokens.log_decay is None else tokens.log_decay.astype(dtype)[..., None, None]
        log_decay = chunk.finite_log_decay(log_decay, resets)
        if log_decay is None:
            log_decay = jnp.zeros((1, 1, 1, size), dtype)
        else:
            log_decay = split(jnp.broadcast_to(log_decay[..., 0], (*shape, 1)))[..., 0]
        chunks = Chunks(split(tokens.q), split(tokens.k), state.ridge, log_decay, state.gram)
        x, final = run(options, precision, pvary_together(chunks))
        out = chunk.join_chunks(x[:, :, :, None], shape[1])[:, :, :, 0].astype(inputs.q.dtype)
        return out, _State(final, state.ridge)

    resets = None if segment_ids is None else resets_of(segment_ids)
    if initial_gram is None:
        initial = chunk.zero_state((batch, heads, key_size, key_size), dtype)
    else:
        initial = symmetric(initial_gram.astype(dtype))
    ridge = inputs.ridge.astype(dtype)[None, :, None, :]
    arguments = _Tokens(inputs.q, inputs.k, inputs.log_decay), resets, _State(initial, ridge)
    out, final = in_blocks(evaluate, *pvary_together(arguments), chunk_size=size)
    return out, final.gram

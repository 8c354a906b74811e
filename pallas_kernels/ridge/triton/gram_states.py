"""Gram matrices at the chunks' starts, and their gradients: a matrix from each chunk, then a scan over chunks.

    H_C = exp(G_C) H_0 + K_tail^T K,  K_tail_r = exp(G_C - G_r) k_r

A chunk's increment is a product that does not depend on other chunks, so all increments are computed in parallel. The
decay over a chunk is one number, so the scan over chunks is elementwise: a program owns a block of rows of a head's
matrix and loops over the chunks, loading several ahead. Gradients are passed back by the same scan, in reverse.
"""

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.common.config import KernelConfig
from pallas_kernels.common.kernel_shape import CHUNK
from pallas_kernels.common.triton.backend import Operand, call, dot_tn, split
from pallas_kernels.common.triton.decay_rows import Rows, rows_of_chunk
from pallas_kernels.common.triton.kernel_shape import KernelShape
from pallas_kernels.ridge.config import Method, RidgeConfig, RidgeInputs
from pallas_kernels.ridge.triton.products import Parts, multiply, parts


def _increments_kernel(r, *, precision: str):
    k = parts(r.k[...], precision)
    tail = k if r.to_end is None else parts(k.value * r.to_end[...][:, None], precision)
    r.increment[...] = multiply(dot_tn, tail, k, precision).astype(r.increment.dtype)


def of_chunk(kernel_shape: KernelShape, array) -> Operand | None:
    """A chunk's matrix of `[B, H, N, K, K]`, for kernels of one program a chunk."""
    return kernel_shape.of_head(array, (None, *array.shape[3:]) if array is not None else (), _place_chunk)


def _place_chunk(h, n, b):
    return b, h, n, 0, 0


def increments_shape(kernel_shape: KernelShape, method: Method):
    """The shape of the increments, whose dtype is as wide as a state's parts together."""
    dtype = jnp.float32 if method.parts == 2 else method.state_dtype
    return kernel_shape.per_head(kernel_shape.chunks, kernel_shape.key_size, kernel_shape.key_size, dtype=dtype)


def _scan_kernel(r, *, chunks: int, ahead: int, reverse: bool, factor: float):
    """From the chunks' increments to the state before each chunk or, in `reverse`, after each chunk."""
    state = jnp.zeros(r.high.shape[1:], jnp.float32)
    if r.boundary is not None:
        state = r.boundary[...].astype(jnp.float32)
    source = r.increments if r.increments is not None else r.before_high

    def steps(start, count: int, state: Array) -> Array:
        numbers = [start + m for m in range(count)]
        if reverse:
            numbers = [chunks - 1 - n for n in numbers]
        added = [source[n, :, :] for n in numbers]  # all loads before anything that waits for them
        others = [None if r.other_high is None else r.other_high[n, :, :] for n in numbers]
        lows = [None if r.other_low is None else r.other_low[n, :, :] for n in numbers]
        for n, increment, other, low in zip(numbers, added, others, lows):
            if r.low is None:
                r.high[n, :, :] = state.astype(r.high.dtype)
            else:
                r.high[n, :, :], r.low[n, :, :] = split(state)
            if r.row_products is not None:
                with_what = state if other is None else Parts(other, low).value
                r.row_products[n, :] = jnp.sum(state * with_what, axis=1)
            state = (1.0 if r.kept is None else r.kept[n]) * state + increment.astype(jnp.float32)
        return state

    state = lax.fori_loop(0, chunks // ahead, lambda m, state: steps(m * ahead, ahead, state), state)
    if chunks % ahead:
        state = steps(chunks - chunks % ahead, chunks % ahead, state)
    if r.end is not None:
        r.end[...] = factor * state


def scan_chunks(
    kernel_shape: KernelShape,
    method: Method,
    rows: Rows,
    increments: Array,
    boundary: Array | None,
    launch: KernelConfig,
    *,
    reverse: bool = False,
    with_end: bool = True,
    other: Parts | None = None,
    with_products: bool = True,
    factor: float = 1.0,
) -> tuple[Parts, Array | None, Array | None]:
    """Adds up `increments` `[B, H, N, K, K]` over chunks with their decay.

    Args:
        kernel_shape: static facts.
        method: how precise states are stored.
        rows: decays.
        increments: the increment of each chunk; its memory is reused for the result if possible.
        boundary: `[B, H, K, K]`, the state before the first chunk or, in `reverse`, after the last; None for zero.
        launch: `block` is a number of rows, `inner` the number of chunks whose loads are begun together.
        reverse: from last to first.
        with_end: whether to return the state after the last chunk (in `reverse`: before the first).
        other: matrices `[B, H, N, K, K]` to multiply the states with; None for the states themselves.
        with_products: whether to return these products.
        factor: factor on the state that `with_end` returns.

    Returns:
        States before each chunk (in `reverse`: after it) `[B, H, N, K, K]`; the state at the other end of the scan
        `[B, H, K, K]` float32 or None; sums over each row of state times other, `[B, H, N, K]` float32, or None.
    """
    p = kernel_shape
    block = min(launch.block, p.key_size)

    def of_states(x):
        return p.of_head(x, (p.chunks, block, p.key_size), lambda c, h, b: (b, h, 0, c, 0))

    def of_boundary(x):
        return p.of_head(x, (block, p.key_size), lambda c, h, b: (b, h, c, 0))

    shape = p.per_head(p.chunks, p.key_size, p.key_size, dtype=method.state_dtype)
    products = p.per_head(p.chunks, p.key_size, dtype=jnp.float32) if with_products else None
    in_place = increments.dtype == method.state_dtype
    results = call(
        _scan_kernel,
        "ridge_reverse_scan" if reverse else "ridge_scan",
        (p.key_size // block, p.value_heads, p.batch),
        {
            "increments": None if in_place else of_states(increments),
            "boundary": of_boundary(boundary),
            "other_high": None if other is None else of_states(other.high),
            "other_low": None if other is None else of_states(other.low),
            "kept": p.of_head(rows.kept, (p.chunks,), lambda c, h, b: (b, h, 0)),
        },
        {
            "high": of_states(shape),
            "low": of_states(shape) if method.parts == 2 else None,
            "row_products": p.of_head(products, (p.chunks, block), lambda c, h, b: (b, h, 0, c)),
            "end": of_boundary(p.per_head(p.key_size, p.key_size, dtype=jnp.float32) if with_end else None),
        },
        launch,
        updates={"high": of_states(increments)} if in_place else None,  # type: ignore[dict-item]
        chunks=p.chunks,
        ahead=launch.inner,
        reverse=reverse,
        factor=factor,
    )
    states = Parts(results["high"], results["low"])  # type: ignore[arg-type]
    return states, results["end"], results["row_products"]


def gram_states(
    kernel_shape: KernelShape, method: Method, inputs: RidgeInputs, rows: Rows, config: RidgeConfig
) -> tuple[Parts, Array, Array]:
    """Gram matrices before each chunk `[B, H, N, K, K]`, after the last `[B, H, K, K]`, and squared norms.

    The squared norms are those of the rows of the matrices before each chunk, `[B, H, N, K]` float32.
    """
    p = kernel_shape
    shape = increments_shape(p, method)
    increments = call(
        _increments_kernel,
        "ridge_increments",
        p.chunk_grid,
        {
            "k": p.of_token(inputs.k, CHUNK, lambda h, n, b: (b, n, h, 0)),
            **rows_of_chunk(p, rows, ("to_end",)),
        },
        {"increment": of_chunk(p, shape)},
        config.increments,
        precision=method.precision,
    )["increment"]
    assert increments is not None
    states, final, squares = scan_chunks(p, method, rows, increments, inputs.initial_gram, config.scan)
    return states, final, squares  # type: ignore[return-value]

"""Gradients of the Gram matrices at the chunks' ends, last chunk to first.

    dH_0 = exp(G_C) dH_C + sum_t from_start_t dH_t,    dH_t = -g_t x_t^T + weight_t H_t / 2

with `x` the solution and `g` the gradient of its right-hand side: the recurrences A and B of Gated KalmaNet, equations
7 to 10. `H_t` in the second consists of the chunk's starting matrix and keys. All gradients of matrices here are sums
of the gradient and its transpose.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.common.kernel_shape import CHUNK
from pallas_kernels.common.triton.backend import call, dot_tn
from pallas_kernels.common.triton.decay_rows import Rows, loaded_decay, rows_of_chunk
from pallas_kernels.common.triton.kernel_shape import KernelShape
from pallas_kernels.ridge.config import Method, RidgeConfig, RidgeInputs
from pallas_kernels.ridge.triton.gram_states import increments_shape, of_chunk, scan_chunks
from pallas_kernels.ridge.triton.iterations import load_strength, pair_decays, strength_operand
from pallas_kernels.ridge.triton.products import Parts, multiply, parts


class NormGradients(NamedTuple):
    """How the solutions depend on the ridge, and through an adaptive one on the norms.

    Attributes:
        ridge: gradient of the ridge by chunk, `[B, H, N]` or `[B, H, N, K]` float32.
        weight: `2 dL/d||H_t|| / ||H_t||`, `[B, H, T]` float32; None unless the ridge is adaptive. As
            `d||H||_F = <H, dH> / ||H||_F`, the gradient of `H_t` by its norm is `weight_t H_t / 2`.
        key_weight: the weight of each key in the sum of `weight_t from_start_t H_t` over its chunk, likewise.
    """

    ridge: Array
    weight: Array | None
    key_weight: Array | None


def _start_gradients_kernel(r, *, method: Method, block: int):
    """The sum over a chunk's tokens of `from_start_t dH_t` and its transpose, and what leads to it."""
    precision, size, adaptive = method.precision, r.x.shape[1], method.adaptive
    minus, solution = -r.d_q[...].astype(jnp.float32), r.x[...].astype(jnp.float32)
    from_start = None if r.from_start is None else r.from_start[...]
    left, x = parts(_scaled(minus, from_start), precision), parts(r.x[...], precision)
    d_diagonal = minus * solution  # of what is added to the diagonal
    keys: Parts | None = None
    start_weight: Any = None
    if adaptive:
        norm = r.norm[...]
        _store_ridge(r, d_diagonal * norm[:, None])
        d_norm = jnp.sum(d_diagonal * load_strength(r.ridge), axis=1)
        weight = jnp.where(norm > 0.0, 2.0 * d_norm / jnp.where(norm > 0.0, norm, 1.0), 0.0)
        seen = weight if from_start is None else weight * from_start
        key_weight = jnp.sum(pair_decays(loaded_decay(r)) * seen[:, None], axis=0)
        start_weight = jnp.sum(seen if from_start is None else seen * from_start, axis=0)
        r.weight[...] = weight
        r.key_weight[...] = key_weight
        keys = parts(parts(r.k[...], precision).value * key_weight[:, None], precision)
    else:
        _store_ridge(r, d_diagonal)

    def store(part, some_x: Parts, some_left: Parts, some_keys: Parts | None) -> None:
        gradient = multiply(dot_tn, left, some_x, precision)
        gradient = multiply(dot_tn, x, some_left, precision, gradient)
        if keys is not None and some_keys is not None:
            gradient = multiply(dot_tn, keys, some_keys, precision, gradient)
            state = Parts(r.high[:, part], None if r.low is None else r.low[:, part])
            gradient = gradient + start_weight * state.value
        r.increment[:, part] = gradient.astype(r.increment.dtype)

    def some_channels(c, carry):
        part = pl.ds(c * block, block)
        some_left = parts(_scaled(-r.d_q[:, part].astype(jnp.float32), from_start), precision)
        store(part, parts(r.x[:, part], precision), some_left, parts(r.k[:, part], precision) if adaptive else None)
        return carry

    if block < size:
        lax.fori_loop(0, size // block, some_channels, 0)
    else:
        store(slice(None), x, left, parts(r.k[...], precision) if adaptive else None)


def _scaled(x: Array, factor: Array | None) -> Array:
    return x if factor is None else x * factor[:, None]


def _store_ridge(r, gradient: Array) -> None:
    """Adds up the gradient of the ridge `[C, K]` over tokens, and over channels where the ridge has none."""
    if len(r.d_ridge.shape) == 1:
        r.d_ridge[...] = jnp.sum(gradient, axis=0)
    else:  # one axis at a time: the backend does not lower both at once
        r.d_ridge[...] = jnp.sum(jnp.sum(gradient, axis=1), axis=0)


def bwd_dh(
    kernel_shape: KernelShape,
    method: Method,
    inputs: RidgeInputs,
    rows: Rows,
    states: Parts,
    x: Array,
    norm: Array | None,
    d_q: Array,
    d_final: Array | None,
    config: RidgeConfig,
) -> tuple[NormGradients, Parts, Array | None, Array | None]:
    """Gradients of the Gram matrix after each chunk, and of the initial one.

    Args:
        kernel_shape: static facts.
        method: of the solve.
        inputs: keys, and whether there is an initial Gram matrix.
        rows: decays.
        states: Gram matrices at the chunks' starts.
        x: solutions `[B, T, H, K]`.
        norm: Frobenius norms `[B, H, T]`; None unless the ridge is adaptive.
        d_q: the solve for the solutions' gradient, `[B, T, H, K]`.
        d_final: `[B, H, K, K]`, the gradient of the final Gram matrix and its transpose together; None for zero.
        config: compilation.

    Returns:
        Gradients by the ridge; `[B, H, N, K, K]`, gradient and transpose together; `[B, H, K, K]` float32 or None; and,
        where there is decay, the products of the former with the chunks' starting matrices, summed over rows,
        `[B, H, N, K]` float32.
    """
    p = kernel_shape

    def token(array):
        return p.of_token(array, CHUNK, lambda h, n, b: (b, n, h, 0))

    def row(array):
        return p.of_head(array, (CHUNK,), lambda h, n, b: (b, h, n))

    adaptive = method.adaptive
    weights = row(p.per_head(p.length, dtype=jnp.float32)) if adaptive else None
    channels = inputs.ridge.shape[1:] if inputs.ridge.shape[1] > 1 else ()
    d_ridge = p.per_head(p.chunks, *channels, dtype=jnp.float32)
    results = call(
        _start_gradients_kernel,
        "ridge_start_gradients",
        p.chunk_grid,
        {
            "d_q": token(d_q),
            "x": token(x),
            "k": token(inputs.k if adaptive else None),
            "high": of_chunk(p, states.high if adaptive else None),
            "low": of_chunk(p, states.low if adaptive else None),
            "norm": row(norm if adaptive else None),
            "ridge": strength_operand(inputs.ridge) if adaptive else None,
            **rows_of_chunk(p, rows, ("total", "fine", "runs", "from_start")),
        },
        {
            "increment": of_chunk(p, increments_shape(p, method)),
            "d_ridge": p.of_head(d_ridge, (None, *channels), lambda h, n, b: (b, h, n, 0)[: d_ridge.ndim]),
            "weight": weights,
            "key_weight": weights,
        },
        config.start_gradients,
        method=method,
        block=min(config.start_gradients.block, p.key_size),
    )
    by_norm = NormGradients(results["d_ridge"], results["weight"], results["key_weight"])  # type: ignore[arg-type]
    has_decay = inputs.log_decay is not None
    d_ends, d_initial, products = scan_chunks(
        p,
        method,
        rows,
        results["increment"],  # type: ignore[arg-type]
        d_final,
        config.reverse_scan,
        reverse=True,
        with_end=inputs.initial_gram is not None,
        other=states if has_decay else None,
        with_products=has_decay,
        factor=0.5,
    )
    return by_norm, d_ends, d_initial, products

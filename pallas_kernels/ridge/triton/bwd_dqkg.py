"""Gradients of keys and log decay, one program for each chunk of each head.

A key is in the Gram matrices of its own and the chunk's later tokens, in their norms, and in the state after the chunk.
A decay is `exp` of a sum of log decays over an interval of tokens. The gradient of a token's log decay is therefore the
sum over all intervals that contain the token. It is computed as a sum and never as a difference, so nothing cancels.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.common.decay import MIN_LOG_DECAY
from pallas_kernels.common.kernel_shape import CHUNK
from pallas_kernels.common.triton.backend import call, dot, dot_nt, dot_tn, iota
from pallas_kernels.common.triton.decay_rows import Rows, loaded_decay, rows_of_chunk
from pallas_kernels.common.triton.kernel_shape import KernelShape
from pallas_kernels.ridge.config import Method, RidgeConfig, RidgeInputs
from pallas_kernels.ridge.triton.bwd_dh import NormGradients
from pallas_kernels.ridge.triton.gram_states import of_chunk
from pallas_kernels.ridge.triton.iterations import pair_decays
from pallas_kernels.ridge.triton.products import Parts, multiply, parts


class StateSums(NamedTuple):
    """Sums over rows of products of matrices at the chunks' boundaries, `[B, H, N, K]` float32.

    Attributes:
        squares: of the starting matrix with itself.
        kept: of the starting matrix with the gradient at the chunk's end; None without decay.
    """

    squares: Array
    kept: Array | None


def _boundary_kernel(r, *, method: Method, block: int):
    """The gradients through the matrices at the chunk's start and end, a block of channels at a time."""
    precision, size = method.precision, r.k.shape[1]

    def product(a: Parts, b: Parts) -> Array:
        return multiply(dot, a, b, precision)

    keys = parts(r.k[...], precision)
    d_q = None if r.d_from_start is None else parts(r.d_q[...], precision)
    to_end = None if r.to_end is None else r.to_end[...]

    def some_channels(c, sums):
        forms, d_to_end, d_from_start = sums
        part = pl.ds(c * block, block)
        some_keys: Any = parts(r.k[:, part], precision).value
        d_written = product(keys, _columns(r.d_end_high, r.d_end_low, part))
        d_k = d_written if to_end is None else to_end[:, None] * d_written
        start = _columns(r.high, r.low, part)
        if r.key_weight is not None:
            keys_state = product(keys, start)
            d_k = d_k + r.key_weight[...][:, None] * keys_state
            forms = forms + jnp.sum(keys_state * some_keys, axis=1)
        if d_q is not None:
            d_to_end = d_to_end + 0.5 * jnp.sum(d_written * some_keys, axis=1)
            some_x = parts(r.x[:, part], precision).value
            d_from_start = d_from_start - jnp.sum(product(d_q, start) * some_x, axis=1)
        r.d_k[:, part] = d_k.astype(r.d_k.dtype)
        return forms, d_to_end, d_from_start

    zero: Any = jnp.zeros((CHUNK,), jnp.float32)
    forms, d_to_end, d_from_start = lax.fori_loop(0, size // block, some_channels, (zero, zero, zero))
    if r.forms is not None:
        r.forms[...] = forms
    if d_q is not None:
        r.d_to_end[...] = d_to_end
        r.d_from_start[...] = d_from_start


def _columns(high, low, part) -> Parts:
    return Parts(high[:, part], None if low is None else low[:, part])


def _gradients_kernel(r, *, method: Method, block: int):
    """Adds the gradients through pairs of the chunk's tokens to those through its ends; d log decay from both."""
    precision, size = method.precision, r.k.shape[1]

    def product(kind, a: Parts, b: Parts, onto: Any = None) -> Any:
        return multiply(kind, a, b, precision, onto)

    def factor(x: Array) -> Parts:
        return parts(x, precision)

    keys, x, d_q = factor(r.k[...]), factor(r.x[...]), factor(r.d_q[...])
    pairs = pair_decays(loaded_decay(r))
    weight = None if r.weight is None else r.weight[...]
    has_decay = r.d_log_decay is not None

    d_q_keys, x_keys = product(dot_nt, d_q, keys), product(dot_nt, x, keys)
    d_pairs: Any = -d_q_keys * x_keys
    by_d_q, by_x, by_keys = factor(-pairs * x_keys), factor(-pairs * d_q_keys), None
    if weight is not None:
        products = product(dot_nt, keys, keys)
        mask = product(dot_tn, factor(pairs), factor(weight[:, None] * pairs))
        by_keys = factor(products * mask)
        if has_decay:
            in_gram = product(dot, factor(pairs), factor(products * products))
            d_pairs = d_pairs + 0.5 * weight[:, None] * in_gram

    def some_channels(c, carry):
        part = pl.ds(c * block, block)
        d_k = product(dot_tn, by_d_q, factor(r.d_q[:, part]))
        d_k = product(dot_tn, by_x, factor(r.x[:, part]), d_k)
        if by_keys is not None:
            d_k = product(dot, by_keys, factor(r.k[:, part]), d_k)
        r.d_k[:, part] = (d_k + r.before_d_k[:, part].astype(jnp.float32)).astype(r.d_k.dtype)
        return carry

    lax.fori_loop(0, size // block, some_channels, 0)

    if has_decay:
        from_start, d_from_start = r.from_start[...], r.d_from_start[...]
        if weight is not None:
            forms = r.forms[...]
            d_pairs = d_pairs + (0.5 * weight * from_start)[:, None] * forms[None, :]
            start_in_gram = from_start * jnp.sum(r.squares[...]) + jnp.sum(pairs * forms[None, :], axis=1)
            d_from_start = d_from_start + 0.5 * weight * start_in_gram
        d_kept = 0.5 * jnp.sum(r.kept_products[...])
        is_last = iota((CHUNK,), 0) == CHUNK - 1
        r.d_log_decay[...] = _over_intervals(
            r,
            d_pairs * pairs,
            from_start * (d_from_start + jnp.where(is_last, d_kept, 0.0)),
            r.to_end[...] * r.d_to_end[...],
            precision,
        )


def _over_intervals(r, pairs: Array, from_start: Array, to_end: Array, precision: str) -> Array:
    """Adds up gradients of the exponents of intervals at each token inside them, `[C]`.

    Args:
        r: the kernel's references.
        pairs: of the intervals from s, left out, to t, `[C (t), C (s)]`.
        from_start: of the intervals from the chunk's start to t, `[C]`.
        to_end: of the intervals from s, left out, to the chunk's end, `[C]`.
        precision: of products.
    """
    i, j = iota((CHUNK, CHUNK), 0), iota((CHUNK, CHUNK), 1)
    # A matrix of ones and zeros is exact in bfloat16, so the other factor's two parts keep 16 bits of the sums.
    exactly = "float32" if precision == "float32" else "split"
    before = jnp.where(i < j, 1.0, 0.0).astype(jnp.float32 if exactly == "float32" else jnp.bfloat16)
    begun = multiply(dot, parts(pairs, exactly), parts(before, exactly), exactly)  # [t, r]: sum over s < r
    crossing = jnp.sum(jnp.where(i >= j, begun + from_start[:, None], 0.0), axis=0)
    gradient = crossing + jnp.sum(jnp.where(i < j, to_end[:, None], 0.0), axis=0)
    is_flat = r.log_decay[...] <= MIN_LOG_DECAY
    if r.resets is not None:
        is_flat = is_flat | (r.resets[...] > 0)
    return jnp.where(is_flat, 0.0, gradient)


def bwd_dqkg(
    kernel_shape: KernelShape,
    method: Method,
    inputs: RidgeInputs,
    rows: Rows,
    states: Parts,
    d_ends: Parts,
    sums: StateSums,
    x: Array,
    d_q: Array,
    by_norm: NormGradients,
    config: RidgeConfig,
) -> tuple[Array, Array | None]:
    """Gradients of `k` `[B, T, H, K]` and of `log_decay` `[B, T, H]` (None if there is none).

    Args:
        kernel_shape: static facts.
        method: of the solve.
        inputs: arguments but for `q`.
        rows: decays.
        states: Gram matrices at the chunks' starts.
        d_ends: gradients of those at the chunks' ends.
        sums: of products of both.
        x: solutions.
        d_q: the solve for their gradient.
        by_norm: gradients by the norms.
        config: compilation.
    """
    p = kernel_shape

    def at(h, n, b):
        return b, n, h, 0

    def token(array):
        return p.of_token(array, CHUNK, at)

    def of_row(array):
        return p.of_head(array, (CHUNK,), lambda h, n, b: (b, h, n))

    def of_rows_of_state(array):
        return p.of_head(array, (None, p.key_size), lambda h, n, b: (b, h, n, 0))

    log_decay = token(inputs.log_decay)
    row = of_row(p.per_head(p.length, dtype=jnp.float32))
    adaptive, has_decay = by_norm.weight is not None, inputs.log_decay is not None
    tokens = {"k": token(inputs.k), "x": token(x), "d_q": token(d_q)}
    boundary = call(
        _boundary_kernel,
        "ridge_boundary_gradients",
        p.chunk_grid,
        {
            **tokens,
            "high": of_chunk(p, states.high),
            "low": of_chunk(p, states.low),
            "d_end_high": of_chunk(p, d_ends.high),
            "d_end_low": of_chunk(p, d_ends.low),
            "key_weight": of_row(by_norm.key_weight),
            **rows_of_chunk(p, rows, ("to_end",)),
        },
        {
            "d_k": tokens["k"],
            "forms": row if adaptive else None,
            "d_to_end": row if has_decay else None,
            "d_from_start": row if has_decay else None,
        },
        config.boundary_gradients,
        method=method,
        block=min(config.boundary_gradients.block, p.key_size),
    )
    d_k = boundary.pop("d_k")
    assert d_k is not None
    results = call(
        _gradients_kernel,
        "ridge_gradients",
        p.chunk_grid,
        {
            **tokens,
            "weight": of_row(by_norm.weight),
            "squares": of_rows_of_state(sums.squares if adaptive else None),
            "kept_products": of_rows_of_state(sums.kept),
            "log_decay": log_decay,
            "resets": p.of_position(inputs.resets, at),
            **{name: of_row(array) for name, array in boundary.items()},
            **rows_of_chunk(p, rows, ("total", "fine", "runs", "from_start", "to_end")),
        },
        {"d_k": tokens["k"], "d_log_decay": log_decay},
        config.gradients,
        updates={"d_k": token(d_k)},
        method=method,
        block=min(config.gradients.block, p.key_size),
    )
    return results["d_k"], results["d_log_decay"]  # type: ignore[return-value]

"""Products, norms and gradients of the Gram matrices of a chunk's tokens, without forming these matrices.

Token `t` of a chunk has, with `S` the Gram matrix at the chunk's start and decays from `Decays`,

    H_t = since_start_t S + sum_s pairs_ts k_s k_s^T        (s <= t, in the chunk)

Arrays are `[..., C, K]` by chunk, batch entry and head, and `S` is `[..., K, K]`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from rnnlib.ops import chunk
from rnnlib.ops.ridge_solve.solvers import LinearSolver, Product


class Decays(NamedTuple):
    """Decays inside a chunk.

    Attributes:
        since_start: from the chunk's start to each token, inclusive, `[..., C]`.
        pairs: from token s, exclusive, to token t, inclusive, `[..., C (t), C (s)]`; zero where `s > t`.
        until_end: from each token, exclusive, to the chunk's end, `[..., C]`.
    """

    since_start: Array
    pairs: Array
    until_end: Array

    @property
    def total(self) -> Array:
        """Decay over the chunk, as a factor of a matrix, `[..., 1, 1]`."""
        return self.since_start[..., -1, None, None]


def decays(log_decay: Array) -> Decays:
    """Decays of a chunk from log decays `[..., C]`, finite."""
    column = log_decay[..., None]
    return Decays(
        since_start=chunk.decay_since_start(column)[..., 0],
        pairs=jnp.exp(chunk.interval_sums(log_decay)),
        until_end=chunk.decay_until_end(column)[..., 0],
    )


def transposed(x: Array) -> Array:
    """Swaps the last two axes."""
    return jnp.swapaxes(x, -1, -2)


def chunk_states(k: Array, decay: Decays, initial: Array) -> tuple[Array, Array]:
    """Gram matrices at the chunks' starts `[N, ..., K, K]`, and the one after the last chunk.

    Args:
        k: `[N, ..., C, K]`.
        decay: of every chunk.
        initial: `[..., K, K]`.
    """
    written = transposed(decay.until_end[..., None] * k) @ k
    total = jnp.broadcast_to(decay.total, (*written.shape[:-2], 1, 1))

    def step(gram: Array, chunk: tuple[Array, Array]) -> tuple[Array, Array]:
        return chunk[0] * gram + chunk[1], gram

    final, states = jax.lax.scan(step, initial, (total, written))
    return states, final


def gram_product(solver: LinearSolver, k: Array, decay: Decays, states: Array) -> Product:
    """The function `x -> H_t x_t` on `[..., C, K]`, in the solver's precision."""

    def product(x: Array) -> Array:
        scores = decay.pairs * solver.product(x, transposed(k))
        return decay.since_start[..., None] * solver.product(x, states) + solver.product(scores, k)

    return product


def square_norms(k: Array, decay: Decays, states: Array) -> Array:
    """`||H_t||_F^2`, `[..., C]`, by three terms (Gated KalmaNet, section 4.2.1 and equation 5).

    None of the terms is negative, so nothing cancels.
    """
    first = jnp.square(decay.since_start) * jnp.sum(jnp.square(states), axis=(-1, -2))[..., None]
    second = 2 * decay.since_start * _row_products(decay.pairs, _quadratic_forms(k, states))
    third = jnp.sum((decay.pairs @ jnp.square(k @ transposed(k))) * decay.pairs, axis=-1)
    return first + second + third


def _quadratic_forms(k: Array, matrix: Array) -> Array:
    """`k_s^T matrix k_s`, `[..., C]`."""
    return jnp.sum((k @ matrix) * k, axis=-1)


def _row_products(matrix: Array, vector: Array) -> Array:
    return (matrix @ vector[..., None])[..., 0]


class GramGradients(NamedTuple):
    """Gradients with respect to the keys, decays and starting matrix that make up `H_t` inside a chunk.

    Attributes:
        k: `[..., C, K]`.
        since_start: `[..., C]`.
        pairs: `[..., C, C]`.
        start: the gradient of the chunk's starting matrix plus its transpose, `dS + dS^T`, `[..., K, K]`.
    """

    k: Array
    since_start: Array
    pairs: Array
    start: Array


def outer_gradients(k: Array, decay: Decays, states: Array, left: Array, right: Array) -> GramGradients:
    """Gradients for `dL/dH_t = left_t right_t^T`: the recurrence `A_i` of Gated KalmaNet, equations 7 and 8.

    Args:
        k: `[..., C, K]`.
        decay: of the chunk.
        states: `[..., K, K]`.
        left: `[..., C, K]`.
        right: `[..., C, K]`.
    """
    left_keys, right_keys = left @ transposed(k), right @ transposed(k)
    start = transposed(decay.since_start[..., None] * left) @ right
    return GramGradients(
        k=transposed(decay.pairs * right_keys) @ left + transposed(decay.pairs * left_keys) @ right,
        since_start=jnp.sum((left @ states) * right, axis=-1),
        pairs=left_keys * right_keys,
        start=start + transposed(start),
    )


def norm_gradients(k: Array, decay: Decays, states: Array, weight: Array) -> GramGradients:
    """Gradients for `dL/dH_t = weight_t H_t / 2`: the recurrence `B_i` of Gated KalmaNet, equations 9, 10 and 34.

    It is nested: `H_t` has a recurrence of its own. With `w_t = -weight_t` in the paper's sign,
    `b_i = sum_t pairs_ti w_t since_start_t` and `M_w = pairs^T Diag(w) pairs`,
    the part inside the chunk is `H_0 (b_i k_i) + sum_j (k_i . k_j) M_w[i, j] k_j`.

    Args:
        k: `[..., C, K]`.
        decay: of the chunk.
        states: `[..., K, K]`.
        weight: `[..., C]`.
    """
    products = k @ transposed(k)
    forms = _quadratic_forms(k, states)
    from_start = _row_products(transposed(decay.pairs), weight * decay.since_start)  # b_i
    mask = transposed(decay.pairs) @ (weight[..., None] * decay.pairs)  # M_w, full and symmetric
    keys_in_gram = decay.since_start[..., None] * forms[..., None, :] + decay.pairs @ jnp.square(
        products
    )  # k_s^T H_t k_s
    start_in_gram = decay.since_start * jnp.sum(jnp.square(states), axis=(-1, -2))[..., None] + _row_products(
        decay.pairs, forms
    )  # <H_t, S>
    total = jnp.sum(weight * jnp.square(decay.since_start), axis=-1)
    return GramGradients(
        k=from_start[..., None] * (k @ states) + (products * mask) @ k,
        since_start=weight * start_in_gram / 2,
        pairs=weight[..., None] * keys_in_gram / 2,
        start=total[..., None, None] * states + transposed(from_start[..., None] * k) @ k,
    )


def finish_gradients(
    k: Array, decay: Decays, states: Array, inside: GramGradients, d_final: Array
) -> tuple[Array, Decays, Array]:
    """Passes gradients back from chunk to chunk (Gated KalmaNet, section 4.2.2, cross-chunk computation).

    Args:
        k: `[N, ..., C, K]`.
        decay: of every chunk.
        states: `[N, ..., K, K]`.
        inside: gradients from the tokens of each chunk.
        d_final: gradient of the final Gram matrix `[..., K, K]`.

    Returns:
        Gradients of `k`, of the decays, and of the initial Gram matrix (symmetric).
    """
    total = jnp.broadcast_to(decay.total, (*states.shape[:-2], 1, 1))

    def step(d_end: Array, chunk: tuple[Array, Array]) -> tuple[Array, Array]:
        return chunk[0] * d_end + chunk[1], d_end

    # As in `GramGradients.start`, these are sums of the gradient and its transpose.
    d_initial, d_ends = jax.lax.scan(step, d_final + transposed(d_final), (total, inside.start), reverse=True)
    d_written = k @ d_ends
    d_total = jnp.sum(d_ends * states, axis=(-1, -2)) / 2
    return (
        inside.k + decay.until_end[..., None] * d_written,
        Decays(
            since_start=inside.since_start.at[..., -1].add(d_total),
            pairs=inside.pairs,
            until_end=jnp.sum(d_written * k, axis=-1) / 2,
        ),
        d_initial / 2,
    )

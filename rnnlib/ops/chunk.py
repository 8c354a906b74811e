"""The chunk form shared by the delta rule, linear attention and their relatives.

A chunk of C tokens acts on the state as an affine map. Each operator computes its own `ChunkFactors`. This module
passes the state from chunk to chunk, forward and backward, which is the same for all operators.

Decays are exponentials of sums of log decays over intervals of tokens. The sums are formed as sums, never as
differences of cumulative sums: no cancellation, and a log decay of -inf (a hard reset) is an ordinary large number.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.custom_derivatives import SymbolicZero
from jax.typing import DTypeLike

from pallas_kernels.common.platform import platform
from pallas_kernels.common.vma import batch_alike, pvary_together
from rnnlib.ops.arguments import accumulation_dtype, is_symbolic, matmul_precision, resets_of
from rnnlib.ops.chunk_blocks import in_blocks
from rnnlib.ops.heads import group_inputs, merge_heads

_SMALLEST_CHUNK = 16
_SMALLEST_PRODUCT = 4
_TPU_CHUNK = 128
# Replaces a log decay of -inf: exp(LOG_ZERO) is 0 in float32 and float64, and sums of LOG_ZERO stay finite.
LOG_ZERO = -1e4


class ChunkFactors(NamedTuple):
    """The affine map by which a chunk changes its initial state `S [K, V]`, for each chunk, row and head (axes `...`).

        R = update - correction S        O = read S + scores R        S_C = Diag(decay) S + write^T R

    Attributes:
        read: `[..., C, K]`, queries with the decay since the chunk's start.
        scores: `[..., C, M]`, causal scores of the queries with the M rows that the chunk writes.
        correction: `[..., M, K]`, or None for an offline rule.
        update: `[..., M, V]`.
        write: `[..., M, K]`, write keys with the decay until the chunk's end.
        decay: `[..., K or 1, 1]`, the decay over the chunk, or None.
    """

    read: Array
    scores: Array
    correction: Array | None
    update: Array
    write: Array
    decay: Array | None


def zero_state(shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    """Zeros that the compiler does not recognise as constant.

    XLA for CPUs (jaxlib 0.11.2) gives uninitialised memory for `sum((x @ zeros) * y, -1)`, a reduced batched product
    with a constant matrix. The first chunk of a state that starts at zero computes such a product.
    """
    return jax.lax.optimization_barrier(jnp.zeros(shape, dtype))


def chunk_length(length: int, chunk_size: int) -> int:
    """The chunk size in use: no more than the sequence, rounded up to a power of two of at least 16.

    A symbolic length (`jax.export`) has no such limit.
    """
    if is_symbolic(length):
        return chunk_size
    return min(chunk_size, max(_SMALLEST_CHUNK, 1 << (length - 1).bit_length()))


def split_chunks(x: Array, size: int) -> Array:
    """`[B, T, H, R, X]` to `[N, B, H, R, C, X]`; the tail is padded with zeros, which leave the state as it is."""
    batch, length, heads, group, channels = x.shape
    chunks = (length + size - 1) // size
    padded = jnp.pad(x, ((0, 0), (0, chunks * size - length), (0, 0), (0, 0), (0, 0)))
    return jnp.transpose(padded.reshape(batch, chunks, size, heads, group, channels), (1, 0, 3, 4, 2, 5))


def join_chunks(x: Array, length: int) -> Array:
    """The inverse of `split_chunks`: `[N, B, H, R, C, X]` to `[B, T, H, R, X]`."""
    chunks, batch, heads, group, size, channels = x.shape
    joined = jnp.transpose(x, (1, 0, 4, 2, 3, 5)).reshape(batch, chunks * size, heads, group, channels)
    return joined[:, :length]


def interval_sums(log_decay: Array) -> Array:
    """The log decay summed over the tokens `s + 1, ..., r`, for every pair of tokens; -inf where `s > r`.

    Args:
        log_decay: `[..., C]`.

    Returns:
        `[..., C (r), C (s)]`.
    """
    size = log_decay.shape[-1]
    r, s = jnp.arange(size)[:, None], jnp.arange(size)[None, :]
    sums = jnp.cumsum(jnp.where(r > s, log_decay[..., :, None], 0.0), axis=-2)
    return jnp.where(r >= s, sums, -jnp.inf)


def decay_since_start(log_decay: Array) -> Array:
    """Decay from the chunk's start to each token, inclusive, `[..., C, X]`."""
    return jnp.exp(jnp.cumsum(log_decay, axis=-2))


def decay_until_end(log_decay: Array) -> Array:
    """Decay from each token, exclusive, to the chunk's end, `[..., C, X]`."""
    return jnp.exp(_sums_after(log_decay))


def _sums_after(log_decay: Array) -> Array:
    following = jnp.concatenate([log_decay[..., 1:, :], jnp.zeros_like(log_decay[..., :1, :])], axis=-2)
    return jnp.flip(jnp.cumsum(jnp.flip(following, -2), axis=-2), -2)


def causal_scores(rows: Sequence[Array], columns: Array, log_decay: Array | None) -> list[Array]:
    """Decayed inner products `sum_k rows[r, k] exp(sum of log_decay over (s, r]) columns[s, k]` where `s <= r`, or 0.

    Args:
        rows: arrays `[..., C, K]` that are scored against the same columns.
        columns: `[..., C, K]`.
        log_decay: None, `[..., C, 1]` or `[..., C, K]`, finite.

    Returns:
        `[..., C, C]` for each of `rows`.
    """
    columns_transposed = jnp.swapaxes(columns, -1, -2)
    if log_decay is None:
        return [jnp.tril(row @ columns_transposed) for row in rows]
    if log_decay.shape[-1] == 1:
        decay = jnp.exp(interval_sums(log_decay[..., 0]))
        return [(row @ columns_transposed) * decay for row in rows]
    return _channel_scores(rows, columns, log_decay)


def _channel_scores(rows: Sequence[Array], columns: Array, log_decay: Array) -> list[Array]:
    """`causal_scores` with a decay per channel, in blocks whose size doubles from one token to the whole chunk.

    Scores between the two halves of a block factor into the decay after its middle and the decay up to its middle. Both
    exponents are <= 0, and each level computes at most one exponential per token and channel.
    """
    scores = [jnp.sum(row * columns, axis=-1)[..., None, None] for row in rows]  # [..., blocks, size, size]
    half = 1
    while half < log_decay.shape[-2]:
        log_earlier, log_later = _halves(log_decay, half)
        column = decay_until_end(log_earlier) * _halves(columns, half)[0]
        since_middle = decay_since_start(log_later)
        for i, row in enumerate(rows):
            across = _block_products(since_middle * _halves(row, half)[1], column)
            earlier, later = scores[i][..., 0::2, :, :], scores[i][..., 1::2, :, :]
            earlier, later, across = jnp.broadcast_arrays(earlier, later, across)
            top = jnp.concatenate([earlier, jnp.zeros_like(earlier)], axis=-1)
            scores[i] = jnp.concatenate([top, jnp.concatenate([across, later], axis=-1)], axis=-2)
        half *= 2
    return [score[..., 0, :, :] for score in scores]


def _halves(x: Array, half: int) -> tuple[Array, Array]:
    """Earlier and later halves of each block of `2 * half` tokens: `[..., C, K]` to twice `[..., blocks, half, K]`."""
    x = x.reshape(*x.shape[:-2], -1, 2, half, x.shape[-1])
    return x[..., 0, :, :], x[..., 1, :, :]


def _block_products(x: Array, y: Array) -> Array:
    """`x y^T` over the last two axes. Small blocks use sums, which are faster there than matrix products."""
    if x.shape[-2] < _SMALLEST_PRODUCT:
        return jnp.sum(x[..., :, None, :] * y[..., None, :, :], axis=-1)
    return x @ jnp.swapaxes(y, -1, -2)


def finite_log_decay(log_decay: Array | None, resets: Array | None) -> Array | None:
    """Log decays with a finite number, whose exponential is zero, in place of -inf and where documents start.

    Args:
        log_decay: None or `[B, T, H, R, X]`.
        resets: None or `[B, T]`, true where a document begins: the state is reset there, as by a log decay of -inf.

    Returns:
        None if both are None, otherwise `[B, T, H, R, X]` (X = 1 for resets alone).
    """
    if log_decay is not None:
        log_decay = jnp.maximum(log_decay, LOG_ZERO)
    if resets is None:
        return log_decay
    resets = resets[:, :, None, None, None]
    return jnp.where(resets, LOG_ZERO, 0.0 if log_decay is None else log_decay)


def group_tokens(inputs: Any, resets: Array | None) -> Any:
    """A rule's arguments with heads grouped and the log decay as `finite_log_decay` gives it.

    Args:
        inputs: a named tuple with at least `q [B, T, H, K]` and `log_decay`.
        resets: None or `[B, T]`, true where a document begins.
    """
    grouped = group_inputs(inputs)
    dtype = accumulation_dtype(*jax.tree.leaves(inputs))
    decay = None if grouped.log_decay is None else grouped.log_decay.astype(dtype)
    return grouped._replace(log_decay=finite_log_decay(decay, resets))


def split_tokens(grouped: Any, size: int) -> Any:
    """Splits the result of `group_tokens` into chunks `[N, B, H, R, C, X]` of `size` tokens, in accumulation dtype."""
    dtype = accumulation_dtype(*jax.tree.leaves(grouped))
    return jax.tree.map(lambda x: split_chunks(x.astype(dtype), size), grouped)


def _unrolled(chunks: int) -> int:
    """Chunks per iteration of the scan over chunks: on a CPU its overhead matters beside small products."""
    return 4 if platform() == "cpu" and not is_symbolic(chunks) else 1


def _states(factors: ChunkFactors, state: Array) -> tuple[Array, Array]:
    """The initial state of each chunk, `[N, B, H, R, K, V]`, and the final state of the last chunk."""

    def step(state: Array, chunk: tuple[Array | None, Array, Array, Array | None]) -> tuple[Array, Array]:
        correction, update, write, decay = chunk
        residual = update if correction is None else update - correction @ state
        decayed = state if decay is None else decay * state
        return decayed + jnp.swapaxes(write, -1, -2) @ residual, state

    chunks = (factors.correction, factors.update, factors.write, factors.decay)
    final, entering = jax.lax.scan(step, state, chunks, unroll=_unrolled(factors.update.shape[0]))
    return entering, final


def _residual(factors: ChunkFactors, states: Array) -> Array:
    return factors.update if factors.correction is None else factors.update - factors.correction @ states


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def evaluate_chunks(
    chunk_factors: Callable[[Any, Array | None], ChunkFactors],
    precision: str,
    inputs: Any,
    resets: Array | None,
    state: Array,
) -> tuple[Array, Array]:
    """Runs a rule given by its chunk factors; differentiable forwards and backwards, any number of times.

    Args:
        chunk_factors: from `(inputs, resets)` to the factors of all chunks at once.
        precision: jax matmul precision.
        inputs: the rule's arguments, any pytree of float arrays.
        resets: None or `[B, T]`, true where a document begins.
        state: the initial state `[B, H, R, K, V]`.

    Returns:
        Outputs in chunks `[N, B, H, R, C, V]` and the final state `[B, H, R, K, V]`.
    """
    return _evaluate(chunk_factors, precision, inputs, resets, state)[:2]


def _evaluate(chunk_factors, precision, inputs, resets, state):
    """Outputs, final state, and the states that enter the chunks."""
    with jax.default_matmul_precision(precision):
        factors = chunk_factors(inputs, resets)
        states, final = _states(factors, state)
        out = factors.read @ states + factors.scores @ _residual(factors, states)
    return *batch_alike((inputs, resets, state), (out, final)), states


@functools.partial(evaluate_chunks.defjvp, symbolic_zeros=True)
def _evaluate_tangents(chunk_factors, precision, primals, tangents):
    inputs, resets, state = primals
    # What has no tangent is None here. Its zeros are made where they are used, so that no backward pass keeps them.
    d_inputs, _, d_state = jax.tree.map(lambda d: None if isinstance(d, SymbolicZero) else d, tangents)
    out, final, states = _evaluate(chunk_factors, precision, inputs, resets, state)
    # The gradient is this function's transpose: of the chunks it keeps the inputs and the states that enter.
    tangents_of = jax.checkpoint(functools.partial(_tangents, chunk_factors, precision), prevent_cse=False)
    return (out, final), tangents_of(inputs, resets, states, d_inputs, d_state)


def _tangents(chunk_factors, precision, inputs, resets, states, d_inputs, d_state):
    """Tangents of the outputs and the final state; linear in `d_inputs` and `d_state`, in which None is zero.

    All that needs no state's tangent is computed for all chunks at once, before and after the scan.
    """
    with jax.default_matmul_precision(precision):
        d_inputs = jax.tree.map(lambda x, d: jnp.zeros_like(x) if d is None else d, inputs, d_inputs)
        d_state = jnp.zeros_like(states[0]) if d_state is None else d_state
        factors, d_factors = jax.jvp(lambda x: chunk_factors(x, resets), (inputs,), (d_inputs,))
        residual = _residual(factors, states)
        d_residual = _residual(d_factors, states)
        d_added = jnp.swapaxes(d_factors.write, -1, -2) @ residual
        if factors.decay is not None:
            d_added = d_added + d_factors.decay * states

        def step(d_state, chunk):
            """From the tangent of a chunk's initial state to that of its final state."""
            correction, write, decay, d_residual, d_added = chunk
            if correction is not None:
                d_residual = d_residual - correction @ d_state
            d_decayed = d_state if decay is None else decay * d_state
            return d_decayed + jnp.swapaxes(write, -1, -2) @ d_residual + d_added, (d_state, d_residual)

        chunks = (factors.correction, factors.write, factors.decay, d_residual, d_added)
        d_final, (d_states, d_residual) = jax.lax.scan(step, d_state, chunks, unroll=_unrolled(states.shape[0]))
        d_out = (
            d_factors.read @ states
            + factors.read @ d_states
            + d_factors.scores @ residual
            + factors.scores @ d_residual
        )
    return d_out, d_final


@functools.partial(jax.jit, static_argnums=(0,), static_argnames=("scale", "chunk_size"), inline=True)
def evaluate_rule(
    rule_factors: Callable[..., ChunkFactors],
    inputs: Any,
    initial_state: Array | None,
    segment_ids: Array | None,
    *,
    scale: float,
    chunk_size: int,
) -> tuple[Array, Array]:
    """Runs a rule given by its chunk factors on arguments in the public layout.

    Args:
        rule_factors: from `(inputs, resets, scale=, size=)` to the factors of all chunks of `size` tokens at once.
        inputs: the rule's token-wise arguments, a named tuple with at least `q [B, T, H, K]` and `v [B, T, HV, V]`.
        initial_state: None (zero) or `[B, HV, K, V]`.
        segment_ids: None or `[B, T]`.
        scale: factor on the output.
        chunk_size: tokens in a chunk; shorter sequences use a smaller one. On a TPU at least 128 where there is no
            decay by channel: a smaller one leaves its matrix unit partly idle.

    Returns:
        Output `[B, T, HV, V]` in `v`'s dtype and final state `[B, HV, K, V]`.
    """
    by_channel = inputs.log_decay is not None and inputs.log_decay.ndim == 4
    if platform() == "tpu" and not by_channel:
        chunk_size = max(chunk_size, _TPU_CHUNK)
    size = chunk_length(inputs.q.shape[1], chunk_size)
    chunk_factors = functools.partial(rule_factors, scale=scale, size=size)
    dtype = accumulation_dtype(*jax.tree.leaves(inputs), initial_state)
    batch, _, heads, key_size = inputs.q.shape
    value_heads, value_size = inputs.v.shape[2:]
    state_shape = (batch, heads, value_heads // heads, key_size, value_size)
    if initial_state is None:
        state = zero_state(state_shape, dtype)
    else:
        state = initial_state.astype(dtype).reshape(state_shape)
    resets = None if segment_ids is None else resets_of(segment_ids)
    precision, out_dtype = matmul_precision(*jax.tree.leaves(inputs)), inputs.v.dtype
    if dtype == jnp.float64:  # perhaps only the state is float64
        inputs = jax.tree.map(lambda x: x.astype(dtype), inputs)

    def evaluate(inputs: Any, resets: Array | None, state: Array) -> tuple[Array, Array]:
        out, final = evaluate_chunks(chunk_factors, precision, inputs, resets, state)
        return merge_heads(join_chunks(out, inputs.q.shape[1])).astype(out_dtype), final

    out, final = in_blocks(evaluate, *pvary_together((inputs, resets, state)), chunk_size=size)
    return out, final.reshape(batch, value_heads, key_size, value_size)

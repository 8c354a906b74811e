"""Gradients of one chunk under a channel-wise decay, as values inside a kernel; `bwd_dqkg` has the equations.

Only the products of pairs have scaled operands. These operands stay in float32, unrounded. One float32 tile of 64
tokens by 64 channels takes an eighth of a thread's registers, so few tiles may be held at once. Gradients are therefore
computed one after another: of the write keys, of the queries, of the erase keys. The gradients of pairs are loaded anew
for each product.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.common.kernel_shape import CHUNK
from pallas_kernels.common.triton.backend import dot, dot_tn, exp2, iota, load_again
from pallas_kernels.common.triton.decay import load_resets
from pallas_kernels.common.triton.kernel_shape import KernelShape
from pallas_kernels.delta_rule.triton.channel_decay import (
    add_up_to_end,
    before_decay,
    clamped_steps,
    end_factor,
    end_masks,
    extreme_factors,
    extreme_groups,
    is_flat,
    keep_rows,
    mild_exponent,
    start_factor,
)


def _written_key(r):
    return r.k if r.write_key is None else r.write_key


def _erase_key(r, k: Array) -> Array:
    """`erase * k`, `[C, K]` float32, but for a gate of one number a token, which the gradients of pairs include."""
    k = k.astype(jnp.float32)
    return k if r.erase is None or len(r.erase.shape) == 1 else load_again(r.erase).astype(jnp.float32) * k


class StateProducts(NamedTuple):
    """Sums over the value channels of one chunk.

    Attributes:
        read: `dO S_0^T`, `[C, K]`; None, like the others, where only one side is asked for.
        erased: `dW S_0^T`, `[C, K]`; None for linear attention.
        written: `R dS_C^T`, `[C, K]`.
        kept: `dS_C * S_0`, `[K]`; None without decay.
        added: `V dS_C^T`, `[C, K]`, with a value key, else None.
    """

    read: Any
    erased: Any
    written: Any
    kept: Any
    added: Any = None


def _but_last(x: Array, last_token: Any) -> Array:
    """What a chunk's tokens write `[C, K]`, as far as a decay of this chunk weakens it: not that of its last token.

    What the last token writes reaches the chunk's end whole. In the gradient of the log decay it would be added at the
    end and taken away at the token; where tokens forget nearly all, only the rounding of that would be left.
    """
    return keep_rows(x, iota((CHUNK,), 0) < last_token)


def _store_decay_gradient(r, d_total: Array, d_end: Array, kernel_shape: KernelShape, d_before: Array | None = None):
    """Stores it, from the gradients of the cumulative log decay `[C, K]` and of the whole chunk's log decay `[K]`.

    `d_before` `[C, K]` is what `d_total` has of tokens that read the state before their own decay.
    """
    d_step = add_up_to_end(d_total, kernel_shape.dtype) + d_end[None]
    if d_before is not None:
        d_step = d_step - d_before
    r.d_log_decay[...] = jnp.where(is_flat(load_again(r.log_decay), load_resets(r)), 0.0, d_step).astype(
        r.d_log_decay.dtype
    )


def channel_gradients(
    r, kernel_shape: KernelShape, last_token: Any, find_sums: Callable[..., StateProducts]
) -> tuple[Array | None, Array]:
    """Stores the gradients of queries and decay of a chunk that is not extreme.

    Args:
        r: references.
        kernel_shape: static facts.
        last_token: row of the chunk's last token.
        find_sums: finds what the state contributes, in a loop that waits for memory. With a value key, whose sum is one
            more, there are too many for the registers: it is then asked for one side after the other.

    Returns:
        Gradients `[C, K]` float32 of what is erased and of what is written.
    """
    is_precise = kernel_shape.dtype == jnp.float32
    sees_start, reaches_end = end_masks(r)
    # These are under way while the loop over value channels waits for its own.
    q, k, key, front, tail = r.q[...], r.k[...], _written_key(r)[...], r.front[...], r.tail[...]
    step = clamped_steps(r.log_decay[...], load_resets(r))
    exponent = mild_exponent(step, kernel_shape.dtype)
    sums = find_sums() if r.value_key is None else find_sums("written")
    reads, writes = exp2(exponent), exp2(-exponent)
    erase_reads = reads if r.value_key is None else reads * before_decay(step)
    written = key * writes
    d_written = keep_rows(tail * sums.written, reaches_end)
    d_end = r.kept[...] * sums.kept + jnp.sum(_but_last(written * d_written, last_token), axis=0)
    d_written = d_written + dot_tn(r.d_scores[...], q * reads, precise=is_precise)
    if kernel_shape.online:
        d_written = d_written + dot_tn(r.d_erased[...], _erase_key(r, k) * erase_reads, precise=is_precise)
    d_key = writes * d_written
    d_total = -_but_last(key * d_key, last_token)

    added = None
    if r.value_key is not None:
        value_key = r.value_key[...]
        added = value_key * writes
        d_added = keep_rows(tail * sums.added, reaches_end)
        d_end = d_end + jnp.sum(_but_last(added * d_added, last_token), axis=0)
        d_added = d_added + dot_tn(r.d_added_scores[...], q * reads, precise=is_precise)
        d_added = d_added + dot_tn(r.d_added_pairs[...], _erase_key(r, k) * erase_reads, precise=is_precise)
        d_value_key = writes * d_added
        d_total = d_total - _but_last(value_key * d_value_key, last_token)
        r.d_value_key[...] = (d_value_key + r.d_added_own[...][:, None] * q).astype(r.d_value_key.dtype)
        # Loaded again, so that nothing of this side stays in registers beside the other's sums.
        sums, q, k = find_sums("readers"), load_again(r.q), load_again(r.k)
        written, added = load_again(_written_key(r)) * writes, load_again(r.value_key) * writes

    d_read = keep_rows((kernel_shape.scale * front) * sums.read, sees_start)
    d_read = d_read + dot(load_again(r.d_scores), written, precise=is_precise)
    if added is not None:
        d_read = d_read + dot(load_again(r.d_added_scores), added, precise=is_precise)
    d_q = reads * d_read
    d_total = d_total + q * d_q
    d_own = r.d_own[...][:, None]
    own = d_own * load_again(_written_key(r))
    if r.value_key is not None:
        own = own + r.d_added_own[...][:, None] * load_again(r.value_key)
    r.d_q[...] = (d_q + own).astype(r.d_q.dtype)
    d_key = d_key + d_own * q

    d_erased: Any = None
    d_before = None
    if kernel_shape.online:
        d_erased = keep_rows(-front * sums.erased, sees_start)
        d_erased = d_erased + dot(load_again(r.d_erased), written, precise=is_precise)
        if added is not None:
            d_erased = d_erased + dot(load_again(r.d_added_pairs), added, precise=is_precise)
        d_erased = erase_reads * d_erased
        d_here = _erase_key(r, k) * d_erased
        d_total = d_total + d_here
        d_before = None if r.value_key is None else d_here
    _store_decay_gradient(r, d_total, d_end, kernel_shape, d_before)
    return d_erased, d_key


def extreme_channel_gradients(
    r, kernel_shape: KernelShape, last_token: Any, find_sums: Callable[[], StateProducts]
) -> tuple[Array | None, Array]:
    """The same for an extreme chunk, whose pairs go in groups."""
    is_precise, sums = kernel_shape.dtype == jnp.float32, find_sums()
    sees_start, reaches_end = end_masks(r)
    step = clamped_steps(r.log_decay[...], load_resets(r))
    d_key = keep_rows(end_factor(step, kernel_shape.dtype) * sums.written, reaches_end)
    d_end = r.kept[...] * sums.kept + jnp.sum(_but_last(load_again(_written_key(r)) * d_key, last_token), axis=0)
    from_start = start_factor(step, kernel_shape.dtype)
    d_q = keep_rows(kernel_shape.scale * from_start * sums.read, sees_start)
    d_erased: Any = None
    if kernel_shape.online:
        d_erased = keep_rows(-from_start * sums.erased, sees_start)

    q, k, key = r.q[...], r.k[...], _written_key(r)[...]
    erase = None if r.erase is None or len(r.erase.shape) == 1 else r.erase[...]
    step = clamped_steps(load_again(r.log_decay), load_resets(r))

    def add_group(group, sums):
        d_q, d_erased, d_key = sums
        reads, writes, is_here = extreme_factors(step, group, kernel_shape.dtype)
        written = key.astype(jnp.float32) * writes
        d_near = jnp.where(is_here, load_again(r.d_scores), 0.0)
        d_q = d_q + reads * dot(d_near, written, precise=is_precise)
        d_written = dot_tn(d_near, q.astype(jnp.float32) * reads, precise=is_precise)
        if kernel_shape.online:
            d_near = jnp.where(is_here, load_again(r.d_erased), 0.0)
            d_erased = d_erased + reads * dot(d_near, written, precise=is_precise)
            erased = k.astype(jnp.float32) * reads
            if erase is not None:
                erased = erase.astype(jnp.float32) * erased
            d_written = d_written + dot_tn(d_near, erased, precise=is_precise)
        return d_q, d_erased, d_key + writes * d_written

    d_q, d_erased, d_key = lax.fori_loop(0, extreme_groups(kernel_shape.dtype), add_group, (d_q, d_erased, d_key))
    q, key, d_own = load_again(r.q), load_again(_written_key(r)), r.d_own[...][:, None]
    d_total = q * d_q - _but_last(key * d_key, last_token)
    if kernel_shape.online:
        d_total = d_total + _erase_key(r, load_again(r.k)) * d_erased
    r.d_q[...] = (d_q + d_own * key).astype(r.d_q.dtype)
    _store_decay_gradient(r, d_total, d_end, kernel_shape)
    return d_erased, d_key + d_own * q

"""Last stage of the backward: gradients of the arguments, by chunk, value head and block of key channels.

Given the state before the chunk, the gradient of the state after it, the residuals R and `dW` (see `reverse`):

    dP = tril(dO R^T)      dT = -tril(dW R^T, -1)
    dQ_G = dO S_0^T + dP Kbar      dEbar = -dW S_0^T + dT Kbar      dKbar = dP^T Q_G + dT^T Ebar      dK_tail = R dS_C^T

`dT` is equation 66 of the Gated DeltaNet-2 paper, `-tril(A^T dA A^T, -1)` with `dA = dR W^T`, shortened by `R = A W`
and `dW = A^T dR`; both gates are inside these products. Cumulative log decay: `dG = q dq + e de - k~ dk~` for each
channel, and on the chunk's last row what the decay of the state and of the writes adds (equations 60 and 72).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.triton.backend import Launch, Operand, call, dot, dot_tn, iota
from pallas_kernels.triton.decay import (
    CHUNK,
    MIN_LOG_DECAY,
    ChunkDecay,
    decay_from_start,
    decay_of_chunk,
    decay_to_end,
    load_decay,
    pair_gradients,
)
from pallas_kernels.triton.prepare import erase_key, load_wide, product
from pallas_kernels.triton.problem import Inputs, Problem


class Saved(NamedTuple):
    """What the passes over chunks left for this stage, transposed as they keep it.

    Attributes:
        states: before each chunk, `[B, HV, N, V, K]`.
        residuals: R, `[B, HV, N, V, C]`.
        d_states: gradients after each chunk, `[B, HV, N, V, K]`.
        d_values: dW, `[B, HV, N, V, C]`.
    """

    states: Array
    residuals: Array
    d_states: Array
    d_values: Array


class Products(NamedTuple):
    """Products over the value channels of one chunk, float32: of pairs `[C, C]`, with states `[C, K]`, dS_C * S_0."""

    d_scores: Array
    d_erased: Any
    read: Array
    erased: Any
    written: Array
    kept: Any


def _value_products(r, problem: Problem, width: int, block: int, with_decay: bool) -> Products:
    """Sums the products over blocks of value channels."""

    def body(n, sums):
        part = pl.ds(n * block, block)
        d_out, residual, d_value = r.d_out[:, part], r.residuals[part, :], r.d_values[part, :]
        state, d_state = r.states[part, :], r.d_states[part, :]
        kept = sums.kept
        if with_decay:
            kept = kept + state.astype(jnp.float32) * d_state.astype(jnp.float32)
        return Products(
            d_scores=sums.d_scores + dot(d_out, residual),
            d_erased=sums.d_erased + dot_tn(d_value, residual) if problem.online else None,
            read=sums.read + dot(d_out, state),
            erased=sums.erased + dot_tn(d_value, state) if problem.online else None,
            written=sums.written + dot_tn(residual, d_state),
            kept=kept,
        )

    pairs, channels = jnp.zeros((CHUNK, CHUNK), jnp.float32), jnp.zeros((CHUNK, width), jnp.float32)
    sums = Products(
        d_scores=pairs,
        d_erased=pairs if problem.online else None,
        read=channels,
        erased=channels if problem.online else None,
        written=channels,
        kept=jnp.zeros((block, width), jnp.float32) if with_decay else None,
    )
    sums = lax.fori_loop(0, problem.value_size // block, body, sums)
    return sums._replace(kept=jnp.sum(sums.kept, axis=0)) if with_decay else sums


def _gradients_kernel(r, *, problem: Problem, width: int, block: int):
    k = r.k[...]
    key = k if r.write_key is None else r.write_key[...]
    q = r.q[...]
    erase = load_wide(r.erase)
    decay = load_decay(r.log_decay, r.starts)
    has_decay = decay.total is not None
    sums = _value_products(r, problem, width, block, has_decay)

    readers, d_pairs = [q], [problem.scale * sums.d_scores]
    if problem.online:
        i, j = iota((CHUNK, CHUNK), 0), iota((CHUNK, CHUNK), 1)
        readers.append(erase_key(k, erase))
        d_pairs.append(jnp.where(i > j, -sums.d_erased, 0.0))
    d_readers, d_key, d_total = pair_gradients(d_pairs, readers, key, decay)

    from_start = decay_from_start(decay)
    d_reads = [product(from_start, problem.scale * sums.read)]
    if problem.online:
        d_reads.append(product(from_start, -sums.erased))
    d_written = product(decay_to_end(decay), sums.written)
    d_rows = [near + far for near, far in zip(d_readers, d_reads)]
    r.d_q[...] = d_rows[0].astype(r.d_q.dtype)
    d_key = d_key + d_written
    _store_key_gradients(r, k, erase, d_rows[1] if problem.online else None, d_key)

    if has_decay:
        far = [x.astype(jnp.float32) * dx for x, dx in zip(readers, d_reads)]
        d_end = key.astype(jnp.float32) * d_written
        _store_decay_gradient(r, decay, d_total, sum(far[1:], far[0]), d_end, sums.kept)
    _store_value_gradients(r, problem)


def _store_key_gradients(r, k: Array, erase: Any, d_erased: Any, d_key: Array):
    """Gradients of the read key, the write key and the erase gate from those of `erase * k` and of the write key."""
    if d_erased is None:
        r.d_k[...] = d_key.astype(r.d_k.dtype)
        return
    d_k = product(erase, d_erased)
    if r.d_write_key is None:
        d_k = d_k + d_key
    else:
        r.d_write_key[...] = d_key.astype(r.d_write_key.dtype)
    r.d_k[...] = d_k.astype(r.d_k.dtype)
    if r.d_erase is not None:
        d_erase = d_erased * k.astype(jnp.float32)
        if erase.ndim == 1:
            d_erase = jnp.sum(d_erase, axis=1)
        r.d_erase[...] = d_erase.astype(r.d_erase.dtype)


def _store_decay_gradient(r, decay: ChunkDecay, d_total: Any, far: Array, d_end: Array, kept: Array):
    """Gradient of the log decay: `dG` added up from each token to the chunk's end; zero where it was clamped."""
    factor: Any = decay_of_chunk(decay)
    d_last = factor * kept  # [K]
    d_total = d_total + _like(d_total, far - d_end)
    d_last = d_last + jnp.sum(d_end, axis=0)
    d_last = jnp.sum(d_last) if d_total.ndim == 1 else d_last[None, :]
    d_log_decay = jnp.sum(d_total, axis=0, keepdims=True) - jnp.cumsum(d_total, axis=0) + d_total + d_last
    log_decay = r.log_decay[...].astype(jnp.float32)
    d_log_decay = jnp.where(log_decay > MIN_LOG_DECAY, d_log_decay, 0.0)
    if r.starts is not None:
        is_start = r.starts[...] > 0
        d_log_decay = jnp.where(is_start if d_total.ndim == 1 else is_start[:, None], 0.0, d_log_decay)
    r.d_log_decay[...] = d_log_decay.astype(r.d_log_decay.dtype)


def _like(total: Array, x: Array) -> Array:
    """`[C, K]` added up over channels if `total` is one number a token."""
    return jnp.sum(x, axis=1) if total.ndim == 1 else x


def _store_value_gradients(r, problem: Problem):
    """Gradients of the values and of the write gate, by the programs of the first block of key channels."""

    @pl.when(lax.rem(pl.program_id(2), pl.num_programs(2) // problem.batch) == 0)
    def _():
        d_value = r.d_values[...].T.astype(jnp.float32)
        write = load_wide(r.write)
        r.d_v[...] = product(write, d_value).astype(r.d_v.dtype)
        if r.d_write is not None:
            d_write = d_value * r.v[...].astype(jnp.float32)
            if write.ndim == 1:
                d_write = jnp.sum(d_write, axis=1)
            r.d_write[...] = d_write.astype(r.d_write.dtype)


def argument_gradients(problem: Problem, inputs: Inputs, d_out: Array, saved: Saved, launch: Launch) -> Inputs:
    """Gradients of all token-wise arguments.

    Args:
        problem: static facts.
        inputs: arguments.
        d_out: `[B, T, HV, V]`.
        saved: results of the passes over chunks.
        launch: compilation; `block` is the width of a block of key channels.

    Returns:
        Gradients in the arguments' shapes and dtypes; that of the initial state is None.
    """
    p, x = problem, inputs
    width = min(launch.block, p.key_size)
    key_blocks = p.key_size // width

    def at_key(h, n, z):
        return lax.div(z, key_blocks), n, h, lax.rem(z, key_blocks)

    def at_value(h, n, z):
        return lax.div(z, key_blocks), n, h, 0

    def token(array, at=at_key, size=width):
        return p.of_token(array, CHUNK, at, size)

    def gradient(like):
        """Gradient of an argument by value head; where it is one number a token, a part from each key block."""
        if like is None:
            return None
        is_whole = like.shape[2] == p.value_heads and (like.ndim == 4 or key_blocks == 1)
        shape = (p.batch, p.length, p.value_heads, *like.shape[3:])
        dtype = like.dtype if is_whole else jnp.float32
        if like.ndim == 4:
            return token(jax.ShapeDtypeStruct(shape, dtype))
        struct = jax.ShapeDtypeStruct((key_blocks, *shape), dtype)
        return Operand(struct, (None, None, CHUNK, None), lambda *g: (at_key(*g)[3], *at_key(*g)[:3]))

    def of_state(array):
        return p.of_head(
            array, (None, p.value_size, width), lambda h, n, z: (at_key(h, n, z)[0], h, n, 0, at_key(h, n, z)[3])
        )

    def of_residual(array):
        return p.of_head(array, (None, p.value_size, CHUNK), lambda h, n, z: (at_key(h, n, z)[0], h, n, 0, 0))

    results = call(
        _gradients_kernel,
        "delta_gradients",
        (p.value_heads, p.chunks, p.batch * key_blocks),
        {
            "q": token(x.q),
            "k": token(x.k),
            "write_key": token(x.write_key),
            "erase": token(x.erase),
            "log_decay": token(x.log_decay),
            "starts": p.of_position(x.starts, at_key),
            "v": token(x.v, at_value, p.value_size) if x.write is not None else None,
            "write": token(x.write, at_value, p.value_size),
            "d_out": token(d_out, at_value, p.value_size),
            "states": of_state(saved.states),
            "residuals": of_residual(saved.residuals),
            "d_states": of_state(saved.d_states),
            "d_values": of_residual(saved.d_values),
        },
        {
            "d_q": gradient(x.q),
            "d_k": gradient(x.k),
            "d_v": token(x.v, at_value, p.value_size),
            "d_write_key": gradient(x.write_key),
            "d_erase": gradient(x.erase),
            "d_write": token(x.write, at_value, p.value_size),
            "d_log_decay": gradient(x.log_decay),
        },
        launch,
        problem=p,
        width=width,
        block=min(launch.inner, p.value_size),
    )

    def summed(name: str, like: Array | None) -> Array | None:
        """Adds up the parts of key blocks and of the value heads that share a key head."""
        part = results["d_" + name]
        if part is None or like is None:
            return None
        if name in ("erase", "log_decay") and like.ndim == 3:
            part = jnp.sum(part, axis=0) if key_blocks > 1 else part[0]
        if like.shape[2] != p.value_heads:
            part = part.reshape(p.batch, p.length, like.shape[2], -1, *like.shape[3:]).sum(axis=3)
        return part.astype(like.dtype)

    names = ("q", "k", "v", "write_key", "erase", "write", "log_decay")
    return Inputs(**{name: summed(name, getattr(x, name)) for name in names})  # type: ignore[arg-type]

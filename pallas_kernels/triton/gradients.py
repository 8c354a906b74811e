"""Last stage of the backward: gradients of the arguments; no chunk waits for another.

Given the state before the chunk, the gradient of the state after it, the residuals R and `dW` (see `reverse`):

    dP = tril(dO R^T)      dT = -tril(dW R^T, -1)
    dQ_G = dO S_0^T + dP Kbar      dEbar = -dW S_0^T + dT Kbar      dKbar = dP^T Q_G + dT^T Ebar      dK_tail = R dS_C^T

`dT` is equation 66 of the Gated DeltaNet-2 paper, `-tril(A^T dA A^T, -1)` with `dA = dR W^T`, shortened by `R = A W`
and `dW = A^T dR`; both gates are inside these products. Cumulative log decay: `dG = q dq + e de - k~ dk~` for each
channel, and on the chunk's last row what the decay of the state and of the writes adds (equations 60 and 72).

Two kernels: the first finds dP and dT, the second takes a block of key channels. Both sum over blocks of value channels
in a loop, which is what makes the compiler copy ahead and leave products in flight; one kernel for both holds too many
registers.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.triton.backend import Launch, Operand, call, dot, dot_tn, iota
from pallas_kernels.triton.channels import offsets, read_factor, sum_rows, write_factor
from pallas_kernels.triton.decay import (
    CHUNK,
    MIN_LOG_DECAY,
    ChunkDecay,
    chunk_decay,
    decay_from_start,
    decay_of_chunk,
    decay_to_end,
    divisible,
)
from pallas_kernels.triton.pairs import pair_gradients, sum_of, weigh_pairs
from pallas_kernels.triton.prepare import erase_key, load_channel_decay, load_wide, product
from pallas_kernels.triton.problem import Inputs, Problem, is_channel_wise
from pallas_kernels.triton.reverse import Reversed


class Saved(NamedTuple):
    """What the passes over chunks left for this stage.

    Attributes:
        states: before each chunk, transposed, `[B, HV, N, V, K]`.
        residuals: R, transposed, `[B, HV, N, V, C]`.
        back: gradients that the reverse pass found.
    """

    states: Array
    residuals: Array
    back: Reversed


class PairGradients(NamedTuple):
    """Gradients of the pairs' matrices.

    Attributes:
        d_scores: dP, weighted by a scalar decay, `[B, HV, N, C, C]`; float32 if the decay is channel-wise.
        d_erased: dT, likewise, times an erase gate of one number a token; None for linear attention.
    """

    d_scores: Array
    d_erased: Array | None


def _chunk_decay(r) -> ChunkDecay:
    return chunk_decay(load_wide(r.log_decay), None if r.starts is None else r.starts[...])


def _is_row(gate: Any) -> bool:
    """Whether a gate, as a reference or a value, is one number a token."""
    return gate is not None and len(gate.shape) == 1


def _reader_ratio(r, shares_gate: bool) -> Any:
    """What turns rows of `dW`, as they are stored, to the gradient of what reads, `[C]`; None for 1.

    What reads is the key where the erase gate is one number a token, which the gradient then includes, and `erase * k`
    where it is one a channel. Nothing is left to do where that number is the write gate too.
    """
    if shares_gate:
        return None
    ratio = divisible(load_wide(r.erase)) if _is_row(r.erase) else None
    if r.gate is None:
        return ratio
    inverse = 1.0 / divisible(load_wide(r.gate))
    return inverse if ratio is None else ratio * inverse


def _scale_rows(x: Any, rows: Any) -> Any:
    return x if rows is None else rows[:, None] * x


def _sum_of_parts(problem: Problem, block: int, terms, start: Any) -> Any:
    """Sum of `terms(part)` over blocks of value channels, trees like `start`."""

    def add(n, sums):
        return jax.tree.map(jnp.add, sums, terms(pl.ds(n * block, block)))

    return lax.fori_loop(0, problem.value_size // block, add, start)


def _pairs_kernel(r, *, problem: Problem, block: int, shares_gate: bool):
    def terms(part):
        residual = r.residuals[part, :]
        d_scores = dot(r.d_out[:, part], residual)
        return (d_scores, dot(r.d_values[:, part], residual)) if problem.online else (d_scores,)

    zero = jnp.zeros((CHUNK, CHUNK), jnp.float32)
    d_scores, *rest = _sum_of_parts(problem, block, terms, (zero, zero) if problem.online else (zero,))
    # Of a channel-wise decay only the restarts concern the pairs' mask.
    decay = _chunk_decay(r)
    r.d_scores[...] = weigh_pairs(problem.scale * d_scores, decay, strict=False).astype(r.d_scores.dtype)
    for d_erased in rest:
        d_erased = _scale_rows(-d_erased, _reader_ratio(r, shares_gate))
        r.d_erased[...] = weigh_pairs(d_erased, decay, strict=True).astype(r.d_erased.dtype)


class _StateProducts(NamedTuple):
    """Sums over the value channels of one chunk.

    Attributes:
        read: `dO S_0^T`, `[C, K]`.
        erased: `dW S_0^T`, `[C, K]`; None for linear attention.
        written: `R dS_C^T`, `[C, K]`.
        kept: `dS_C * S_0`, `[K]`; None without decay.
    """

    read: Array
    erased: Any
    written: Array
    kept: Any


def _state_products(r, problem: Problem, block: int, shares_gate: bool) -> _StateProducts:
    def terms(part):
        state, d_state, d_out = r.states[part, :], r.d_states[part, :], r.d_out[:, part]
        return _StateProducts(
            read=dot(d_out, state),
            erased=dot(r.d_values[:, part], state) if problem.online else None,
            written=dot_tn(r.residuals[part, :], d_state),
            # All pairs of key channels, for the sake of the diagonal: as a product it takes nothing from registers.
            kept=None if r.log_decay is None else dot_tn(state, d_state),
        )

    width = r.states.shape[1]
    zero, pairs = jnp.zeros((CHUNK, width), jnp.float32), jnp.zeros((width, width), jnp.float32)
    start = _StateProducts(zero, zero if problem.online else None, zero, None if r.log_decay is None else pairs)
    result = _sum_of_parts(problem, block, terms, start)
    if result.kept is not None:
        i, j = iota((width, width), 0), iota((width, width), 1)
        result = result._replace(kept=jnp.sum(jnp.where(i == j, result.kept, 0.0), axis=0))
    if problem.online:
        result = result._replace(erased=_scale_rows(result.erased, _reader_ratio(r, shares_gate)))
    return result


def _keys_kernel(r, *, problem: Problem, block: int, shares_gate: bool):
    if r.extreme is not None:
        pl.when(r.extreme[...] != 0)(lambda: _store_key_side(r, problem, block, shares_gate))
    elif r.log_decay is not None and len(r.log_decay.shape) == 2:
        _store_channel_side(r, problem, block, shares_gate)
    else:
        _store_key_side(r, problem, block, shares_gate)


def _store_channel_side(r, problem: Problem, block: int, shares_gate: bool):
    """The same for a channel-wise decay, from the gradients of the matrices as products of pairs take them.

    These products are the only ones whose operands were scaled; they take them as float32, and not rounded.
    """
    decay = load_channel_decay(r, is_mild=True)
    offset = offsets(decay, problem.dtype)
    reads, writes = read_factor(decay, offset), write_factor(decay, offset)
    sums = _state_products(r, problem, block, shares_gate)
    k, erase = r.k[...], load_wide(r.erase)
    key = k if r.write_key is None else r.write_key[...]
    is_precise = problem.dtype == jnp.float32
    written = key.astype(jnp.float32) * writes

    # Loaded anew for each product, a matrix of pairs is not kept in registers between them.
    read = load_wide(r.q) * reads
    d_read = problem.scale * (decay.front * sums.read) + dot(r.d_scores[...], written, precise=is_precise)
    r.d_q[...] = (reads * d_read).astype(r.d_q.dtype)
    d_total = read * d_read

    d_written = dot_tn(r.d_scores[...], read, precise=is_precise)
    d_erased = None
    if problem.online:
        erased = product(None if _is_row(erase) else erase, k.astype(jnp.float32) * reads)
        d_scaled = dot(r.d_erased[...], written, precise=is_precise) - decay.front * sums.erased
        d_total = d_total + erased * d_scaled
        d_erased = reads * d_scaled
        d_written = d_written + dot_tn(r.d_erased[...], erased, precise=is_precise)
    d_total = d_total - written * d_written
    d_far = decay.tail * sums.written
    d_last = written * d_far
    d_total, d_end = d_total - d_last, jnp.sum(d_last, axis=0)
    d_written = d_written + d_far
    _store_key_gradients(r, k, erase, d_erased, writes * d_written)

    i, j = iota((CHUNK, CHUNK), 0), iota((CHUNK, CHUNK), 1)
    d_step = sum_rows(jnp.where(i <= j, 1.0, 0.0), d_total, problem.dtype) + (d_end + decay.kept * sums.kept)[None]
    is_flat = decay.step <= MIN_LOG_DECAY
    if r.starts is not None:
        is_flat = is_flat | (r.starts[...] > 0)[:, None]
    r.d_log_decay[...] = jnp.where(is_flat, 0.0, d_step).astype(r.d_log_decay.dtype)


def _store_key_side(r, problem: Problem, block: int, shares_gate: bool):
    """Gradients of queries, keys, erase gate and log decay."""
    q, k, erase = r.q[...], r.k[...], load_wide(r.erase)
    key = k if r.write_key is None else r.write_key[...]
    decay = _chunk_decay(r)
    sums = _state_products(r, problem, block, shares_gate)
    readers, scores = [q], [r.d_scores[...]]
    if problem.online:
        readers.append(k if _is_row(erase) else erase_key(k, erase))
        scores.append(r.d_erased[...])
    d_near, d_key_near, d_total = pair_gradients(scores, readers, key, decay)

    from_start = decay_from_start(decay)
    d_far = [product(from_start, problem.scale * sums.read)]
    if problem.online:
        d_far.append(product(from_start, -sums.erased))
    d_key_far = product(decay_to_end(decay), sums.written)
    d_readers = [near + far for near, far in zip(d_near, d_far)]
    d_key = d_key_near + d_key_far
    r.d_q[...] = d_readers[0].astype(r.d_q.dtype)
    _store_key_gradients(r, k, erase, d_readers[1] if problem.online else None, d_key)

    if decay.total is not None:
        d_end = key.astype(jnp.float32) * d_key_far
        if decay.is_scalar:
            both = [x.astype(jnp.float32) * dx for x, dx in zip(readers, d_readers)]
            d_total = jnp.sum(sum_of(both) - key.astype(jnp.float32) * d_key, axis=1)
            d_end = jnp.sum(d_end, axis=1)
        else:
            far = [x.astype(jnp.float32) * dx for x, dx in zip(readers, d_far)]
            d_total = jnp.asarray(d_total) + sum_of(far) - d_end
        starts = None if r.starts is None else r.starts[...]
        d_log_decay = _log_decay_gradient(decay, load_wide(r.log_decay), starts, d_total, d_end, sums.kept)
        r.d_log_decay[...] = d_log_decay.astype(r.d_log_decay.dtype)


def _store_key_gradients(r, k: Array, erase: Any, d_erased: Any, d_key: Array):
    """Gradients of the read key, the write key and the erase gate from those of what reads and of the write key."""
    if d_erased is None:
        r.d_k[...] = d_key.astype(r.d_k.dtype)
        return
    is_row = _is_row(erase)
    d_k = product(None if is_row else erase, d_erased)
    if r.d_write_key is None:
        d_k = d_k + d_key
    else:
        r.d_write_key[...] = d_key.astype(r.d_write_key.dtype)
    r.d_k[...] = d_k.astype(r.d_k.dtype)
    if r.d_erase is not None:
        d_erase = d_erased * k.astype(jnp.float32)
        if is_row:
            d_erase = jnp.sum(d_erase, axis=1) / divisible(erase)
        r.d_erase[...] = d_erase.astype(r.d_erase.dtype)


def _log_decay_gradient(
    decay: ChunkDecay, log_decay: Array, starts: Array | None, d_total: Array, d_end: Array, kept: Array
) -> Array:
    """`dG` added up from each token to the chunk's end; zero where the decay was clamped or a segment starts.

    Args:
        decay: the chunk's decay.
        log_decay: `[C]` or `[C, K]`.
        starts: `[C]` or None.
        d_total: `dG` but for the last row's special part, in the shape of `log_decay`.
        d_end: what each token's write adds to the last row, likewise.
        kept: `dS_C * S_0` summed over the values, `[K]`.
    """
    factor: Any = decay_of_chunk(decay)
    d_last = factor * kept
    d_last = jnp.sum(d_end, axis=0) + (jnp.sum(d_last) if d_total.ndim == 1 else d_last)
    gradient = jnp.sum(d_total, axis=0)[None] - jnp.cumsum(d_total, axis=0) + d_total + d_last[None]
    is_flat = log_decay <= MIN_LOG_DECAY
    if starts is not None:
        is_flat = is_flat | (starts > 0 if d_total.ndim == 1 else (starts > 0)[:, None])
    return jnp.where(is_flat, 0.0, gradient)


def gradients_of_pairs(
    problem: Problem, inputs: Inputs, d_out: Array, saved: Saved, launch: Launch, shares_gate: bool = False
) -> PairGradients:
    """DP and dT of each chunk, `[B, HV, N, C, C]`."""
    p, x = problem, inputs

    def at(h, n, b):
        return b, n, h, 0

    def of_matrix(array, rows):
        return p.of_head(array, (None, rows, CHUNK), lambda h, n, b: (b, h, n, 0, 0))

    def token(array):
        return p.of_token(array, CHUNK, at)

    pairs_dtype = jnp.float32 if is_channel_wise(x.log_decay) else None
    pairs = of_matrix(p.per_head(p.chunks, CHUNK, CHUNK, dtype=pairs_dtype), CHUNK)
    results = call(
        _pairs_kernel,
        "delta_pair_gradients",
        p.chunk_grid,
        {
            "erase": None if is_channel_wise(x.erase) or shares_gate else token(x.erase),
            "gate": None if is_channel_wise(x.write) or shares_gate else token(x.write),
            "log_decay": token(x.log_decay) if x.log_decay is not None and x.log_decay.ndim == 3 else None,
            "starts": p.of_position(x.starts, at),
            "d_out": token(d_out),
            "residuals": of_matrix(saved.residuals, p.value_size),
            "d_values": token(saved.back.d_values) if p.online else None,
        },
        {
            "d_scores": pairs,
            "d_erased": pairs if p.online else None,
        },
        launch,
        problem=p,
        block=min(launch.inner, p.value_size),
        shares_gate=shares_gate,
    )
    return PairGradients(**results)  # type: ignore[arg-type]


def argument_gradients(
    problem: Problem,
    inputs: Inputs,
    d_out: Array,
    saved: Saved,
    pairs: PairGradients,
    extreme: Array | None,
    launch: Launch,
    shares_gate: bool = False,
    write_key_dtype: Any = None,
) -> Inputs:
    """Gradients of all token-wise arguments.

    Args:
        problem: static facts.
        inputs: arguments.
        d_out: `[B, T, HV, V]`.
        saved: results of the passes over chunks.
        pairs: gradients of the pairs' matrices.
        extreme: the first stage's flags of chunks with an extreme decay.
        launch: compilation; `block` is the width of a block of key channels.
        shares_gate: whether the write gate is the erase gate, whose gradient then has both parts.
        write_key_dtype: of the write key's gradient; None is the write key's.

    Returns:
        Gradients in the arguments' shapes and dtypes; that of the initial state is None.
    """
    p, x, d_write = problem, inputs, saved.back.d_write
    write_key: Any = x.write_key
    if write_key is not None and write_key_dtype is not None:
        write_key = jax.ShapeDtypeStruct(write_key.shape, write_key_dtype)
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
        is_whole = like.shape[2] == p.value_heads and (like.ndim == 4 or (key_blocks == 1 and not shares_gate))
        shape = (p.batch, p.length, p.value_heads, *like.shape[3:])
        dtype = like.dtype if is_whole else jnp.float32
        if like.ndim == 4:
            return token(jax.ShapeDtypeStruct(shape, dtype))
        struct = jax.ShapeDtypeStruct((key_blocks, *shape), dtype)
        return Operand(struct, (None, None, CHUNK, None), lambda *g: (at_key(*g)[3], *at_key(*g)[:3]))

    def of_state(array):
        def place(*g):
            b, n, h, c = at_key(*g)
            return b, h, n, 0, c

        return p.of_head(array, (None, p.value_size, width), place)

    def of_matrix(array, rows):
        return p.of_head(array, (None, rows, CHUNK), lambda *g: (at_key(*g)[0], at_key(*g)[2], at_key(*g)[1], 0, 0))

    outputs = {
        "d_q": gradient(x.q),
        "d_k": gradient(x.k),
        "d_write_key": gradient(write_key),
        "d_erase": gradient(x.erase),
        "d_log_decay": gradient(x.log_decay),
    }
    operands = {
        "q": token(x.q),
        "k": token(x.k),
        "write_key": token(x.write_key),
        "erase": token(x.erase),
        "gate": None if is_channel_wise(x.write) or shares_gate else token(x.write),
        "log_decay": token(x.log_decay),
        "starts": p.of_position(x.starts, at_key),
        "d_out": token(d_out, at_value, p.value_size),
        "states": of_state(saved.states),
        "d_states": of_state(saved.back.d_states),
        "residuals": of_matrix(saved.residuals, p.value_size),
        "d_values": token(saved.back.d_values, at_value, p.value_size) if p.online else None,
        "d_scores": of_matrix(pairs.d_scores, CHUNK),
        "d_erased": of_matrix(pairs.d_erased, CHUNK),
    }
    flags = p.of_head(extreme, (None,), lambda *g: (at_key(*g)[0], at_key(*g)[2], at_key(*g)[1]))
    grid = (p.value_heads, p.chunks, p.batch * key_blocks)
    block = min(launch.inner, p.value_size)
    mild = {**operands, "extreme": None}
    static: dict[str, Any] = {"problem": p, "block": block, "shares_gate": shares_gate}
    results = call(_keys_kernel, "delta_gradients", grid, mild, outputs, launch, **static)
    if extreme is not None:
        updates = {
            name: dataclasses.replace(operand, array=results[name])
            for name, operand in outputs.items()
            if operand is not None
        }
        results = call(
            _keys_kernel,
            "delta_gradients_extreme",
            grid,
            {**operands, "extreme": flags},
            outputs,
            launch,
            updates=updates,
            **static,
        )
    results["d_write"] = None if shares_gate else d_write

    def summed(name: str, like: Any) -> Array | None:
        """Adds up the parts of key blocks and of the value heads that share a key head."""
        part = results["d_" + name]
        if part is None or like is None:
            return None
        if name in ("erase", "log_decay") and like.ndim == 3:
            part = jnp.sum(part, axis=0) if key_blocks > 1 else part[0]
            if name == "erase" and shares_gate:
                part = jnp.add(part, d_write)  # type: ignore[arg-type]
        if like.shape[2] != p.value_heads:
            part = part.reshape(p.batch, p.length, like.shape[2], -1, *like.shape[3:]).sum(axis=3)
        return part.astype(like.dtype)

    names = ("q", "k", "write_key", "erase", "write", "log_decay")
    given = x._replace(write_key=write_key)
    return Inputs(v=saved.back.d_v, **{name: summed(name, getattr(given, name)) for name in names})  # type: ignore[arg-type]

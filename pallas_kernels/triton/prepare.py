"""First stage: everything of a chunk that does not need the state, one program for each chunk of each value head.

    T = tril(Ebar Kbar^T, -1)    A = (I + T)^-1    P = scale * tril(Q_G Kbar^T)

and the factors with which queries, erase keys and write keys meet the state at the chunk's ends. A factor that is one
number a token is stored as that number; only one that differs by channel is multiplied into its matrix and stored.
"""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from pallas_kernels.triton.backend import Launch, call, dot_nt, iota
from pallas_kernels.triton.channels import ChannelDecay, channel_decay, offsets, read_factor, write_factor
from pallas_kernels.triton.decay import (
    CHUNK,
    ChunkDecay,
    chunk_decay,
    decay_from_start,
    decay_of_chunk,
    decay_to_end,
)
from pallas_kernels.triton.inverse import unit_lower_inverse
from pallas_kernels.triton.pairs import pair_products
from pallas_kernels.triton.problem import Inputs, Problem


class Prepared(NamedTuple):
    """What the first stage leaves for the passes over chunks. N is the number of chunks, C = 64.

    Attributes:
        inverse: A, `[B, HV, N, C, C]`; None for linear attention.
        scores: P, `[B, HV, N, C, C]`.
        read: `q * exp(G)`, `[B, HV, T, K]`, if the decay is channel-wise, else None.
        erased: `erase * k * exp(G)`, `[B, HV, T, K]`, if either factor is channel-wise, else None.
        written: `write_key * exp(G_C - G)`, `[B, HV, T, K]`, if the decay is channel-wise, else None.
        read_rows: `scale * exp(G)` where it is a number a token, `[B, HV, T]` float32, else None.
        erased_rows: `erase * exp(G)` likewise.
        written_rows: `exp(G_C - G)` likewise.
        kept: `exp(G_C)`, `[B, HV, N]` or `[B, HV, N, K]` float32; None without decay.
        growth: log of how far the chunk's writes can enlarge a state, the product of `|1 - erase * k . write_key|`
            where above 1, `[B, HV, N]` float32; None where nothing asks for it.
        extreme: 1 where a channel-wise decay is too strong for one product of pairs, `[B, HV, N]` int32, else None.
    """

    inverse: Array | None
    scores: Array | None
    read: Array | None
    erased: Array | None
    written: Array | None
    read_rows: Array | None
    erased_rows: Array | None
    written_rows: Array | None
    kept: Array | None
    growth: Array | None
    extreme: Array | None


def product(*factors: Array | None) -> Any:
    """Product of the factors that are not None, `[C]` factors along the rows of `[C, K]` ones; None if all are."""
    result: Any = None
    for factor in factors:
        if factor is None:
            continue
        if result is None:
            result = factor
        elif result.ndim < factor.ndim:
            result = result[:, None] * factor
        elif result.ndim > factor.ndim:
            result = result * factor[:, None]
        else:
            result = result * factor
    return result


def load_wide(ref) -> Any:
    """A reference's value in float32; None for None."""
    return None if ref is None else ref[...].astype(jnp.float32)


def load_channel_decay(r, is_mild: bool = False) -> ChannelDecay:
    """A chunk's channel-wise decay from `log_decay` and `starts`."""
    starts = None if r.starts is None else r.starts[...]
    return channel_decay(load_wide(r.log_decay), r.log_decay[0, :].astype(jnp.float32), starts, is_mild)


def erase_key(k: Array, erase: Array | None) -> Array:
    """`erase * k` in the dtype of `k`, `[C, K]`."""
    return k if erase is None else product(erase, k.astype(jnp.float32)).astype(k.dtype)


def _prepare_kernel(r, *, scale: float, with_pairs: bool):
    if r.read is not None:
        _prepare_channels(r, scale, with_pairs)
        return
    k = r.k[...]
    erase = load_wide(r.erase)
    decay = chunk_decay(load_wide(r.log_decay), None if r.starts is None else r.starts[...])
    if with_pairs:
        _store_pairs(r, r.q[...], k, k if r.write_key is None else r.write_key[...], erase, decay, scale)
    from_start: Any = decay_from_start(decay)
    if r.erased is not None:
        r.erased[...] = product(erase, from_start, k.astype(jnp.float32)).astype(r.erased.dtype)
    if r.read_rows is not None:
        r.read_rows[...] = scale * from_start
    if r.written_rows is not None:
        r.written_rows[...] = decay_to_end(decay)
    if r.erased_rows is not None:
        r.erased_rows[...] = product(erase, from_start)
    if r.kept is not None:
        r.kept[...] = decay_of_chunk(decay)


def _prepare_channels(r, scale: float, with_pairs: bool):
    """The first stage where the decay is channel-wise; pairs of extreme chunks are made again by `_extreme_kernel`."""
    dtype = r.read.dtype
    decay = load_channel_decay(r)
    r.kept[...] = decay.kept
    offset = offsets(decay, dtype)
    k = r.k[...]
    reads = read_factor(decay, offset)
    read = load_wide(r.q) * reads
    r.read[...] = (read * decay.front).astype(dtype)
    erased = None
    if r.erased is not None:
        erased = product(load_wide(r.erase), k.astype(jnp.float32) * reads)
        r.erased[...] = (erased * decay.front).astype(dtype)
    key = k if r.write_key is None else r.write_key[...]
    written = key.astype(jnp.float32) * write_factor(decay, offset)
    r.written[...] = (written * decay.tail).astype(dtype)
    if with_pairs:
        r.extreme[...] = decay.is_extreme.astype(jnp.int32)
        # Scaled matrices go into the scores as float32: to round both would cost the output as much as two of its own.
        scores = dot_nt(read, written, precise=dtype == jnp.float32)
        r.scores[...] = jnp.where(_is_causal(strict=False), scale * scores, 0.0).astype(dtype)
        if erased is not None:
            _store_inverse(r, dot_nt(erased.astype(dtype), written.astype(dtype)))


def _extreme_kernel(r, *, scale: float):
    @pl.when(r.extreme[...] != 0)
    def _():
        k = r.k[...]
        decay = chunk_decay(load_wide(r.log_decay), None if r.starts is None else r.starts[...])
        key = k if r.write_key is None else r.write_key[...]
        _store_pairs(r, r.q[...], k, key, load_wide(r.erase), decay, scale)


def _store_pairs(r, q: Array, k: Array, key: Array, erase: Array | None, decay: ChunkDecay, scale: float):
    if r.inverse is None:
        (scores,) = pair_products([q], key, decay)
    elif erase is not None and erase.ndim == 1:  # a number a token: multiplied after the product
        scores, erased = pair_products([q, k], key, decay)
        erased = erase[:, None] * erased
    else:
        scores, erased = pair_products([q, erase_key(k, erase)], key, decay)
    r.scores[...] = (scale * scores).astype(r.scores.dtype)
    if r.inverse is not None:
        _store_inverse(r, erased)


def _is_causal(strict: bool) -> Array:
    i, j = iota((CHUNK, CHUNK), 0), iota((CHUNK, CHUNK), 1)
    return i > j if strict else i >= j


def _store_inverse(r, erased: Array):
    dtype = r.inverse.dtype
    if r.growth is not None:
        i, j = iota((CHUNK, CHUNK), 0), iota((CHUNK, CHUNK), 1)
        left = 1.0 - jnp.sum(jnp.where(i == j, erased, 0.0), axis=1)
        r.growth[...] = jnp.sum(jnp.log(jnp.maximum(jnp.abs(left), 1.0)))
    r.inverse[...] = unit_lower_inverse(jnp.where(_is_causal(strict=True), erased, 0.0), dtype).astype(dtype)


def prepare(problem: Problem, inputs: Inputs, launch: Launch, with_pairs: bool = True) -> Prepared:
    """Runs the first stage; `with_pairs=False` leaves out the two `[C, C]` matrices of each chunk."""
    p, x = problem, inputs
    decay_ndim = 0 if x.log_decay is None else x.log_decay.ndim
    erase_ndim = 0 if x.erase is None else x.erase.ndim

    def at(h, n, b):
        return b, n, h, 0

    matrix = p.per_head(p.chunks, CHUNK, CHUNK)
    channels = p.per_head(p.length, p.key_size)
    rows = p.per_head(p.length, dtype=jnp.float32)
    chunk_rows = p.per_head(p.chunks, p.key_size, dtype=jnp.float32)
    is_erased_wide = p.online and 4 in (decay_ndim, erase_ndim)

    def of_pairs(wanted):
        return p.of_head(matrix if wanted else None, (None, CHUNK, CHUNK), lambda h, n, b: (b, h, n, 0, 0))

    def of_channels(wanted):
        return p.of_head(channels if wanted else None, (CHUNK, p.key_size), lambda h, n, b: (b, h, n, 0))

    def of_rows(wanted):
        return p.of_head(rows if wanted else None, (CHUNK,), lambda h, n, b: (b, h, n))

    def of_flag(array):
        return p.of_head(array, (None,), lambda h, n, b: (b, h, n))

    per_channel = p.of_head(chunk_rows if decay_ndim == 4 else None, (None, p.key_size), lambda h, n, b: (b, h, n, 0))
    outputs = {
        "inverse": of_pairs(with_pairs and p.online),
        "scores": of_pairs(with_pairs),
        "read": of_channels(decay_ndim == 4),
        "erased": of_channels(is_erased_wide),
        "written": of_channels(decay_ndim == 4),
        "read_rows": of_rows(decay_ndim == 3),
        "erased_rows": of_rows(p.online and not is_erased_wide and max(decay_ndim, erase_ndim) == 3),
        "written_rows": of_rows(decay_ndim == 3),
        "kept": of_flag(p.per_head(p.chunks, dtype=jnp.float32)) if decay_ndim == 3 else per_channel,
        "growth": of_flag(
            p.per_head(p.chunks, dtype=jnp.float32)
            if with_pairs and p.online and decay_ndim and p.segments > 1
            else None
        ),
        "extreme": of_flag(p.per_head(p.chunks, dtype=jnp.int32) if with_pairs and decay_ndim == 4 else None),
    }
    if not any(outputs.values()):
        return Prepared(**dict.fromkeys(outputs))
    names = {"q": x.q, "k": x.k, "write_key": x.write_key, "erase": x.erase, "log_decay": x.log_decay}
    operands = {name: p.of_token(array, CHUNK, at) for name, array in names.items()}
    operands["starts"] = p.of_position(x.starts, at)
    results = call(
        _prepare_kernel,
        "delta_prepare",
        p.chunk_grid,
        operands,
        outputs,
        launch,
        scale=p.scale,
        with_pairs=with_pairs,
    )
    if results["extreme"] is None:
        return Prepared(**results)
    pairs = {
        name: operand
        for name, operand in outputs.items()
        if name in ("inverse", "scores", "growth") and operand is not None
    }
    exact = call(
        _extreme_kernel,
        "delta_prepare_extreme",
        p.chunk_grid,
        {**operands, "extreme": of_flag(results["extreme"])},
        {"inverse": None, "scores": None, "growth": None, **pairs},
        launch,
        updates={name: dataclasses.replace(operand, array=results[name]) for name, operand in pairs.items()},
        scale=p.scale,
    )
    return Prepared(**{**results, **exact})

"""First stage: everything of a chunk that does not need the state, one program for each chunk of each value head.

    T = tril(Ebar Kbar^T, -1)    A = (I + T)^-1    P = scale * tril(Q_G Kbar^T)

and the factors with which queries, erase keys and write keys meet the state at the chunk's ends. A factor that is one
number a token is stored as that number; only one that differs by channel is multiplied into its matrix and stored.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.common.config import KernelConfig
from pallas_kernels.common.kernel_shape import CHUNK
from pallas_kernels.common.triton.backend import Operand, call, dot_nt, exp2, iota, load_again
from pallas_kernels.common.triton.chunks import product
from pallas_kernels.common.triton.decay import (
    ChunkDecay,
    chunk_decay,
    decay_from_start,
    decay_of_chunk,
    decay_to_end,
    load_resets,
)
from pallas_kernels.common.triton.kernel_shape import KernelShape
from pallas_kernels.common.triton.pairs import pair_products, weigh_pairs
from pallas_kernels.delta_rule.inputs import Inputs
from pallas_kernels.delta_rule.triton.channel_decay import (
    before_decay,
    chunk_ends,
    clamped_steps,
    end_factor,
    end_masks,
    extreme_factors,
    extreme_groups,
    keep_rows,
    mild_exponent,
    runs_of,
    start_factor,
)
from pallas_kernels.delta_rule.triton.extreme_chunks import EXTREME_WIDTH, extreme_visits, list_extreme
from pallas_kernels.delta_rule.triton.triangular_inverse import unit_lower_inverse


class WYFactors(NamedTuple):
    """Results of the first stage, which the passes over chunks read. N is the number of chunks, C = 64.

    Attributes:
        inverse: A, `[B, HV, N, C, C]`; None for linear attention.
        scores: P, `[B, HV, N, C, C]`; see `stored_scores`.
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
        front: what completes the factors of a chunk that is not extreme to those at its start (see `channel_decay`),
            `[B, HV, N, K]` float32, if the decay is channel-wise, else None.
        tail: likewise at its end.
        added: with a value key, `value_key * exp(G_C - G)`, `[B, HV, T, K]`, else None.
        added_scores: with a value key, queries' scores with it, as `scores`, else None.
        added_pairs: with a value key, erase keys' products with it, `[B, HV, N, C, C]`, else None.
        decay_sums: in Mosaic GPU, where another stage finds the scores: see `PassArrays`; else None.
        write_rows: in Mosaic GPU, where the erase gate is the write gate, too: it, `[B, HV, T]` float32; else None.
        listed: the chunks that `extreme` marks, as `list_extreme` has them; None without `extreme`.
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
    front: Array | None
    tail: Array | None
    added: Array | None = None
    added_scores: Array | None = None
    added_pairs: Array | None = None
    decay_sums: Array | None = None
    write_rows: Array | None = None
    listed: Array | None = None


def load_wide(ref) -> Any:
    """A reference's value in float32; None for None."""
    return None if ref is None else ref[...].astype(jnp.float32)


def key_parts(size: int, width: int) -> list:
    """Slices of key channels."""
    return [pl.ds(start, min(width, size)) for start in range(0, size, min(width, size))]


def load_part(ref, part) -> Array:
    """A block of channels in float32, loaded where it is used; a gate of one number a token as it is."""
    if len(ref.shape) == 1:
        return ref[...].astype(jnp.float32)[:, None]
    return load_again(ref.at[:, part]).astype(jnp.float32)


def load_chunk_decay(r) -> ChunkDecay:
    """A chunk's scalar decay and restarts."""
    return chunk_decay(load_wide(r.log_decay), load_resets(r))


def erase_key(k: Array, erase: Array | None) -> Array:
    """`erase * k` in the dtype of `k`, `[C, K]`."""
    return k if erase is None else product(erase, k.astype(jnp.float32)).astype(k.dtype)


def _prepare_kernel(r, *, scale: float, block: int):
    if r.read is not None:
        _prepare_channels(r, scale, block)
        return
    k = r.k[...]
    erase = load_wide(r.erase)
    decay = load_chunk_decay(r)
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


def _prepare_channels(r, scale: float, block: int):
    """The first stage where the decay is channel-wise, in blocks of key channels.

    Pairs of extreme chunks are left to `_extreme_kernel`.
    """
    parts = key_parts(r.read.shape[1], block)
    runs = runs_of(r)
    resets = load_resets(r)
    ends = []
    for part in parts:
        first = clamped_steps(r.log_decay[0, part], None if resets is None else r.resets[0])
        ends.append(chunk_ends(clamped_steps(r.log_decay[:, part], resets), first, runs, r.read.dtype))
    is_extreme = functools.reduce(jnp.logical_or, [end.is_extreme for end in ends])
    for part, end in zip(parts, ends):
        r.front[part], r.tail[part], r.kept[part] = end.front, end.tail, end.kept
    if r.extreme is None:
        _store_mild(r, parts, [(end.front, end.tail) for end in ends], runs, resets, scale)
        return
    r.extreme[...] = is_extreme.astype(jnp.int32)
    sides = [(end.front, end.tail) for end in ends]
    pl.when(jnp.logical_not(is_extreme))(lambda: _store_mild(r, parts, sides, runs, resets, scale))
    pl.when(is_extreme)(lambda: _store_extreme_factors(r, parts, resets))


def _store_mild(r, parts, sides, runs, resets, scale: float):
    dtype = r.read.dtype
    sees_start, reaches_end = end_masks(r)
    scores = erased_pairs = added_scores = added_pairs = jnp.zeros((CHUNK, CHUNK), jnp.float32)
    for part, (front, tail) in zip(parts, sides):
        step = clamped_steps(load_again(r.log_decay.at[:, part]), resets)
        exponent = mild_exponent(step, dtype)
        reads, writes = exp2(exponent), exp2(-exponent)
        written = load_part(r.k if r.write_key is None else r.write_key, part) * writes
        r.written[:, part] = keep_rows(written * tail, reaches_end).astype(dtype)
        added = None
        if r.added is not None:
            added = load_part(r.value_key, part) * writes
            r.added[:, part] = keep_rows(added * tail, reaches_end).astype(dtype)
        if r.erased is not None:
            erased = load_part(r.k, part) * reads
            if r.erase is not None:
                erased = load_part(r.erase, part) * erased
            if added is not None:
                erased = erased * before_decay(step)
                added_pairs = added_pairs + dot_nt(erased.astype(dtype), added.astype(dtype))
            r.erased[:, part] = keep_rows(erased * front, sees_start).astype(dtype)
            erased_pairs = erased_pairs + dot_nt(erased.astype(dtype), written.astype(dtype))
        read = load_part(r.q, part) * reads
        r.read[:, part] = keep_rows(read * front, sees_start).astype(dtype)
        # Both scaled matrices stay in float32: rounding them would double the error of the output.
        scores = scores + dot_nt(read, written, precise=dtype == jnp.float32)
        if added is not None:
            added_scores = added_scores + dot_nt(read, added, precise=dtype == jnp.float32)
    if r.added is not None:
        causal = ChunkDecay(None, None, runs)
        added_scores = scale * weigh_pairs(added_scores, causal, strict=False)
        r.added_scores[...] = added_scores.astype(r.added_scores.dtype)
        r.added_pairs[...] = weigh_pairs(added_pairs, causal, strict=True).astype(r.added_pairs.dtype)
    _store_channel_pairs(r, scores, erased_pairs, runs, scale)


def _store_extreme_factors(r, parts, resets):
    dtype = r.read.dtype
    sees_start, reaches_end = end_masks(r)
    for part in parts:
        step = clamped_steps(load_again(r.log_decay.at[:, part]), resets)
        written = load_part(r.k if r.write_key is None else r.write_key, part) * end_factor(step, dtype)
        r.written[:, part] = keep_rows(written, reaches_end).astype(dtype)
        from_start = start_factor(step, dtype)
        r.read[:, part] = keep_rows(load_part(r.q, part) * from_start, sees_start).astype(dtype)
        if r.erased is not None:
            erased = load_part(r.k, part) * from_start
            if r.erase is not None:
                erased = load_part(r.erase, part) * erased
            r.erased[:, part] = keep_rows(erased, sees_start).astype(dtype)


def _store_channel_pairs(r, scores: Array, erased: Array, runs, scale: float):
    decay = ChunkDecay(None, None, runs)
    r.scores[...] = (scale * weigh_pairs(scores, decay, strict=False)).astype(r.scores.dtype)
    if r.inverse is not None:
        _store_inverse(r, weigh_pairs(erased, decay, strict=False))


def _extreme_kernel(r, *, scale: float, block: int):
    _store_extreme_pairs(r, scale, block)
    if r.read is not None:
        _store_extreme_factors(r, key_parts(r.q.shape[1], block), load_resets(r))


def _store_extreme_pairs(r, scale: float, block: int):
    dtype = r.q.dtype
    resets = load_resets(r)
    scores = erased_pairs = jnp.zeros((CHUNK, CHUNK), jnp.float32)
    for part in key_parts(r.q.shape[1], block):
        step = clamped_steps(r.log_decay[:, part], resets)
        q, k, key = r.q[:, part], r.k[:, part], (r.k if r.write_key is None else r.write_key)[:, part]
        erase = None if r.erase is None else load_part(r.erase, part)

        def add_group(group, pairs):
            scores, erased_pairs = pairs
            reads, writes, is_here = extreme_factors(step, group, dtype)
            written = key.astype(jnp.float32) * writes
            near = dot_nt(q.astype(jnp.float32) * reads, written, precise=dtype == jnp.float32)
            scores = jnp.where(is_here, scores + near, scores)
            if r.inverse is not None:
                erased = product(erase, k.astype(jnp.float32) * reads)
                near = dot_nt(erased.astype(dtype), written.astype(dtype))
                erased_pairs = jnp.where(is_here, erased_pairs + near, erased_pairs)
            return scores, erased_pairs

        scores, erased_pairs = lax.fori_loop(0, extreme_groups(dtype), add_group, (scores, erased_pairs))
    _store_channel_pairs(r, scores, erased_pairs, runs_of(r), scale)


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


def _store_inverse(r, erased: Array):
    dtype = r.inverse.dtype
    i, j = iota((CHUNK, CHUNK), 0), iota((CHUNK, CHUNK), 1)
    if r.growth is not None:
        left = 1.0 - jnp.sum(jnp.where(i == j, erased, 0.0), axis=1)
        r.growth[...] = jnp.sum(jnp.log(jnp.maximum(jnp.abs(left), 1.0)))
    r.inverse[...] = unit_lower_inverse(jnp.where(i > j, erased, 0.0), dtype).astype(dtype)


def stored_scores(kernel_shape: KernelShape) -> jax.ShapeDtypeStruct:
    """Shape and dtype of all chunks' P. Linear attention keeps P in float32: rounding it would be most of its error."""
    return kernel_shape.per_head(kernel_shape.chunks, CHUNK, CHUNK, dtype=None if kernel_shape.online else jnp.float32)


def _outputs(kernel_shape: KernelShape, inputs: Inputs) -> dict[str, Operand | None]:
    """The results, by the names of `WYFactors`."""
    p, x = kernel_shape, inputs
    decay_ndim = 0 if x.log_decay is None else x.log_decay.ndim
    erase_ndim = 0 if x.erase is None else x.erase.ndim
    matrix, scores = p.per_head(p.chunks, CHUNK, CHUNK), stored_scores(p)
    channels = p.per_head(p.length, p.key_size)
    rows = p.per_head(p.length, dtype=jnp.float32)
    chunk_rows = p.per_head(p.chunks, p.key_size, dtype=jnp.float32)
    is_erased_wide = p.online and 4 in (decay_ndim, erase_ndim)

    def of_pairs(array):
        return p.of_head(array, (None, CHUNK, CHUNK), lambda h, n, b: (b, h, n, 0, 0))

    def of_channels(wanted):
        return p.of_head(channels if wanted else None, (CHUNK, p.key_size), lambda h, n, b: (b, h, n, 0))

    def of_rows(wanted):
        return p.of_head(rows if wanted else None, (CHUNK,), lambda h, n, b: (b, h, n))

    def of_flag(array):
        return _of_chunk(p, array)

    per_channel = p.of_head(chunk_rows if decay_ndim == 4 else None, (None, p.key_size), lambda h, n, b: (b, h, n, 0))
    return {
        "inverse": of_pairs(matrix if p.online else None),
        "scores": of_pairs(scores),
        "read": of_channels(decay_ndim == 4),
        "erased": of_channels(is_erased_wide),
        "written": of_channels(decay_ndim == 4),
        "read_rows": of_rows(decay_ndim == 3),
        "erased_rows": of_rows(p.online and not is_erased_wide and max(decay_ndim, erase_ndim) == 3),
        "written_rows": of_rows(decay_ndim == 3),
        "kept": of_flag(p.per_head(p.chunks, dtype=jnp.float32)) if decay_ndim == 3 else per_channel,
        "front": per_channel,
        "tail": per_channel,
        "growth": of_flag(
            p.per_head(p.chunks, dtype=jnp.float32) if p.online and decay_ndim and p.num_splits > 1 else None
        ),
        "extreme": of_flag(p.per_head(p.chunks, dtype=jnp.int32) if decay_ndim == 4 and x.value_key is None else None),
        "added": of_channels(x.value_key is not None),
        "added_scores": of_pairs(None if x.value_key is None else scores),
        "added_pairs": of_pairs(None if x.value_key is None else matrix),
    }


def _of_chunk(kernel_shape: KernelShape, x: Any) -> Operand | None:
    """One number a chunk, `[B, HV, N]`."""
    return kernel_shape.of_head(x, (None,), lambda h, n, b: (b, h, n))


def _arguments(
    kernel_shape: KernelShape, inputs: Inputs, launch: KernelConfig
) -> tuple[dict[str, Operand | None], dict[str, Any]]:
    """What kernels of the first stage read, and their static arguments."""
    p, x = kernel_shape, inputs

    def at(h, n, b):
        return b, n, h, 0

    names = {"q": x.q, "k": x.k, "write_key": x.write_key, "erase": x.erase, "log_decay": x.log_decay}
    names |= {"value_key": x.value_key}
    operands = {name: p.of_token(array, CHUNK, at) for name, array in names.items()}
    operands["resets"] = p.of_position(x.resets, at)
    return operands, {"scale": p.scale, "block": min(launch.inner, p.key_size)}


def wy_factors(kernel_shape: KernelShape, inputs: Inputs, launch: KernelConfig) -> WYFactors:
    """Runs the first stage.

    Args:
        kernel_shape: static facts.
        inputs: arguments.
        launch: compilation; `inner` is the width of a block of key channels where the decay is channel-wise.
    """
    operands, static = _arguments(kernel_shape, inputs, launch)
    outputs = _outputs(kernel_shape, inputs)
    results = call(_prepare_kernel, "delta_prepare", kernel_shape.chunk_grid, operands, outputs, launch, **static)
    prepared = WYFactors(**results)
    return prepared if prepared.extreme is None else with_extreme(kernel_shape, inputs, prepared, launch, _OF_PAIRS)


_OF_PAIRS = "inverse", "scores", "growth"
_FACTORS = "read", "erased", "written"
OF_EXTREME = _OF_PAIRS + _FACTORS
"""What a kernel for chunks that are not extreme leaves to find, by the names of `WYFactors`."""


def with_extreme(
    kernel_shape: KernelShape,
    inputs: Inputs,
    prepared: WYFactors,
    launch: KernelConfig,
    names: tuple[str, ...] = OF_EXTREME,
) -> WYFactors:
    """The same results, with those of `names` replaced in extreme chunks.

    Args:
        kernel_shape: static facts.
        inputs: arguments.
        prepared: results, with `extreme`.
        launch: as in `wy_factors`.
        names: with those of all factors or without.
    """
    listed = list_extreme(prepared.extreme)  # type: ignore[arg-type]
    operands, static = _arguments(kernel_shape, inputs, dataclasses.replace(launch, inner=EXTREME_WIDTH))
    found = {name: operand for name, operand in _outputs(kernel_shape, inputs).items() if name in names and operand}
    updates = {name: dataclasses.replace(at, array=getattr(prepared, name)) for name, at in found.items()}
    if "scores" in found:  # in the dtype in which the kernel before has them
        found["scores"] = updates["scores"]
    exact = call(
        _extreme_kernel,
        "delta_prepare_extreme",
        kernel_shape.chunk_grid,
        operands,
        {**dict.fromkeys(OF_EXTREME), **found},
        launch,
        updates=updates,
        visits=extreme_visits(kernel_shape, listed),
        **static,
    )
    return prepared._replace(listed=listed, **{name: exact[name] for name in found})

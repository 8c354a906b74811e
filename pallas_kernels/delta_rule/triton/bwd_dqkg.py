"""Last stage of the backward: gradients of the arguments; no chunk waits for another.

Given the state before the chunk, the gradient of the state after it, the residuals R and `dW` (see `bwd_dh`):

    dP = tril(dO R^T)      dT = -tril(dW R^T, -1)
    dQ_G = dO S_0^T + dP Kbar      dEbar = -dW S_0^T + dT Kbar      dKbar = dP^T Q_G + dT^T Ebar      dK_tail = R dS_C^T

`dT` is equation 66 of the Gated DeltaNet-2 paper, `-tril(A^T dA A^T, -1)` with `dA = dR W^T`, shortened by `R = A W`
and `dW = A^T dR`; both gates are inside these products. Cumulative log decay: `dG = q dq + e de - k~ dk~` for each
channel, and on the chunk's last row what the decay of the state and of the writes adds (equations 60 and 72). A token's
score with itself is left out of these products, see `PairGradients`.

Two kernels: that of `bwd_pairs` finds dP and dT, the one here takes a block of key channels. Both sum over blocks of
value channels in a loop, which is what makes the compiler copy ahead and leave products in flight; one kernel for both
holds too many registers.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.common.config import KernelConfig
from pallas_kernels.common.decay import divisible
from pallas_kernels.common.kernel_shape import CHUNK, is_channel_wise
from pallas_kernels.common.triton.backend import Operand, call, dot, dot_halves, dot_tn, iota, load_again
from pallas_kernels.common.triton.chunks import product
from pallas_kernels.common.triton.decay import ChunkDecay, decay_from_start, decay_of_chunk, decay_to_end, load_resets
from pallas_kernels.common.triton.kernel_shape import KernelShape
from pallas_kernels.common.triton.pairs import diagonal, pair_gradients, sum_of, sum_of_parts
from pallas_kernels.delta_rule.inputs import Inputs
from pallas_kernels.delta_rule.triton.bwd_dqkg_channel import (
    StateProducts,
    channel_gradients,
    extreme_channel_gradients,
)
from pallas_kernels.delta_rule.triton.bwd_pairs import (
    PairGradients,
    Saved,
    is_row,
    load_residuals,
    loaded_reader_ratio,
    scale_rows,
)
from pallas_kernels.delta_rule.triton.channel_decay import is_flat
from pallas_kernels.delta_rule.triton.closed_gates import zero_closed
from pallas_kernels.delta_rule.triton.extreme_chunks import EXTREME_WIDTH, extreme_visits
from pallas_kernels.delta_rule.triton.wy import WYFactors, erase_key, load_chunk_decay, load_wide


def _state_products(
    r, kernel_shape: KernelShape, block: int, tied_gates: bool, side: str | None = None
) -> StateProducts:
    """The sums over value channels; with `side` only those of what reads or of what is written, None for the others."""
    of_readers, of_written = side != "written", side != "readers"

    def terms(part):
        state, d_state, d_out = r.states[part, :], r.d_states[part, :], r.d_out[:, part]
        return StateProducts(
            read=dot_halves(d_out, state) if of_readers else None,
            erased=dot(r.d_values[:, part], state) if of_readers and kernel_shape.online else None,
            written=dot_halves(load_residuals(r, part), d_state, (0, 0)) if of_written else None,
            kept=keep(state, d_state) if of_written and r.log_decay is not None else None,
            added=dot(r.v[:, part], d_state) if of_written and r.v is not None else None,
        )

    def keep(state, d_state):
        # Only the diagonal is wanted. A product forms all pairs of key channels, but needs fewer registers. States in
        # float32 (`stored_states`) must be multiplied in float32, elementwise.
        return dot_tn(state, d_state) if are_operands else jnp.sum(state * d_state, axis=0)

    width, are_operands = r.states.shape[1], r.states.dtype == r.d_out.dtype
    zero = jnp.zeros((CHUNK, width), jnp.float32)
    pairs = jnp.zeros((width, width) if are_operands else (width,), jnp.float32)
    start = StateProducts(
        read=zero if of_readers else None,
        erased=zero if of_readers and kernel_shape.online else None,
        written=zero if of_written else None,
        kept=pairs if of_written and r.log_decay is not None else None,
        added=zero if of_written and r.v is not None else None,
    )
    result = sum_of_parts(kernel_shape.value_size, block, terms, start)
    if result.kept is not None and are_operands:
        result = result._replace(kept=diagonal(result.kept, axis=0))
    if result.erased is not None:
        result = result._replace(erased=scale_rows(result.erased, loaded_reader_ratio(r, tied_gates)))
    return result


def _keys_kernel(r, *, kernel_shape: KernelShape, block: int, tied_gates: bool):
    if r.log_decay is None or len(r.log_decay.shape) == 1:
        _store_key_side(r, kernel_shape, block, tied_gates)
        return
    last_token = kernel_shape.last_token(pl.program_id(1) if r.visit is None else r.visit[1])

    def store(find):
        def find_sums(side: str | None = None) -> StateProducts:
            return _state_products(r, kernel_shape, block, tied_gates, side)

        d_erased, d_key = find(r, kernel_shape, last_token, find_sums)
        _store_key_gradients(r, load_again(r.k), load_wide(r.erase), d_erased, d_key)

    if r.visit is not None:
        store(extreme_channel_gradients)
    elif r.extreme is None:
        store(channel_gradients)
    else:
        pl.when(r.extreme[...] == 0)(lambda: store(channel_gradients))


def _store_key_side(r, kernel_shape: KernelShape, block: int, tied_gates: bool):
    """Gradients of queries, keys, erase gate and log decay."""
    q, k, erase = r.q[...], r.k[...], load_wide(r.erase)
    key = k if r.write_key is None else r.write_key[...]
    decay = load_chunk_decay(r)
    sums = _state_products(r, kernel_shape, block, tied_gates)
    readers, scores = [q], [r.d_scores[...]]
    if kernel_shape.online:
        readers.append(k if is_row(erase) else erase_key(k, erase))
        scores.append(r.d_erased[...])
    d_near, d_key_near = pair_gradients(scores, readers, key)

    from_start = decay_from_start(decay)
    d_far = [product(from_start, kernel_shape.scale * sums.read)]
    if kernel_shape.online:
        d_far.append(product(from_start, -sums.erased))
    d_key_far = product(decay_to_end(decay), sums.written)
    d_readers = [near + far for near, far in zip(d_near, d_far)]
    d_key = d_key_near + d_key_far
    if r.d_own is None:
        r.d_q[...] = d_readers[0].astype(r.d_q.dtype)
    else:
        d_own = r.d_own[...][:, None]
        r.d_q[...] = (d_readers[0] + d_own * key.astype(jnp.float32)).astype(r.d_q.dtype)
        d_key = d_key + d_own * q.astype(jnp.float32)
    _store_key_gradients(r, k, erase, d_readers[1] if kernel_shape.online else None, d_key)

    if decay.total is not None:
        d_end = jnp.sum(key.astype(jnp.float32) * d_key_far, axis=1)
        both = [x.astype(jnp.float32) * dx for x, dx in zip(readers, d_readers)]
        d_total = jnp.sum(sum_of(both) - key.astype(jnp.float32) * d_key_near, axis=1)
        resets = load_resets(r)
        d_log_decay = _log_decay_gradient(decay, load_wide(r.log_decay), resets, d_total, d_end, sums.kept)
        r.d_log_decay[0, :] = d_log_decay.astype(r.d_log_decay.dtype)


def _store_key_gradients(r, k: Array, erase: Any, d_erased: Any, d_key: Array):
    """Gradients of the read key, the write key and the erase gate from those of what reads and of the write key."""
    if d_erased is None:
        r.d_k[...] = d_key.astype(r.d_k.dtype)
        return
    has_row = is_row(erase)
    d_k = product(None if has_row else erase, d_erased)
    if r.d_write_key is None:
        d_k = d_k + d_key
    else:
        r.d_write_key[...] = d_key.astype(r.d_write_key.dtype)
    r.d_k[...] = d_k.astype(r.d_k.dtype)
    if r.d_erase is None:
        return
    d_erase = d_erased * k.astype(jnp.float32)
    if not has_row:
        r.d_erase[...] = d_erase.astype(r.d_erase.dtype)
        return
    r.d_erase[0, :] = (jnp.sum(d_erase, axis=1) / divisible(erase)).astype(r.d_erase.dtype)
    for other in range(1, r.d_erase.shape[0]):  # the parts of narrower blocks
        r.d_erase[other, :] = jnp.zeros((CHUNK,), r.d_erase.dtype)


def _log_decay_gradient(
    decay: ChunkDecay, log_decay: Array, resets: Array | None, d_total: Array, d_end: Array, kept: Array
) -> Array:
    """The gradient of each token's log decay; zero where the decay was clamped or a document starts.

    A token's decay weakens what it and later tokens read of earlier ones and of the state, and what earlier tokens
    leave at the chunk's end. What a token itself leaves there is not weakened by it, and can be far larger than that:
    it takes no part, instead of being added and taken away.

    Args:
        decay: the chunk's decay.
        log_decay: `[C]`.
        resets: `[C]` or None.
        d_total: `dG` by reading and by being read in this chunk, `[C]`.
        d_end: what each token's write leaves at the chunk's end, times the gradient there, `[C]`.
        kept: `dS_C * S_0` summed over the values, `[K]`.
    """
    factor: Any = decay_of_chunk(decay)
    is_later = iota((CHUNK, CHUNK), 0) >= iota((CHUNK, CHUNK), 1)
    parts = jnp.where(is_later, d_total[:, None], d_end[:, None])
    gradient = jnp.sum(parts, axis=0) + jnp.sum(factor * kept)[None]
    return jnp.where(is_flat(log_decay, resets), 0.0, gradient)


def of_argument(kernel_shape: KernelShape, part: Array, like: Any, dtype: Any = None) -> Array:
    """An argument's gradient, in its shape and dtype or another one, from one by value head: their sum by key head."""
    if like.shape[2] != kernel_shape.value_heads:
        part = part.reshape(kernel_shape.batch, kernel_shape.length, like.shape[2], -1, *like.shape[3:]).sum(axis=3)
    return part.astype(dtype or like.dtype)


# The arguments whose gradients the kernel finds.
_FOUND = ("q", "k", "write_key", "erase", "log_decay", "value_key")


@dataclasses.dataclass(frozen=True)
class _KeyBlocks:
    """Where each program, of a value head, a chunk and a block of key channels, finds its arrays.

    Attributes:
        shape: static facts.
        width: key channels of a block.
        finest: those of the narrowest blocks of a call, each of which has a part of the gradients of gates and decays
            that are one number a token.
        shares_parts: whether such a gradient has several parts.
    """

    shape: KernelShape
    width: int
    finest: int
    shares_parts: bool

    @property
    def grid(self) -> tuple[int, int, int]:
        """Value heads, chunks, and blocks of key channels of all rows."""
        return self.shape.value_heads, self.shape.chunks, self.shape.batch * (self.shape.key_size // self.width)

    def at_key(self, h, n, z) -> tuple[Any, ...]:
        """Row, chunk, value head and block of key channels."""
        key_blocks = self.shape.key_size // self.width
        return lax.div(z, key_blocks), n, h, lax.rem(z, key_blocks)

    def at_value(self, *program) -> tuple[Any, ...]:
        """The same with all channels."""
        return *self.at_key(*program)[:3], 0

    def at_matrix(self, *program) -> tuple[Any, ...]:
        """Row, value head and chunk of a matrix of the chunk."""
        b, n, h, _ = self.at_key(*program)
        return b, h, n, 0

    def token(self, array: Any) -> Operand | None:
        """The block's channels of the chunk's tokens, or their one number."""
        return self.shape.of_token(array, CHUNK, self.at_key, self.width)

    def token_values(self, array: Any) -> Operand | None:
        """All value channels of the chunk's tokens."""
        return self.shape.of_token(array, CHUNK, self.at_value, self.shape.value_size)

    def state(self, array: Any) -> Operand | None:
        """The block's channels of the state at the chunk, `[V, K]`."""

        def place(*program):
            b, n, h, c = self.at_key(*program)
            return b, h, n, 0, c

        return self.shape.of_head(array, (None, self.shape.value_size, self.width), place)

    def matrix(self, array: Any, rows: int) -> Operand | None:
        """A matrix of the chunk, `[rows, C]`."""
        return self.shape.of_head(array, (None, rows, CHUNK), lambda *program: (*self.at_matrix(*program), 0))

    def row(self, array: Any) -> Operand | None:
        """One number a token of the chunk."""
        return self.shape.of_head(array, (None, CHUNK), self.at_matrix)

    def of_chunk(self, array: Any, *size: int) -> Operand | None:
        """What the chunk has once, for all key channels or for the block's."""

        def place(*program):
            b, n, h, c = self.at_key(*program)
            return (b, h, n, c)[: array.ndim]

        return self.shape.of_head(array, (None, *size), place)

    def gradient(self, like: Any) -> Operand | None:
        """Gradient of an argument by value head; where it is one number a token, a part from each key block."""
        if like is None:
            return None
        s = self.shape
        is_whole = like.shape[2] == s.value_heads and (like.ndim == 4 or not self.shares_parts)
        shape = (s.batch, s.length, s.value_heads, *like.shape[3:])
        dtype = like.dtype if is_whole else jnp.float32
        if like.ndim == 4:
            return self.token(jax.ShapeDtypeStruct(shape, dtype))

        def place(*program):
            b, n, h, c = self.at_key(*program)
            return c, b, n, h

        struct = jax.ShapeDtypeStruct((s.key_size // self.finest, *shape), dtype)
        return Operand(struct, (self.width // self.finest, None, CHUNK, None), place)


def _arguments(
    blocks: _KeyBlocks, x: Inputs, d_out: Array, saved: Saved, pairs: PairGradients, tied_gates: bool
) -> dict[str, Operand | None]:
    """What `_keys_kernel` reads, by name, but for a channel-wise decay's factors."""
    shape = blocks.shape
    return {
        "q": blocks.token(x.q),
        "k": blocks.token(x.k),
        "write_key": blocks.token(x.write_key),
        "erase": blocks.token(x.erase),
        "gate": None if is_channel_wise(x.write) or tied_gates else blocks.token(x.write),
        "log_decay": blocks.token(x.log_decay),
        "resets": shape.of_position(x.resets, blocks.at_key),
        "d_out": blocks.token_values(d_out),
        "states": blocks.state(saved.states),
        "d_states": blocks.state(saved.back.d_states),
        "residuals": blocks.matrix(saved.residuals, shape.value_size),
        "values": blocks.token_values(x.v) if saved.residuals is None else None,
        "d_values": blocks.token_values(saved.back.d_values) if shape.online else None,
        "d_scores": blocks.matrix(pairs.d_scores, CHUNK),
        "d_erased": blocks.matrix(pairs.d_erased, CHUNK),
        "d_own": blocks.row(pairs.d_own),
        "value_key": blocks.token(x.value_key),
        "v": None if x.value_key is None else blocks.token_values(x.v),
        "d_added_scores": blocks.matrix(pairs.d_added_scores, CHUNK),
        "d_added_pairs": blocks.matrix(pairs.d_added_pairs, CHUNK),
        "d_added_own": blocks.row(pairs.d_added_own),
    }


def bwd_dqkg(
    kernel_shape: KernelShape,
    inputs: Inputs,
    d_out: Array,
    saved: Saved,
    pairs: PairGradients,
    prepared: WYFactors,
    launch: KernelConfig,
    gates: tuple[Array | None, Array | None] = (None, None),
    tied_gates: bool = False,
    write_key_dtype: Any = None,
    others: dict[str, Array | None] | None = None,
) -> Inputs:
    """Gradients of all token-wise arguments.

    Args:
        kernel_shape: static facts.
        inputs: arguments.
        d_out: `[B, T, HV, V]`.
        saved: results of the passes over chunks.
        pairs: gradients of the pairs' matrices.
        prepared: the first stage's results.
        launch: compilation; `block` is the width of a block of key channels.
        gates: erase and write gate as they are given, for gradients that are exactly 0 where a gate is.
        tied_gates: whether the write gate is the erase gate, whose gradient then has both parts.
        write_key_dtype: of the write key's gradient; None is the write key's.
        others: under a channel-wise decay, gradients by value head of all chunks that are not extreme, by `d_` and the
            argument's name; None to find them here. Of an erase gate of one number a token there is a part for each
            `EXTREME_WIDTH` key channels, `[., B, T, HV]` float32.

    Returns:
        Gradients in the arguments' shapes and dtypes; that of the initial state is None.
    """
    x = inputs
    write_key: Any = x.write_key
    if write_key is not None and write_key_dtype is not None:
        write_key = jax.ShapeDtypeStruct(write_key.shape, write_key_dtype)
    like = x._replace(write_key=write_key)
    is_channel_side = is_channel_wise(x.log_decay)
    width = min(launch.block, kernel_shape.key_size)
    finest = min(width, EXTREME_WIDTH) if is_channel_side else width
    blocks = _KeyBlocks(kernel_shape, width, finest, shares_parts=finest < kernel_shape.key_size or tied_gates)

    def arrays(blocks: _KeyBlocks) -> tuple[tuple[int, int, int], dict[str, Any], dict[str, Operand | None]]:
        """The grid of a kernel, what it reads and what it writes."""
        given = _arguments(blocks, x, d_out, saved, pairs, tied_gates)
        if is_channel_side:
            given |= {
                name: blocks.of_chunk(getattr(prepared, name), blocks.width) for name in ("front", "tail", "kept")
            }
            given["extreme"] = blocks.of_chunk(prepared.extreme)
        return blocks.grid, given, {f"d_{name}": blocks.gradient(getattr(like, name)) for name in _FOUND}

    static: dict[str, Any] = {"kernel_shape": kernel_shape, "tied_gates": tied_gates}
    static["block"] = min(launch.inner, kernel_shape.value_size)
    results = others or call(_keys_kernel, "delta_gradients", *arrays(blocks), launch, **static)
    if is_channel_side and prepared.extreme is not None:
        grid, given, outputs = arrays(dataclasses.replace(blocks, width=finest))
        del given["extreme"]
        updates = {
            name: dataclasses.replace(operand, array=results[name])  # type: ignore[arg-type]
            for name, operand in outputs.items()
            if operand is not None
        }
        visits = extreme_visits(kernel_shape, prepared.listed, parts=kernel_shape.key_size // finest)  # type: ignore[arg-type]
        options: dict[str, Any] = {"updates": updates, "visits": visits, **static}
        results = call(_keys_kernel, "delta_gradients_extreme", grid, given, outputs, launch, **options)
    results["d_write"] = None if tied_gates else saved.back.d_write
    d_v, results["d_k"], results["d_write_key"] = zero_closed(
        kernel_shape, *gates, saved.back.d_v, results["d_k"], results["d_write_key"]
    )

    def summed(name: str) -> Array | None:
        """Adds up the parts of key blocks and of the value heads that share a key head."""
        part, argument = results["d_" + name], getattr(like, name)
        if part is None or argument is None:
            return None
        if name in ("erase", "log_decay") and argument.ndim == 3:
            part = jnp.sum(part, axis=0) if part.shape[0] > 1 else part[0]
            if name == "erase" and tied_gates:
                part = jnp.add(part, saved.back.d_write)  # type: ignore[arg-type]
        return of_argument(kernel_shape, part, argument)

    names = ("q", "k", "write_key", "erase", "write", "log_decay", "value_key")
    return Inputs(v=d_v, **{name: summed(name) for name in names})  # type: ignore[arg-type]

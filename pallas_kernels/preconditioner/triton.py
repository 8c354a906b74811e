"""Kernels of the diagonal Gram recurrence: a program owns some tokens of one head, channels in registers.

    A_t = exp(log_decay_t) A_{t-1} + gain_t k_t^2        out_t = readout(A_{t-1}, A_t, x_t, parameter)

The gradient runs backwards, `G` that in A after a token: `dA_{t-1} = exp(log_decay_t) G_t`, each readout's own added.
"""

import math
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.common.triton.backend import exp2
from pallas_kernels.preconditioner.readouts import RowGradients


@runtime_checkable
class Readout(Protocol):
    """A function of A and of a row more, as `preconditioner_readouts` has them."""

    def __call__(self, before: Any, after: Any, x: Any, parameter: Any) -> Any:
        """Its value, a row."""

    def gradients(self, before: Any, after: Any, x: Any, parameter: Any, d_out: Any) -> RowGradients:
        """Its gradients for the gradient `d_out` in the value."""


class Token(NamedTuple):
    """One token's values in float32, `[K]` or one number; `keep` is 0 where a document starts, None if none does."""

    k: Any
    x: Any
    decay: Any
    gain: Any
    keep: Any


def _load(ref, t) -> Any:
    return None if ref is None else ref[t, :] if len(ref.shape) == 2 else ref[t]


def _inputs(r) -> tuple[Any, ...]:
    return r.k, r.x, r.log_decay, r.gain, r.resets


def _token(k, x, log_decay, gain, start) -> Token:
    """One token of what was loaded from `_inputs`."""
    k, gain = k.astype(jnp.float32), 1.0 if gain is None else gain.astype(jnp.float32)
    decay: Any = 1.0
    keep = None
    if log_decay is not None:
        decay = exp2(math.log2(math.e) * log_decay.astype(jnp.float32))
    if start is not None:
        keep = (1 - start).astype(jnp.float32)
        decay = decay * keep
    return Token(k, k if x is None else x.astype(jnp.float32), decay, gain, keep)


class Blocks:
    """The blocks of tokens that a program goes through."""

    def __init__(self, refs: Any, place: Any, blocks: Any, block: int, ahead: bool):
        """Loads the first block.

        Args:
            refs: arrays to load.
            place: from a block's number to its first token.
            blocks: number of blocks, at least 1.
            block: tokens of a block.
            ahead: whether a block is loaded while the one before it is worked on.
        """
        self.refs, self.place, self.blocks, self.block, self.ahead = refs, place, blocks, block, ahead
        self.first = self.load(0) if ahead else None

    def load(self, m) -> list[tuple[Any, ...]]:
        """What each token of block `m` has in each of the arrays, in their dtypes."""
        t = self.place(m)
        return [tuple(_load(ref, t + i) for ref in self.refs) for i in range(self.block)]

    def loop(self, body: Any, state: Any) -> Any:
        """`state = body(first token, what was loaded, state)` for all blocks."""

        def step(m, carry):
            state, loaded = carry
            if self.ahead:
                following = self.load(jnp.minimum(m + 1, self.blocks - 1))
            else:
                loaded = self.load(m)
                following = None
            return body(self.place(m), loaded, state), following

        return lax.fori_loop(0, self.blocks, step, (state, self.first))[0]


def _step(token: Token, gram: Any) -> tuple[Any, Any]:
    """A as the token's readout sees it before and after the token."""
    before = gram if token.keep is None else gram * token.keep
    return before, token.decay * gram + token.gain * (token.k * token.k)


def _carry(r, sums, kept, start: Any, count, index, unroll: int = 16) -> Any:
    """Applies the affine maps number `index(0)` to `index(count - 1)` to `start`."""
    last = sums.shape[0] - 1
    unroll = min(unroll, sums.shape[0])

    def body(m, state):
        rows = [jnp.clip(index(m * unroll + i), 0, last) for i in range(unroll)]
        loaded = [(sums[n, :], kept[n] if len(kept.shape) == 1 else kept[n, :]) for n in rows]
        for i, (offset, factor) in enumerate(loaded):
            state = jnp.where(m * unroll + i < count, factor * state + offset, state)
        return state

    return lax.fori_loop(0, lax.div(count + unroll - 1, unroll), body, start)


def part(from_end: bool) -> Any:
    """Number of the program's part of the sequence.

    Of two passes over the same tokens one goes from the end: it begins with what the other left in the cache.
    """
    n = pl.program_id(1)
    return pl.num_programs(1) - 1 - n if from_end else n


def sums_kernel(r, *, tokens: int, block: int, ahead: bool):
    """What a program's tokens add to A, and what they leave of A before them."""
    n = part(from_end=True)
    first = n * tokens
    blocks = _blocks(r, first, tokens, block)

    def body(t, loaded, carry):
        gram, kept = carry
        for token in (_token(*row) for row in loaded):
            gram = _step(token, gram)[1]
            kept = kept * token.decay
        return gram, kept

    channels = r.k.shape[1]
    ones = jnp.ones(r.kept.shape[1:], jnp.float32)
    start = jnp.zeros(channels, jnp.float32), ones
    gram, kept = Blocks(_inputs(r), lambda m: first + m * block, blocks, block, ahead).loop(body, start)
    r.sums[n, :] = gram
    if len(r.kept.shape) == 1:
        r.kept[n] = kept
    else:
        r.kept[n, :] = kept


def _blocks(r, first, tokens: int, block: int) -> Any:
    """Number of blocks of a program; static unless the last program has fewer."""
    length = r.k.shape[0]
    if length % tokens == 0:
        return tokens // block
    return jnp.clip(lax.div(length - first, block), 0, tokens // block)


def _start(r) -> Any:
    channels = r.k.shape[1]
    return jnp.zeros(channels, jnp.float32) if r.initial_state is None else r.initial_state[...]


def _parameter(r) -> Any:
    return None if r.parameter is None else jnp.broadcast_to(r.parameter[...], (r.k.shape[1],))


def apply_kernel(r, *, readout: Readout, tokens: int, block: int, ahead: bool):
    """The readout of each token, and A before each program and after the last token."""
    n = part(from_end=False)
    first = n * tokens
    blocks = Blocks(_inputs(r), lambda m: first + m * block, _blocks(r, first, tokens, block), block, ahead)
    gram = _start(r) if r.sums is None else _carry(r, r.sums, r.kept, _start(r), n, lambda i: i)
    if r.states is not None:
        r.states[n, :] = gram
    parameter = _parameter(r)

    def body(t, loaded, gram):
        for i, row in enumerate(loaded):
            token = _token(*row)
            before, gram = _step(token, gram)
            r.out[t + i, :] = readout(before, gram, token.x, parameter).astype(r.out.dtype)
        return gram

    gram = blocks.loop(body, gram)

    @pl.when(n == pl.num_programs(1) - 1)
    def _():
        r.final_state[...] = gram


def _from_before(token: Token, d_before: Any, d_gram: Any) -> Any:
    """Adds a readout's gradient in A before its token."""
    if d_before is None:
        return d_gram
    return d_gram + (d_before if token.keep is None else token.keep * d_before)


def reverse_sums_kernel(r, *, readout: Readout, tokens: int, block: int, ahead: bool):
    """What a program's tokens add to the gradient in A before them, and A before each block."""
    n = part(from_end=False)
    first = n * tokens
    parameter = _parameter(r)

    def body(t, loaded, carry):
        gram, kept, d_gram = carry
        r.block_states[lax.div(t, block), :] = gram
        for *row, d_out in loaded:
            token = _token(*row)
            before, gram = _step(token, gram)
            d = readout.gradients(before, gram, token.x, parameter, d_out.astype(jnp.float32))
            if d.before is not None:
                d_gram = d_gram + kept * (d.before if token.keep is None else token.keep * d.before)
            kept = kept * token.decay
            if d.after is not None:
                d_gram = d_gram + kept * d.after
        return gram, kept, d_gram

    channels = r.k.shape[1]
    per_channel = r.log_decay is not None and len(r.log_decay.shape) == 2
    ones, zeros = jnp.ones((channels,) if per_channel else (), jnp.float32), jnp.zeros(channels, jnp.float32)
    blocks = _blocks(r, first, tokens, block)
    start = r.states[n, :], ones, zeros
    refs = (*_inputs(r), r.d_out)
    r.d_sums[n, :] = Blocks(refs, lambda m: first + m * block, blocks, block, ahead).loop(body, start)[2]


def _store_gate(ref, t, value) -> None:
    if ref is None:
        return
    if len(ref.shape) == 1:
        ref[t] = jnp.sum(value).astype(ref.dtype)
    else:
        ref[t, :] = value.astype(ref.dtype)


def reverse_kernel(r, *, readout: Readout, tokens: int, block: int, ahead: bool):
    """Gradients in the arguments, from the last token to the first."""
    n, programs = part(from_end=True), pl.num_programs(1)
    first = n * tokens
    count = _blocks(r, first, tokens, block)
    refs = (*_inputs(r), r.d_out, r.d_passed)
    blocks = Blocks(refs, lambda m: first + (count - 1 - m) * block, count, block, ahead)
    parameter = _parameter(r)
    d_gram = _carry(r, r.d_sums, r.kept, r.d_final_state[...], programs - 1 - n, lambda i: programs - 1 - i)

    def body(t, loaded, carry):
        d_gram, d_parameter = carry
        token_rows = [_token(*row[:-2]) for row in loaded]
        grams = [r.block_states[lax.div(t, block), :]]
        for token in token_rows:
            grams.append(_step(token, grams[-1])[1])
        for i in reversed(range(block)):
            token, gram, (d_out, d_passed) = token_rows[i], grams[i], loaded[i][-2:]
            before = _step(token, gram)[0]
            d = readout.gradients(before, grams[i + 1], token.x, parameter, d_out.astype(jnp.float32))
            if d.after is not None:
                d_gram = d_gram + d.after
            d_k = (2.0 * token.gain) * (token.k * d_gram)
            if r.d_x is not None:
                r.d_x[t + i, :] = d.x.astype(r.d_x.dtype)
            elif d.x is not None:
                d_k = d_k + d.x
            if d_passed is not None:
                d_k = d_k + d_passed.astype(jnp.float32)
            r.d_k[t + i, :] = d_k.astype(r.d_k.dtype)
            _store_gate(r.d_gain, t + i, token.k * (token.k * d_gram))
            d_gram = token.decay * d_gram
            _store_gate(r.d_log_decay, t + i, gram * d_gram)
            d_gram = _from_before(token, d.before, d_gram)
            if d.parameter is not None:
                d_parameter = d_parameter + d.parameter
        return d_gram, d_parameter

    none = None if parameter is None else jnp.zeros(r.k.shape[1], jnp.float32)
    d_gram, d_parameter = blocks.loop(body, (d_gram, none))
    if parameter is not None:
        r.d_parameter[n] = jnp.sum(d_parameter)

    @pl.when(n == 0)
    def _():
        r.d_initial_state[...] = d_gram

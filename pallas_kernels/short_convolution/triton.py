"""Kernels of the short convolution: a program goes over some tokens of some channels, one token after another.

    a_t = bias + sum_i filter_i x_{t - i}      h_t = silu(a_t)      y_t = h_t / sqrt(|h_t|^2 + eps)

The last inputs stay in registers, so that each input is loaded once and nothing but the result is stored. The backward
computes `a` again; the gradient of `a_t` reaches x_{t - W + 1} to x_t, whose gradients are added up in registers until
they are complete.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.common.triton.backend import iota, load_masked, sigmoid, store_masked


@dataclass(frozen=True)
class Cut:
    """Static facts of a kernel.

    Attributes:
        width: taps W of the filter.
        length: tokens T.
        channels: D.
        size: channels of a head; a multiple of them is a program's.
        heads: of a program, a power of two.
        columns: `size`, or the next power of two.
        tokens: of a program, a multiple of `block` and at least W - 1.
        block: tokens that are loaded at once.
        ahead: whether a block is loaded while the one before it is worked on.
        activation: None or "silu".
        eps: added to the squared norm; None is no norm.
    """

    width: int
    length: int
    channels: int
    size: int
    heads: int
    columns: int
    tokens: int
    block: int
    ahead: bool
    activation: str | None
    eps: float | None


class Place(NamedTuple):
    """A program's channels, and its first token.

    Attributes:
        columns: indices of channels `[heads, columns]`.
        mask: which of them exist; None where all do.
        first: the first token.
    """

    columns: Array
    mask: Array | None
    first: Any

    def where(self, condition: Any) -> Array | None:
        """The mask of a row that exists where `condition` (None: it does)."""
        if condition is None:
            return self.mask
        condition = jnp.broadcast_to(condition, self.columns.shape)
        return condition if self.mask is None else condition & self.mask

    def load(self, ref: Any, t: Any, condition: Any = None) -> Array:
        """Row `t`, zero where `condition` is false."""
        return load_masked(ref, (t, self.columns), self.where(condition))

    def store(self, ref: Any, t: Any, value: Array, condition: Any = None) -> None:
        """Stores row `t` where `condition`."""
        store_masked(ref, (t, self.columns), value, self.where(condition))


def _place(cut: Cut) -> Place:
    shape = (cut.heads, cut.columns)
    head, channel = pl.program_id(0) * cut.heads + iota(shape, 0), iota(shape, 1)
    columns = head * cut.size + channel
    masks = []
    if cut.columns != cut.size:
        masks.append(channel < cut.size)
    if cut.channels % (cut.size * cut.heads):
        masks.append(columns < cut.channels)
    mask = masks[0] & masks[1] if len(masks) == 2 else masks[0] if masks else None
    return Place(columns, mask, pl.program_id(1) * cut.tokens)


def _filter(r, cut: Cut, place: Place) -> tuple[list[Array], Array | None]:
    """Weights of the present token, of the one before it, and so on; and the bias."""
    taps = [place.load(r.kernel, cut.width - 1 - i).astype(jnp.float32) for i in range(cut.width)]
    if r.bias is None:
        return taps, None
    return taps, load_masked(r.bias, (place.columns,), place.mask).astype(jnp.float32)


def _start(r, t: Any, condition: Any) -> Any:
    """Whether a document starts at `t`; None where none ever does."""
    if r.resets is None:
        return None
    return load_masked(r.resets, (t,), condition) > 0


def _of_segment(window: tuple[Array, ...], start: Any) -> tuple[Array, ...]:
    """The inputs before a token that it sees: none of another segment."""
    return window if start is None else tuple(jnp.where(start, 0.0, w) for w in window)


def _past(r, cut: Cut, place: Place) -> tuple[Array, ...]:
    """The inputs before a program's first token, the last one first."""
    window = tuple(jnp.zeros(place.columns.shape, jnp.float32) for _ in range(cut.width - 1))
    for i in reversed(range(1, cut.width)):
        t = place.first - i
        is_in = t >= 0
        x = place.load(r.x, jnp.maximum(t, 0), is_in).astype(jnp.float32)
        if r.initial_state is not None:
            row = jnp.minimum(t, -1) + cut.width - 1
            x = x + place.load(r.initial_state, row, t < 0).astype(jnp.float32)
        window = (x, *_of_segment(window, _start(r, jnp.maximum(t, 0), is_in)))[: len(window)]
    return window


def _blocks(cut: Cut, place: Place, load: Any, body: Any, state: Any) -> Any:
    """`state = body(t, load(t), state)` for all tokens of a program."""

    def load_block(m):
        t = place.first + m * cut.block
        return [load(t + i) for i in range(cut.block)]

    count = cut.tokens // cut.block

    def step(m, carry):
        state, loaded = carry
        if cut.ahead:
            following = load_block(jnp.minimum(m + 1, count - 1))
        else:
            loaded, following = load_block(m), None
        for i, row in enumerate(loaded):
            state = body(place.first + m * cut.block + i, row, state)
        return state, following

    return lax.fori_loop(0, count, step, (state, load_block(0) if cut.ahead else None))[0]


def _inside(cut: Cut, t: Any) -> Any:
    """Whether token `t` exists; None where all of a program's do."""
    return None if cut.length % cut.tokens == 0 else t < cut.length


def _at(cut: Cut, t: Any) -> Any:
    """Token `t`, or the last one."""
    return t if cut.length % cut.tokens == 0 else jnp.minimum(t, cut.length - 1)


class _Value(NamedTuple):
    """What the convolution's sum becomes, and what the gradient takes again."""

    hidden: Array  # h
    gate: Array | None  # sigmoid(a)
    inverse: Array | None  # 1 / sqrt(|h|^2 + eps), one number a head


def _value(cut: Cut, taps: list[Array], bias: Array | None, x: Array, window: tuple[Array, ...]) -> _Value:
    a = taps[0] * x
    if bias is not None:
        a = a + bias
    for tap, w in zip(taps[1:], window):
        a = a + tap * w
    gate = sigmoid(a) if cut.activation == "silu" else None
    hidden = a if gate is None else a * gate
    inverse = None
    if cut.eps is not None:
        inverse = lax.rsqrt(jnp.sum(hidden * hidden, axis=1) + cut.eps)[:, None]
    return _Value(hidden, gate, inverse)


def _gradient(value: _Value, d_y: Array) -> Array:
    """The gradient in the convolution's sum."""
    h, gate, inverse = value
    d = d_y
    if inverse is not None:
        along = jnp.sum(h * d_y, axis=1)[:, None]
        d = inverse * d_y - (inverse * inverse * inverse * along) * h
    return d if gate is None else d * (gate + h * (1.0 - gate))


def convolution_kernel(r, *, cut: Cut):
    """The result."""
    place = _place(cut)
    taps, bias = _filter(r, cut, place)

    def load(t):
        is_in = _inside(cut, t)
        return place.load(r.x, _at(cut, t), is_in), _start(r, _at(cut, t), is_in)

    def body(t, loaded, window):
        x, window = loaded[0].astype(jnp.float32), _of_segment(window, loaded[1])
        value = _value(cut, taps, bias, x, window)
        y = value.hidden if value.inverse is None else value.hidden * value.inverse
        place.store(r.y, _at(cut, t), y, _inside(cut, t))
        return (x, *window)[: len(window)]

    _blocks(cut, place, load, body, _past(r, cut, place))


class _Carry(NamedTuple):
    """What the backward carries from token to token."""

    window: tuple[Array, ...]  # the inputs before it, the last one first
    ahead: tuple[Array, ...]  # what is known of their gradients
    run: Any  # tokens of the segment before it, at least; None without segments
    d_taps: tuple[Array, ...]
    d_bias: Array | None


def reverse_convolution_kernel(r, *, cut: Cut):
    """Gradients in inputs and initial state, and a program's part of those in filter and bias."""
    place = _place(cut)
    taps, bias = _filter(r, cut, place)
    past = cut.width - 1
    zeros = jnp.zeros(place.columns.shape, jnp.float32)

    def load(t):
        is_in = t < cut.length
        t = jnp.minimum(t, cut.length - 1)
        return place.load(r.x, t, is_in), place.load(r.d_y, t, is_in), _start(r, t, is_in)

    def load_own(t):
        if cut.length % cut.tokens:
            return load(t)
        return place.load(r.x, t), place.load(r.d_y, t), _start(r, t, None)

    def body(t, loaded, carry, is_own=True):
        x, d_y, start = loaded[0].astype(jnp.float32), loaded[1].astype(jnp.float32), loaded[2]
        window, run = _of_segment(carry.window, start), carry.run
        if start is not None:
            run = jnp.where(start, 0, run + 1)
        d = _gradient(_value(cut, taps, bias, x, window), d_y)
        d_taps, d_bias = carry.d_taps, carry.d_bias
        if is_own:  # the next program has the rest
            d_taps = tuple(s + d * w for s, w in zip(d_taps, (x, *window)))
            d_bias = None if d_bias is None else d_bias + d

        def add(i, known):
            reaching = d if run is None or i == 0 else jnp.where(run >= i, d, 0.0)
            return taps[i] * reaching if known is None else known + taps[i] * reaching

        known = [add(i, known) for i, known in enumerate((None, *carry.ahead))]
        source = t - past  # whose gradient is complete
        if is_own and past:
            is_in = source >= place.first
            if cut.length % cut.tokens:
                is_in = is_in & (source < cut.length)
            if r.d_initial_state is not None:
                row = jnp.minimum(source, -1) + past
                place.store(r.d_initial_state, row, known[-1], source < 0)
        else:
            is_in = None if cut.length % cut.tokens == 0 else source < cut.length
        place.store(r.d_x, jnp.clip(source, 0, cut.length - 1), known[-1], is_in)
        return _Carry((x, *window)[:past], tuple(known[:past]), run, d_taps, d_bias)

    run = None if r.resets is None else _run_before(r, cut, place)
    carry = _Carry(_past(r, cut, place), (zeros,) * past, run, (zeros,) * cut.width, None if bias is None else zeros)
    carry = _blocks(cut, place, load_own, body, carry)
    for i in range(cut.width):
        store_masked(r.d_kernel, (cut.width - 1 - i, place.columns), carry.d_taps[i], place.mask)
    if r.d_bias is not None:
        store_masked(r.d_bias, (place.columns,), carry.d_bias, place.mask)
    for i in range(past):
        t = place.first + cut.tokens + i
        carry = body(t, load(t), carry, is_own=False)


def _run_before(r, cut: Cut, place: Place) -> Any:
    """`_Carry.run` at a program's first token."""
    run = jnp.int32(cut.width)
    for i in reversed(range(1, cut.width)):
        t = place.first - i
        run = jnp.where(_start(r, jnp.maximum(t, 0), t >= 0), 0, run + 1)
    return run

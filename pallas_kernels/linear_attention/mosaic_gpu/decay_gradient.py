"""The gradient of a log decay of one number a token, from what the sums leave."""

import functools
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from pallas_kernels.common.config import KernelConfig
from pallas_kernels.common.decay import MIN_LOG_DECAY
from pallas_kernels.common.kernel_shape import CHUNK, cdiv
from pallas_kernels.common.triton.backend import Operand, call, iota, store_masked
from pallas_kernels.common.triton.chunks import product
from pallas_kernels.common.triton.kernel_shape import KernelShape
from pallas_kernels.delta_rule.inputs import Inputs
from pallas_kernels.linear_attention.mosaic_gpu.decay import Factors
from pallas_kernels.linear_attention.mosaic_gpu.sums import STATES_EVERY, Sums

# One warp: sums and running sums over 64 tokens are then its shuffles alone, without a barrier.
_LAUNCH = KernelConfig(num_warps=1, num_stages=1)
_NOTHING = 2.0**-24


class _Chunk(NamedTuple):
    """What the sums leave of one chunk, of all channels: `[C]` float32 but for `kept` and `is_flat`.

    Attributes:
        kept: what the chunk leaves of the state, a scalar.
        q_far: what a token reads of other chunks.
        k_far: what others read of a token.
        pairs: what a token reads within the chunk less what others there read of it.
        is_flat: whether the gradient is zero, `[C]` bool.
    """

    kept: Array
    q_far: Array
    k_far: Array
    pairs: Array
    is_flat: Array


def _summed(ref: Any, at: Any) -> Array:
    """The sum over blocks of channels."""
    return functools.reduce(operator.add, (ref[block, at] for block in range(ref.shape[0])))


def _load_chunk(r: Any, n: Array, rest_line: int | None) -> _Chunk:
    tokens = pl.ds(n * CHUNK, CHUNK)
    k_far = _summed(r.k_far, tokens)
    if rest_line is not None:
        k_far = product(r.lines[n, rest_line, :], k_far)
    is_flat = r.log_decay[tokens].astype(jnp.float32) <= MIN_LOG_DECAY
    if r.resets is not None:
        is_flat = is_flat | (r.resets[tokens] > 0)
    pairs = _summed(r.pairs_read, tokens) - _summed(r.pairs_written, tokens)
    return _Chunk(r.kept[n], _summed(r.q_far, tokens), k_far, pairs, is_flat)


def _crossed(found: list[Array], kept: list[Array], steps: list[Array], is_last: Array) -> list[Array]:
    """What crosses each of a group's chunks; scalars.

    From that of the first chunk, by what each step adds. Each step is a sum of rounded products, and their errors add
    up. Where what crosses is known again, at the next group's first chunk or where a chunk leaves next to nothing, what
    they miss it by is shared out among the steps.

    Args:
        found: what crosses the first chunk of this group and of the next.
        kept: what each chunk leaves of the state, and the next group's first.
        steps: from one of these chunks to the next.
        is_last: whether there is no next group.
    """
    crossed, since, missed = [found[0]], [jnp.float32(0)], [jnp.float32(0)]
    for left, step in zip(kept[1:], steps, strict=True):
        more = crossed[-1] + step
        is_end = left < _NOTHING
        missed.append(jnp.where(is_end, 0.0, found[1]) - more)
        crossed.append(jnp.where(is_end, 0.0, more))
        since.append(jnp.where(is_end, 0.0, since[-1] + 1.0))
    ends = [left < _NOTHING for left in kept]
    share = jnp.where(is_last, 0.0, missed[-1] / (since[-2] + 1.0))
    for i in reversed(range(1, len(kept) - 1)):
        crossed[i] = crossed[i] + since[i] * share
        share = jnp.where(ends[i], missed[i] / (since[i - 1] + 1.0), share)
    return crossed[:-1]


def _kernel(r, *, kernel_shape: KernelShape, rest_line: int | None):
    """As many chunks of one head as one of whose states is stored."""
    group, last = pl.program_id(1), kernel_shape.chunks - 1
    places = [group * STATES_EVERY + i for i in range(STATES_EVERY)]
    following = jnp.minimum(places[-1] + 1, last)
    # All loads before what waits for them.
    chunks = [_load_chunk(r, jnp.minimum(n, last), rest_line) for n in places]
    kept = [*(x.kept for x in chunks), r.kept[following]]
    found = [_summed(r.crossed, group), _summed(r.crossed, jnp.minimum(group + 1, r.crossed.shape[1] - 1))]
    reads = [*(x.q_far for x in chunks[1:]), _summed(r.q_far, pl.ds(following * CHUNK, CHUNK))]
    steps = [jnp.sum(x.k_far) - jnp.sum(read) for x, read in zip(chunks, reads, strict=True)]
    starts = [kernel_shape.scale * left * jnp.sum(x) for left, x in zip((kept[0], kept[-1]), found, strict=True)]
    crossed = _crossed(starts, kept, steps, places[-1] >= last)
    for n, x, beyond in zip(places, chunks, crossed, strict=True):
        # Of this token and later ones, and of earlier ones, by one running sum.
        within = x.pairs + x.q_far
        gradient = beyond + jnp.sum(within) + jnp.cumsum(x.k_far - within, axis=0) - (x.k_far - within)
        tokens = jnp.minimum(n, last) * CHUNK + iota((CHUNK,), 0)
        store_masked(r.gradient, (tokens,), jnp.where(x.is_flat, 0.0, gradient), jnp.full((CHUNK,), n <= last))


def log_decay_gradient(kernel_shape: KernelShape, inputs: Inputs, back: Factors, d_q: Sums, d_k: Sums) -> Array:
    """The decay's gradient, `[B, T, HV]`; zero where it is clamped or a document starts.

    A token's decay scales everything that the token and later ones read of earlier tokens: pairs in its chunk, what the
    token and later ones of its chunk read of other chunks, what later chunks read of the chunk's tokens before it, and
    of the state before the chunk. The last is the product of that state with its gradient. It is found every fourth
    chunk, and the chunks between follow from it, since reads of a chunk end and its writes begin what crosses it. Where
    a chunk leaves next to nothing of the state nothing crosses it. See `_crossed` for their errors.

    Args:
        kernel_shape: static facts.
        inputs: arguments.
        back: the factors of the sum that `d_k` is.
        d_q: the sum that is the queries' gradient, with `pairs` and `far`.
        d_k: that of the keys, with `far` and `crossed`.
    """
    p, x, resets = kernel_shape, inputs.log_decay, inputs.resets
    assert x is not None
    rest_line = back.names.index("rest") if "rest" in back.names else None

    def of_sums(array: Array | None, *tail: int) -> Operand:
        assert array is not None
        return Operand(array, (array.shape[0], None, None, *tail), lambda h, m, b: (0, b, h, *(0 for _ in tail)))

    def at(h: Any, m: Any, b: Any) -> tuple[Any, ...]:
        return b, 0, h, 0

    def whole(h: Any, m: Any, b: Any) -> tuple[Any, ...]:
        return b, h, 0, 0, 0

    groups = cdiv(p.chunks, STATES_EVERY)
    lines = None if rest_line is None else back.lines
    results = call(
        _kernel,
        "linear_decay_gradient",
        (p.value_heads, groups, p.batch),
        {
            "pairs_read": of_sums(d_q.pairs_read, p.length),
            "pairs_written": of_sums(d_q.pairs_written, p.length),
            "q_far": of_sums(d_q.far, p.length),
            "k_far": of_sums(d_k.far, p.length),
            "crossed": of_sums(d_k.crossed, groups, CHUNK),
            "kept": p.of_head(back.kept, (p.chunks,), lambda *g: whole(*g)[:3]),
            "lines": p.of_head(lines, (p.chunks, len(back.names), CHUNK), whole),
            "log_decay": p.of_token(x, p.length, at),
            "resets": None if resets is None else Operand(resets, (None, p.length), lambda h, m, b: (b, 0)),
        },
        {"gradient": p.of_token(jax.ShapeDtypeStruct(x.shape, x.dtype), p.length, at)},
        _LAUNCH,
        kernel_shape=p,
        rest_line=rest_line,
    )
    return results["gradient"]  # type: ignore[return-value]

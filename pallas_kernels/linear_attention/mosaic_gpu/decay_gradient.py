"""The gradient of a log decay of one number a token, from what the sums leave."""

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from pallas_kernels.common.config import KernelConfig
from pallas_kernels.common.decay import MIN_LOG_DECAY
from pallas_kernels.common.kernel_shape import CHUNK, cdiv
from pallas_kernels.common.triton.backend import Operand, call, iota
from pallas_kernels.common.triton.chunks import product
from pallas_kernels.common.triton.kernel_shape import KernelShape
from pallas_kernels.delta_rule.inputs import Inputs
from pallas_kernels.linear_attention.mosaic_gpu.decay import Factors
from pallas_kernels.linear_attention.mosaic_gpu.sums import STATES_EVERY, Sums

_LAUNCH = KernelConfig(num_warps=4, num_stages=1)
_NOTHING = 2.0**-24


def _kernel(r, *, kernel_shape: KernelShape, rest_line: int | None):
    """As many chunks of one head as one of whose states is stored."""
    group = pl.program_id(1)
    row, column = (iota((CHUNK, CHUNK), axis) for axis in (0, 1))

    def summed(ref, at):
        return functools.reduce(operator.add, (ref[part, at] for part in range(ref.shape[0])))

    crossed = written = jnp.zeros((), jnp.float32)
    for i in range(STATES_EVERY):
        chunk = group * STATES_EVERY + i
        n = jnp.minimum(chunk, kernel_shape.chunks - 1)
        rows, kept = pl.ds(n * CHUNK, CHUNK), r.kept[n]
        q_far, k_far = summed(r.q_far, rows), summed(r.k_far, rows)
        if rest_line is not None:
            k_far = product(r.lines[n, rest_line, :], k_far)
        if i == 0:
            crossed = kernel_shape.scale * kept * jnp.sum(summed(r.crossed, group))
        else:
            crossed = jnp.where(kept < _NOTHING, 0.0, crossed + written - jnp.sum(q_far))
        written = jnp.sum(k_far)
        within = summed(r.pairs_read, rows) - summed(r.pairs_written, rows) + q_far
        gradient = crossed + jnp.sum(jnp.where(column >= row, within[None, :], k_far[None, :]), axis=1)
        is_flat = r.log_decay[rows].astype(jnp.float32) <= MIN_LOG_DECAY
        if r.resets is not None:
            is_flat = is_flat | (r.resets[rows] > 0)
        found = jnp.where(is_flat, 0.0, gradient).astype(r.gradient.dtype)

        @pl.when(chunk < kernel_shape.chunks)
        def _():
            r.gradient[rows] = found


def log_decay_gradient(kernel_shape: KernelShape, inputs: Inputs, back: Factors, d_q: Sums, d_k: Sums) -> Array:
    """The decay's gradient, `[B, T, HV]`; zero where it is clamped or a document starts.

    A token's decay scales everything that the token and later ones read of earlier tokens: pairs in its chunk, what the
    token and later ones of its chunk read of other chunks, what later chunks read of the chunk's tokens before it, and
    of the state before the chunk. The last is the product of that state with its gradient. It is found every fourth
    chunk, and the chunks between follow from it, since reads of a chunk end and its writes begin what crosses it. Where
    a chunk leaves next to nothing of the state nothing crosses it.

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

"""Linear attention with one decay a token or none, forward and backward, out of the sums of `sums`."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.common.config import NUM_SMS, KernelConfig
from pallas_kernels.common.decay import split_gate
from pallas_kernels.common.kernel_shape import CHUNK
from pallas_kernels.common.mosaic_gpu import SIDE
from pallas_kernels.common.platform import device_kind
from pallas_kernels.common.triton.kernel_shape import KernelShape
from pallas_kernels.common.vma import batch_alike
from pallas_kernels.delta_rule.inputs import Inputs, kernel_shape_of
from pallas_kernels.delta_rule.tuned_configs import load_table
from pallas_kernels.linear_attention.gradients import of_key_heads, with_divisible_gate
from pallas_kernels.linear_attention.mosaic_gpu.decay import (
    Factors,
    by_chunk,
    by_token,
    factors_ahead,
    factors_back,
    factors_of,
)
from pallas_kernels.linear_attention.mosaic_gpu.decay_gradient import log_decay_gradient
from pallas_kernels.linear_attention.mosaic_gpu.increments import increments
from pallas_kernels.linear_attention.mosaic_gpu.sums import Places, Wanted, sums
from pallas_kernels.linear_attention.row_shards import initial_state_gradient
from pallas_kernels.linear_attention.triton import scan_shard, scan_splits

_SHARED_MEMORY = 216 * 1024
_SCAN = KernelConfig(num_warps=4, num_stages=1, block=8, inner=8)


@dataclasses.dataclass(frozen=True)
class Options:
    """Static options of a call.

    Attributes:
        scale: factor on the output.
        num_splits: splits of a sequence, which run side by side.
        processors: multiprocessors of the card.
        diagonal_size: rows of a token, where there is a diagonal.
        context_axis: mesh axis over which tokens are split; None where each device has whole rows.
    """

    scale: float
    num_splits: int
    processors: int
    diagonal_size: int = 1
    context_axis: str | None = None


def choose_options(inputs: Inputs, scale: float, diagonal_size: int = 1, context_axis: str | None = None) -> Options:
    """Options of a call on padded inputs: as many splits of a sequence as leave no processor two programs.

    More splits would be passed over twice for programs that wait for one another; measured on an H100 at 8 heads of
    8,192 and 32,768 tokens.
    """
    processors = (load_table(device_kind()) or {}).get("processors", NUM_SMS)
    batch, length, heads, size = inputs.v.shape
    programs, parts = batch * heads * (size // SIDE), 1
    while 2 * parts * programs <= processors and 4 * parts <= length // CHUNK:
        parts *= 2
    return Options(scale, parts, processors, diagonal_size, context_axis)


def _kernel_shape(options: Options, inputs: Inputs) -> KernelShape:
    return kernel_shape_of(KernelShape, inputs, online=False, scale=options.scale, num_splits=options.num_splits)


def _swapped(kernel_shape: KernelShape) -> KernelShape:
    return dataclasses.replace(kernel_shape, key_size=kernel_shape.value_size, value_size=kernel_shape.key_size)


def _groups(kernel_shape: KernelShape, options: Options) -> int:
    """Blocks of 64 value channels of a program: two share their tiles where there are programs enough."""
    p = kernel_shape
    blocks = p.value_size // SIDE
    return 1 if blocks == 1 or p.batch * p.value_heads * p.num_splits * blocks <= options.processors else 2


def _launch(kernel_shape: KernelShape, options: Options, *, with_other: bool = False) -> dict[str, Any]:
    groups = _groups(kernel_shape, options)
    matrices = 2 * kernel_shape.key_size + SIDE * groups * (2 if with_other else 1) + CHUNK
    slot = 2 * CHUNK * matrices + 4 * CHUNK * 7
    free = _SHARED_MEMORY - groups * 2 * CHUNK * SIDE - (groups + 1) * 2048
    return {
        "diagonal_size": options.diagonal_size,
        "num_compute_warpgroups": groups,
        "num_stages": max(1, min(4, free // slot)),
    }


def _folded(
    kernel_shape: KernelShape,
    options: Options,
    factors: Factors,
    key: Array,
    value: Array,
    boundary: Array | None,
    *,
    reverse: bool,
) -> Array | None:
    """States at the splits' starts (`reverse`: ends), transposed, `[B, HV, P, D, A]`; None for zero.

    The boundary is as of `states_of_splits` in `pallas_kernels.linear_attention.triton`, transposed.
    """
    axis = options.context_axis
    if kernel_shape.num_splits == 1 and axis is None:
        return None if boundary is None else boundary.astype(jnp.float32)[:, :, None]
    added, kept = increments(
        kernel_shape,
        key,
        value,
        factors,
        reverse=reverse,
        num_compute_warpgroups=_groups(kernel_shape, options),
        processors=options.processors,
        of_last=axis is not None,
    )
    if axis is not None:
        return scan_shard(kernel_shape, added, kept, boundary, _SCAN, axis, reverse=reverse)
    return scan_splits(kernel_shape, added, kept, boundary, _SCAN, reverse=reverse)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def linear_pass(options: Options, inputs: Inputs) -> tuple[Array, Array]:
    """Output `[B, T, HV, V]` and final state `[B, HV, K, V]` for padded inputs; differentiable.

    Decay and write gate are one number a token, or absent.
    """
    return _forward(options, inputs)[0]


def _transposed(x: Array | None) -> Array | None:
    return None if x is None else jnp.swapaxes(x, -1, -2)


def _forward(options: Options, inputs: Inputs) -> tuple[tuple[Array, Array], Any]:
    kernel_shape, x = _kernel_shape(options, inputs), with_divisible_gate(inputs)
    factors = factors_of(kernel_shape, x)
    split_states = _folded(kernel_shape, options, factors, x.k, x.v, _transposed(x.initial_state), reverse=False)
    found = sums(
        kernel_shape,
        Places(x.q, x.k, x.v),
        factors,
        split_states,
        wanted=Wanted(end=True),
        **_launch(kernel_shape, options),
    )
    return batch_alike(inputs, (found.out, found.end)), (inputs, factors.lines, factors.kept, split_states)


def _backward(options: Options, residuals: Any, cotangents: tuple[Array, Array]) -> tuple[Inputs]:
    inputs, lines, kept, split_states = residuals
    x = with_divisible_gate(inputs)
    d_out, d_final_state = cotangents
    kernel_shape = _kernel_shape(options, x)
    swapped, has_decay, has_gate = _swapped(kernel_shape), x.log_decay is not None, x.write is not None
    has_diagonal = x.diagonal is not None
    # With a diagonal the gate's gradient is the same sums as the decay's; without one it is in the values' gradient.
    by_pairs = has_decay or (has_diagonal and has_gate)
    has_other = by_pairs or has_diagonal
    ahead = factors_ahead(x, lines, kept)
    back = factors_back(kernel_shape, x, ahead)
    # The kernels multiply their sums by the scale at the end, the first state included: hence the division.
    d_final = d_final_state.astype(jnp.float32) / kernel_shape.scale
    ends = _folded(swapped, options, back, d_out, x.q, d_final, reverse=True)
    of_keys = functools.partial(_launch, swapped, options, with_other=has_other)
    d_q = sums(
        swapped,
        Places(d_out, x.v, x.k),
        ahead,
        split_states,
        is_turned=True,
        wanted=Wanted(pairs=by_pairs, far=by_pairs, diagonal=has_diagonal, states=has_decay),
        other=x.q if has_other else None,
        **of_keys(),
    )
    d_k = sums(
        swapped,
        Places(x.v, d_out, x.q),
        back,
        ends,
        reverse=True,
        wanted=Wanted(far=by_pairs, crossed=has_decay),
        other=x.k if by_pairs else None,
        states=d_q.states,
        **of_keys(),
    )
    sums_gate = has_gate and not has_diagonal
    d_v = sums(
        kernel_shape,
        Places(x.k, x.q, d_out),
        back,
        ends,
        reverse=True,
        is_turned=True,
        wanted=Wanted(total=sums_gate, end=x.initial_state is not None),
        other=x.v if sums_gate else None,
        **_launch(kernel_shape, options, with_other=sums_gate),
    )
    d_write = d_log_decay = d_diagonal = d_initial_state = None
    if inputs.write is not None and x.write is not None:
        divisor, _ = split_gate(by_chunk(x.write.astype(jnp.float32)))
        total = _summed(d_q.pairs_written) + _summed(d_k.far) if has_diagonal else _summed(d_v.total)
        d_write = by_token(total / divisor).astype(inputs.write.dtype)
    if x.diagonal is not None:
        d_diagonal = by_token(_summed(d_q.diagonal)).astype(x.diagonal.dtype)
    if has_decay:
        d_log_decay = log_decay_gradient(kernel_shape, x, back, d_q, d_k)
    if d_v.end is not None:
        d_initial_state = initial_state_gradient(x, kernel_shape.scale * d_v.end, options.context_axis)
    gradients = Inputs(
        q=of_key_heads(d_q.out, x.q),
        k=of_key_heads(d_k.out, x.k),
        v=d_v.out,
        write=d_write,
        log_decay=d_log_decay,
        initial_state=d_initial_state,
        diagonal=d_diagonal,
    )
    return (gradients,)


linear_pass.defvjp(_forward, _backward)


def _summed(x: Array | None) -> Array:
    """The sum over blocks of channels, `[B, HV, N, C]`."""
    assert x is not None
    total = jnp.sum(x, axis=0)
    return total.reshape(*total.shape[:2], -1, CHUNK)

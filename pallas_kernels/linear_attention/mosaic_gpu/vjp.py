"""Linear attention with one decay a token or none, forward and backward, out of the sums of `sums`."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.common.config import NUM_SMS
from pallas_kernels.common.kernel_shape import CHUNK, KernelShape
from pallas_kernels.common.mosaic_gpu import SIDE
from pallas_kernels.common.platform import device_kind
from pallas_kernels.common.vma import batch_alike
from pallas_kernels.delta_rule.inputs import Inputs, kernel_shape_of
from pallas_kernels.delta_rule.tuned_configs import load_table
from pallas_kernels.linear_attention.gradients import dtype_of_parts, of_key_heads, with_divisible_gate, without_flat
from pallas_kernels.linear_attention.mosaic_gpu.decay import (
    Decay,
    Factors,
    by_token,
    decay_of,
    factors_of,
    fold_parts,
    gate_factors,
)
from pallas_kernels.linear_attention.mosaic_gpu.sums import STATES_EVERY, Places, Wanted, increments, sums

_SHARED_MEMORY = 216 * 1024
_NOTHING = 2.0**-24


@dataclasses.dataclass(frozen=True)
class Options:
    """Static options of a call.

    Attributes:
        scale: factor on the output.
        num_splits: splits of a sequence, which run side by side.
        processors: multiprocessors of the card.
        diagonal_size: rows of a token, where there is a diagonal.
    """

    scale: float
    num_splits: int
    processors: int
    diagonal_size: int = 1


def choose_options(inputs: Inputs, scale: float, diagonal_size: int = 1) -> Options:
    """Options of a call on padded inputs: as many splits of a sequence as leave no processor two programs.

    More splits would be passed over twice for programs that wait for one another; measured on an H100 at 8 heads of
    8,192 and 32,768 tokens.
    """
    processors = (load_table(device_kind()) or {}).get("processors", NUM_SMS)
    batch, length, heads, size = inputs.v.shape
    programs, parts = batch * heads * (size // SIDE), 1
    while 2 * parts * programs <= processors and 4 * parts <= length // CHUNK:
        parts *= 2
    return Options(scale, parts, processors, diagonal_size)


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
    num_compute_warpgroups = _groups(kernel_shape, options)
    slot = (
        2 * CHUNK * (2 * kernel_shape.key_size + SIDE * num_compute_warpgroups * (2 if with_other else 1))
        + 4 * CHUNK * 7
    )
    free = _SHARED_MEMORY - num_compute_warpgroups * 2 * (2 * CHUNK * SIDE) - num_compute_warpgroups * 2048
    stages = max(1, min(4, free // slot))
    return {
        "diagonal_size": options.diagonal_size,
        "num_compute_warpgroups": num_compute_warpgroups,
        "num_stages": stages,
    }


def _folded(
    kernel_shape: KernelShape,
    options: Options,
    decay: Decay,
    factors: Factors,
    key: Array,
    value: Array,
    boundary: Array | None,
    *,
    reverse: bool,
) -> Array | None:
    """States at the splits' starts (`reverse`: ends), transposed, `[B, HV, P, D, A]`; None for zero."""
    if kernel_shape.num_splits == 1:
        return None if boundary is None else boundary.astype(jnp.float32)[:, :, None]
    num_compute_warpgroups = _groups(kernel_shape, options)
    added = increments(
        kernel_shape, key, value, factors, decay.kept, reverse=reverse, num_compute_warpgroups=num_compute_warpgroups
    )
    return fold_parts(kernel_shape, decay, added, boundary, reverse=reverse)


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
    decay = decay_of(x.log_decay, x.resets)
    factors = factors_of(kernel_shape, decay, x, reverse=False)
    split_states = _folded(kernel_shape, options, decay, factors, x.k, x.v, _transposed(x.initial_state), reverse=False)
    found = sums(kernel_shape, Places(x.q, x.k, x.v), decay, factors, split_states, **_launch(kernel_shape, options))
    return batch_alike(inputs, (found.out, jnp.swapaxes(found.end, 2, 3))), (inputs, decay, split_states)


def _backward(options: Options, residuals: Any, cotangents: tuple[Array, Array]) -> tuple[Inputs]:
    inputs, decay, split_states = residuals
    x = with_divisible_gate(inputs)
    d_out, d_final_state = cotangents
    kernel_shape = _kernel_shape(options, x)
    swapped, has_decay, has_gate = _swapped(kernel_shape), x.log_decay is not None, x.write is not None
    has_diagonal = x.diagonal is not None
    # With a diagonal the gate's gradient is the same sums as the decay's; without one it is in the values' gradient.
    by_pairs = has_decay or (has_diagonal and has_gate)
    has_other = by_pairs or has_diagonal
    ahead, back = (factors_of(kernel_shape, decay, x, reverse=reverse) for reverse in (False, True))
    # The kernels multiply their sums by the scale at the end, the first state included: hence the division.
    d_final = d_final_state.astype(jnp.float32) / kernel_shape.scale
    ends = _folded(swapped, options, decay, back, d_out, x.q, d_final, reverse=True)
    of_keys = functools.partial(_launch, swapped, options, with_other=has_other)
    d_q = sums(
        swapped,
        Places(d_out, x.v, x.k),
        decay,
        ahead,
        _transposed(split_states),
        dtype=dtype_of_parts(x.q, x),
        wanted=Wanted(pairs=by_pairs, far=by_pairs, diagonal=has_diagonal, states=has_decay),
        other=x.q if has_other else None,
        **of_keys(),
    )
    d_k = sums(
        swapped,
        Places(x.v, d_out, x.q),
        decay,
        back,
        ends,
        reverse=True,
        dtype=dtype_of_parts(x.k, x),
        wanted=Wanted(far=by_pairs, crossed=has_decay),
        other=x.k if by_pairs else None,
        states=d_q.states,
        **of_keys(),
    )
    sums_gate = has_gate and not has_diagonal
    d_v = sums(
        kernel_shape,
        Places(x.k, x.q, d_out),
        decay,
        back,
        _transposed(ends),
        reverse=True,
        wanted=Wanted(total=sums_gate),
        other=x.v if sums_gate else None,
        **_launch(kernel_shape, options, with_other=sums_gate),
    )
    divisor, rest = gate_factors(x.write)
    rest = None if has_diagonal else rest
    d_write = d_log_decay = d_diagonal = None
    if inputs.write is not None and divisor is not None:
        total = _summed(d_q.pairs_written) + _summed(d_k.far) if has_diagonal else _summed(d_v.total)
        d_write = by_token(total / divisor).astype(inputs.write.dtype)
    if x.diagonal is not None:
        d_diagonal = by_token(_summed(d_q.diagonal)).astype(x.diagonal.dtype)
    if has_decay:
        kept = decay.kept[:, :, ::STATES_EVERY]
        crossed = kernel_shape.scale * kept * d_k.crossed.sum(axis=(0, 4))  # type: ignore[union-attr]
        d_log_decay = _log_decay_gradient(x, d_q, d_k, rest, crossed, decay.kept)
    gradients = Inputs(
        q=of_key_heads(d_q.out, x.q),
        k=of_key_heads(d_k.out, x.k),
        v=d_v.out,
        write=d_write,
        log_decay=d_log_decay,
        initial_state=None
        if x.initial_state is None
        else (kernel_shape.scale * jnp.swapaxes(d_v.end, 2, 3)).astype(x.initial_state.dtype),
        diagonal=d_diagonal,
    )
    return (gradients,)


linear_pass.defvjp(_forward, _backward)


def _summed(x: Array | None) -> Array:
    """The sum over blocks of channels, `[B, HV, N, C]`."""
    assert x is not None
    total = jnp.sum(x, axis=0)
    return total.reshape(*total.shape[:2], -1, CHUNK)


def _log_decay_gradient(inputs: Inputs, d_q: Any, d_k: Any, rest: Array | None, crossed: Array, kept: Array) -> Array:
    """The decay's gradient; zero where it is clamped or a document starts.

    A token's decay scales everything that the token and later ones read of earlier tokens: pairs in its chunk, what the
    token and later ones of its chunk read of other chunks, what later chunks read of the chunk's tokens before it, and
    of the state before the chunk. The last is the product of that state with its gradient. It is found every fourth
    chunk, and the chunks between follow from it, since reads of a chunk end and its writes begin what crosses it.

    Args:
        inputs: arguments.
        d_q: the sum that is the queries' gradient.
        d_k: that of the keys.
        rest: of the write gate, see `split_gate`; None for 1.
        crossed: what later chunks read of the state before each fourth chunk, `[B, HV, N / 4]`.
        kept: what a chunk leaves of the state, `[B, HV, N]`.
    """
    pairs = _summed(d_q.pairs_read) - _summed(d_q.pairs_written)
    q_far, k_far = _summed(d_q.far), _summed(d_k.far)
    if rest is not None:
        k_far = rest * k_far
    # Apart: XLA (jaxlib 0.11.2) fails to compile both sums in one kernel that keeps rows of five to seven tokens.
    within = jax.lax.optimization_barrier(jax.lax.cumsum(pairs + q_far, axis=3, reverse=True))
    before = jnp.pad(k_far[..., :-1], ((0, 0), (0, 0), (0, 0), (1, 0)))
    beyond = jax.lax.cumsum(before, axis=3) + _crossed(q_far.sum(axis=3), k_far.sum(axis=3), crossed, kept)[..., None]
    return without_flat(by_token(within + beyond), inputs)


def _crossed(reads: Array, writes: Array, found: Array, kept: Array) -> Array:
    """What crosses each chunk, `[B, HV, N]`, from that of every fourth.

    Args:
        reads: of a chunk's tokens from other chunks, `[B, HV, N]`.
        writes: of a chunk's tokens to later ones, likewise.
        found: `[B, HV, N / 4]`.
        kept: what a chunk leaves of the state, `[B, HV, N]`. Where that is next to nothing nothing crosses.
    """
    chunks = reads.shape[2]

    def by_fours(x):
        return jnp.pad(x, ((0, 0), (0, 0), (0, -chunks % STATES_EVERY))).reshape(*found.shape, STATES_EVERY)

    reads, writes, kept = by_fours(reads), by_fours(writes), by_fours(kept)
    crossed = [found]
    for i in range(1, STATES_EVERY):
        more = crossed[-1] + writes[..., i - 1] - reads[..., i]
        crossed.append(jnp.where(kept[..., i] < _NOTHING, 0.0, more))
    return jnp.stack(crossed, axis=3).reshape(*found.shape[:2], -1)[:, :, :chunks]

"""Linear attention with one decay a token or none, forward and backward, out of the sums of `sums`."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.common.decay import split_gate
from pallas_kernels.common.kernel_shape import CHUNK, is_channel_wise
from pallas_kernels.common.triton.chunks import product
from pallas_kernels.common.triton.kernel_shape import KernelShape
from pallas_kernels.common.vma import batch_alike
from pallas_kernels.delta_rule.inputs import Inputs, kernel_shape_of
from pallas_kernels.delta_rule.vjp import Options
from pallas_kernels.linear_attention.gradients import (
    diagonal_gradient,
    dtype_of_parts,
    of_key_heads,
    with_divisible_gate,
    without_flat,
)
from pallas_kernels.linear_attention.row_shards import initial_state_gradient
from pallas_kernels.linear_attention.triton import Places, rows_of, states_of_splits, sums


def _problem(options: Options, inputs: Inputs) -> KernelShape:
    return kernel_shape_of(KernelShape, inputs, online=False, scale=options.scale, num_splits=options.config.num_splits)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def linear_pass(options: Options, inputs: Inputs) -> tuple[Array, Array]:
    """Output `[B, T, HV, V]` and final state `[B, HV, K, V]` for padded inputs; differentiable.

    Decay and write gate are one number a token, or absent.
    """
    return _forward(options, inputs)[0]


def _forward(options: Options, inputs: Inputs) -> tuple[tuple[Array, Array], Any]:
    kernel_shape, config, x = _problem(options, inputs), options.config, with_divisible_gate(inputs)
    launches = config.increments, config.scan
    rows = rows_of(kernel_shape, x)
    axis = options.context_axis
    split_states = states_of_splits(kernel_shape, x, rows, x.k, x.v, x.initial_state, launches, context_axis=axis)
    found = sums(
        kernel_shape,
        x,
        rows,
        Places(x.q, x.k, x.v),
        split_states,
        config.sums,
        diagonal_size=options.diagonal_size,
    )
    return batch_alike(inputs, (found.out, found.end)), (inputs, rows, split_states)


def _backward(options: Options, residuals: Any, cotangents: tuple[Array, Array]) -> tuple[Inputs]:
    inputs, rows, split_states = residuals
    x, size = with_divisible_gate(inputs), options.diagonal_size
    d_out, d_final_state = cotangents
    kernel_shape, launch = _problem(options, x), options.config.gradient_sums
    swapped = dataclasses.replace(kernel_shape, key_size=kernel_shape.value_size, value_size=kernel_shape.key_size)
    has_decay, has_diagonal = x.log_decay is not None, x.diagonal is not None
    # Whether a token's pair with itself is kept out of the decay's gradient. In bfloat16 this would spill registers and
    # take a tenth longer, and it changes only gradients below 1e-4 of a mild decay's.
    is_exact = has_decay and (x.q.dtype == jnp.float32 or size > 1)
    # The kernel multiplies its sums by the scale at the end, the first state included: hence the division.
    launches = options.config.increments, options.config.scan
    d_final, axis = d_final_state / kernel_shape.scale, options.context_axis
    ends = states_of_splits(kernel_shape, x, rows, x.q, d_out, d_final, launches, reverse=True, context_axis=axis)
    d_q = sums(
        swapped,
        x,
        rows,
        Places(d_out, x.v, x.k),
        split_states,
        launch,
        transposed=True,
        dtype=dtype_of_parts(x.q, x),
        product_with=x.q if has_decay else None,
        keeps_own_apart=is_exact,
        diagonal_size=size,
        with_states=has_decay,
    )
    d_k = sums(
        swapped,
        x,
        rows,
        Places(x.v, d_out, x.q),
        ends,
        launch,
        reverse=True,
        transposed=True,
        dtype=dtype_of_parts(x.k, x),
        product_with=x.k if has_decay else None,
        keeps_own_apart=is_exact,
        diagonal_size=size,
        states=d_q.states,
    )
    d_v = sums(
        kernel_shape,
        x,
        rows,
        Places(x.k, x.q, d_out),
        ends,
        launch,
        reverse=True,
        product_with=None if x.write is None else x.v,
        keeps_own_apart=has_diagonal and x.write is not None,
        diagonal_size=size,
    )
    divisor = rest = None
    if x.write is not None and has_diagonal:
        divisor = x.write
    elif x.write is not None:
        divisor, rest = split_gate(x.write.astype(jnp.float32))
    d_write = None if divisor is None else _sum_parts(d_v.products) / divisor
    d_log_decay = None
    if has_decay:
        d_total = _sum_parts(d_q.products) - product(rest, _sum_parts(d_k.products))
        d_ends = product(rest, _sum_parts(d_k.far_products))
        d_log_decay = _log_decay_gradient(x, d_total, d_ends, kernel_shape.scale * _sum_parts(d_k.crossed))
    gradients = Inputs(
        q=of_key_heads(d_q.out, x.q),
        k=of_key_heads(d_k.out, x.k),
        v=d_v.out,
        write=None if d_write is None else d_write.astype(inputs.write.dtype),
        log_decay=d_log_decay,
        initial_state=initial_state_gradient(x, kernel_shape.scale * d_v.end, axis),
        diagonal=diagonal_gradient(x, d_out, size, kernel_shape.scale) if has_diagonal else None,
    )
    return (gradients,)


linear_pass.defvjp(_forward, _backward)


def gated_values(v: Array, write: Array | None) -> Array:
    """Values `[B, T, HV, V]` times their write gate, rounded as they are; None is 1."""
    if write is None:
        return v
    return jnp.multiply(write if write.ndim == 4 else write[..., None], v.astype(jnp.float32)).astype(v.dtype)


def with_gate_in_values(inputs: Inputs) -> Inputs:
    """The inputs with a write gate of one number a channel multiplied into the values; any other stays."""
    if is_channel_wise(inputs.write):
        inputs = inputs._replace(v=gated_values(inputs.v, inputs.write), write=None)
    return inputs


def _sum_parts(x: Array | None) -> Array:
    """Sum over the blocks of channels that the parts are from."""
    assert x is not None
    return jnp.sum(x, axis=0)


def _log_decay_gradient(inputs: Inputs, d_total: Array, d_ends: Array, crossed: Array) -> Array:
    """The decay's gradient; zero where it is clamped or a document starts.

    A token's decay scales everything that the token and later ones read of earlier tokens. Within the chunk this
    contributes the sum of `q dq - k dk` from the token to the chunk's end. Beyond the chunk it contributes what later
    chunks read of two things: the chunk's tokens before this one, and the state before the chunk.

    Terms that must cancel were rounded in the same way. A token's own write is left out, since its decay does not
    weaken it. In float32 a token's pair with itself is left out too.

    Args:
        inputs: arguments.
        d_total: `q dq - k dk` without the part of `k dk` from later chunks, `[B, T, HV]` float32.
        d_ends: that part, likewise.
        crossed: product of what the chunk leaves of the state before it and the gradient after it, `[B, HV, N]`.
    """
    x = inputs.log_decay
    assert x is not None
    batch, length, heads = x.shape

    def by_chunk(rows):
        return rows.reshape(batch, length // CHUNK, CHUNK, heads)

    # Apart: XLA (jaxlib 0.11.2) fails to compile both sums in one kernel that keeps rows of five to seven tokens.
    within = jax.lax.optimization_barrier(jax.lax.cumsum(by_chunk(d_total), axis=2, reverse=True))
    before = jnp.pad(by_chunk(d_ends)[:, :, :-1], ((0, 0), (0, 0), (1, 0), (0, 0)))
    beyond = jax.lax.cumsum(before, axis=2) + jnp.moveaxis(crossed, 1, 2)[:, :, None]
    return without_flat((within + beyond).reshape(x.shape), inputs)

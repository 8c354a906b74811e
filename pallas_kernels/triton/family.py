"""The whole family in one differentiable function: delta rule and linear attention, any gates, forward and backward.

Linear attention goes through `linear` unless its decay is channel-wise.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.triton.backend import next_power_of_two
from pallas_kernels.triton.decay import CHUNK
from pallas_kernels.triton.decode import decode
from pallas_kernels.triton.gradients import Saved, argument_gradients, gradients_of_pairs
from pallas_kernels.triton.linear import LinearOptions, linear_pass
from pallas_kernels.triton.prepare import prepare
from pallas_kernels.triton.problem import Inputs, Problem, is_channel_wise, is_sum, problem_of
from pallas_kernels.triton.reverse import reverse_offsets, reverse_pass
from pallas_kernels.triton.schedule import Schedule
from pallas_kernels.triton.segments import fold_segments, segment_maps
from pallas_kernels.triton.state import output_pass, states_pass
from pallas_kernels.varying import batch_alike, vary_alike


@dataclasses.dataclass(frozen=True)
class Options:
    """Static options of a call: see `Problem` and `Schedule`.

    Attributes:
        online: see `Problem`.
        scale: likewise.
        schedule: compilation.
        shares_gate: whether `erase`, one number a token, is the write gate too; then the inputs have no other. Its
            gradient is one sum, rounded once.
        write_key_dtype: of the write key as it is given and of its gradient, where that is not the kernels' own.
    """

    online: bool
    scale: float
    schedule: Schedule
    shares_gate: bool = False
    write_key_dtype: Any = None


def _problem(options: Options, inputs: Inputs) -> Problem:
    return problem_of(inputs, online=options.online, scale=options.scale, segments=options.schedule.segments)


def _operands(options: Options, inputs: Inputs) -> Inputs:
    """The inputs as kernels load them: with both gates, and with the write key in the dtype of the other matrices."""
    if options.shares_gate:
        inputs = inputs._replace(write=inputs.erase)
    if inputs.write_key is not None:
        inputs = inputs._replace(write_key=inputs.write_key.astype(inputs.k.dtype))
    return inputs


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def chunked_pass(options: Options, inputs: Inputs) -> tuple[Array, Array]:
    """Output `[B, T, HV, V]` and final state `[B, HV, K, V]` for padded inputs; differentiable."""
    return _forward(options, inputs)[0]


def _forward(options: Options, inputs: Inputs) -> tuple[tuple[Array, Array], Any]:
    problem, schedule = _problem(options, inputs), options.schedule
    inputs = _operands(options, inputs)
    prepared = prepare(problem, inputs, schedule.prepare)
    maps = starts = None
    if problem.segments > 1:
        maps = segment_maps(problem, inputs, prepared, schedule.maps)
        starts = fold_segments(problem, maps, inputs.initial_state, schedule.fold)
    results = batch_alike(inputs, output_pass(problem, inputs, prepared, starts, schedule.output))
    # Matrices as large as the inputs are made again in the backward; what is a number a token is kept.
    kept = prepared._replace(read=None, erased=None, written=None, growth=None)
    return results, (inputs, kept, maps, starts)


def _backward(options: Options, residuals: Any, cotangents: tuple[Array, Array]) -> tuple[Inputs]:
    inputs, prepared, maps, starts = residuals
    d_out, d_final_state = cotangents
    problem, schedule = _problem(options, inputs), options.schedule
    if _has_wide_factors(inputs):
        prepared = prepare(problem, inputs, schedule.prepare, prepared)
    states, residual = states_pass(problem, inputs, prepared, starts, schedule.states)
    ends = None
    if problem.segments > 1:
        offsets = reverse_offsets(problem, inputs, prepared, d_out, schedule.offsets)
        adjoint = maps._replace(offset=offsets)
        ends = fold_segments(problem, adjoint, d_final_state, schedule.fold, reverse=True)
    back = reverse_pass(problem, inputs, prepared, d_out, d_final_state, ends, schedule.reverse)
    saved, shared = Saved(states, residual, back), options.shares_gate
    pairs = gradients_of_pairs(problem, inputs, d_out, saved, schedule.pair_gradients, shared)
    gradients = argument_gradients(
        problem,
        inputs,
        d_out,
        saved,
        pairs,
        prepared,
        schedule.gradients,
        shares_gate=shared,
        write_key_dtype=options.write_key_dtype,
    )
    if inputs.initial_state is not None:
        gradients = gradients._replace(initial_state=back.d_initial_state.astype(inputs.initial_state.dtype))  # type: ignore[union-attr]
    return (gradients,)


def _has_wide_factors(inputs: Inputs) -> bool:
    return any(x is not None and x.ndim == 4 for x in (inputs.log_decay, inputs.erase))


chunked_pass.defvjp(_forward, _backward)


def pad_inputs(inputs: Inputs, tokens: int) -> Inputs:
    """Appends `tokens` tokens and channels up to powers of two, all of which do nothing."""
    key_size, value_size = inputs.q.shape[3], inputs.v.shape[3]
    keys, values = next_power_of_two(key_size) - key_size, next_power_of_two(value_size) - value_size
    if not (tokens or keys or values):
        return inputs

    def pad(x, channels):
        return None if x is None else jnp.pad(x, [(0, 0), (0, tokens), (0, 0), (0, channels)][: x.ndim])

    state = inputs.initial_state
    return Inputs(
        q=pad(inputs.q, keys),
        k=pad(inputs.k, keys),
        v=pad(inputs.v, values),
        write_key=pad(inputs.write_key, keys),
        erase=pad(inputs.erase, keys),
        write=pad(inputs.write, values),
        log_decay=pad(inputs.log_decay, keys),
        initial_state=None if state is None else jnp.pad(state, [(0, 0), (0, 0), (0, keys), (0, values)]),
        starts=pad(inputs.starts, 0),
    )


def _run_chunks(options: Options, inputs: Inputs) -> tuple[Array, Array]:
    """`chunked_pass` for inputs of any length and width."""
    length, key_size, value_size = inputs.q.shape[1], inputs.q.shape[3], inputs.v.shape[3]
    padded = pad_inputs(inputs, -length % CHUNK)
    if is_sum(padded, options.online):
        if is_channel_wise(padded.write):
            v = jnp.multiply(padded.write, padded.v.astype(jnp.float32)).astype(padded.v.dtype)  # type: ignore[arg-type]
            padded = padded._replace(v=v, write=None)
        out, state = linear_pass(LinearOptions(options.scale, options.schedule), padded)
    else:
        out, state = chunked_pass(options, padded)
    return out[:, :length, :, :value_size], state[:, :, :key_size, :value_size]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run_one_token(options: Options, inputs: Inputs) -> tuple[Array, Array]:
    """One token through the decode kernel; its gradient goes through `chunked_pass`."""
    key_size, value_size = inputs.q.shape[3], inputs.v.shape[3]
    padded = _operands(options, pad_inputs(inputs, 0))
    out, state = decode(_problem(options, padded), padded, options.schedule.decode)
    return batch_alike(inputs, (out[..., :value_size], state[:, :, :key_size, :value_size]))


def _one_token_forward(options: Options, inputs: Inputs) -> tuple[tuple[Array, Array], Any]:
    results, transposed = jax.vjp(functools.partial(_run_chunks, options), inputs)
    return batch_alike(inputs, results), transposed


def _one_token_backward(options: Options, transposed: Any, cotangents: tuple[Array, Array]) -> tuple[Inputs]:
    (gradients,) = transposed(cotangents)
    return (gradients._replace(starts=None),)


_run_one_token.defvjp(_one_token_forward, _one_token_backward)


def run(options: Options, inputs: Inputs) -> tuple[Array, Array]:
    """Output `[B, T, HV, V]` and final state `[B, HV, K, V]` of inputs of any length and width; differentiable."""
    inputs = vary_alike(inputs)
    return _run_one_token(options, inputs) if inputs.q.shape[1] == 1 else _run_chunks(options, inputs)

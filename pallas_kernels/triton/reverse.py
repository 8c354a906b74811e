"""The pass over chunks, last to first, with the state's gradient in registers.

With `W = Z - Ebar S_0`, so that `R = A W`, equations 53 to 65 of the Gated DeltaNet-2 paper shorten to

    dR = P^T dO + K_tail dS_C      dW = A^T dR      dS_0 = Diag(exp(G_C)) dS_C + Q_G^T dO - Ebar^T dW

and `dW` is the gradient of `Z`. Times a write gate of one number a token it is that of the values: so it is stored, as
then neither is rounded twice. As in `state`, everything is kept transposed, a program owns a block of value channels,
and segments of the sequence run side by side: the gradient goes back through one by `dS -> M^T dS + N'`.
"""

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.triton.backend import Launch, Operand, call, dot, dot_nt, dot_tn
from pallas_kernels.triton.decay import CHUNK, divisible
from pallas_kernels.triton.prepare import Prepared
from pallas_kernels.triton.problem import Inputs, Problem, is_channel_wise
from pallas_kernels.triton.state import (
    keep_factor,
    load_row,
    loop,
    pass_operands,
    scale_tokens,
    segment_range,
    sequence_grid,
)


def _reverse_step(r, n, d_state: Array, problem: Problem) -> tuple[Array, Array]:
    """One chunk from the gradient `[V, K]` of the state after it: `dW` transposed `[V, C]`, the gradient before it."""
    rows = pl.ds(n * CHUNK, CHUNK)
    dtype = problem.dtype
    d_out = r.d_out[rows, :]
    written = r.written[rows, :]
    d_written = dot_nt(d_state.astype(dtype), written)
    d_residual = dot_tn(d_out, r.scores[n, :, :]) + scale_tokens(d_written, load_row(r.written_rows, rows))

    if r.read_rows is not None:
        d_read = dot(scale_tokens(d_out.T, load_row(r.read_rows, rows)).astype(dtype), r.read[rows, :])
    else:
        d_read = problem.scale * dot_tn(d_out, r.read[rows, :])
    before = keep_factor(r.kept, n) * d_state + d_read
    if not problem.online:
        return d_residual, before
    d_value = dot(d_residual.astype(dtype), r.inverse[n, :, :])
    erased = written if r.erased is None else r.erased[rows, :]
    return d_value, before - dot(scale_tokens(d_value, load_row(r.erased_rows, rows)).astype(dtype), erased)


def _reverse_kernel(r, *, problem: Problem, block: int):
    segment = lax.rem(pl.program_id(2), problem.segments)
    first, count = segment_range(problem, segment)
    if r.ends_of_segments is not None:
        d_state = r.ends_of_segments[...]
    elif r.d_final_state is not None:
        d_state = r.d_final_state[...].astype(jnp.float32).T
    else:
        d_state = jnp.zeros((block, problem.key_size), jnp.float32)

    def body(m, d_state):
        n = first + count - 1 - m
        if r.d_states is not None:
            r.d_states[n, :, :] = d_state.astype(r.d_states.dtype)
        d_value, before = _reverse_step(r, n, d_state, problem)
        if r.d_values is not None:
            if r.gate is not None:
                gate = r.gate[pl.ds(n * CHUNK, CHUNK)].astype(jnp.float32)
                d_value = scale_tokens(d_value, divisible(gate))
            high = d_value.astype(r.d_values.dtype)
            r.d_values[n, :, :] = high
            if r.d_values_rest is not None:
                r.d_values_rest[n, :, :] = (d_value - high.astype(jnp.float32)).astype(high.dtype)
        return before

    d_state = loop(count, body, d_state)
    if r.offsets is not None:
        r.offsets[...] = d_state
    if r.d_initial_state is not None:

        @pl.when(segment == 0)
        def _():
            r.d_initial_state[...] = d_state.T


def _operands(
    problem: Problem, inputs: Inputs, prepared: Prepared, d_out: Array, at, block: int
) -> dict[str, Operand | None]:
    return {
        **pass_operands(problem, inputs, prepared, at, None, with_reads=True),
        "d_out": problem.of_token(d_out, problem.length, at, block),
        "gate": None if is_channel_wise(inputs.write) else problem.of_token(inputs.write, problem.length, at),
    }


def keeps_rest(problem: Problem, inputs: Inputs) -> bool:
    """Whether what rounding leaves of `dW` is stored too, for the write gate's gradient and values gated by channel."""
    is_rounded = problem.online and problem.dtype != jnp.float32 and inputs.write is not None
    return is_rounded and (inputs.log_decay is not None or is_channel_wise(inputs.write))


_OUTPUTS = ("d_states", "d_values", "d_values_rest", "offsets", "d_initial_state")


def reverse_offsets(problem: Problem, inputs: Inputs, prepared: Prepared, d_out: Array, launch: Launch) -> Array:
    """N' of each segment, transposed: the gradient at its start if that at its end is zero, `[B, HV, P, V, K]`."""
    p = problem
    block = min(launch.block, p.value_size)
    grid, at = sequence_grid(p, p.value_size, block)
    offsets = p.per_head(p.segments, p.value_size, p.key_size, dtype=jnp.float32)

    def place(c, h, z):
        return *p.segment_at(h, z), c, 0

    result = call(
        _reverse_kernel,
        "delta_reverse_offsets",
        grid,
        {**_operands(p, inputs, prepared, d_out, at, block), "ends_of_segments": None, "d_final_state": None},
        {**dict.fromkeys(_OUTPUTS), "offsets": p.of_head(offsets, (None, block, p.key_size), place)},
        launch,
        problem=p,
        block=block,
    )
    return result["offsets"]  # type: ignore[return-value]


def reverse_pass(
    problem: Problem,
    inputs: Inputs,
    prepared: Prepared,
    d_out: Array,
    d_final_state: Array | None,
    ends: Array | None,
    launch: Launch,
) -> tuple[Array, Array, Array | None, Array | None]:
    """Gradients with respect to the state after each chunk, to `Z`, and to the initial state.

    That to `Z` is stored times a write gate of one number a token (see `divisible`).

    Args:
        problem: static facts.
        inputs: arguments.
        prepared: the first stage's results.
        d_out: `[B, T, HV, V]`.
        d_final_state: `[B, HV, K, V]`, where there is one segment.
        ends: `[B, HV, P, V, K]`, the gradients at the segments' ends, where there are several.
        launch: compilation.

    Returns:
        `[B, HV, N, V, K]`, `[B, HV, N, V, C]`, what rounding left of the latter where it is wanted (see `keeps_rest`),
        and, if there is an initial state, `[B, HV, K, V]` float32.
    """
    p = problem
    block = min(launch.block, p.value_size)
    grid, at = sequence_grid(p, p.value_size, block)
    boundary = p.per_head(p.key_size, p.value_size, dtype=jnp.float32)

    def place(c, h, z):
        return at(c, h, z)[0], h, 0, c, 0

    def place_end(c, h, z):
        return *p.segment_at(h, z), c, 0

    def of_boundary(array):
        return p.of_head(array, (p.key_size, block), lambda c, h, z: (at(c, h, z)[0], h, 0, c))

    results = call(
        _reverse_kernel,
        "delta_reverse",
        grid,
        {
            **_operands(p, inputs, prepared, d_out, at, block),
            "ends_of_segments": p.of_head(ends, (None, block, p.key_size), place_end),
            "d_final_state": of_boundary(d_final_state if ends is None else None),
        },
        {
            **dict.fromkeys(_OUTPUTS),
            "d_states": p.of_head(p.per_head(p.chunks, p.value_size, p.key_size), (p.chunks, block, p.key_size), place),
            "d_values": p.of_head(p.per_head(p.chunks, p.value_size, CHUNK), (p.chunks, block, CHUNK), place),
            "d_values_rest": p.of_head(
                p.per_head(p.chunks, p.value_size, CHUNK) if keeps_rest(p, inputs) else None,
                (p.chunks, block, CHUNK),
                place,
            ),
            "d_initial_state": of_boundary(None if inputs.initial_state is None else boundary),
        },
        launch,
        problem=p,
        block=block,
    )
    names = ("d_states", "d_values", "d_values_rest", "d_initial_state")
    return tuple(results[name] for name in names)  # type: ignore[return-value]

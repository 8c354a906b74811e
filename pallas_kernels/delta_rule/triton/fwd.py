"""Passes over the chunks of a sequence, first to last, with the state in registers.

    R = A (Z - Ebar S_0)      O = Q_G S_0 + P R      S_C = Diag(exp(G_C)) S_0 + K_tail^T R

A program owns one head and a block of value channels. It keeps the state transposed, `[value block, K]`: every link of
the chain from one chunk to the next is then a product whose left side is the last one's result, in registers already.

A sequence may be cut into splits that run side by side; `split_sequence` finds the state at each one's start.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.common.config import KernelConfig
from pallas_kernels.common.kernel_shape import CHUNK, is_channel_wise, split_range
from pallas_kernels.common.triton.backend import Operand, call, dot, dot_halves, dot_nt, dot_tn, dot_tt, load_tile
from pallas_kernels.common.triton.chunks import keep_factor, load_row, loop, sequence_grid
from pallas_kernels.common.triton.kernel_shape import KernelShape
from pallas_kernels.delta_rule.inputs import Inputs
from pallas_kernels.delta_rule.triton.wy import WYFactors


def scale_tokens(x: Array, row: Array | None) -> Array:
    """`x` `[..., C]` times one number a token."""
    return x if row is None else x * row[None, :]


def loop_with_late_stores(first, count, step, store, state, left, reverse: bool = False):
    """Goes over chunks, and stores each step's result in the next step, before that step's first product.

    The compiler begins the copies for a step at the end of the step before, and waits for all of them at the first
    product. A store before that product costs no time.

    Args:
        first: the first chunk.
        count: number of chunks.
        step: from a chunk's number and the state to the next state and the result to store.
        store: stores the result of the chunk of a number.
        state: the state before the first step.
        left: an array in the shape of a step's result. The first step stores it as the first chunk's result, which
            the second step overwrites.
        reverse: from the last chunk to the first.

    Returns:
        The state after the last step.
    """

    def place(m):
        return first + (count - 1 - m if reverse else m)

    def body(m, carry):
        state, left = carry
        store(place(jnp.maximum(m - 1, 0)), left)
        return step(place(m), state)

    state, left = loop(count, body, (state, left))
    pl.when(count > 0)(lambda: store(place(count - 1), left))
    return state


def has_decay(r) -> bool:
    """Whether the state decays.

    With a decay, residuals are not rounded before they are multiplied by the inverse, for one more product a chunk.
    Without a decay the errors do not need it (BOUNDS.md).
    """
    return r.kept is not None


def chunk_step(
    r, n, state: Array, kernel_shape: KernelShape, is_value=None, is_exact: bool = False, values: Array | None = None
) -> tuple[Array, Array]:
    """One chunk from the state `[V, K]` before it: the residuals, transposed `[V, C]`, and the state after it.

    With `is_exact`, the difference of values and what is recalled, small beside both where keys repeat, is not rounded
    before it goes through the inverse. `values` are the chunk's where they are loaded already.

    With a value key the rule itself writes nothing: values are added along that key, and in their place is what a token
    erases of those that the chunk's earlier tokens added.
    """
    # The compiler copies ahead only what a product takes as stored. All else is loaded here, before the first wait.
    rows = pl.ds(n * CHUNK, CHUNK)
    written = load_tile(r.written, rows, r.is_lean)
    values = r.v[rows, :] if values is None else values
    write = None if r.write is None else r.write[rows] if len(r.write.shape) == 1 else r.write[rows, :]
    erased_row, written_row = load_row(r.erased_rows, rows), load_row(r.written_rows, rows)
    kept = keep_factor(r.kept, n)
    recalled = None
    if kernel_shape.online:
        erased = written if r.erased is None else load_tile(r.erased, rows, r.is_lean)
        recalled = scale_tokens(dot_nt(state.astype(kernel_shape.dtype), erased), erased_row)
    residual = values.astype(jnp.float32)
    if write is not None:
        residual = residual * (write[:, None] if write.ndim == 1 else write)
    residual = residual.T.astype(jnp.float32)
    if r.added is not None:
        residual = -dot_tt(values, load_tile(r.added_pairs, n, r.is_lean))
    if is_value is not None:
        residual = jnp.where(is_value, residual, 0.0)
    if recalled is not None:
        residual, inverse = residual - recalled, load_tile(r.inverse, n, r.is_lean)
        if is_exact:
            residual = dot_halves(residual, inverse, (1, 1))
        else:
            residual = dot_nt(residual.astype(kernel_shape.dtype), inverse)
    update = dot(scale_tokens(residual, written_row).astype(kernel_shape.dtype), written)
    if r.added is not None:
        added = dot_tn(values, load_tile(r.added, rows, r.is_lean))
        update = update + (added if is_value is None else jnp.where(is_value, added, 0.0))
    return residual, kept * state + update


def _start_state(r, kernel_shape: KernelShape, block: int) -> Array:
    """The state `[block, K]` that a program starts from."""
    if r.split_states is not None:
        return r.split_states[...]
    if r.initial_state is not None:
        return r.initial_state[...].astype(jnp.float32).T
    return jnp.zeros((block, kernel_shape.key_size), jnp.float32)


def _output_kernel(r, *, kernel_shape: KernelShape, block: int):
    split = lax.rem(pl.program_id(2), kernel_shape.num_splits)
    first, count = split_range(kernel_shape, split)

    def step(n, state):
        rows = pl.ds(n * CHUNK, CHUNK)
        read_row = load_row(r.read_rows, rows)
        values = None if r.added is None else load_tile(r.v, rows, r.is_lean)
        residual, after = chunk_step(r, n, state, kernel_shape, is_exact=has_decay(r), values=values)
        out = scale_tokens(dot_nt(state.astype(kernel_shape.dtype), load_tile(r.read, rows, r.is_lean)), read_row)
        if r.read_rows is None:
            out = kernel_shape.scale * out
        if values is not None:
            out = out + dot_tt(values, load_tile(r.added_scores, n, r.is_lean))
        residual = residual.astype(r.scores.dtype)
        return after, out + dot_nt(
            residual, load_tile(r.scores, n, r.is_lean), precise=kernel_shape.dtype == jnp.float32
        )

    def store(n, out):
        r.out[pl.ds(n * CHUNK, CHUNK), :] = out.T.astype(r.out.dtype)

    nothing = jnp.zeros((block, CHUNK), jnp.float32)
    state = loop_with_late_stores(first, count, step, store, _start_state(r, kernel_shape, block), nothing)

    @pl.when(split == kernel_shape.num_splits - 1)
    def _():
        r.final_state[...] = state.T


def _states_kernel(r, *, kernel_shape: KernelShape, block: int):
    first, count = split_range(kernel_shape, lax.rem(pl.program_id(2), kernel_shape.num_splits))

    def step(n, state):
        r.states[n, :, :] = state.astype(r.states.dtype)
        residual, after = chunk_step(r, n, state, kernel_shape, is_exact=True)
        return after, residual

    def store(n, residual):
        r.residuals[n, :, :] = residual.astype(r.residuals.dtype)

    nothing = jnp.zeros((block, CHUNK), jnp.float32)
    loop_with_late_stores(first, count, step, store, _start_state(r, kernel_shape, block), nothing)


def pass_operands(
    kernel_shape: KernelShape, inputs: Inputs, prepared: WYFactors, at, block: int | None, with_reads: bool
) -> dict[str, Operand | None]:
    """What the passes over chunks read of the inputs and of the first stage's results.

    Args:
        kernel_shape: static facts.
        inputs: arguments.
        prepared: the first stage's results.
        at: maps the grid's indices to (batch, 0, value head, block of value channels).
        block: width of the value block; None leaves the values out.
        with_reads: whether queries and scores take part.
    """
    p, x = kernel_shape, inputs

    def head(array, shape):
        return p.of_head(array, shape, lambda *g: (at(*g)[0], at(*g)[2], *(0 for _ in shape)))

    def key_like(stored, raw):
        if stored is not None:
            return head(stored, (p.length, p.key_size))
        return p.of_token(raw, p.length, lambda *g: (*at(*g)[:3], 0))

    has_own_erased = p.online and (
        prepared.erased is not None or prepared.written is not None or x.write_key is not None
    )
    pairs = (p.chunks, CHUNK, CHUNK)
    operands = {
        "written": key_like(prepared.written, x.k if x.write_key is None else x.write_key),
        "written_rows": head(prepared.written_rows, (p.length,)),
        "erased": key_like(prepared.erased, x.k) if has_own_erased else None,
        "erased_rows": head(prepared.erased_rows, (p.length,)),
        "inverse": head(prepared.inverse, pairs),
        "kept": None if prepared.kept is None else head(prepared.kept, prepared.kept.shape[2:]),
        "v": None if block is None else p.of_token(x.v, p.length, at, block),
        "write": None if block is None or x.write is None else p.of_token(x.write, p.length, at, block),
        "read": key_like(prepared.read, x.q) if with_reads else None,
        "read_rows": head(prepared.read_rows, (p.length,)) if with_reads else None,
        "scores": head(prepared.scores, pairs) if with_reads else None,
        "added": key_like(prepared.added, x.value_key) if prepared.added is not None else None,
        "added_pairs": head(prepared.added_pairs, pairs),
        "added_scores": head(prepared.added_scores, pairs) if with_reads else None,
    }
    return operands


def split_state_operands(
    kernel_shape: KernelShape, inputs: Inputs, split_states: Array | None, block: int
) -> dict[str, Operand | None]:
    """The states that programs start from: the splits' if there are several, or the initial one."""
    p = kernel_shape
    if split_states is not None:

        def place(c, h, z):
            return *p.split_at(h, z), c, 0

        return {
            "split_states": p.of_head(split_states, (None, block, p.key_size), place),
            "initial_state": None,
        }
    initial = p.of_head(inputs.initial_state, (p.key_size, block), lambda c, h, z: (z, h, 0, c))
    return {"split_states": None, "initial_state": initial}


def fwd_o(
    kernel_shape: KernelShape, inputs: Inputs, prepared: WYFactors, split_states: Array | None, launch: KernelConfig
) -> tuple[Array, Array]:
    """Output `[B, T, HV, V]` and final state `[B, HV, K, V]` from the states at the splits' starts."""
    p, write = kernel_shape, inputs.write
    block = min(launch.block, p.value_size)
    grid, at = sequence_grid(p, p.value_size, block)
    if is_channel_wise(write) and write.dtype == jnp.float32:  # its tiles leave no room for a third stage of copies
        launch = launch.with_stages(2)
    out = jax.ShapeDtypeStruct(inputs.v.shape, p.dtype)
    final = p.per_head(p.key_size, p.value_size, dtype=jnp.float32)
    results = call(
        _output_kernel,
        "delta_output",
        grid,
        {
            **pass_operands(p, inputs, prepared, at, block, with_reads=True),
            **split_state_operands(p, inputs, split_states, block),
        },
        {
            "out": p.of_token(out, p.length, at, block),
            "final_state": p.of_head(final, (p.key_size, block), lambda c, h, z: (at(c, h, z)[0], h, 0, c)),
        },
        launch,
        kernel_shape=p,
        block=block,
    )
    return results["out"], results["final_state"]  # type: ignore[return-value]


def stored_states(kernel_shape: KernelShape) -> jax.ShapeDtypeStruct:
    """A state for each chunk as the backward reads it, `[B, HV, N, V, K]`.

    Linear attention stores states in float32. Its states grow as long as nothing decays. The decay's gradient is then
    nearly all the product of the state before a chunk with the gradient after the chunk, a sum whose terms cancel, so
    that neither factor may be rounded. In the gradients of queries and keys no other product is rounded.
    """
    p = kernel_shape
    return p.per_head(p.chunks, p.value_size, p.key_size, dtype=None if p.online else jnp.float32)


def fwd_h(
    kernel_shape: KernelShape, inputs: Inputs, prepared: WYFactors, split_states: Array | None, launch: KernelConfig
) -> tuple[Array, Array]:
    """For the backward: the state before each chunk `[B, HV, N, V, K]` and the residuals `[B, HV, N, V, C]`."""
    p = kernel_shape
    block = min(launch.block, p.value_size)
    grid, at = sequence_grid(p, p.value_size, block)

    def place(c, h, z):
        return at(c, h, z)[0], h, 0, c, 0

    results = call(
        _states_kernel,
        "delta_states",
        grid,
        {
            **pass_operands(p, inputs, prepared, at, block, with_reads=False),
            **split_state_operands(p, inputs, split_states, block),
        },
        {
            "states": p.of_head(stored_states(p), (p.chunks, block, p.key_size), place),
            "residuals": p.of_head(p.per_head(p.chunks, p.value_size, CHUNK), (p.chunks, block, CHUNK), place),
        },
        launch,
        kernel_shape=p,
        block=block,
    )
    return results["states"], results["residuals"]  # type: ignore[return-value]

"""The pass over chunks, last to first, with the state's gradient in registers.

With `W = Z - Ebar S_0`, so that `R = A W`, equations 53 to 65 of the Gated DeltaNet-2 paper shorten to

    dR = P^T dO + K_tail dS_C      dW = A^T dR      dS_0 = Diag(exp(G_C)) dS_C + Q_G^T dO - Ebar^T dW

and `dW` is the gradient of `Z = write * V`, from which those of the values and of the write gate follow at once:

    dV = write * dW      d_write = V * dW, for a gate of one number a token summed over the value channels

With a value key `-L V` is in the place of Z (`dplr`), so that values get the gradient of their other uses beside it:

    dV = P_k^T dO + K_tail dS_C - L^T dW

As in `fwd`, all matrices are transposed, and a program owns a block of value channels. Segments of the sequence run
side by side: the gradient goes back through one by `dS -> M^T dS + N'`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.common.config import KernelConfig
from pallas_kernels.common.decay import divisible
from pallas_kernels.common.kernel_shape import CHUNK, is_channel_wise, split_range
from pallas_kernels.common.triton.backend import Operand, call, dot, dot_halves, dot_nt, dot_tn, load_tile
from pallas_kernels.common.triton.chunks import keep_factor, load_row, loop, sequence_grid
from pallas_kernels.common.triton.kernel_shape import KernelShape
from pallas_kernels.delta_rule.inputs import Inputs
from pallas_kernels.delta_rule.triton.fwd import has_decay, pass_operands, scale_tokens, stored_states
from pallas_kernels.delta_rule.triton.wy import WYFactors


def _reverse_step(r, n, d_state: Array, kernel_shape: KernelShape, is_exact: bool = False) -> tuple[Array, Array]:
    """One chunk from the gradient `[V, K]` of the state after it: the gradient before it, `dW` transposed `[V, C]`."""
    rows = pl.ds(n * CHUNK, CHUNK)
    dtype = kernel_shape.dtype
    d_out, written, read = (load_tile(ref, rows, r.is_lean) for ref in (r.d_out, r.written, r.read))
    # In linear attention the values' gradient is this product plus one with the scores; neither rounds its operands.
    d_written = dot_nt(d_state.astype(dtype), written) if kernel_shape.online else dot_halves(d_state, written, (1, 1))
    scores = load_tile(r.scores, n, r.is_lean)
    d_near = dot_tn(d_out.astype(scores.dtype), scores, precise=dtype == jnp.float32)
    d_residual = d_near + scale_tokens(d_written, load_row(r.written_rows, rows))

    if r.read_rows is not None:
        d_read = dot(scale_tokens(d_out.T, load_row(r.read_rows, rows)).astype(dtype), read)
    else:
        d_read = kernel_shape.scale * dot_tn(d_out, read)
    before = keep_factor(r.kept, n) * d_state + d_read
    if not kernel_shape.online:
        return before, d_residual
    inverse = load_tile(r.inverse, n, r.is_lean)
    d_value = dot_halves(d_residual, inverse) if is_exact else dot(d_residual.astype(dtype), inverse)
    erased = written if r.erased is None else load_tile(r.erased, rows, r.is_lean)
    return before - dot(scale_tokens(d_value, load_row(r.erased_rows, rows)).astype(dtype), erased), d_value


def _store_added_side(r, n, d_state: Array, d_written: Array):
    """With a value key, gradients of a chunk's values and of what it erases of them, from `dS_C` and `dW`."""
    rows, dtype = pl.ds(n * CHUNK, CHUNK), r.d_v.dtype
    d_out, added, scores = (
        load_tile(x, i, r.is_lean) for x, i in ((r.d_out, rows), (r.added, rows), (r.added_scores, n))
    )
    d_v = dot_nt(d_state.astype(dtype), added) + dot_tn(d_out, scores)
    d_v = d_v - dot(d_written.astype(dtype), load_tile(r.added_pairs, n, r.is_lean))
    r.d_v[rows, :] = d_v.astype(dtype).T
    r.d_written[rows, :] = d_written.astype(dtype).T


def _store_value_side(r, rows, values: Array | None, d_written: Array):
    """Gradients of a chunk's values and write gate from `dW`, transposed `[V, C]` float32."""
    if r.write is None:
        r.d_v[rows, :] = d_written.astype(r.d_v.dtype).T
        return
    d_write = d_written * values.T.astype(jnp.float32)  # type: ignore[union-attr]
    if len(r.write.shape) == 1:
        write = r.write[rows].astype(jnp.float32)
        r.d_write[rows] = jnp.sum(d_write, axis=0)
        # Stored as a product with the gate, `dW` is rounded once for both of its uses: it is the values' gradient as it
        # is, and `bwd_dqkg` divides it by the gate.
        r.d_v[rows, :] = scale_tokens(d_written, divisible(write)).astype(r.d_v.dtype).T
        return
    write = r.write[rows, :].T.astype(jnp.float32)
    r.d_write[rows, :] = d_write.astype(r.d_write.dtype).T
    r.d_written[rows, :] = d_written.astype(r.d_written.dtype).T
    r.d_v[rows, :] = (write * d_written).astype(r.d_v.dtype).T


def _reverse_kernel(r, *, kernel_shape: KernelShape, block: int):
    split = lax.rem(pl.program_id(2), kernel_shape.num_splits)
    first, count = split_range(kernel_shape, split)
    if r.ends_of_splits is not None:
        d_state = r.ends_of_splits[...]
    elif r.d_final_state is not None:
        d_state = r.d_final_state[...].astype(jnp.float32).T
    else:
        d_state = jnp.zeros((block, kernel_shape.key_size), jnp.float32)

    def body(m, d_state):
        n = first + count - 1 - m
        rows = pl.ds(n * CHUNK, CHUNK)
        values = None if r.v is None else r.v[rows, :]  # no product takes them: see `chunk_step`
        if r.d_states is not None:
            r.d_states[n, :, :] = d_state.astype(r.d_states.dtype)
        before, d_written = _reverse_step(r, n, d_state, kernel_shape, is_exact=r.d_v is not None and has_decay(r))
        if r.added is not None:
            _store_added_side(r, n, d_state, d_written)
        elif r.d_v is not None:
            _store_value_side(r, rows, values, d_written)
        return before

    d_state = loop(count, body, d_state)
    if r.offsets is not None:
        r.offsets[...] = d_state
    if r.d_initial_state is not None:

        @pl.when(split == 0)
        def _():
            r.d_initial_state[...] = d_state.T


def _operands(
    kernel_shape: KernelShape, inputs: Inputs, prepared: WYFactors, d_out: Array, at, block: int
) -> dict[str, Operand | None]:
    return {
        **pass_operands(kernel_shape, inputs, prepared, at, None, with_reads=True),
        "d_out": kernel_shape.of_token(d_out, kernel_shape.length, at, block),
    }


class Reversed(NamedTuple):
    """Results of the reverse pass.

    Attributes:
        d_states: gradient of the state after each chunk, `[B, HV, N, V, K]`.
        d_v: gradient of the values, `[B, T, HV, V]`: `dW` times the write gate (see `divisible`).
        d_written: `dW`, `[B, T, HV, V]`, where the write gate is one number a channel or there is a value key, else
            None.
        d_write: gradient of the write gate in its shape, float32 if that is one number a token; None without a gate.
        d_initial_state: `[B, HV, K, V]` float32; None without an initial state.
        rests: what rounding left of `d_states`, for linear attention in Mosaic GPU (`rounded_rests` there); else None.
    """

    d_states: Array
    d_v: Array
    d_written: Array | None
    d_write: Array | None
    d_initial_state: Array | None
    rests: Array | None = None

    @property
    def d_values(self) -> Array:
        """`dW`, times the write gate if that is one number a token."""
        return self.d_v if self.d_written is None else self.d_written


_ONLY_IN_PASS = ("v", "write", "ends_of_splits", "d_final_state", "added", "added_pairs", "added_scores")
_OUTPUTS = ("d_states", "d_v", "d_written", "d_write", "d_initial_state", "offsets")


def bwd_dh_offsets(
    kernel_shape: KernelShape, inputs: Inputs, prepared: WYFactors, d_out: Array, launch: KernelConfig
) -> Array:
    """N' of each split, transposed: the gradient at its start if that at its end is zero, `[B, HV, P, V, K]`."""
    p = kernel_shape
    block = min(launch.block, p.value_size)
    grid, at = sequence_grid(p, p.value_size, block)
    offsets = p.per_head(p.num_splits, p.value_size, p.key_size, dtype=jnp.float32)

    def place(c, h, z):
        return *p.split_at(h, z), c, 0

    result = call(
        _reverse_kernel,
        "delta_reverse_offsets",
        grid,
        {**_operands(p, inputs, prepared, d_out, at, block), **dict.fromkeys(_ONLY_IN_PASS)},
        {**dict.fromkeys(_OUTPUTS), "offsets": p.of_head(offsets, (None, block, p.key_size), place)},
        launch,
        kernel_shape=p,
        block=block,
    )
    return result["offsets"]  # type: ignore[return-value]


def bwd_dh(
    kernel_shape: KernelShape,
    inputs: Inputs,
    prepared: WYFactors,
    d_out: Array,
    d_final_state: Array | None,
    ends: Array | None,
    launch: KernelConfig,
) -> Reversed:
    """Gradients with respect to the state after each chunk, the values, the write gate and the initial state.

    Args:
        kernel_shape: static facts.
        inputs: arguments.
        prepared: the first stage's results.
        d_out: `[B, T, HV, V]`.
        d_final_state: `[B, HV, K, V]`, where there is one split.
        ends: `[B, HV, P, V, K]`, the gradients at the splits' ends, where there are several.
        launch: compilation.
    """
    p, write = kernel_shape, inputs.write
    block = min(launch.block, p.value_size)
    grid, at = sequence_grid(p, p.value_size, block)
    boundary = p.per_head(p.key_size, p.value_size, dtype=jnp.float32)

    def place(c, h, z):
        return at(c, h, z)[0], h, 0, c, 0

    def place_end(c, h, z):
        return *p.split_at(h, z), c, 0

    def of_boundary(array):
        return p.of_head(array, (p.key_size, block), lambda c, h, z: (at(c, h, z)[0], h, 0, c))

    def of_values(array):
        return p.of_token(array, p.length, at, block)

    is_wide = is_channel_wise(write)
    if is_wide:  # values and gate by channel leave no room for a third stage of copies
        launch = launch.with_stages(2)
    values = None if write is None else inputs.v
    like_values = jax.ShapeDtypeStruct((p.batch, p.length, p.value_heads, p.value_size), p.dtype)
    if write is None or is_wide:
        d_write = of_values(write)
    else:  # a part from each block of value channels
        parts = jax.ShapeDtypeStruct((grid[0], *write.shape), jnp.float32)
        d_write = Operand(parts, (None, None, p.length, None), lambda c, h, z: (c, *at(c, h, z)[:3]))
    results = call(
        _reverse_kernel,
        "delta_reverse",
        grid,
        {
            **_operands(p, inputs, prepared, d_out, at, block),
            "v": of_values(values),
            "write": of_values(write),
            "ends_of_splits": p.of_head(ends, (None, block, p.key_size), place_end),
            "d_final_state": of_boundary(d_final_state if ends is None else None),
        },
        {
            **dict.fromkeys(_OUTPUTS),
            "d_states": p.of_head(stored_states(p), (p.chunks, block, p.key_size), place),
            "d_v": of_values(like_values),
            "d_written": of_values(like_values if is_wide or inputs.value_key is not None else None),
            "d_write": d_write,
            "d_initial_state": of_boundary(None if inputs.initial_state is None else boundary),
        },
        launch,
        kernel_shape=p,
        block=block,
    )
    if d_write is not None and not is_wide:
        results["d_write"] = jnp.sum(results["d_write"], axis=0)  # type: ignore[arg-type]
    return Reversed(**{name: results.get(name) for name in Reversed._fields})  # type: ignore[arg-type]

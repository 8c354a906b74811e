"""The pass over chunks, last to first, with the state's gradient in registers.

    dR = P^T dO + K_tail dS_C      dW = A^T dR      dS_0 = Diag(exp(G_C)) dS_C + Q_G^T dO - Ebar^T dW

As in `fwd`, all matrices but keys and queries are transposed. The source of the equations is in
`pallas_kernels.delta_rule.triton.bwd_dh`. In linear attention `dW = dR` is the values' gradient, and the last product
is not there.

What a token writes is `R = w (V - S^T k)` if its erase and its write gate are one gate w, where S is the state that it
meets. That gate's gradient is therefore a sum over the value channels alone, `dW (V - S^T k) = dW R / w`. It is taken
here, of the `dW` that is not rounded yet, and of R with two binary digits more than bfloat16 has. Where two keys and
128 value channels leave little shared memory, R has one slot, through which `dW` leaves afterwards.

A write gate of one number a channel and the values have one slot, too, as has what is erased. The gradients of both
leave through it, and `dW` through the place of dO.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.common.decay import divisible
from pallas_kernels.common.kernel_shape import CHUNK, KernelShape
from pallas_kernels.common.mosaic_gpu import (
    SIDE,
    added,
    awaited,
    column_sums,
    fence_smem,
    left_parts,
    load_matrix,
    load_plain,
    load_turned,
    matrix_buffer,
    multiply,
    remainder,
    scale_columns,
    split,
    store,
    store_turned,
    sum_buffer,
    wait_for_stores,
    with_accumulators,
)
from pallas_kernels.delta_rule.mosaic_gpu.fwd import stored_state
from pallas_kernels.delta_rule.mosaic_gpu.pipeline import (
    PassArrays,
    Place,
    Tile,
    call,
    chunk_tiles,
    digit_tile,
    keep,
    load_kept,
    own_values,
    parted_value_tile,
    refined,
    residual_tile,
    row_of,
    start_state,
    tokens,
    value_tile,
)
from pallas_kernels.delta_rule.mosaic_gpu.rounded_rests import rests_struct


def _write_gradient(
    r: Any, tiles: Any, slot: Any, place: Place, d_state: Array, kept: Any, is_exact: bool
) -> tuple[Array, Array, Array, Array | None]:
    """`dW^T`, the state's gradient before the chunk's reads and writes, `dO^T` as it meets Q, and the erased rows."""
    left = d_state.astype(jnp.bfloat16)

    def body(d_written, d_near, d_value):
        multiply(d_written, left, tiles.written.at[slot].T)
        d_out = load_matrix(own_values(tiles.d_out, slot, place).T)
        multiply(d_near, d_out, tiles.scores.at[slot])
        written = row_of(tiles, "written_rows", slot)
        d_residual = scale_columns(awaited(d_written, running=1), written) + awaited(d_near)
        for part in left_parts(d_residual, is_exact):
            multiply(d_value, part, tiles.inverse.at[slot])
        before = keep(d_state, kept)
        if r.read_rows is not None:
            d_out = scale_columns(d_out.astype(jnp.float32), row_of(tiles, "read_rows", slot)).astype(jnp.bfloat16)
        erased = row_of(tiles, "erased_rows", slot)
        return awaited(d_value), before, d_out, erased

    return with_accumulators(body, CHUNK, CHUNK, CHUNK)


def _linear_write_gradient(
    tiles: Any, slot: Any, place: Place, d_state: Array, kept: Any
) -> tuple[Array, Array, Array]:
    """Linear attention's `dV^T`, and the next two results of `_write_gradient`."""

    def body(d_value):
        for part in split(d_state):  # `dV` is rounded once, and has no larger error
            multiply(d_value, part, tiles.written.at[slot].T)
        d_out = load_matrix(own_values(tiles.d_out, slot, place).T)
        multiply(d_value, d_out, tiles.scores.at[slot])
        before = keep(d_state, kept)
        return awaited(d_value), before, d_out

    return with_accumulators(body, CHUNK)


def _reverse_kernel(r, tiles, buffers, pipeline, place, chunks, *, kernel_shape: KernelShape, is_exact: bool):
    first, count = chunks
    erases_keys = kernel_shape.online
    # Without rows of factors the queries' factor is multiplied in afterwards, so that no operand is rounded once more.
    is_scaled_late = r.read_rows is None
    with_values, single_stage = r.d_v is not None, pipeline.single_stage
    is_wide = hasattr(tiles, "write")  # a write gate of one number a channel

    def outlet():
        """The shared memory through which `dW` leaves."""
        return tiles.residuals.at[0, place.own] if single_stage is not None else buffers.d_v.at[place.group]

    def erased(slot):
        if is_wide and hasattr(tiles, "erased"):
            return tiles.erased.at[0]
        return getattr(tiles, "erased", tiles.written).at[slot]

    def load_factor(slot):
        """What `dW` is multiplied by in the sum over value channels: R or the values."""
        if r.residuals is None:
            return load_turned(tiles.v.at[slot, :, place.own])
        rounded = load_matrix(tiles.residuals.at[slot, place.own])
        if r.digits is None:
            return rounded.astype(jnp.float32)
        return refined(rounded, load_plain(tiles.digits.at[slot, place.own]))

    def store_value_side(slot, n, m, d_value):
        write = row_of(tiles, "write_rows", slot)
        if single_stage is not None:  # all read R before `dW` comes in its place
            factor = load_factor(single_stage.wait(m))
            fence_smem()
        if write is not None:
            write = divisible(write)
        outlet().T[...] = split(scale_columns(d_value, write))[0]
        fence_smem()
        store(buffers.d_states.at[place.group], r.d_states.at[place.batch, place.head, n, place.channels], last=False)
        store(outlet(), r.d_v.at[place.batch, tokens(n), place.head, place.channels])
        if r.d_write is not None:
            # Here, since the next step waits for what is stored, and the sum would delay products before `fence_smem`.
            if single_stage is None:
                factor = load_factor(slot)
            sums = column_sums(d_value * factor, buffers.sums.at[place.group])
            r.d_write[place.part, place.batch, place.head, tokens(n)] = sums
            if single_stage is None:  # the factor is read
                fence_smem()

    def store_wide_side(slot, n, m, d_value):
        """The same where the write gate is one number a channel, whose gradient is no sum."""
        gate, values = (load_turned(own_values(tile, 0, place)) for tile in (tiles.write, tiles.v))
        fence_smem()  # all is read before gradients come in its place
        leaving = {
            "d_written": (own_values(tiles.d_out, slot, place), d_value),
            "d_v": (own_values(tiles.v, 0, place), gate * d_value),
            "d_write": (own_values(tiles.write, 0, place), values * d_value),
        }
        for tile, gradient in leaving.values():
            store_turned(tile, gradient)
        fence_smem()
        for name, (tile, _) in leaving.items():
            target = getattr(r, name).at[place.batch, tokens(n), place.head, place.channels]
            store(tile, target, last=False)
        store(buffers.d_states.at[place.group], r.d_states.at[place.batch, place.head, n, place.channels])

    def wait_for_values(m):
        """Waits until what the step before m stored has left."""
        wait_for_stores()

        def release():
            single_stage.release(0)
            if is_wide:
                pipeline.release(remainder(m - 1, pipeline.num_stages))

        if single_stage is not None:
            pl.when(m > 0)(release)

    def step(m, d_state):
        n = first + count - 1 - m
        if with_values:
            wait_for_values(m)
            buffers.d_states[place.group] = stored_state(r.rests, place, n, d_state)
        slot = pipeline.wait(m)
        kept = load_kept(r, tiles, place, slot, n)
        if is_scaled_late:
            kept = jnp.float32(1 / kernel_shape.scale) if kept is None else kept * (1 / kernel_shape.scale)
        if erases_keys:
            d_value, before, reads, row = _write_gradient(r, tiles, slot, place, d_state, kept, is_exact)
            erases = scale_columns(-d_value, row).astype(jnp.bfloat16)
        else:
            d_value, before, reads = _linear_write_gradient(tiles, slot, place, d_state, kept)

        def add(d_state):
            multiply(d_state, reads, tiles.read.at[slot])
            if is_wide:
                single_stage.wait(m)
            if erases_keys and not is_scaled_late:
                multiply(d_state, erases, erased(slot))
            if is_wide:
                store_wide_side(slot, n, m, d_value)
            elif with_values:
                store_value_side(slot, n, m, d_value)
            else:
                fence_smem()

        (d_state,) = added(add, before)
        if is_scaled_late and erases_keys:
            (d_state,) = added(lambda x: multiply(x, erases, erased(slot)), d_state * kernel_shape.scale)
        elif is_scaled_late:
            d_state = d_state * kernel_shape.scale
        if not is_wide:
            pipeline.release(slot)
        return d_state

    d_state = lax.fori_loop(0, count, step, start_state(r.ends, place, kernel_shape.key_size))
    if r.offsets is not None:
        r.offsets[place.batch, place.head, place.split, place.channels] = d_state
    if r.d_initial_state is not None:

        @pl.when(place.split == 0)
        def _():
            r.d_initial_state[place.batch, place.head, place.channels] = d_state

    if single_stage is not None:
        wait_for_values(count)
    wait_for_stores(only_read=False)


def _call(
    kernel_shape: KernelShape,
    arrays: PassArrays,
    d_out: Array,
    ends: Array | None,
    outputs: dict[str, jax.ShapeDtypeStruct | None],
    buffers: dict[str, Any],
    name: str,
    *,
    residuals: Array | None = None,
    digits: Array | None = None,
    is_exact: bool,
    num_compute_warpgroups: int,
    num_stages: int,
    has_single_stage: bool = False,
) -> dict[str, Array | None]:
    groups, is_wide = num_compute_warpgroups, arrays.write is not None
    tiles = chunk_tiles(kernel_shape, arrays, groups)
    tiles["d_out"] = (parted_value_tile if is_wide else value_tile)("d_out", groups)
    single_stage: dict[str, Tile] = {}
    if is_wide:
        tiles |= {name: parted_value_tile(name, groups, getattr(arrays, name).dtype) for name in ("v", "write")}
        single_stage = {name: tiles.pop(name) for name in ("erased", "v", "write") if name in tiles}
    factor = single_stage if has_single_stage else tiles
    if residuals is not None:
        factor["residuals"] = residual_tile(groups)
    if digits is not None:
        factor["digits"] = digit_tile(groups)
    absent = dict.fromkeys(("d_states", "rests", "d_v", "d_written", "d_write", "d_initial_state", "offsets"))
    return call(
        _reverse_kernel,
        name,
        kernel_shape,
        {**arrays.by_name(), "d_out": d_out, "ends": ends, "residuals": residuals, "digits": digits},
        {**absent, **outputs},
        tiles,
        buffers,
        num_compute_warpgroups=num_compute_warpgroups,
        num_stages=num_stages,
        single_stage=single_stage,
        reverse=True,
        is_exact=is_exact,
    )


def bwd_dh_offsets(
    kernel_shape: KernelShape, arrays: PassArrays, d_out: Array, *, num_compute_warpgroups: int, num_stages: int
) -> Array:
    """What a split's outputs add to the gradient at its start, `[B, HV, P, V, K]` float32."""
    p = kernel_shape
    offsets = p.per_head(p.num_splits, p.value_size, p.key_size, dtype=jnp.float32)
    arrays = arrays._replace(v=None, write=None, write_rows=None)
    outputs: dict[str, jax.ShapeDtypeStruct | None] = {"offsets": offsets}
    results = _call(
        p,
        arrays,
        d_out,
        None,
        outputs,
        {},
        "delta_reverse_offsets",
        is_exact=False,
        num_compute_warpgroups=num_compute_warpgroups,
        num_stages=num_stages,
    )
    return results["offsets"]  # type: ignore[return-value]


def bwd_dh(
    kernel_shape: KernelShape,
    arrays: PassArrays,
    d_out: Array,
    ends: Array | None,
    residuals: Array | None,
    digits: Array | None,
    *,
    is_exact: bool,
    with_initial_state: bool,
    num_compute_warpgroups: int,
    num_stages: int,
) -> dict[str, Array | None]:
    """Gradients with respect to states, values, write gate and initial state.

    Args:
        kernel_shape: static facts.
        arrays: what a pass reads.
        d_out: `[B, T, HV, V]`.
        ends: gradients at the splits' ends, transposed, `[B, HV, P, V, K]` float32; None for zero.
        residuals: R, `[B, HV, N, V, C]`, if the write gate is the erase gate too, not 0 and one number a token; else
            None.
        digits: further digits of R, `[B, HV, N, V, 8]`, or None.
        is_exact: whether what goes through the inverse is not rounded before.
        with_initial_state: whether the initial state's gradient is wanted.
        num_compute_warpgroups: blocks of 64 value channels of a program.
        num_stages: chunks whose tiles are in shared memory.

    Returns:
        `d_states` `[B, HV, N, V, K]`, of the state after each chunk; `rests`, in linear attention what rounding left of
        these (`rests_struct`), else None; `d_v` `[B, T, HV, V]`, `dW` times the write gate; `d_write` of a gate of one
        number a token, `[B, HV, T]` float32, with residuals times the gate, in which it then both erases and writes, of
        one of one number a channel `[B, T, HV, V]` in its dtype; `d_written`, with such a gate, `dW`, else None;
        `d_initial_state`, transposed, `[B, HV, V, K]` float32 or None.
    """
    p, is_wide = kernel_shape, arrays.write is not None
    with_d_write = arrays.write_rows is not None
    if residuals is not None or not (with_d_write or is_wide):
        arrays = arrays._replace(v=None, write=None)
    final = p.per_head(p.value_size, p.key_size, dtype=jnp.float32)
    parts = jax.ShapeDtypeStruct((p.value_size // SIDE, p.batch, p.value_heads, p.length), jnp.float32)
    by_value = p.batch, p.length, p.value_heads, p.value_size
    like_values = jax.ShapeDtypeStruct(by_value, p.dtype)
    d_write = parts if with_d_write else None
    if is_wide:
        d_write = jax.ShapeDtypeStruct(by_value, arrays.write.dtype)  # type: ignore[union-attr]
    outputs = {
        "d_states": p.per_head(p.chunks, p.value_size, p.key_size),
        "rests": None if p.online else rests_struct(p),
        "d_v": like_values,
        "d_written": like_values if is_wide else None,
        "d_write": d_write,
        "d_initial_state": final if with_initial_state else None,
    }
    buffers = {"d_states": matrix_buffer(num_compute_warpgroups, SIDE, p.key_size)}
    has_single_stage = residuals is not None and arrays.erased is not None and num_compute_warpgroups > 1
    if not (has_single_stage or is_wide):
        buffers["d_v"] = matrix_buffer(num_compute_warpgroups, CHUNK, SIDE)
    if with_d_write:
        buffers["sums"] = sum_buffer(num_compute_warpgroups)
    results = _call(
        p,
        arrays,
        d_out,
        ends,
        outputs,
        buffers,
        "delta_reverse",
        residuals=residuals,
        digits=digits,
        is_exact=is_exact,
        num_compute_warpgroups=num_compute_warpgroups,
        num_stages=num_stages,
        has_single_stage=has_single_stage,
    )
    if with_d_write:
        results["d_write"] = jnp.sum(results["d_write"], axis=0)  # type: ignore[arg-type]
    return results

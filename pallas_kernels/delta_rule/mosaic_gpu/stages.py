"""Stages in Mosaic GPU, with the signatures of their counterparts in Triton: what brings a call's arrays to them."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array

from pallas_kernels.common.config import KernelConfig, MosaicConfig
from pallas_kernels.common.decay import divisible
from pallas_kernels.common.kernel_shape import is_channel_wise
from pallas_kernels.common.triton.kernel_shape import KernelShape
from pallas_kernels.delta_rule.config import DeltaRuleConfig
from pallas_kernels.delta_rule.inputs import Inputs
from pallas_kernels.delta_rule.mosaic_gpu import bwd_dh as mosaic_bwd_dh
from pallas_kernels.delta_rule.mosaic_gpu import bwd_dqkg as mosaic_bwd_dqkg
from pallas_kernels.delta_rule.mosaic_gpu import fused_fwd as mosaic_fused_fwd
from pallas_kernels.delta_rule.mosaic_gpu import fwd as mosaic_fwd
from pallas_kernels.delta_rule.mosaic_gpu import split_sequence as mosaic_split_sequence
from pallas_kernels.delta_rule.mosaic_gpu import wy as mosaic_wy
from pallas_kernels.delta_rule.mosaic_gpu.bwd_dqkg_channel import channel_gradients
from pallas_kernels.delta_rule.mosaic_gpu.bwd_tile_scheduler import GradientArrays, gradient_structs
from pallas_kernels.delta_rule.mosaic_gpu.pipeline import Keys, PassArrays, run_rows
from pallas_kernels.delta_rule.mosaic_gpu.wy_channel import channel_factors
from pallas_kernels.delta_rule.triton import bwd_dqkg as triton_gradients
from pallas_kernels.delta_rule.triton.bwd_dh import Reversed
from pallas_kernels.delta_rule.triton.bwd_dqkg import of_argument
from pallas_kernels.delta_rule.triton.bwd_pairs import Saved, bwd_pairs, reader_ratio
from pallas_kernels.delta_rule.triton.channel_decay import is_flat
from pallas_kernels.delta_rule.triton.closed_gates import zero_closed
from pallas_kernels.delta_rule.triton.extreme_chunks import EXTREME_WIDTH
from pallas_kernels.delta_rule.triton.fwd import has_decay
from pallas_kernels.delta_rule.triton.split_sequence import SplitTransitions
from pallas_kernels.delta_rule.triton.wy import WYFactors, with_extreme


def forward(kernel_shape: KernelShape, inputs: Inputs, launch: KernelConfig) -> tuple[Array, Array]:
    """Output `[B, T, HV, V]` and final state `[B, HV, K, V]` in one kernel."""
    split_states = _split_states(inputs.initial_state, None)
    return mosaic_fused_fwd.forward(kernel_shape, inputs, split_states, num_stages=_launch(launch).num_stages)


def wy_factors(kernel_shape: KernelShape, inputs: Inputs, launch: KernelConfig) -> WYFactors:
    """The first stage; under a channel-wise decay, extreme chunks are Triton's."""
    at = _launch(launch)
    if not is_channel_wise(inputs.log_decay):
        results = mosaic_wy.wy_factors(
            kernel_shape,
            inputs,
            num_compute_warpgroups=at.num_compute_warpgroups,
            num_ctas=at.num_ctas,
            with_scores=not at.scores_in_output,
        )
        return WYFactors(**{**dict.fromkeys(WYFactors._fields), **results})  # type: ignore[arg-type]
    found = channel_factors(kernel_shape, inputs, num_stages=at.num_stages, num_ctas=at.num_ctas)
    prepared = WYFactors(**{**dict.fromkeys(WYFactors._fields), **found})  # type: ignore[arg-type]
    return with_extreme(kernel_shape, inputs, prepared, launch)


def split_transitions(
    kernel_shape: KernelShape, inputs: Inputs, prepared: WYFactors, launch: KernelConfig
) -> SplitTransitions:
    """Affine map of each split."""
    at = _launch(launch)
    arrays = _arrays(inputs, prepared)
    sizes = {"num_compute_warpgroups": at.num_compute_warpgroups, "num_stages": at.num_stages}
    if kernel_shape.online:
        results = mosaic_split_sequence.split_transitions(kernel_shape, arrays, prepared.growth, **sizes)
    else:
        results = mosaic_split_sequence.linear_split_transitions(kernel_shape, arrays, **sizes)
    return SplitTransitions(**results)  # type: ignore[arg-type]


def fwd_o(
    kernel_shape: KernelShape,
    inputs: Inputs,
    prepared: WYFactors,
    split_states: Array | None,
    launch: KernelConfig,
    *,
    keeps_scores: bool = False,
) -> tuple[Array | None, ...]:
    """Output `[B, T, HV, V]` and final state `[B, HV, K, V]` from the states at the splits' starts.

    With `keeps_scores`, which needs `scores_in_output`, then the scores, too.
    """
    at, arrays = _launch(launch), _arrays(inputs, prepared)
    if at.scores_in_output:
        run = run_rows(kernel_shape, inputs.resets).get("run")
        arrays = arrays._replace(decay_sums=prepared.decay_sums, run=run)
    out, final, scores = mosaic_fwd.fwd_o(
        kernel_shape,
        arrays,
        _split_states(inputs.initial_state, split_states),
        is_exact=has_decay(prepared),
        num_compute_warpgroups=at.num_compute_warpgroups,
        num_stages=at.num_stages,
        keeps_scores=keeps_scores,
    )
    return (out, final, scores) if keeps_scores else (out, final)


def fwd_h(
    kernel_shape: KernelShape,
    inputs: Inputs,
    prepared: WYFactors,
    split_states: Array | None,
    launch: KernelConfig,
    *,
    with_digits: bool,
) -> tuple[Array, Array | None, Array | None]:
    """For the backward: states, residuals and, `with_digits`, further digits; see `fwd.fwd_h`."""
    at = _launch(launch)
    arrays, split_states = _arrays(inputs, prepared), _split_states(inputs.initial_state, split_states)
    return mosaic_fwd.fwd_h(
        kernel_shape,
        arrays,
        split_states,
        with_digits=with_digits,
        num_compute_warpgroups=at.num_compute_warpgroups,
        num_stages=at.num_stages,
    )


def bwd_dh_offsets(
    kernel_shape: KernelShape, inputs: Inputs, prepared: WYFactors, d_out: Array, launch: KernelConfig
) -> Array:
    """What a split's outputs add to the gradient at its start, `[B, HV, P, V, K]`."""
    at = _launch(launch)
    arrays = _arrays(inputs, prepared)
    return mosaic_bwd_dh.bwd_dh_offsets(
        kernel_shape, arrays, d_out, num_compute_warpgroups=at.num_compute_warpgroups, num_stages=at.num_stages
    )


def bwd_dh(
    kernel_shape: KernelShape,
    inputs: Inputs,
    prepared: WYFactors,
    d_out: Array,
    d_final_state: Array,
    ends: Array | None,
    launch: KernelConfig,
    *,
    residuals: Array | None = None,
    digits: Array | None = None,
) -> Reversed:
    """Gradients of states, values, write gate and initial state; see `bwd_dh.bwd_dh`.

    With residuals, and further digits of these, `d_write` is of a gate that both erases and writes, and is not 0.
    """
    at = _launch(launch)
    results = mosaic_bwd_dh.bwd_dh(
        kernel_shape,
        _arrays(inputs, prepared),
        d_out,
        _split_states(d_final_state, ends),
        residuals,
        digits,
        is_exact=has_decay(prepared),
        with_initial_state=inputs.initial_state is not None,
        num_compute_warpgroups=at.num_compute_warpgroups,
        num_stages=at.num_stages,
    )
    d_write, d_initial = results["d_write"], results["d_initial_state"]
    if d_write is not None and not is_channel_wise(inputs.write):
        d_write = jnp.swapaxes(d_write, 1, 2)
    if residuals is not None:
        d_write = d_write / inputs.write.astype(jnp.float32)  # type: ignore[operator,union-attr]
    return Reversed(
        d_states=results["d_states"],  # type: ignore[arg-type]
        d_v=results["d_v"],  # type: ignore[arg-type]
        d_written=results["d_written"],
        d_write=d_write,
        d_initial_state=None if d_initial is None else jnp.swapaxes(d_initial, 2, 3),
        rests=results["rests"],
    )


def bwd_dqkg(
    kernel_shape: KernelShape,
    inputs: Inputs,
    d_out: Array,
    saved: Saved,
    prepared: WYFactors,
    config: DeltaRuleConfig,
    *,
    gates: tuple[Array | None, Array | None],
    tied_gates: bool,
    write_key_dtype: Any,
) -> Inputs:
    """Gradients of all token-wise arguments; see `bwd_dqkg.bwd_dqkg`."""
    at = _launch(config.gradients)
    x, has_channels = inputs, is_channel_wise(inputs.log_decay)
    if has_channels:  # as the kernel takes it, and leaves its gradient
        x = x._replace(log_decay=x.log_decay.astype(jnp.float32))  # type: ignore[union-attr]
    erase, write = _token_gate(x.erase), _token_gate(x.write)
    arrays = GradientArrays(
        q=x.q,
        k=x.k,
        write_key=x.write_key,
        d_out=d_out,
        d_values=saved.back.d_values if kernel_shape.online else None,
        states=saved.states,
        d_states=saved.back.d_states,
        residuals=saved.residuals,
        values=None if kernel_shape.online else x.v,
        rests=saved.rests,
        d_rests=saved.back.rests,
        ratio=None if tied_gates else reader_ratio(erase, write),
        erase=x.erase if is_channel_wise(x.erase) else None,
        log_decay=x.log_decay,
        resets=x.resets,
        read_rows=prepared.read_rows,
        written_rows=prepared.written_rows,
        kept=prepared.kept,
        front=prepared.front,
        tail=prepared.tail,
    )
    wanted = gradient_structs(kernel_shape, arrays, with_erase=erase is not None, write_key_dtype=write_key_dtype)
    find = channel_gradients if has_channels else mosaic_bwd_dqkg.bwd_dqkg
    found = find(kernel_shape, arrays, wanted, num_key_stages=at.num_stages, num_ctas=at.num_ctas)

    def summed(part: Array | None, like: Array | None, dtype: Any = None) -> Array | None:
        return None if part is None or like is None else of_argument(kernel_shape, part, like, dtype)

    def by_token(name: str) -> Array | None:
        halves = found[name]
        return None if halves is None else jnp.swapaxes(halves[0] + halves[1], 1, 2)

    d_erase: Any = found["d_erase"]
    d_write = saved.back.d_write
    if erase is not None:
        d_erase = by_token("d_erase") / divisible(erase)  # type: ignore[operator]
    if has_channels:
        if erase is not None:  # in the first part, as the stage below has them
            d_erase = jnp.pad(d_erase[None], ((0, max(1, kernel_shape.key_size // EXTREME_WIDTH) - 1), *[(0, 0)] * 3))
        of_extreme = config.pair_gradients, tied_gates, prepared.listed
        gradients = triton_gradients.bwd_dqkg(
            kernel_shape,
            x,
            d_out,
            saved,
            bwd_pairs(kernel_shape, x, d_out, saved, *of_extreme),
            prepared,
            dataclasses.replace(config.gradients, mosaic=None),
            gates=gates,
            tied_gates=tied_gates,
            write_key_dtype=write_key_dtype,
            others={**found, "d_erase": d_erase},
        )
        return gradients._replace(log_decay=gradients.log_decay.astype(inputs.log_decay.dtype))  # type: ignore[union-attr]
    if tied_gates:
        d_erase, d_write = d_erase + d_write, None
    d_v, d_k, d_write_key = zero_closed(
        kernel_shape,
        *gates,
        saved.back.d_v,
        found["d_k"],
        found["d_write_key"],
    )
    d_log_decay = by_token("d_log_decay")
    if d_log_decay is not None:
        flat = is_flat(x.log_decay, None)  # type: ignore[arg-type]
        flat = flat if x.resets is None else flat | (x.resets > 0)[:, :, None]
        d_log_decay = jnp.where(flat, 0.0, d_log_decay)
    return Inputs(
        q=summed(found["d_q"], x.q),  # type: ignore[arg-type]
        k=summed(d_k, x.k),  # type: ignore[arg-type]
        v=d_v,
        write_key=summed(d_write_key, x.write_key, write_key_dtype),
        erase=summed(d_erase, x.erase),
        write=summed(d_write, x.write),
        log_decay=summed(d_log_decay, x.log_decay),
    )


def _token_gate(gate: Array | None) -> Array | None:
    """A gate of one number a token in float32; None for any other."""
    return None if gate is None or is_channel_wise(gate) else gate.astype(jnp.float32)


def _launch(launch: KernelConfig) -> MosaicConfig:
    assert launch.mosaic is not None
    return launch.mosaic


def _split_states(boundary: Array | None, split_states: Array | None) -> Array | None:
    """States, or their gradients, where programs start, `[B, HV, P, V, K]`: the splits', or the sequence's."""
    if split_states is not None or boundary is None:
        return split_states
    return jnp.swapaxes(boundary.astype(jnp.float32), 2, 3)[:, :, None]


def _arrays(inputs: Inputs, prepared: WYFactors) -> PassArrays:
    """What a pass reads of the inputs and of the first stage's results."""
    x, write = inputs, _token_gate(inputs.write)

    def keys(stored: Array | None, given: Array) -> Keys:
        return Keys(given, False) if stored is None else Keys(stored, True)

    write_rows = prepared.write_rows
    if write_rows is None and write is not None:  # the copy engine takes numbers that lie side by side
        write_rows = jnp.swapaxes(write, 1, 2)
    # Under a channel-wise decay keys are stored as they are erased, but for linear attention.
    has_own_erased = prepared.erased is not None or (prepared.written is None and x.write_key is not None)
    return PassArrays(
        written=keys(prepared.written, x.k if x.write_key is None else x.write_key),
        erased=keys(prepared.erased, x.k) if has_own_erased else None,
        read=keys(prepared.read, x.q),
        v=x.v,
        inverse=prepared.inverse,
        scores=prepared.scores,
        write=x.write if is_channel_wise(x.write) else None,
        write_rows=write_rows,
        erased_rows=prepared.erased_rows,
        written_rows=prepared.written_rows,
        read_rows=prepared.read_rows,
        kept=prepared.kept,
    )

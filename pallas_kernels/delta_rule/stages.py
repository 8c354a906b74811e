"""Stages that exist in several backends, each by the one that its launch asks for: Triton or Mosaic GPU."""

from collections.abc import Callable
from typing import Any, NamedTuple

from jax import Array

from pallas_kernels.common.triton.kernel_shape import KernelShape
from pallas_kernels.delta_rule.config import DeltaRuleConfig
from pallas_kernels.delta_rule.inputs import Inputs
from pallas_kernels.delta_rule.triton.bwd_dh import bwd_dh, bwd_dh_offsets
from pallas_kernels.delta_rule.triton.bwd_dqkg import bwd_dqkg
from pallas_kernels.delta_rule.triton.bwd_pairs import Saved, bwd_pairs
from pallas_kernels.delta_rule.triton.fwd import fwd_h, fwd_o
from pallas_kernels.delta_rule.triton.split_sequence import split_transitions
from pallas_kernels.delta_rule.triton.wy import WYFactors, wy_factors


class Stages(NamedTuple):
    """One function for each stage.

    See those of the same names in `wy`, `split_sequence`, `fwd` and `bwd_dh`.

    Attributes:
        wy_factors: everything of a chunk that does not need the state.
        split_transitions: affine map of each split.
        fwd_o: output and final state.
        fwd_h: states and residuals for the backward.
        bwd_dh_offsets: what a split's outputs add to the gradient at its start.
        bwd_dh: gradients of states, values, write gate and initial state.
        bwd_dqkg: gradients of the other arguments, those of the pairs' matrices included.
        forward: output and final state in one kernel; None where the schedule has none.
    """

    wy_factors: Callable[..., Any]
    split_transitions: Callable[..., Any]
    fwd_o: Callable[..., Any]
    fwd_h: Callable[..., Any]
    bwd_dh_offsets: Callable[..., Any]
    bwd_dh: Callable[..., Any]
    bwd_dqkg: Callable[..., Any]
    forward: Callable[..., Any] | None = None


def choose_stages(config: DeltaRuleConfig) -> Stages:
    """The stages that a schedule asks for. Functions, so that a traceback has no frame of the choice."""
    forward = wy_factors, split_transitions, fwd_o
    in_triton = Stages(*forward, fwd_h, bwd_dh_offsets, bwd_dh, _bwd_dqkg)
    pass_over = config.maps, config.output, config.states, config.offsets, config.reverse
    configs = config.prepare, *pass_over, config.gradients
    if config.output.uses_mma:
        from pallas_kernels.delta_rule.mosaic_mma import stages as mma

        return in_triton._replace(wy_factors=mma.wy_factors, fwd_o=mma.fwd_o)
    if all(kernel.mosaic is None for kernel in configs):
        return in_triton
    # Imported where it runs: a jax without Mosaic GPU still has all that Triton serves.
    from pallas_kernels.delta_rule.mosaic_gpu import stages as mosaic

    backward = mosaic.fwd_h, mosaic.bwd_dh_offsets, mosaic.bwd_dh, mosaic.bwd_dqkg
    in_mosaic = Stages(mosaic.wy_factors, mosaic.split_transitions, mosaic.fwd_o, *backward)
    choices = zip(configs, in_triton, in_mosaic)
    chosen = Stages._make([*(triton if kernel.mosaic is None else other for kernel, triton, other in choices), None])
    return chosen if config.forward.mosaic is None else chosen._replace(forward=mosaic.forward)


def _bwd_dqkg(
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
    """Gradients of the pairs' matrices, then those of the arguments."""
    pairs = bwd_pairs(kernel_shape, inputs, d_out, saved, config.pair_gradients, tied_gates)
    options: dict[str, Any] = {"gates": gates, "tied_gates": tied_gates, "write_key_dtype": write_key_dtype}
    return bwd_dqkg(kernel_shape, inputs, d_out, saved, pairs, prepared, config.gradients, **options)

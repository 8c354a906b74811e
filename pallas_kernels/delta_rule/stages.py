"""Stages that exist in several backends, each by the one that its launch asks for: Triton or Mosaic GPU."""

from collections.abc import Callable
from typing import Any, NamedTuple

from jax import Array

from pallas_kernels.common.triton.kernel_shape import KernelShape
from pallas_kernels.delta_rule.config import DeltaRuleConfig
from pallas_kernels.delta_rule.inputs import Inputs
from pallas_kernels.delta_rule.triton import bwd_dqkg as gradients
from pallas_kernels.delta_rule.triton.bwd_dh import reverse_offsets, reverse_pass
from pallas_kernels.delta_rule.triton.fwd import output_pass, states_pass
from pallas_kernels.delta_rule.triton.split_sequence import split_transitions
from pallas_kernels.delta_rule.triton.wy import WYFactors, prepare


class Stages(NamedTuple):
    """One function for each stage.

    See those of the same names in `wy`, `split_sequence`, `fwd` and `bwd_dh`.

    Attributes:
        prepare: everything of a chunk that does not need the state.
        split_transitions: affine map of each segment.
        output_pass: output and final state.
        states_pass: states and residuals for the backward.
        reverse_offsets: what a segment's outputs add to the gradient at its start.
        reverse_pass: gradients of states, values, write gate and initial state.
        argument_gradients: gradients of the other arguments, those of the pairs' matrices included.
    """

    prepare: Callable[..., Any]
    split_transitions: Callable[..., Any]
    output_pass: Callable[..., Any]
    states_pass: Callable[..., Any]
    reverse_offsets: Callable[..., Any]
    reverse_pass: Callable[..., Any]
    argument_gradients: Callable[..., Any]


def choose_stages(config: DeltaRuleConfig) -> Stages:
    """The stages that a schedule asks for. Functions, so that a traceback has no frame of the choice."""
    forward = prepare, split_transitions, output_pass
    in_triton = Stages(*forward, states_pass, reverse_offsets, reverse_pass, _argument_gradients)
    pass_over = config.maps, config.output, config.states, config.offsets, config.reverse
    configs = config.prepare, *pass_over, config.gradients
    if config.output.uses_mma:
        from pallas_kernels.delta_rule.mosaic_mma import stages as mma

        return in_triton._replace(prepare=mma.prepare, output_pass=mma.output_pass)
    if all(kernel.mosaic is None for kernel in configs):
        return in_triton
    # Imported where it runs: a jax without Mosaic GPU still has all that Triton serves.
    from pallas_kernels.delta_rule.mosaic_gpu import stages as mosaic

    forward = mosaic.prepare, mosaic.split_transitions, mosaic.output_pass
    backward = mosaic.states_pass, mosaic.reverse_offsets, mosaic.reverse_pass, mosaic.argument_gradients
    choices = zip(configs, in_triton, (*forward, *backward))
    return Stages._make(triton if kernel.mosaic is None else other for kernel, triton, other in choices)


def _argument_gradients(
    kernel_shape: KernelShape,
    inputs: Inputs,
    d_out: Array,
    saved: gradients.Saved,
    prepared: WYFactors,
    config: DeltaRuleConfig,
    *,
    gates: tuple[Array | None, Array | None],
    tied_gates: bool,
    write_key_dtype: Any,
) -> Inputs:
    """Gradients of the pairs' matrices, then those of the arguments."""
    pairs = gradients.gradients_of_pairs(kernel_shape, inputs, d_out, saved, config.pair_gradients, tied_gates)
    options: dict[str, Any] = {"gates": gates, "tied_gates": tied_gates, "write_key_dtype": write_key_dtype}
    return gradients.argument_gradients(
        kernel_shape, inputs, d_out, saved, pairs, prepared, config.gradients, **options
    )

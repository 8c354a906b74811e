"""Stages that exist in two backends, each by the one that its launch asks for: Triton, or Mosaic GPU on Hopper."""

from collections.abc import Callable
from typing import Any, NamedTuple

from jax import Array

from pallas_kernels.common.triton.problem import Problem
from pallas_kernels.delta_rule.config import Schedule
from pallas_kernels.delta_rule.inputs import Inputs
from pallas_kernels.delta_rule.triton import bwd_dqkg as gradients
from pallas_kernels.delta_rule.triton.bwd_dh import reverse_offsets, reverse_pass
from pallas_kernels.delta_rule.triton.fwd import output_pass, states_pass
from pallas_kernels.delta_rule.triton.split_sequence import segment_maps
from pallas_kernels.delta_rule.triton.wy import Prepared, prepare


class Stages(NamedTuple):
    """One function for each stage.

    See those of the same names in `wy`, `split_sequence`, `fwd` and `bwd_dh`.

    Attributes:
        prepare: everything of a chunk that does not need the state.
        segment_maps: affine map of each segment.
        output_pass: output and final state.
        states_pass: states and residuals for the backward.
        reverse_offsets: what a segment's outputs add to the gradient at its start.
        reverse_pass: gradients of states, values, write gate and initial state.
        argument_gradients: gradients of the other arguments, those of the pairs' matrices included.
    """

    prepare: Callable[..., Any]
    segment_maps: Callable[..., Any]
    output_pass: Callable[..., Any]
    states_pass: Callable[..., Any]
    reverse_offsets: Callable[..., Any]
    reverse_pass: Callable[..., Any]
    argument_gradients: Callable[..., Any]


def choose_stages(schedule: Schedule) -> Stages:
    """The stages that a schedule asks for. Functions, so that a traceback has no frame of the choice."""
    forward = prepare, segment_maps, output_pass
    in_triton = Stages(*forward, states_pass, reverse_offsets, reverse_pass, _argument_gradients)
    launches = {
        "prepare": schedule.prepare,
        "segment_maps": schedule.maps,
        "output_pass": schedule.output,
        "states_pass": schedule.states,
        "reverse_offsets": schedule.offsets,
        "reverse_pass": schedule.reverse,
        "argument_gradients": schedule.gradients,
    }
    in_mosaic = [name for name, launch in launches.items() if launch.mosaic is not None]
    if not in_mosaic:
        return in_triton
    # Imported where it runs: a jax without Mosaic GPU still has all that Triton serves.
    from pallas_kernels.delta_rule.mosaic_gpu import stages as mosaic_stages

    return in_triton._replace(**{name: getattr(mosaic_stages, name) for name in in_mosaic})


def _argument_gradients(
    problem: Problem,
    inputs: Inputs,
    d_out: Array,
    saved: gradients.Saved,
    prepared: Prepared,
    schedule: Schedule,
    *,
    gates: tuple[Array | None, Array | None],
    tied_gates: bool,
    write_key_dtype: Any,
) -> Inputs:
    """Gradients of the pairs' matrices, then those of the arguments."""
    pairs = gradients.gradients_of_pairs(problem, inputs, d_out, saved, schedule.pair_gradients, tied_gates)
    options: dict[str, Any] = {"gates": gates, "tied_gates": tied_gates, "write_key_dtype": write_key_dtype}
    return gradients.argument_gradients(problem, inputs, d_out, saved, pairs, prepared, schedule.gradients, **options)

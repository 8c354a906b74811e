"""The stages of the chunk form put together, forward and backward, and the step of a single token."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax import Array

from pallas_kernels.common.decay import divisible
from pallas_kernels.common.row_shards import of_first_shard
from pallas_kernels.common.triton.backend import interpreted
from pallas_kernels.common.triton.kernel_shape import KernelShape
from pallas_kernels.common.vma import batch_alike
from pallas_kernels.delta_rule.config import DeltaRuleConfig
from pallas_kernels.delta_rule.inputs import Inputs, crop_results, kernel_shape_of, pad_inputs
from pallas_kernels.delta_rule.row_shards import gradient_after, state_before
from pallas_kernels.delta_rule.stages import choose_stages
from pallas_kernels.delta_rule.triton.bwd_dqkg import of_argument
from pallas_kernels.delta_rule.triton.bwd_pairs import Saved
from pallas_kernels.delta_rule.triton.decode import decode
from pallas_kernels.delta_rule.triton.split_sequence import combine_splits


@dataclasses.dataclass(frozen=True)
class Options:
    """Static options of a call: see `KernelShape` and `DeltaRuleConfig`.

    Attributes:
        online: see `KernelShape`.
        scale: likewise.
        config: compilation.
        tied_gates: whether `erase`, one number a token, is the write gate too; then the inputs have no other. Its
            gradient is one sum, rounded once.
        write_key_dtype: of the write key as it is given and of its gradient, where that is not the kernels' own.
        tokens: of a sequence before it is padded; None where it is not.
        diagonal_size: rows of a token, where linear attention has a diagonal.
        context_axis: mesh axis over which tokens are split; None where each device has whole rows.
    """

    online: bool
    scale: float
    config: DeltaRuleConfig
    tied_gates: bool = False
    write_key_dtype: Any = None
    tokens: int | None = None
    diagonal_size: int = 1
    context_axis: str | None = None

    @property
    def has_maps(self) -> bool:
        """Whether the splits' maps are needed: there are several, or they compose to the map of a shard."""
        return self.config.num_splits > 1 or self.context_axis is not None

    @property
    def sums_tied_gate(self) -> bool:
        """Whether the reverse pass finds the whole gradient of a shared gate, which it divides by the gate."""
        return self.tied_gates and self.config.reverse.mosaic is not None


def _problem(options: Options, inputs: Inputs) -> KernelShape:
    o = options
    return kernel_shape_of(
        KernelShape, inputs, online=o.online, scale=o.scale, num_splits=o.config.num_splits, tokens=o.tokens
    )


def _operands(options: Options, inputs: Inputs, has_gradient: bool = True) -> Inputs:
    """The inputs as kernels load them: with both gates, and with the write key in the dtype of the other matrices."""
    if options.tied_gates:
        gate: Any = inputs.erase
        gate = divisible(gate) if options.sums_tied_gate and has_gradient else gate
        inputs = inputs._replace(erase=gate, write=gate)
    if inputs.write_key is not None:
        inputs = inputs._replace(write_key=inputs.write_key.astype(inputs.k.dtype))
    return inputs


Pass = Callable[[Options, Inputs], tuple[Array, Array]]


def choose_pass() -> Pass:
    """`chunked_pass` with its gradients, for the caller to call."""
    return _interpreted_pass if interpreted() else _compiled_pass


def chunked_pass(options: Options, inputs: Inputs) -> tuple[Array, Array]:
    """Output `[B, T, HV, V]` and final state `[B, HV, K, V]` for padded inputs."""
    kernel_shape, config = _problem(options, inputs), options.config
    stages = choose_stages(config)
    forward = stages.forward if options.context_axis is None else None
    inputs = _operands(options, inputs, has_gradient=forward is None)
    if forward is not None:
        return batch_alike(inputs, forward(kernel_shape, inputs, config.forward))
    prepared = stages.wy_factors(kernel_shape, inputs, config.prepare)
    maps = stages.split_transitions(kernel_shape, inputs, prepared, config.maps) if options.has_maps else None
    boundary, _ = state_before(kernel_shape, maps, inputs.initial_state, config.fold, options.context_axis)
    split_states = combine_splits(kernel_shape, maps, boundary, config.fold)
    return batch_alike(inputs, stages.fwd_o(kernel_shape, inputs, prepared, split_states, config.output))


def _forward(options: Options, inputs: Inputs) -> tuple[tuple[Array, Array], Any]:
    """The stages of `chunked_pass` with what the backward keeps; here rather than there for a shorter traceback."""
    kernel_shape, config = _problem(options, inputs), options.config
    gates = inputs.erase, inputs.erase if options.tied_gates else inputs.write
    inputs = _operands(options, inputs)
    stages = choose_stages(config)
    prepared = stages.wy_factors(kernel_shape, inputs, config.prepare)
    maps = stages.split_transitions(kernel_shape, inputs, prepared, config.maps) if options.has_maps else None
    boundary, transition = state_before(kernel_shape, maps, inputs.initial_state, config.fold, options.context_axis)
    split_states = combine_splits(kernel_shape, maps, boundary, config.fold)
    output = config.output
    wanted = {"keeps_scores": True} if output.mosaic is not None and output.mosaic.scores_in_output else {}
    out, final, *scores = stages.fwd_o(kernel_shape, inputs, prepared, split_states, output, **wanted)
    if scores:
        prepared = prepared._replace(scores=scores[0])
    results = batch_alike(inputs, (out, final))
    kept = prepared._replace(growth=None, decay_sums=None), maps, transition, split_states
    return results, (inputs, gates, *kept)


def _backward(options: Options, residuals: Any, cotangents: tuple[Array, Array]) -> tuple[Inputs]:
    inputs, gates, prepared, maps, transition, split_states = residuals
    d_out, d_final_state = cotangents
    kernel_shape, config, axis = _problem(options, inputs), options.config, options.context_axis
    stages = choose_stages(config)
    is_found = options.sums_tied_gate
    # Triton's stage has no further digits of the residuals, nor of linear attention's states.
    wanted = {} if config.states.mosaic is None else {"with_digits": is_found}
    states, residual, *digits = stages.fwd_h(kernel_shape, inputs, prepared, split_states, config.states, **wanted)
    ends = None
    if maps is not None:
        offsets = stages.bwd_dh_offsets(kernel_shape, inputs, prepared, d_out, config.offsets)
        adjoint = maps._replace(offset=offsets)
        if axis is not None:
            d_final_state = gradient_after(kernel_shape, adjoint, transition, d_final_state, config.fold, axis)
        ends = combine_splits(kernel_shape, adjoint, d_final_state, config.fold, reverse=True)
    more = {"residuals": residual, "digits": digits[0] if digits else None} if is_found else {}
    back = stages.bwd_dh(kernel_shape, inputs, prepared, d_out, d_final_state, ends, config.reverse, **more)
    gate, d_gate = inputs.erase, back.d_write
    if is_found:
        inputs, back = inputs._replace(erase=None, write=None), back._replace(d_write=None)
    saved = Saved(states, residual, back, None if kernel_shape.online or not digits else digits[0])
    gradients = stages.bwd_dqkg(
        kernel_shape,
        inputs,
        d_out,
        saved,
        prepared,
        config,
        gates=gates,
        tied_gates=options.tied_gates and not is_found,
        write_key_dtype=options.write_key_dtype,
    )
    if is_found:
        gradients = gradients._replace(erase=of_argument(kernel_shape, d_gate, gate))
    if inputs.initial_state is not None:
        d_initial = of_first_shard(back.d_initial_state, axis)  # type: ignore[arg-type]
        gradients = gradients._replace(initial_state=d_initial.astype(inputs.initial_state.dtype))
    return (gradients,)


# Where a block is recomputed (`jax.checkpoint`), its first forward is that without a gradient: it keeps nothing. jax
# does not do so for what calls back, as the interpreter of kernels does.
_compiled_pass = jax.custom_vjp(chunked_pass, nondiff_argnums=(0,))
_compiled_pass.defvjp(_forward, _backward, optimize_remat=True)
_interpreted_pass = jax.custom_vjp(chunked_pass, nondiff_argnums=(0,))
_interpreted_pass.defvjp(_forward, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def one_token(run: Pass, options: Options, inputs: Inputs) -> tuple[Array, Array]:
    """Output and state of one token by the decode kernel; the gradient goes through `run`, a pass over chunks."""
    padded = _operands(options, pad_inputs(inputs, whole_chunks=False))
    results = decode(_problem(options, padded), padded, options.config.decode)
    return batch_alike(inputs, crop_results(inputs, results))


def _one_token_forward(run: Pass, options: Options, inputs: Inputs) -> tuple[tuple[Array, Array], Any]:
    results, transposed = jax.vjp(lambda x: crop_results(x, run(options, pad_inputs(x))), inputs)
    return batch_alike(inputs, results), transposed


def _one_token_backward(run: Pass, options: Options, transposed: Any, cotangents: tuple[Array, Array]) -> tuple[Inputs]:
    (gradients,) = transposed(cotangents)
    return (gradients._replace(resets=None),)


one_token.defvjp(_one_token_forward, _one_token_backward)

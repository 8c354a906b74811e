"""One token of several streams: their convolutions in one launch on NVIDIA GPUs."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.common.platform import platform
from pallas_kernels.short_convolution.branch import Epilogue
from rnnlib.ops.context_parallel import current_axis
from rnnlib.ops.derivatives import with_derivatives_of
from rnnlib.ops.kernels import kernel_operators, unsupported_reason
from rnnlib.ops.sharding import is_split
from rnnlib.ops.short_convolution.inputs import ConvolutionInputs
from rnnlib.ops.short_convolution.taps import last_inputs, short_convolution_taps

Call = tuple[ConvolutionInputs, Epilogue]


def one_launch_supports(calls: Sequence[Call]) -> bool:
    """Whether `one_token_convolutions` is faster than each call by itself: one token of bfloat16 on a GPU."""
    return (
        platform() == "gpu"
        and current_axis() is None
        and all(x.x.shape[1] == 1 and x.x.dtype == jnp.bfloat16 and x.initial_state is not None for x, _ in calls)
        and not any(map(is_split, jax.tree.leaves([x for x, _ in calls])))
        and unsupported_reason(
            lambda kernels: kernels.token_convolution.unsupported_reason(_streams([x for x, _ in calls], calls))
        )
        is None
    )


def _streams(inputs: Sequence[ConvolutionInputs], calls: Sequence[Call]) -> list:
    """The kernel's arguments."""
    kernels = kernel_operators().token_convolution
    return [
        kernels.TokenStream(x.x[:, 0], x.kernel, x.bias, x.initial_state, epilogue)
        for x, (_, epilogue) in zip(inputs, calls)
    ]


def one_token_convolutions(calls: Sequence[Call]) -> list[tuple[Array, Array]]:
    """`short_convolution` of one token for several streams, by one kernel; its derivatives are XLA's.

    The next states overwrite the initial states if no other code holds these.

    Args:
        calls: arrays and options of each stream. Segment ids are ignored: the first token always continues the state.

    Returns:
        For each stream the output `[B, 1, D]` and the next state `[B, W - 1, D]`.

    Raises:
        NotImplementedError: the kernel does not support the calls.
    """

    def run(inputs: list[ConvolutionInputs]) -> list[tuple[Array, Array]]:
        found = kernel_operators().token_convolution.one_token_convolutions(_streams(inputs, calls))
        return [(y[:, None], state) for y, state in found]

    def formula(inputs: list[ConvolutionInputs]) -> list[tuple[Array, Array]]:
        return [(short_convolution_taps(x, epilogue), last_inputs(x)) for x, (_, epilogue) in zip(inputs, calls)]

    return with_derivatives_of(formula, run)([x._replace(segment_ids=None) for x, _ in calls])

"""The short convolution on NVIDIA GPUs: the kernels of `pallas_kernels.short_convolution`."""

import functools
from typing import Any

import jax
from jax import Array

from pallas_kernels.short_convolution.branch import Epilogue
from rnnlib.ops.derivatives import with_further_derivatives
from rnnlib.ops.kernels import kernel_operators, unsupported_reason
from rnnlib.ops.short_convolution.inputs import ConvolutionInputs
from rnnlib.ops.short_convolution.taps import short_convolution_taps


def convolution_unsupported_reason(inputs: ConvolutionInputs, epilogue: Epilogue) -> str | None:
    """Why the kernels can't serve a call, as a noun phrase, or None if they can."""
    options = {"activation": epilogue.activation, "norm_size": epilogue.norm_size}
    return unsupported_reason(lambda kernels: kernels.short_convolution.unsupported_reason(*inputs[:4], **options))


@functools.partial(jax.jit, static_argnames=("epilogue",), inline=True)
def short_convolution_triton(inputs: ConvolutionInputs, epilogue: Epilogue) -> Array:
    """Evaluates the convolution by kernels; arguments and result as `short_convolution_taps`."""

    def keywords(inputs, segment_ids) -> dict[str, Any]:
        options = {"activation": epilogue.activation, "norm_size": epilogue.norm_size, "eps": epilogue.norm_eps}
        return inputs._replace(segment_ids=segment_ids)._asdict() | options

    def reference(inputs, segment_ids):
        return short_convolution_taps(inputs._replace(segment_ids=segment_ids), epilogue)

    run = with_further_derivatives(kernel_operators().short_convolution.short_convolution, keywords, reference)
    return run(inputs._replace(segment_ids=None), inputs.segment_ids)

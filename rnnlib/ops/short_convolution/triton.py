"""The short convolution on NVIDIA GPUs: the kernels of `pallas_kernels.triton`."""

import functools

import jax
from jax import Array

from rnnlib.ops.derivatives import with_further_derivatives
from rnnlib.ops.kernels import triton_kernels
from rnnlib.ops.short_convolution.inputs import ConvolutionInputs, Finish
from rnnlib.ops.short_convolution.taps import short_convolution_taps


def triton_convolution_unsupported(inputs: ConvolutionInputs, finish: Finish) -> str | None:
    """Why the kernels can't serve a call, as a noun phrase, or None if they can."""
    try:
        kernels = triton_kernels()
    except ImportError as error:
        return f"this installation: {error}"
    return kernels.convolution_unsupported(*inputs[:4], activation=finish.activation, norm_size=finish.norm_size)


@functools.partial(jax.jit, static_argnames=("finish",), inline=True)
def short_convolution_triton(inputs: ConvolutionInputs, finish: Finish) -> Array:
    """Evaluates the convolution by kernels; arguments and result as `short_convolution_taps`."""

    def kernel(inputs, segment_ids):
        options = {"activation": finish.activation, "norm_size": finish.norm_size, "eps": finish.norm_eps}
        return triton_kernels().short_convolution(**inputs._replace(segment_ids=segment_ids)._asdict(), **options)

    def reference(inputs, segment_ids):
        return short_convolution_taps(inputs._replace(segment_ids=segment_ids), finish)

    floating = inputs._replace(segment_ids=None)
    return with_further_derivatives(kernel, reference)(floating, inputs.segment_ids)

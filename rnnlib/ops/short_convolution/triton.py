"""The short convolution on NVIDIA GPUs: the kernels of `pallas_kernels.triton`."""

import functools

import jax
from jax import Array

from rnnlib.ops.kernels import triton_kernels
from rnnlib.ops.short_convolution.inputs import ConvolutionInputs, Finish


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
    return triton_kernels().short_convolution(
        **inputs._asdict(), activation=finish.activation, norm_size=finish.norm_size, eps=finish.norm_eps
    )

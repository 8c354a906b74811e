"""Kernels in Pallas on its Triton backend, for NVIDIA GPUs; interpreted on a CPU."""

from pallas_kernels.triton import preconditioner_readouts
from pallas_kernels.triton.gated_delta_rule import gated_delta_rule, linear_attention, unsupported
from pallas_kernels.triton.preconditioner import GramSchedule, diagonal_gram_readout, gram_unsupported
from pallas_kernels.triton.ridge_problem import RidgeSchedule
from pallas_kernels.triton.ridge_solve import ridge_solve, ridge_solve_unsupported
from pallas_kernels.triton.schedule import Schedule
from pallas_kernels.triton.short_convolution import (
    ConvolutionPrograms,
    ConvolutionSchedule,
    convolution_unsupported,
    short_convolution,
)

__all__ = [
    "ConvolutionPrograms",
    "ConvolutionSchedule",
    "GramSchedule",
    "RidgeSchedule",
    "Schedule",
    "convolution_unsupported",
    "diagonal_gram_readout",
    "gated_delta_rule",
    "gram_unsupported",
    "linear_attention",
    "preconditioner_readouts",
    "ridge_solve",
    "ridge_solve_unsupported",
    "short_convolution",
    "unsupported",
]

"""Kernels in Pallas on its Triton backend, for NVIDIA GPUs; interpreted on a CPU."""

from pallas_kernels.triton.gated_delta_rule import gated_delta_rule, linear_attention, unsupported
from pallas_kernels.triton.schedule import Schedule

__all__ = ["Schedule", "gated_delta_rule", "linear_attention", "unsupported"]

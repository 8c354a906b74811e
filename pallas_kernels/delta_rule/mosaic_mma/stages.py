"""Stages of the forward, with the signatures of their counterparts in Triton, and which calls they serve."""

import jax.numpy as jnp
from jax import Array

from pallas_kernels.common.config import KernelConfig
from pallas_kernels.common.mosaic_gpu import SIDE
from pallas_kernels.common.mosaic_mma import threads_copy
from pallas_kernels.common.triton.kernel_shape import KernelShape
from pallas_kernels.delta_rule.inputs import Inputs
from pallas_kernels.delta_rule.mosaic_mma import fwd, wy
from pallas_kernels.delta_rule.triton.wy import WYFactors


def wy_factors(kernel_shape: KernelShape, inputs: Inputs, launch: KernelConfig) -> WYFactors:
    """The first stage."""
    results = wy.wy_factors(kernel_shape, inputs, by_threads=threads_copy())
    return WYFactors(**{**dict.fromkeys(WYFactors._fields), **results})  # type: ignore[arg-type]


def fwd_o(
    kernel_shape: KernelShape, inputs: Inputs, prepared: WYFactors, split_states: Array | None, launch: KernelConfig
) -> tuple[Array, Array]:
    """Output `[B, T, HV, V]` and final state `[B, HV, K, V]`; `split_states` is None, as there is one split."""
    return fwd.fwd_o(kernel_shape, inputs, prepared, by_threads=threads_copy())


def unsupported_reason(inputs: Inputs) -> str | None:
    """Why these stages can't serve a call that Triton serves, as a noun phrase, or None if they can."""
    x = inputs
    if x.v.dtype != jnp.bfloat16:
        return f"matrices of dtype {x.v.dtype} (only bfloat16)"
    if x.q.shape[1] == 1:
        return "a single token (its kernel is Triton's)"
    if x.write_key is not None:
        return "a write key"
    for name in ("erase", "write", "log_decay"):
        gate = getattr(x, name)
        if gate is not None and gate.ndim == 4:
            return f"{name} of shape {gate.shape} (only one number a token)"
    for name, size in (("key", x.q.shape[3]), ("value", x.v.shape[3])):
        if not SIDE // 2 < size <= 2 * SIDE:
            return f"{name} size {size} ({SIDE // 2 + 1} to {2 * SIDE})"
    return None

"""Access to `pallas_kernels`, which is imported when a kernel is first needed."""

import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

from pallas_kernels.common.platform import platform


def kernel_operators() -> ModuleType:
    """The kernels: `pallas_kernels.operators`, which has a module for each operator.

    Raises:
        ImportError: this jax has no Pallas, or its Pallas has no Triton backend. On a GPU there is also a warning.
    """
    try:
        from pallas_kernels import operators
    except ImportError as error:
        if platform() == "gpu":
            warnings.warn(f"operators run without kernels, several times slower: {error}", RuntimeWarning, stacklevel=2)
        raise
    return operators


def unsupported_reason(ask: Callable[[Any], str | None]) -> str | None:
    """Why kernels can't serve a call, as a noun phrase, or None if they can.

    Args:
        ask: from `kernel_operators()` to the reason, where there are kernels at all.
    """
    try:
        operators = kernel_operators()
    except ImportError as error:
        return f"this installation: {error}"
    return ask(operators)


def attention_gradient_kernel(q: Any, k: Any, v: Any) -> Callable[..., Any] | None:
    """`pallas_kernels.attention.mosaic_gpu.bwd.attention_gradients` if it serves these arrays here, else None."""
    try:
        from pallas_kernels.attention.mosaic_gpu import bwd as kernels
    except ImportError:  # this jax has no Mosaic GPU; cuDNN's gradients serve as well, more slowly
        return None
    return kernels.attention_gradients if kernels.unsupported_reason(q, k, v) is None else None

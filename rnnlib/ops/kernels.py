"""Access to `pallas_kernels`, which is imported when a kernel is first needed."""

import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

from pallas_kernels.common.platform import platform


def triton_kernels() -> ModuleType:
    """The package of Triton kernels.

    Raises:
        ImportError: this jax has no Pallas, or its Pallas has no Triton backend. On a GPU there is also a warning.
    """
    try:
        from pallas_kernels import operators as triton
    except ImportError as error:
        if platform() == "gpu":
            warnings.warn(f"operators run without kernels, several times slower: {error}", RuntimeWarning, stacklevel=2)
        raise
    return triton


def attention_gradient_kernel(q: Any, k: Any, v: Any) -> Callable[..., Any] | None:
    """`pallas_kernels.attention.mosaic_gpu.bwd.attention_gradients` if it serves these arrays here, else None."""
    try:
        from pallas_kernels.attention.mosaic_gpu import bwd as kernels
    except ImportError:  # this jax has no Mosaic GPU; cuDNN's gradients serve as well, more slowly
        return None
    return kernels.attention_gradients if kernels.attention_gradients_unsupported(q, k, v) is None else None


def triton_unsupported(objection: str, *arrays: Any, **options: Any) -> str | None:
    """Why the Triton kernels can't serve a call, as a noun phrase, or None if they can.

    Args:
        objection: name of the function of `pallas_kernels.operators` that checks the call, such as `"unsupported"`.
        *arrays: its arguments.
        **options: likewise.
    """
    try:
        kernels = triton_kernels()
    except ImportError as error:
        return f"this installation: {error}"
    return getattr(kernels, objection)(*arrays, **options)

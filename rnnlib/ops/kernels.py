"""The way from the operators to `pallas_kernels`: imported when first needed, and only there."""

from types import ModuleType

from jax import Array


def triton_kernels() -> ModuleType:
    """The package of Triton kernels.

    Raises:
        ImportError: this jax has no Pallas, or its Pallas no Triton backend.
    """
    from pallas_kernels import triton

    return triton


def triton_unsupported(q: Array, k: Array, v: Array, *gates: Array | None, chunk_size: int) -> str | None:
    """Why the Triton kernels can't serve a call, as a noun phrase, or None if they can; `gates` are erase and decay."""
    try:
        kernels = triton_kernels()
    except ImportError as error:
        return f"this installation: {error}"
    return kernels.unsupported(q, k, v, *gates, chunk_size=chunk_size)

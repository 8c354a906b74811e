"""Products of rows with a matrix. For few rows, as in decoding one token, XLA is slow and a kernel replaces it."""

import contextlib
import contextvars
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from pallas_kernels.platform import platform
from rnnlib.ops.derivatives import with_derivatives_of
from rnnlib.ops.kernels import triton_kernels, triton_unsupported
from rnnlib.ops.sharding import dot_general_over_mesh, is_split


def thin_kernel_serves(x: Array, kernels: Sequence[Array]) -> bool:
    """Whether `thin_products` of these arrays is faster by a kernel: few rows of bfloat16 on a GPU."""
    return (
        platform() == "gpu"
        and x.dtype == jnp.bfloat16
        and not any(map(is_split, (x, *kernels)))
        and triton_unsupported("thin_unsupported", _flat(x), *kernels) is None
    )


def _flat(x: Array) -> Array:
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def thin_products(
    x: Float[Array, "*rows K"],
    kernels: Sequence[Float[Array, "K _"]],
    *,
    is_gated: bool = False,
    added: Float[Array, "*rows _"] | None = None,
) -> tuple[Float[Array, "*rows _"], ...]:
    """`x @ W` for each of `kernels` in one launch, accumulated in float32; derivatives are computed by XLA.

    Args:
        x: rows, at most 256 over all leading axes.
        kernels: matrices in `x`'s dtype. Their numbers of columns may differ.
        is_gated: `kernels` are two matrices of one shape, and the only result is `silu(x W_0) * (x W_1)`.
        added: if given, in `x`'s dtype, `kernels` is one matrix and the result is `added + x @ W`.

    Returns:
        The results in `x`'s dtype, each rounded once.

    Raises:
        NotImplementedError: the kernel does not support the call.
    """

    def run(x: Array, kernels: tuple[Array, ...], added: Array | None) -> tuple[Array, ...]:
        other = None if added is None else _flat(added)
        found = triton_kernels().thin_products(_flat(x), kernels, is_gated=is_gated, added=other)
        return tuple(y.reshape(*x.shape[:-1], y.shape[-1]) for y in found)

    def formula(x: Array, kernels: tuple[Array, ...], added: Array | None) -> tuple[Array, ...]:
        results = [jnp.matmul(x, kernel, preferred_element_type=jnp.float32) for kernel in kernels]
        if is_gated:
            results = [jax.nn.silu(results[0]) * results[1]]
        if added is not None:
            results = [added + results[0]]
        return tuple(y.astype(x.dtype) for y in results)

    return with_derivatives_of(formula, run)(x, tuple(kernels), added)


_MADE: contextvars.ContextVar[list[tuple[Array, Array, Array]] | None]
_MADE = contextvars.ContextVar("products_of_few_rows", default=None)


@contextlib.contextmanager
def remembered_products() -> Iterator[None]:
    """Within this context, `added_to` knows which of its arguments are products by the kernel."""
    token = _MADE.set([])
    try:
        yield
    finally:
        _MADE.reset(token)


def added_to(x: Array, y: Array) -> Array:
    """`x + y`. If `y` is a product by the kernel, the kernel adds `x` itself, and XLA drops the product without `x`."""
    for made, lhs, rhs in _MADE.get() or ():
        if made is y and x.dtype == y.dtype and x.shape == y.shape and not is_split(x):
            return thin_products(lhs, (rhs,), added=x)[0]
    return x + y


def row_product(x: Float[Array, "*rows K"], kernel: Float[Array, "K N"], **options: Any) -> Float[Array, "*rows N"]:
    """`x @ kernel`. On a CPU, all row axes are flattened into one.

    The kernel's gradient contracts all row axes. If these are two axes, XLA for CPUs (jaxlib 0.11.2) first copies the
    array into transposed order, element by element, and recomputes the array's own operations in that copy. With one
    row axis, both arrays are used in their present layout.

    Args:
        x: rows.
        kernel: the matrix.
        **options: of `jax.lax.dot_general`.

    Returns:
        The products, in the dtype of `jax.lax.dot_general`.
    """
    rows = x.shape[:-1]
    if len(rows) > 1 and platform() == "cpu" and not is_split(x) and not is_split(kernel):
        flat = jax.lax.dot_general(_flat(x), kernel, (((1,), (0,)), ((), ())), **options)
        return flat.reshape(*rows, kernel.shape[1])
    return dot_general_over_mesh(x, kernel, (((x.ndim - 1,), (0,)), ((), ())), **options)


def linear_product(lhs: Array, rhs: Array, dimension_numbers: Any, *args: Any, **options: Any) -> Array:
    """`jax.lax.dot_general` for linear maps: by a kernel for few rows, else as `row_product`."""
    plain = not args and all(value is None for value in options.values())
    is_map = dimension_numbers == (((lhs.ndim - 1,), (0,)), ((), ())) and rhs.ndim == 2
    if plain and is_map and lhs.size and lhs.dtype == rhs.dtype and thin_kernel_serves(lhs, (rhs,)):
        y = thin_products(lhs, (rhs,))[0]
        made = _MADE.get()
        if made is not None:
            made.append((y, lhs, rhs))
        return y
    if is_map and not args:
        return row_product(lhs, rhs, **options)
    return dot_general_over_mesh(lhs, rhs, dimension_numbers, *args, **options)

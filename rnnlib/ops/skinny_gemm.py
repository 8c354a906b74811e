"""Products of rows with a matrix. For few rows, as in decoding one token, XLA is slow and a kernel replaces it."""

import dataclasses
import functools
import math
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from pallas_kernels.common.platform import platform
from pallas_kernels.skinny_gemm.columns import KernelColumns
from rnnlib.ops.derivatives import with_derivatives_of
from rnnlib.ops.kernels import kernel_operators, unsupported_reason
from rnnlib.ops.sharding import dot_general_over_mesh, is_split


def skinny_kernel_supports(x: Array, kernels: Sequence[Array | KernelColumns]) -> bool:
    """Whether `skinny_matmuls` of these arrays is faster by a kernel: few rows of bfloat16 on a GPU."""
    return (
        platform() == "gpu"
        and x.dtype == jnp.bfloat16
        and not any(map(is_split, (x, *jax.tree.leaves(list(kernels)))))
        and unsupported_reason(lambda operators: operators.skinny_gemm.unsupported_reason(_flat(x), *kernels)) is None
    )


def _flat(x: Array) -> Array:
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


@functools.partial(jax.tree_util.register_dataclass, data_fields=(), meta_fields=("bound",))
@dataclasses.dataclass(frozen=True)
class BoundedSigmoid:
    """`bound * sigmoid(y)`, which `skinny_matmuls` can make of a product y.

    Attributes:
        bound: factor of the sigmoid.
    """

    bound: float = 1.0

    def __call__(self, y: Float[Array, "*rows N"]) -> Float[Array, "*rows N"]:
        """The formula, in `y`'s dtype."""
        return self.bound * jax.nn.sigmoid(y)


@functools.partial(jax.tree_util.register_dataclass, data_fields=("log_rate", "bias"), meta_fields=())
@dataclasses.dataclass(frozen=True)
class LogDecay:
    """`-exp(log_rate) * softplus(y + bias)`, which `skinny_matmuls` can make of a product y.

    Attributes:
        log_rate: `[R]`, each of `N / R` consecutive columns.
        bias: `[N]`.
    """

    log_rate: Float[Array, " R"]
    bias: Float[Array, " N"]

    def __call__(self, y: Float[Array, "*rows N"]) -> Float[Array, "*rows N"]:
        """The formula, in `y`'s dtype."""
        rate = jnp.repeat(jnp.exp(self.log_rate.astype(y.dtype)), y.shape[-1] // len(self.log_rate))
        return -rate * jax.nn.softplus(y + self.bias.astype(y.dtype))


Epilogue = BoundedSigmoid | LogDecay


def skinny_matmuls(
    x: Float[Array, "*rows K"] | Sequence[Float[Array, "*rows _"]],
    kernels: Sequence[Float[Array, "_ _"] | KernelColumns],
    *,
    is_gated: bool = False,
    residual: Float[Array, "*rows _"] | None = None,
    epilogues: Sequence[Epilogue | None] | None = None,
) -> tuple[Float[Array, "*rows _"], ...]:
    """`x @ W` for each of `kernels` in one launch, accumulated in float32; derivatives are computed by XLA.

    Args:
        x: rows, at most 512 over all leading axes; or those of each kernel, which differ in their last axis at most.
        kernels: matrices in `x`'s dtype, or columns of one. Their numbers of columns may differ.
        is_gated: `kernels` are two matrices of one shape, and the only result is `silu(x W_0) * (x W_1)`.
        residual: if given, in `x`'s dtype, `kernels` is one matrix and the result is `residual + x @ W`.
        epilogues: of each product, a function of it that is the result, or None. It takes the product rounded to `x`'s
            dtype, and computes in float32; not with `is_gated` or `residual`.

    Returns:
        The results in `x`'s dtype, each rounded once; those with an epilogue in float32.

    Raises:
        NotImplementedError: the kernel does not support the call.
        ValueError: arguments do not go together.
    """
    xs = list(x) if isinstance(x, Sequence) else [x]
    which = range(len(kernels)) if isinstance(x, Sequence) else [0] * len(kernels)  # of the inputs

    def run(xs: list[Array], kernels: list[Any], residual: Array | None, epilogues: list[Epilogue | None]) -> Any:
        flat, other = [_flat(own) for own in xs], None if residual is None else _flat(residual)
        options = {"is_gated": is_gated, "added": other, "epilogues": [_of_kernel(epilogue) for epilogue in epilogues]}
        gemm = kernel_operators().skinny_gemm
        found = gemm.skinny_matmuls(flat if isinstance(x, Sequence) else flat[0], kernels, **options)
        return tuple(y.reshape(*xs[0].shape[:-1], y.shape[-1]) for y in found)

    def formula(xs: list[Array], kernels: list[Any], residual: Array | None, epilogues: list[Epilogue | None]) -> Any:
        arrays = [w.array() if isinstance(w, KernelColumns) else w for w in kernels]
        results = [jnp.matmul(xs[n], w, preferred_element_type=jnp.float32) for n, w in zip(which, arrays)]
        if is_gated:
            results = [jax.nn.silu(results[0]) * results[1]]
        if residual is not None:
            results = [residual + results[0]]
        rounded = [y.astype(xs[0].dtype) for y in results]
        return tuple(y if f is None else f(y.astype(jnp.float32)) for y, f in zip(rounded, epilogues))

    given = [None] * len(kernels) if epilogues is None else list(epilogues)
    return with_derivatives_of(formula, run)(xs, list(kernels), residual, given)


def _of_kernel(epilogue: Epilogue | None) -> Any:
    """An epilogue as the kernel takes it."""
    if epilogue is None:
        return None
    fields = {field.name: getattr(epilogue, field.name) for field in dataclasses.fields(epilogue)}
    return kernel_operators().skinny_gemm.Epilogue(**fields)


def residual_product(
    x: Float[Array, "*rows K"], kernel: Float[Array, "K N"], residual: Float[Array, "*rows N"]
) -> Float[Array, "*rows N"]:
    """`residual + x @ kernel` of few rows, by a kernel that adds the residual itself or by one loop after it.

    Raises:
        NotImplementedError: `skinny_kernel_supports` says no.
    """
    return skinny_matmuls(x, (kernel,), residual=residual)[0]


def split_k_partials(x: Float[Array, "*rows K"], kernel: Float[Array, "K N"]) -> Float[Array, "S *rows N"] | None:
    """`x @ kernel` of few rows as the S sums over parts of K that its kernel makes, float32, for what adds them up.

    None where the kernel makes one sum.

    Raises:
        NotImplementedError: `skinny_kernel_supports` says no.
    """
    splits = kernel_operators().skinny_gemm.num_partials(math.prod(x.shape[:-1]), *kernel.shape)
    if splits == 1:
        return None

    def run(x: Array, kernel: Array) -> Array:
        parts = kernel_operators().skinny_gemm.skinny_matmul_partials(_flat(x), kernel)
        return parts.reshape(splits, *x.shape[:-1], kernel.shape[1])

    def formula(x: Array, kernel: Array) -> Array:
        # How the derivative of the product is cut into parts does not matter: they are added up.
        product = jnp.matmul(x, kernel, preferred_element_type=jnp.float32)
        return jnp.zeros((splits, *product.shape), product.dtype).at[0].set(product)

    return with_derivatives_of(formula, run)(x, kernel)


def sum_of_partials(partials: Float[Array, "S *rows N"], residual: Float[Array, "*rows N"]) -> Float[Array, "*rows N"]:
    """`residual` and all `partials` added up in float32, rounded once to the residual's dtype."""
    total = functools.reduce(operator.add, partials)  # one loop for XLA, in a fixed order
    return (total + residual.astype(jnp.float32)).astype(residual.dtype)


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
    if plain and is_map and lhs.size and lhs.dtype == rhs.dtype and skinny_kernel_supports(lhs, (rhs,)):
        return skinny_matmuls(lhs, (rhs,))[0]
    if is_map and not args:
        return row_product(lhs, rhs, **options)
    return dot_general_over_mesh(lhs, rhs, dimension_numbers, *args, **options)

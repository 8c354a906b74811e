"""Products of rows with a matrix. For few rows, as in decoding one token, XLA is slow and a kernel replaces it."""

import contextlib
import contextvars
import dataclasses
import functools
import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from pallas_kernels.common.platform import platform
from rnnlib.ops.derivatives import with_derivatives_of
from rnnlib.ops.kernels import kernel_operators, unsupported_reason
from rnnlib.ops.sharding import dot_general_over_mesh, is_split


def thin_kernel_serves(x: Array, kernels: Sequence[Array]) -> bool:
    """Whether `thin_products` of these arrays is faster by a kernel: few rows of bfloat16 on a GPU."""
    return (
        platform() == "gpu"
        and x.dtype == jnp.bfloat16
        and not any(map(is_split, (x, *kernels)))
        and unsupported_reason(lambda operators: operators.skinny_gemm.unsupported_reason(_flat(x), *kernels)) is None
    )


def _flat(x: Array) -> Array:
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


@functools.partial(jax.tree_util.register_dataclass, data_fields=(), meta_fields=("bound",))
@dataclasses.dataclass(frozen=True)
class BoundedSigmoid:
    """`bound * sigmoid(y)`, which `thin_products` can make of a product y.

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
    """`-exp(log_rate) * softplus(y + bias)`, which `thin_products` can make of a product y.

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


Finish = BoundedSigmoid | LogDecay


def thin_products(
    x: Float[Array, "*rows K"] | Sequence[Float[Array, "*rows _"]],
    kernels: Sequence[Float[Array, "_ _"]],
    *,
    is_gated: bool = False,
    added: Float[Array, "*rows _"] | None = None,
    finishes: Sequence[Finish | None] | None = None,
) -> tuple[Float[Array, "*rows _"], ...]:
    """`x @ W` for each of `kernels` in one launch, accumulated in float32; derivatives are computed by XLA.

    Args:
        x: rows, at most 512 over all leading axes; or those of each kernel, which differ in their last axis at most.
        kernels: matrices in `x`'s dtype. Their numbers of columns may differ.
        is_gated: `kernels` are two matrices of one shape, and the only result is `silu(x W_0) * (x W_1)`.
        added: if given, in `x`'s dtype, `kernels` is one matrix and the result is `added + x @ W`.
        finishes: of each product, a function of it that is the result, or None. It takes the product rounded to `x`'s
            dtype, and computes in float32; not with `is_gated` or `added`.

    Returns:
        The results in `x`'s dtype, each rounded once; those with a finish in float32.

    Raises:
        NotImplementedError: the kernel does not support the call.
        ValueError: arguments do not go together.
    """
    xs = list(x) if isinstance(x, Sequence) else [x] * len(kernels)
    distinct = {id(own): own for own in xs}  # each is one argument of the function with derivatives
    which = [list(distinct).index(id(own)) for own in xs]

    def run(xs: list[Array], kernels: tuple[Array, ...], added: Array | None, finishes: list[Finish | None]) -> Any:
        other, flat = None if added is None else _flat(added), [_flat(own) for own in xs]
        options = {"is_gated": is_gated, "added": other, "finishes": [_of_kernel(finish) for finish in finishes]}
        found = kernel_operators().skinny_gemm.thin_products([flat[n] for n in which], kernels, **options)
        return tuple(y.reshape(*xs[0].shape[:-1], y.shape[-1]) for y in found)

    def formula(xs: list[Array], kernels: tuple[Array, ...], added: Array | None, finishes: list[Finish | None]) -> Any:
        results = [jnp.matmul(xs[n], w, preferred_element_type=jnp.float32) for n, w in zip(which, kernels)]
        if is_gated:
            results = [jax.nn.silu(results[0]) * results[1]]
        if added is not None:
            results = [added + results[0]]
        rounded = [y.astype(xs[0].dtype) for y in results]
        return tuple(y if f is None else f(y.astype(jnp.float32)) for y, f in zip(rounded, finishes))

    given = [None] * len(kernels) if finishes is None else list(finishes)
    return with_derivatives_of(formula, run)(list(distinct.values()), tuple(kernels), added, given)


def _of_kernel(finish: Finish | None) -> Any:
    """A finish as the kernel takes it."""
    if finish is None:
        return None
    fields = {field.name: getattr(finish, field.name) for field in dataclasses.fields(finish)}
    return kernel_operators().skinny_gemm.Finish(**fields)


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


class SumInParts(NamedTuple):
    """A sum that nothing has computed yet: a norm that reads it can do so in its own kernel.

    Attributes:
        added: one summand.
        parts: the others.
    """

    added: Float[Array, "*rows N"]
    parts: Float[Array, "S *rows N"]

    def computed(self) -> Float[Array, "*rows N"]:
        """The sum, in float32, rounded once to the dtype of `added`."""
        total = functools.reduce(operator.add, self.parts)  # one loop for XLA, in a fixed order
        return (total + self.added.astype(jnp.float32)).astype(self.added.dtype)


def added_to(x: Array, y: Array) -> Array | SumInParts:
    """`x + y`, which may be a sum still to be computed: see `computed`.

    If `y` is a product by the kernel, the kernel adds `x` itself, or gives the parts of the product that it makes. XLA
    drops the product without `x`.
    """
    for made, lhs, rhs in _MADE.get() or ():
        if made is y and x.dtype == y.dtype and x.shape == y.shape and not is_split(x):
            rows = math.prod(lhs.shape[:-1])
            if (splits := kernel_operators().skinny_gemm.thin_splits(rows, *rhs.shape)) > 1:
                return SumInParts(x, _parts(lhs, rhs, splits))
            return thin_products(lhs, (rhs,), added=x)[0]
    return x + y


def computed(x: Array | SumInParts) -> Array:
    """An array, or the sum that is still to be computed."""
    return x.computed() if isinstance(x, SumInParts) else x


def _parts(x: Float[Array, "*rows K"], kernel: Float[Array, "K N"], splits: int) -> Float[Array, "S *rows N"]:
    """`x @ kernel` as the sums that its kernel makes, float32."""

    def run(x: Array, kernel: Array) -> Array:
        parts = kernel_operators().skinny_gemm.thin_product_parts(_flat(x), kernel)
        return parts.reshape(splits, *x.shape[:-1], kernel.shape[1])

    def formula(x: Array, kernel: Array) -> Array:
        # How the derivative of the product is cut into parts does not matter: they are added up.
        product = jnp.matmul(x, kernel, preferred_element_type=jnp.float32)
        return jnp.zeros((splits, *product.shape), product.dtype).at[0].set(product)

    return with_derivatives_of(formula, run)(x, kernel)


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

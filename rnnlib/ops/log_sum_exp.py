"""The logarithm of a sum of exponentials; long rows on a GPU take one pass over memory."""

from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from pallas_kernels.common.platform import platform
from rnnlib.ops.kernels import kernel_operators, unsupported_reason
from rnnlib.ops.sharding import is_split

# Smallest number of elements for which the kernel is faster, despite its launch.
_LEAST = 1 << 20


def log_sum_exp_kernel_supports(x: Array) -> bool:
    """Whether the kernel is faster for an array: a large one on a GPU."""
    return (
        platform() == "gpu"
        and x.size >= _LEAST
        and not is_split(x)
        and unsupported_reason(lambda kernels: kernels.cross_entropy.unsupported_reason(x)) is None
    )


def log_sum_exp(
    x: Float[Array, "*rows V"], *, implementation: Literal["xla", "triton"] | None = None
) -> Float[Array, "*rows"]:
    """`log(sum(exp(x)))` over the last axis, computed in float32 at least.

    XLA reads rows once for their largest number and once more for the sum, the kernel once. Derivatives are XLA's.

    Args:
        x: rows, at least one number each. -inf is a number that is left out.
        implementation: `"xla"`, `"triton"`, or None for the kernel where `log_sum_exp_kernel_supports`.

    Returns:
        The result, in float32 at least.

    Raises:
        NotImplementedError: the kernel is asked for and does not support the call.
    """
    if implementation is None:
        implementation = "triton" if log_sum_exp_kernel_supports(x) else "xla"

    def formula(x: Array) -> Array:
        return jax.nn.logsumexp(x.astype(jnp.promote_types(x.dtype, jnp.float32)), axis=-1)

    if implementation == "xla":
        return formula(x)
    run = jax.custom_jvp(lambda x: kernel_operators().cross_entropy.log_sum_exp(x))

    def derivative(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
        (x,), (d_x,) = primals, tangents
        result = run(x)
        return result, jnp.sum(jnp.exp(x.astype(result.dtype) - result[..., None]) * d_x, axis=-1)

    run.defjvp(derivative)
    return run(x)

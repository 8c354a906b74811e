"""A log decay by channel, `-rate softplus(p + bias)`, by kernels for large arrays on a GPU."""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from pallas_kernels.common.platform import platform
from rnnlib.ops.derivatives import with_further_derivatives
from rnnlib.ops.kernels import kernel_operators, unsupported_reason
from rnnlib.ops.sharding import is_split

# Smallest number of elements for which the kernels are faster, despite their launches.
_LEAST = 1 << 20


def softplus_decay_supports(p: Array, rate: Array, bias: Array) -> bool:
    """Whether `softplus_decay` of these arrays is faster than XLA: large ones of bfloat16 on a GPU."""
    return (
        platform() == "gpu"
        and p.dtype == jnp.bfloat16
        and p.size >= _LEAST
        and not any(map(is_split, (p, rate, bias)))
        and unsupported_reason(lambda kernels: kernels.softplus_decay.unsupported_reason(p, rate, bias)) is None
    )


def softplus_decay(
    p: Float[Array, "*rows F"], rate: Float[Array, " F"], bias: Float[Array, " F"]
) -> Float[Array, "*rows F"]:
    """`-rate * softplus(p + bias)` by channel, computed in float32 by kernels.

    The first derivative is the kernel's, which keeps the result and not `p`; further ones are XLA's.

    Args:
        p: projections.
        rate: of each channel, above 0.
        bias: of each channel.

    Returns:
        The log decay, float32.

    Raises:
        NotImplementedError: the kernels do not support the call.
    """

    def reference(p: Array, rate: Array, bias: Array, unused: None) -> Array:
        return -rate.astype(jnp.float32) * jax.nn.softplus(p.astype(jnp.float32) + bias.astype(jnp.float32))

    def keywords(p: Array, rate: Array, bias: Array, unused: None) -> dict[str, Array]:
        return {"p": p, "rate": rate, "bias": bias}

    kernel = kernel_operators().softplus_decay.softplus_decay
    return with_further_derivatives(kernel, keywords, reference)(p, rate, bias, None)

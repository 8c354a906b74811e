"""RMS norm of rows, with an optional output gate or residual stream; supported cases take one pass over memory."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float

from pallas_kernels.common.platform import platform
from rnnlib.ops.derivatives import with_derivatives_of, with_further_derivatives
from rnnlib.ops.kernels import kernel_operators, unsupported_reason
from rnnlib.ops.sharding import is_split
from rnnlib.ops.skinny_gemm import sum_of_partials

# Smallest number of elements for which a kernel is faster, despite its launch.
_LEAST = 1 << 20


def norm_kernel_supports(
    x: Array, scale: Array, z: Array | None = None, z_bias: Array | None = None, *, between_kernels: bool = False
) -> bool:
    """Whether `rms_norm` of these arrays is faster by a kernel: large ones of bfloat16 on a GPU.

    With `between_kernels`, a kernel is faster for small arrays too: XLA then has nothing to fuse the norm with and
    launches it in two parts.
    """
    return (
        platform() == "gpu"
        and x.dtype == jnp.bfloat16
        and (between_kernels or x.size >= _LEAST)
        and not any(map(is_split, (x, scale, z, z_bias)))
        and unsupported_reason(lambda kernels: kernels.norms.unsupported_reason(x, scale, z, z_bias)) is None
    )


def rms_norm(
    x: Float[Array, "*rows F"],
    scale: Float[Array, " F"],
    *,
    z: Float[Array, "*rows F"] | None = None,
    z_bias: Float[Array, "H F"] | None = None,
    activation: Literal["silu", "sigmoid"] = "silu",
    eps: float = 1e-6,
    dtype: DTypeLike | None = None,
    keeps: bool = False,
    implementation: Literal["xla", "triton"] | None = None,
) -> tuple[Float[Array, "*rows F"], Float[Array, "*rows F"] | None]:
    """`x / sqrt(mean x^2 + eps) * scale * activation(z + z_bias)` over the last axis, computed in float32 at least.

    Zhang and Sennrich, 2019 (arXiv 1910.07467).

    Args:
        x: rows.
        scale: of each feature.
        z: the argument of the gate's activation; None is no gate.
        z_bias: added to `z`, of each head of rows `[..., H, F]`; None is zero. It needs `z`.
        activation: of the gate.
        eps: added to the mean square.
        dtype: of the result; None is `x`'s.
        keeps: whether to return `x` too, for a residual stream that continues with it. The gradient's kernel then adds
            the gradient of the returned `x`, which saves a pass over memory.
        implementation: `"xla"`, `"triton"`, or None for the kernel where `norm_kernel_supports`.

    Returns:
        The result, rounded once, and `x` or None.

    Raises:
        ValueError: `z_bias` is not of each head, or given without `z`.
        NotImplementedError: the kernel is asked for and does not support the call.
    """
    if z_bias is not None and (z is None or z_bias.shape != x.shape[-2:]):
        raise ValueError(
            f"rms_norm: z_bias has shape {z_bias.shape} where z is {None if z is None else 'an array'}, expected the "
            f"last two axes of x, {x.shape[-2:]}, and a z"
        )
    dtype = x.dtype if dtype is None else dtype
    if implementation is None:
        implementation = "triton" if norm_kernel_supports(x, scale, z, z_bias) else "xla"

    def reference(
        x: Array, scale: Array, z: Array | None, z_bias: Array | None, unused: None
    ) -> tuple[Array, Array | None]:
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        y = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps) * scale.astype(wide.dtype)
        if z is not None:
            z = z.astype(wide.dtype)
            z = z if z_bias is None else z + z_bias.astype(wide.dtype)
            y = y * (jax.nn.silu if activation == "silu" else jax.nn.sigmoid)(z)
        return y.astype(dtype), x if keeps else None

    if implementation == "xla":
        return reference(x, scale, z, z_bias, None)

    def keywords(x: Array, scale: Array, z: Array | None, z_bias: Array | None, unused: None) -> dict[str, Any]:
        options = {"activation": activation, "eps": eps, "dtype": jnp.dtype(dtype).name, "keeps": keeps}
        return {"x": x, "scale": scale, "z": z, "z_bias": z_bias} | options

    if keeps:  # without the barrier XLA computes the residual stream's sum twice: for the norm and for the next sum
        x = jax.lax.optimization_barrier(x)
    return with_further_derivatives(kernel_operators().norms.rms_norm, keywords, reference)(x, scale, z, z_bias, None)


def rms_norm_of_sum(
    parts: Float[Array, "S *rows F"],
    added: Float[Array, "*rows F"],
    scale: Float[Array, " F"],
    *,
    eps: float = 1e-6,
    dtype: DTypeLike | None = None,
) -> tuple[Float[Array, "*rows F"], Float[Array, "*rows F"]]:
    """The RMS norm of `added` and all `parts` together, and their sum, by one kernel; derivatives are computed by XLA.

    Args:
        parts: float32, added up in their order.
        added: rows that they are added to.
        scale: of each feature.
        eps: added to the mean square.
        dtype: of the norm; None is `added`'s.

    Returns:
        The norm of the rounded sum, rounded once, and this sum in `added`'s dtype.

    Raises:
        NotImplementedError: the kernel does not support the call.
    """
    dtype = jnp.dtype(added.dtype if dtype is None else dtype)

    def run(parts: Array, added: Array, scale: Array) -> tuple[Array, Array]:
        flat = added.reshape(-1, added.shape[-1])
        y, total = kernel_operators().norms.rms_norm_of_sum(
            parts.reshape(len(parts), *flat.shape), flat, scale, eps=eps, dtype=dtype.name
        )
        return y.reshape(added.shape), total.reshape(added.shape)

    def formula(parts: Array, added: Array, scale: Array) -> tuple[Array, Array]:
        total = sum_of_partials(parts, added)
        return rms_norm(total, scale, eps=eps, dtype=dtype, implementation="xla")[0], total

    return with_derivatives_of(formula, run)(parts, added, scale)

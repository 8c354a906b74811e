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
    x: Array,
    scale: Array,
    z: Array | None = None,
    z_bias: Array | None = None,
    v: Array | None = None,
    skip: Array | None = None,
    *,
    between_kernels: bool = False,
) -> bool:
    """Whether `rms_norm` of these arrays is faster by a kernel: large ones of bfloat16 on a GPU.

    With `between_kernels`, a kernel is faster for small arrays too: XLA then has nothing to fuse the norm with and
    launches it in two parts.
    """
    return (
        platform() == "gpu"
        and x.dtype == jnp.bfloat16
        and (between_kernels or x.size >= _LEAST)
        and not any(map(is_split, (x, scale, z, z_bias, v, skip)))
        and unsupported_reason(lambda kernels: kernels.norms.unsupported_reason(x, scale, z, z_bias, v, skip)) is None
    )


def rms_norm(
    x: Float[Array, "*rows F"],
    scale: Float[Array, " F"] | Float[Array, "H F"],
    *,
    z: Float[Array, "*rows F"] | None = None,
    z_bias: Float[Array, "H F"] | None = None,
    v: Float[Array, "*rows F"] | None = None,
    skip: Float[Array, "H F"] | None = None,
    activation: Literal["silu", "sigmoid"] = "silu",
    gate_first: bool = False,
    eps: float = 1e-6,
    dtype: DTypeLike | None = None,
    keeps: bool = False,
    implementation: Literal["xla", "triton"] | None = None,
) -> tuple[Float[Array, "*rows F"], Float[Array, "*rows F"] | None]:
    """`u / sqrt(mean u^2 + eps) * scale * activation(z + z_bias)` over the last axis, with `u = x + skip * v`.

    Zhang and Sennrich, 2019 (arXiv 1910.07467). With `gate_first` the gate stands before the norm (Mamba-2, arXiv
    2405.21060): `u = (x + skip * v) * activation(z + z_bias)`. All is computed in float32 at least.

    Args:
        x: rows.
        scale: of each feature, or of each head of rows `[..., H, F]`.
        z: the argument of the gate's activation; None is no gate.
        z_bias: added to `z`, of each head of rows `[..., H, F]`; None is zero. It needs `z`.
        v: what the skip adds to `x`; None is no skip.
        skip: the factor of `v`, of each head of rows `[..., H, F]`. It is given with `v`.
        activation: of the gate.
        gate_first: whether the gate stands before the norm, and not behind it.
        eps: added to the mean square.
        dtype: of the result; None is `x`'s.
        keeps: whether to return `x` too, for a residual stream that continues with it. The gradient's kernel then adds
            the gradient of the returned `x`, which saves a pass over memory.
        implementation: `"xla"`, `"triton"`, or None for the kernel where `norm_kernel_supports`.

    Returns:
        The result, rounded once, and `x` or None.

    Raises:
        ValueError: `scale`, `z_bias` or `skip` is not of each head; `z_bias` is given without `z`, or one of `v` and
            `skip` without the other.
        NotImplementedError: the kernel is asked for and does not support the call.
    """
    of_heads = (
        ("scale", scale if scale.ndim > 1 else None, "x", x),
        ("z_bias", z_bias, "z", z),
        ("skip", skip, "v", v),
    )
    for name, own, beside, rows in of_heads:
        if own is not None and (rows is None or own.shape != x.shape[-2:]):
            raise ValueError(
                f"rms_norm: {name} has shape {own.shape} where {beside} is {None if rows is None else 'an array'}, "
                f"expected the last two axes of x, {x.shape[-2:]}, and {beside}"
            )
    if v is not None and skip is None:
        raise ValueError("rms_norm: v is given without skip, expected both or neither")
    dtype = x.dtype if dtype is None else dtype
    arrays = (x, scale, z, z_bias, v, skip)
    if implementation is None:
        implementation = "triton" if norm_kernel_supports(*arrays) else "xla"

    def reference(x: Array, scale: Array, *rest: Array | None) -> tuple[Array, Array | None]:
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        z, z_bias, v, skip = (None if a is None else a.astype(wide.dtype) for a in rest[:4])
        if v is not None and skip is not None:
            wide = wide + skip * v
        gate = None
        if z is not None:
            gate = (jax.nn.silu if activation == "silu" else jax.nn.sigmoid)(z if z_bias is None else z + z_bias)
        u = wide * gate if gate is not None and gate_first else wide
        y = u * jax.lax.rsqrt(jnp.mean(jnp.square(u), axis=-1, keepdims=True) + eps) * scale.astype(u.dtype)
        if gate is not None and not gate_first:
            y = y * gate
        return y.astype(dtype), x if keeps else None

    if implementation == "xla":
        return reference(*arrays)

    def keywords(*given: Array | None) -> dict[str, Any]:
        options = {"activation": activation, "eps": eps, "dtype": jnp.dtype(dtype).name, "keeps": keeps}
        names = ("x", "scale", "z", "z_bias", "v", "skip")
        return dict(zip(names, given)) | options | {"gate_first": gate_first}

    if keeps:  # without the barrier XLA computes the residual stream's sum twice: for the norm and for the next sum
        arrays = (jax.lax.optimization_barrier(x), *arrays[1:])
    return with_further_derivatives(kernel_operators().norms.rms_norm, keywords, reference)(*arrays, None)


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

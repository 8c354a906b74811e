"""Norms: RMS norm with a learned scale, and the norms of queries and keys."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float

from rnnlib.layers.tensor import sum_over_shards
from rnnlib.ops.rms_norm import norm_kernel_supports, rms_norm


def l2_normalize(x: Float[Array, "*axes K"], eps: float = 1e-6) -> Float[Array, "*axes K"]:
    """`x * rsqrt(sum x^2 + eps)` over the last axis, computed in float32 at least; a zero vector stays zero.

    Args:
        x: vectors `[..., K]`.
        eps: added to the squared norm.

    Returns:
        Vectors of unit length, in `x`'s dtype.
    """
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return (wide * jax.lax.rsqrt(jnp.sum(jnp.square(wide), axis=-1, keepdims=True) + eps)).astype(x.dtype)


def l1_normalize(x: Float[Array, "*axes K"], eps: float = 1e-6) -> Float[Array, "*axes K"]:
    """`x / max(sum |x|, eps)` over the last axis, computed in float32 at least, in `x`'s dtype.

    Args:
        x: vectors `[..., K]`.
        eps: lower bound of the divisor.
    """
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return (wide / jnp.maximum(jnp.sum(jnp.abs(wide), axis=-1, keepdims=True), eps)).astype(x.dtype)


def sum_normalize(x: Float[Array, "*axes K"], eps: float = 1e-4) -> Float[Array, "*axes K"]:
    """`x / (sum x + eps)` over the last axis, computed in float32 at least, in `x`'s dtype: for feature maps above 0.

    Args:
        x: vectors `[..., K]`.
        eps: added to the sum.
    """
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return (wide / (jnp.sum(wide, axis=-1, keepdims=True) + eps)).astype(x.dtype)


def norm_and_stream(
    norm: nnx.Module, x: Float[Array, "*axes F"]
) -> tuple[Float[Array, "*axes F"], Float[Array, "*axes F"]]:
    """`norm(x)`, and `x` as the residual stream continues with it. The kernel adds the gradients of both.

    Args:
        norm: `nnx.RMSNorm`, `RMSNorm` or any other map.
        x: the residual stream.
    """
    found = scale_and_eps(norm)
    if found is None or not norm_kernel_supports(x, found[0], between_kernels=x.shape[-2] == 1):
        return norm(x), x  # type: ignore[operator]
    options: dict[str, Any] = {"dtype": norm.dtype, "keeps": True, "implementation": "triton"}  # type: ignore[attr-defined]
    y, kept = rms_norm(x, found[0], eps=found[1], **options)
    assert kept is not None
    return y, kept


def norm_of_rows(norm: nnx.Module, x: Float[Array, "*axes F"]) -> Float[Array, "*axes F"]:
    """`norm(x)`, by one kernel where that is faster.

    Args:
        norm: as that of `norm_and_stream`.
        x: rows.
    """
    found = scale_and_eps(norm)
    if found is None or not norm_kernel_supports(x, found[0]):
        return norm(x)  # type: ignore[operator]
    options: dict[str, Any] = {"dtype": norm.dtype, "implementation": "triton"}  # type: ignore[attr-defined]
    return rms_norm(x, found[0], eps=found[1], **options)[0]


def scale_and_eps(norm: nnx.Module) -> tuple[Array, float] | None:
    """The factor and the eps of an RMS norm over the last axis; None for any other module."""
    if type(norm) is RMSNorm and norm.groups == norm.tp_size == 1 and norm.scale is not None:
        scale = norm.scale[...]
        return (1 + scale if norm.zero_centred else scale), norm.eps
    if type(norm) is nnx.RMSNorm and norm.scale is not None and norm.feature_axes == -1 and norm.reduction_axes == -1:
        return norm.scale[...], norm.epsilon
    return None


class RMSNorm(nnx.Module):
    """`x / sqrt(mean x^2 + eps) * scale` over the last axis, computed in float32 at least.

    Zhang and Sennrich, 2019 (arXiv 1910.07467). `scale` `[F]` starts at 1. With `zero_centred` the factor is
    `1 + scale`, and `scale` starts at 0 (Gemma, Qwen3-Next): bfloat16 then represents small differences from 1. With
    `groups`, the axis is divided into that many equal parts, each with its own mean (Mamba-2); `scale` stays `[F]`.
    Without `use_scale` there is no scale. With `tp_size`, the axis is divided over that many devices
    (`rnnlib.layers.tensor`).

    Raises:
        ValueError: a size is not positive, or the groups do not divide the features.
    """

    def __init__(
        self,
        features: int,
        *,
        eps: float = 1e-6,
        groups: int = 1,
        use_scale: bool = True,
        zero_centred: bool = False,
        tp_size: int = 1,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
    ):
        if features < 1:
            raise ValueError(f"RMSNorm: features is {features}, expected at least 1")
        if groups < 1 or features % groups != 0:
            raise ValueError(f"RMSNorm: groups is {groups}, expected a divisor of features = {features}")
        if eps <= 0:
            raise ValueError(f"RMSNorm: eps is {eps}, expected above 0")
        self.eps = eps
        self.groups = groups
        self.dtype = dtype
        self.zero_centred = zero_centred
        self.tp_size = tp_size
        self.scale = nnx.Param(jnp.full((features,), 0 if zero_centred else 1, param_dtype)) if use_scale else None

    def __call__(self, x: Float[Array, "*axes F"]) -> Float[Array, "*axes F"]:
        """Normalises the last axis; the result has the module's `dtype`."""
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        parts = wide if self.groups == 1 else wide.reshape(*wide.shape[:-1], self.groups, -1)
        mean = sum_over_shards(jnp.mean(jnp.square(parts), axis=-1, keepdims=True), self.tp_size) / self.tp_size
        normalised = parts * jax.lax.rsqrt(mean + self.eps)
        normalised = normalised.reshape(wide.shape)
        if self.scale is None:
            return normalised.astype(self.dtype)
        scale = self.scale[...].astype(wide.dtype)
        return (normalised * (1 + scale if self.zero_centred else scale)).astype(self.dtype)

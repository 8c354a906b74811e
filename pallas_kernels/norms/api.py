"""RMS norm of rows in one pass over memory, forward and backward."""

import dataclasses
import functools
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from pallas_kernels.common.config import KernelConfig
from pallas_kernels.common.kernel_shape import cdiv, next_power_of_two
from pallas_kernels.common.refusal import refuse
from pallas_kernels.common.triton.backend import Operand, call, interpreted, unsupported_arrays, whole
from pallas_kernels.common.vma import pvary_together
from pallas_kernels.norms.triton import Cut, norm_kernel, reverse_norm_kernel

_MAX_FEATURES = 8192


@dataclasses.dataclass(frozen=True)
class NormConfig:
    """How a call is cut into programs. The defaults are the fastest of six measured on an H200.

    Attributes:
        elements: numbers that a program works on at once, where a row has fewer.
        blocks: times that it does, in the backward pass.
        num_warps: of a program.
    """

    elements: int = 1024
    blocks: int = 16
    num_warps: int = 4


class NormInputs(NamedTuple):
    """Arguments.

    Attributes:
        x: `[N, F]`.
        scale: `[F]`.
        z: None or `[N, F]`.
        bias: None or `[H, F]`, added to `z`'s rows in turn.
    """

    x: Array
    scale: Array
    z: Array | None
    bias: Array | None


@dataclasses.dataclass(frozen=True)
class Options:
    """Static options of a call.

    Attributes:
        eps: added to the mean square.
        activation: of the gate.
        dtype: of the result.
        keeps: whether `x` is a result too.
        config: how the call is cut.
    """

    eps: float
    activation: str | None
    dtype: str
    keeps: bool
    config: NormConfig


def _cut(options: Options, inputs: NormInputs, blocks: int, parts: int = 0) -> tuple[Cut, int, KernelConfig]:
    """A kernel's static facts, its programs, and its launch."""
    rows, features = inputs.x.shape
    columns = 1 << (features - 1).bit_length()
    heads = 1 if inputs.bias is None else inputs.bias.shape[0]
    block = max(heads, options.config.elements // columns)
    activation = options.activation if inputs.z is not None else None
    cut = Cut(rows, features, columns, block, blocks, options.eps, activation, heads, parts)
    warps = min(16, max(1, options.config.num_warps * block * columns // options.config.elements))
    return cut, cdiv(rows, block * blocks), KernelConfig(num_warps=warps, num_stages=1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(options: Options, inputs: NormInputs) -> tuple[Array, Array | None]:
    cut, programs, launch = _cut(options, inputs, 1)
    outputs = {"y": whole(jax.ShapeDtypeStruct(inputs.x.shape, jnp.dtype(options.dtype)))}
    operands = {name: whole(x) for name, x in inputs._asdict().items()}
    y = call(norm_kernel, "rms_norm", (programs,), operands, outputs, launch, cut=cut)["y"]
    return y, inputs.x if options.keeps else None  # type: ignore[return-value]


def _forward(options: Options, inputs: NormInputs) -> tuple[tuple[Array, Array | None], NormInputs]:
    return _run(options, inputs), inputs


def _backward(options: Options, inputs: NormInputs, cotangents: tuple[Array, Array | None]) -> tuple[NormInputs]:
    d_y, d_kept = cotangents
    cut, programs, launch = _cut(options, inputs, options.config.blocks)
    parts = jax.ShapeDtypeStruct((programs, cut.features), jnp.float32)
    results = call(
        reverse_norm_kernel,
        "rms_norm_reverse",
        (programs,),
        {name: whole(x) for name, x in inputs._asdict().items()} | {"d_y": whole(d_y), "d_kept": whole(d_kept)},
        {
            "d_x": whole(jax.ShapeDtypeStruct(inputs.x.shape, inputs.x.dtype)),
            "d_z": None if inputs.z is None else whole(jax.ShapeDtypeStruct(inputs.z.shape, inputs.z.dtype)),
            "d_scale": Operand(parts, (None, cut.features), lambda p: (p, 0)),
            "d_bias": None
            if inputs.bias is None
            else Operand(
                jax.ShapeDtypeStruct((programs, cut.block, cut.features), jnp.float32),
                (None, cut.block, cut.features),
                lambda p: (p, 0, 0),
            ),
        },
        launch,
        cut=cut,
    )
    d_scale = jnp.sum(results["d_scale"], axis=0).astype(inputs.scale.dtype)  # type: ignore[arg-type]
    d_bias = None
    if inputs.bias is not None:
        assert results["d_bias"] is not None
        d_bias = jnp.sum(results["d_bias"].reshape(-1, *inputs.bias.shape), axis=0).astype(inputs.bias.dtype)
    return (NormInputs(results["d_x"], d_scale, results["d_z"], d_bias),)  # type: ignore[arg-type]


_run.defvjp(_forward, _backward)


def _schedule() -> NormConfig:
    return NormConfig(elements=64, blocks=2) if interpreted() else NormConfig()


def unsupported_reason(x: Array, scale: Array, z: Array | None = None, z_bias: Array | None = None) -> str | None:
    """Why `rms_norm` can't serve a call, as a noun phrase, or None if it can.

    Args:
        x: rows `[..., F]`.
        scale: `[F]`.
        z: gates `[..., F]`, or None.
        z_bias: `[H, F]`, or None.
    """
    if x.shape[-1] > _MAX_FEATURES:
        return f"rows of {x.shape[-1]} features (at most {_MAX_FEATURES})"
    if z_bias is not None:
        heads = z_bias.shape[0]
        if heads & (heads - 1) or heads * next_power_of_two(x.shape[-1]) > _MAX_FEATURES:
            return f"a bias of {heads} heads (a power of two, with at most {_MAX_FEATURES} features together)"
    return unsupported_arrays(x=x, scale=scale, z=z, z_bias=z_bias)


def rms_norm(
    x: Float[Array, "*rows F"],
    scale: Float[Array, " F"],
    *,
    z: Float[Array, "*rows F"] | None = None,
    z_bias: Float[Array, "H F"] | None = None,
    activation: Literal["silu", "sigmoid"] = "silu",
    eps: float = 1e-6,
    dtype: str | None = None,
    keeps: bool = False,
    config: NormConfig | None = None,
) -> tuple[Float[Array, "*rows F"], Float[Array, "*rows F"] | None]:
    """`x / sqrt(mean x^2 + eps) * scale * activation(z + z_bias)` over the last axis, computed in float32.

    Args:
        x: rows, bfloat16 or float32.
        scale: of each feature.
        z: the argument of the gate's activation; None is no gate.
        z_bias: added to `z`, whose rows are of H heads in turn; None is zero.
        activation: of the gate.
        eps: added to the mean square.
        dtype: of the result; None is `x`'s.
        keeps: return `x` as well, for a residual stream that continues with it. The kernel of the norm's gradient then
            adds the gradient of this `x`.
        config: how the call is cut into programs.

    Returns:
        The result, rounded once, and `x` or None.

    Raises:
        NotImplementedError: there is an `unsupported_reason`.
    """
    refuse("rms_norm", unsupported_reason(x, scale, z, z_bias))
    config = config or _schedule()
    shape, name = x.shape, jnp.dtype(x.dtype if dtype is None else dtype).name
    flat = [None if a is None else a.reshape(-1, shape[-1]) for a in (x, z)]
    options = Options(eps, activation, name, keeps, config)
    y, kept = _run(options, pvary_together(NormInputs(flat[0], scale, flat[1], z_bias)))  # type: ignore[arg-type]
    return y.reshape(shape), None if kept is None else kept.reshape(shape)


def rms_norm_of_sum(
    parts: Float[Array, "S N F"],
    added: Float[Array, "N F"],
    scale: Float[Array, " F"],
    *,
    eps: float = 1e-6,
    dtype: str | None = None,
) -> tuple[Float[Array, "N F"], Float[Array, "N F"]]:
    """The RMS norm of `added` and all `parts` together, as `rms_norm` of their sum, and the sum; no derivative.

    Args:
        parts: float32, added up in their order.
        added: bfloat16 or float32.
        scale: of each feature.
        eps: added to the mean square.
        dtype: of the norm; None is `added`'s.

    Returns:
        The norm of the rounded sum, rounded once, and this sum in `added`'s dtype.

    Raises:
        NotImplementedError: there is an `unsupported_reason`.
        ValueError: `parts` is not `[S, N, F]` of float32, with at least one part.
    """
    refuse("rms_norm_of_sum", unsupported_reason(added, scale))
    if parts.shape[1:] != added.shape or not len(parts) or parts.dtype != jnp.float32:
        raise ValueError(
            f"rms_norm_of_sum: parts are {parts.dtype} of shape {parts.shape}, expected float32 [S, N, F] with S of at "
            f"least 1 and N, F = {added.shape}"
        )
    name = jnp.dtype(added.dtype if dtype is None else dtype).name
    inputs, parts = pvary_together((NormInputs(added, scale, None, None), parts))
    cut, programs, launch = _cut(Options(eps, None, name, False, _schedule()), inputs, 1, len(parts))
    results = call(
        norm_kernel,
        "rms_norm_of_sum",
        (programs,),
        {key: whole(x) for key, x in (inputs._asdict() | {"parts": parts}).items()},
        {
            "y": whole(jax.ShapeDtypeStruct(added.shape, jnp.dtype(name))),
            "total": whole(jax.ShapeDtypeStruct(added.shape, added.dtype)),
        },
        launch,
        cut=cut,
    )
    return results["y"], results["total"]  # type: ignore[return-value]

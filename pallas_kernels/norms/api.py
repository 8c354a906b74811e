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
_WIDE = 2048  # numbers of a block with a skip from which a program loads the next block ahead
_MAX_SKIPPED = 4096  # most numbers of such a block: above, registers spill, and XLA was as fast


@dataclasses.dataclass(frozen=True)
class NormConfig:
    """How a call is cut into programs.

    Attributes:
        elements: numbers that a program works on at once, where a row has fewer.
        blocks: times that it does, in the backward pass.
        num_warps: for as many numbers; at most 16 of a program.
        ahead: whether the backward loads a block while it works on the one before.
    """

    elements: int = 1024
    blocks: int = 16
    num_warps: int = 4
    ahead: bool = False


def choose_norm_config(columns: int, *, has_skip: bool) -> NormConfig:
    """The schedule for the device at hand, of those measured on an H200.

    Args:
        columns: numbers of a block of rows, at least.
        has_skip: whether there is a skip.
    """
    ahead = has_skip and columns >= _WIDE
    if interpreted():
        return NormConfig(elements=64, blocks=2, ahead=ahead)
    return NormConfig(blocks=32, ahead=True) if ahead else NormConfig()


class NormInputs(NamedTuple):
    """Arguments. What heads have is `[H, F]`, for rows of H heads in turn, or `[1, F]`.

    Attributes:
        x: `[N, F]`.
        scale: of the norm.
        z: None or `[N, F]`.
        bias: None or what is added to `z`.
        v: None or `[N, F]`.
        skip: None or the factor of `v`.
    """

    x: Array
    scale: Array
    z: Array | None = None
    bias: Array | None = None
    v: Array | None = None
    skip: Array | None = None

    def of_heads(self) -> dict[str, Array | None]:
        """The arrays that heads have."""
        return {"scale": self.scale, "bias": self.bias, "skip": self.skip}


@dataclasses.dataclass(frozen=True)
class Options:
    """Static options of a call.

    Attributes:
        eps: added to the mean square.
        activation: of the gate.
        gate_first: whether the gate stands before the norm.
        dtype: of the result.
        keeps: whether `x` is a result too.
        config: how the call is cut.
    """

    eps: float
    activation: str | None
    gate_first: bool
    dtype: str
    keeps: bool
    config: NormConfig


def _cut(options: Options, inputs: NormInputs, blocks: int, parts: int = 0) -> tuple[Cut, int, KernelConfig]:
    """A kernel's static facts, its programs, and its launch."""
    rows, features = inputs.x.shape
    columns = 1 << (features - 1).bit_length()
    heads = max(len(own) for own in inputs.of_heads().values() if own is not None)
    block = max(heads, options.config.elements // columns)
    activation = options.activation if inputs.z is not None else None
    cut = Cut(
        rows,
        features,
        columns,
        block,
        blocks,
        options.eps,
        activation,
        options.gate_first,
        ahead=options.config.ahead and blocks > 1,
        parts=parts,
    )
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

    def sums(own: Array | None) -> Operand | None:
        """A program's part of the gradient in what heads have: of each row of a block, or of all of them."""
        if own is None:
            return None
        rows = cut.block if len(own) > 1 else 1
        parts = jax.ShapeDtypeStruct((programs, rows, cut.features), jnp.float32)
        return Operand(parts, (None, rows, cut.features), lambda p: (p, 0, 0))

    def like(x: Array | None) -> Operand | None:
        return None if x is None else whole(jax.ShapeDtypeStruct(x.shape, x.dtype))

    results = call(
        reverse_norm_kernel,
        "rms_norm_reverse",
        (programs,),
        {name: whole(x) for name, x in inputs._asdict().items()} | {"d_y": whole(d_y), "d_kept": whole(d_kept)},
        {"d_x": like(inputs.x), "d_z": like(inputs.z)}
        | {f"d_{name}": sums(own) for name, own in inputs.of_heads().items()},
        launch,
        cut=cut,
    )
    for name, own in inputs.of_heads().items():
        if own is not None:
            parts = results[f"d_{name}"]
            assert parts is not None
            results[f"d_{name}"] = jnp.sum(parts.reshape(-1, *own.shape), axis=0).astype(own.dtype)
    results["d_v"] = None
    if inputs.v is not None and inputs.skip is not None:
        # A product of XLA, which has another gradient of these rows to add: of the recurrence that they are written to.
        skipped = results["d_x"].astype(jnp.float32).reshape(-1, *inputs.skip.shape) * inputs.skip  # type: ignore[union-attr]
        results["d_v"] = skipped.reshape(inputs.v.shape).astype(inputs.v.dtype)
    return (NormInputs(**{name: results[f"d_{name}"] for name in NormInputs._fields}),)  # type: ignore[arg-type]


_run.defvjp(_forward, _backward)


def unsupported_reason(
    x: Array,
    scale: Array,
    z: Array | None = None,
    z_bias: Array | None = None,
    v: Array | None = None,
    skip: Array | None = None,
) -> str | None:
    """Why `rms_norm` can't serve a call, as a noun phrase, or None if it can.

    Args:
        x: rows `[..., F]`.
        scale: `[F]` or `[H, F]`.
        z: gates `[..., F]`, or None.
        z_bias: `[H, F]`, or None.
        v: `[..., F]`, or None.
        skip: `[H, F]`, or None.
    """
    if x.shape[-1] > _MAX_FEATURES:
        return f"rows of {x.shape[-1]} features (at most {_MAX_FEATURES})"
    for name, own in {"a scale": scale, "a bias": z_bias, "a skip": skip}.items():
        heads = 1 if own is None or own.ndim == 1 else own.shape[0]
        if heads & (heads - 1) or heads * next_power_of_two(x.shape[-1]) > _MAX_FEATURES:
            return f"{name} of {heads} heads (a power of two, with at most {_MAX_FEATURES} features together)"
    if skip is not None and skip.shape[0] * next_power_of_two(x.shape[-1]) > _MAX_SKIPPED:
        return f"a skip of {skip.shape[0]} heads of {x.shape[-1]} features (at most {_MAX_SKIPPED} together)"
    return unsupported_arrays(x=x, scale=scale, z=z, z_bias=z_bias, v=v, skip=skip)


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
    dtype: str | None = None,
    keeps: bool = False,
    config: NormConfig | None = None,
) -> tuple[Float[Array, "*rows F"], Float[Array, "*rows F"] | None]:
    """`u / sqrt(mean u^2 + eps) * scale * activation(z + z_bias)` over the last axis, with `u = x + skip * v`.

    With `gate_first` the gate stands before the norm, `u = (x + skip * v) * activation(z + z_bias)`. All is computed in
    float32.

    Args:
        x: rows, bfloat16 or float32.
        scale: of each feature; `[H, F]` is that of H heads, which the rows are of in turn.
        z: the argument of the gate's activation; None is no gate.
        z_bias: added to `z`, by head; None is zero.
        v: what the skip adds to `x`; None is no skip.
        skip: the factor of `v`, by head. It is given with `v`.
        activation: of the gate.
        gate_first: whether the gate stands before the norm, and not behind it.
        eps: added to the mean square.
        dtype: of the result; None is `x`'s.
        keeps: return `x` as well, for a residual stream that continues with it. The kernel of the norm's gradient then
            adds the gradient of this `x`.
        config: how the call is cut into programs.

    Returns:
        The result, rounded once, and `x` or None.

    Raises:
        NotImplementedError: there is an `unsupported_reason`.
        ValueError: only one of `v` and `skip` is given.
    """
    refuse("rms_norm", unsupported_reason(x, scale, z, z_bias, v, skip))
    if (v is None) != (skip is None):
        raise ValueError(f"rms_norm: {'skip' if v is None else 'v'} is given alone, expected v and skip, or neither")
    shape, name = x.shape, jnp.dtype(x.dtype if dtype is None else dtype).name
    flat = {key: None if a is None else a.reshape(-1, shape[-1]) for key, a in {"x": x, "z": z, "v": v}.items()}
    heads = {"scale": scale.reshape(-1, shape[-1]), "bias": z_bias, "skip": skip}
    if config is None:
        columns = max(1 if own is None else len(own) for own in heads.values()) * next_power_of_two(shape[-1])
        config = choose_norm_config(columns, has_skip=v is not None)
    # The gradient in `v` is that in the kernel's `x` alone.
    options = Options(eps, activation, gate_first, name, keeps and v is None, config)
    y, kept = _run(options, pvary_together(NormInputs(**flat, **heads)))  # type: ignore[arg-type]
    return y.reshape(shape), (x if keeps else None) if kept is None else kept.reshape(shape)


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
    inputs, parts = pvary_together((NormInputs(added, scale[None]), parts))
    cut, programs, launch = _cut(
        Options(eps, None, False, name, False, choose_norm_config(0, has_skip=False)), inputs, 1, len(parts)
    )
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

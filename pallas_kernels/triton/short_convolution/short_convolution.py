"""The short causal convolution over time with what follows it, in one kernel: bias, SiLU, and the L2 norm of heads.

    a_t = bias + sum_i kernel[W - 1 - i] x_{t - i}      h_t = silu(a_t)      y_t = h_t / sqrt(|h_t|^2 + eps)

Inputs are read once and results written once, forward; the backward reads inputs and the gradient of the results once
and writes the gradient of the inputs. Nothing else is kept for it. The filter's and the bias's gradient are sums by
program, added up in a fixed order.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from pallas_kernels.platform import platform
from pallas_kernels.problem import cdiv, next_power_of_two, segment_starts
from pallas_kernels.schedule import Launch
from pallas_kernels.triton.common.backend import Operand, call, interpreted
from pallas_kernels.triton.short_convolution.kernels import Cut, convolution_kernel, reverse_convolution_kernel
from pallas_kernels.varying import vary_alike

_MAX_WIDTH = 8
_MAX_HEAD = 1024
_PLAIN = 128  # channels of a "head" where there is no norm


@dataclasses.dataclass(frozen=True)
class ConvolutionPrograms:
    """How a kernel is cut into programs, and compiled.

    Attributes:
        tokens: of a program, a multiple of `launch.block`.
        launch: `block` is the number of tokens that are loaded at once, with two stages while the program works on the
            ones before; `inner` the channels of a program (or one head, if that is more), for which `num_warps` are.
    """

    tokens: int
    launch: Launch

    def shortened(self, columns: int, length: int) -> "ConvolutionPrograms":
        """Fewer tokens a program where there would be less than eight programs a processor of a large card.

        Args:
            columns: programs side by side, for the rows of the batch and the channels.
            length: T.
        """
        tokens = self.tokens
        while tokens % (2 * self.launch.block) == 0 and tokens > 16 and columns * cdiv(length, tokens) < 1056:
            tokens //= 2
        return ConvolutionPrograms(tokens, self.launch)


@dataclasses.dataclass(frozen=True)
class ConvolutionSchedule:
    """How a call is cut into programs. The defaults are the fastest of those measured on an H200.

    Attributes:
        forward: of the forward's kernel.
        backward: of the backward's kernel.
        adapts: whether programs are shortened where they would be few.
    """

    forward: ConvolutionPrograms = ConvolutionPrograms(64, Launch(num_warps=1, num_stages=1, block=8, inner=128))
    backward: ConvolutionPrograms = ConvolutionPrograms(128, Launch(num_warps=1, num_stages=2, block=4, inner=128))
    adapts: bool = True


def choose_convolution_schedule() -> ConvolutionSchedule:
    """The schedule for the device at hand: interpreted, small blocks compile fast."""
    if interpreted():
        programs = ConvolutionPrograms(8, Launch(num_stages=1, block=1, inner=32))
        return ConvolutionSchedule(programs, programs, adapts=False)
    return ConvolutionSchedule()


class ConvolutionInputs(NamedTuple):
    """Arguments.

    Attributes:
        x: `[B, T, D]`.
        kernel: `[W, D]`.
        bias: None or `[D]`.
        initial_state: None or `[B, W - 1, D]`.
        starts: None, or `[B, T]` int32, 1 at each token that starts a segment.
    """

    x: Array
    kernel: Array
    bias: Array | None
    initial_state: Array | None
    starts: Array | None


@dataclasses.dataclass(frozen=True)
class Options:
    """Static options of a call.

    Attributes:
        activation: None or "silu".
        norm_size: channels of a head, or None for no norm.
        eps: added to the squared norm.
        schedule: how the call is cut.
    """

    activation: str | None
    norm_size: int | None
    eps: float
    schedule: ConvolutionSchedule


def _cut(
    options: Options, inputs: ConvolutionInputs, programs: ConvolutionPrograms
) -> tuple[Cut, tuple[int, int, int], Launch]:
    """A kernel's static facts, its grid, and its launch with as many warps as its channels need."""
    batch, length, channels = inputs.x.shape
    launch = programs.launch
    size = min(_PLAIN, next_power_of_two(channels)) if options.norm_size is None else options.norm_size
    columns = 1 << (size - 1).bit_length()
    heads = max(1, min(launch.inner // columns, 1 << (cdiv(channels, size) - 1).bit_length()))
    tiles = cdiv(channels, size * heads)
    if options.schedule.adapts:
        programs = programs.shortened(tiles * batch, length)
    cut = Cut(
        width=inputs.kernel.shape[0],
        length=length,
        channels=channels,
        size=size,
        heads=heads,
        columns=columns,
        tokens=programs.tokens,
        block=launch.block,
        ahead=launch.num_stages > 1,
        activation=options.activation,
        eps=None if options.norm_size is None else options.eps,
    )
    warps = launch.num_warps * max(1, heads * columns // launch.inner)
    return cut, (tiles, cdiv(length, cut.tokens), batch), dataclasses.replace(launch, num_warps=warps)


def _of_row(x: Array | jax.ShapeDtypeStruct | None) -> Operand | None:
    """One row of the batch of `[B, ...]`."""
    if x is None:
        return None
    return Operand(x, (None, *x.shape[1:]), lambda c, p, b: (b, *(0 for _ in x.shape[1:])))


def _of_program(x: jax.ShapeDtypeStruct | None) -> Operand | None:
    """One part of one row of `[B, P, ...]`."""
    if x is None:
        return None
    return Operand(x, (None, None, *x.shape[2:]), lambda c, p, b: (b, p, *(0 for _ in x.shape[2:])))


def _shared(x: Array | None) -> Operand | None:
    """All of an array that every program sees."""
    return None if x is None else Operand(x, x.shape, lambda c, p, b: tuple(0 for _ in x.shape))


def _operands(inputs: ConvolutionInputs) -> dict[str, Operand | None]:
    return {
        "x": _of_row(inputs.x),
        "kernel": _shared(inputs.kernel),
        "bias": _shared(inputs.bias),
        "initial_state": _of_row(inputs.initial_state),
        "starts": _of_row(inputs.starts),
    }


def _like(x: Array | None) -> jax.ShapeDtypeStruct | None:
    return None if x is None else jax.ShapeDtypeStruct(x.shape, x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(options: Options, inputs: ConvolutionInputs) -> Array:
    cut, grid, launch = _cut(options, inputs, options.schedule.forward)
    outputs = {"y": _of_row(_like(inputs.x))}
    return call(convolution_kernel, "short_convolution", grid, _operands(inputs), outputs, launch, cut=cut)["y"]  # type: ignore[return-value]


def _forward(options: Options, inputs: ConvolutionInputs) -> tuple[Array, ConvolutionInputs]:
    return _run(options, inputs), inputs


def _backward(options: Options, inputs: ConvolutionInputs, d_y: Array) -> tuple[ConvolutionInputs]:
    cut, grid, launch = _cut(options, inputs, options.schedule.backward)
    batch, parts = inputs.x.shape[0], grid[1]

    def partial_sums(x):
        return None if x is None else jax.ShapeDtypeStruct((batch, parts, *x.shape), jnp.float32)

    results = call(
        reverse_convolution_kernel,
        "short_convolution_reverse",
        grid,
        {**_operands(inputs), "d_y": _of_row(d_y)},
        {
            "d_x": _of_row(_like(inputs.x)),
            "d_kernel": _of_program(partial_sums(inputs.kernel)),
            "d_bias": _of_program(partial_sums(inputs.bias)),
            "d_initial_state": _of_row(_like(inputs.initial_state)),
        },
        launch,
        cut=cut,
    )

    def total(name, like):
        parts = results[name]
        return None if parts is None else jnp.sum(parts, axis=(0, 1)).astype(like.dtype)

    return (
        ConvolutionInputs(
            x=results["d_x"],  # type: ignore[arg-type]
            kernel=total("d_kernel", inputs.kernel),  # type: ignore[arg-type]
            bias=total("d_bias", inputs.bias),
            initial_state=results["d_initial_state"],
            starts=None,
        ),
    )


_run.defvjp(_forward, _backward)


def convolution_unsupported(
    x: Array, kernel: Array, *others: Array | None, activation: str | None = None, norm_size: int | None = None
) -> str | None:
    """Why `short_convolution` can't serve a call, as a noun phrase, or None if it can.

    Args:
        x: inputs `[B, T, D]`.
        kernel: filter `[W, D]`.
        *others: the other arrays, or None.
        activation: None or "silu".
        norm_size: channels of a head whose results get unit length, or None.
    """
    if platform() not in ("gpu", "cpu"):
        return f"platform {platform()!r} (it runs on NVIDIA GPUs and, interpreted, on CPUs)"
    for array in (x, kernel, *others):
        if array is not None and array.dtype not in (jnp.bfloat16, jnp.float32):
            return f"arrays of dtype {array.dtype} (only bfloat16 and float32)"
    if kernel.shape[0] > _MAX_WIDTH:
        return f"a filter of {kernel.shape[0]} tokens (at most {_MAX_WIDTH})"
    if activation not in (None, "silu"):
        return f"activation {activation!r} (None or 'silu')"
    if norm_size is not None and norm_size > _MAX_HEAD:
        return f"a norm of {norm_size} channels (at most {_MAX_HEAD})"
    return None


def short_convolution(
    x: Float[Array, "B T D"],
    kernel: Float[Array, "W D"],
    *,
    bias: Float[Array, " D"] | None = None,
    initial_state: Float[Array, "B tail D"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    activation: str | None = None,
    norm_size: int | None = None,
    eps: float = 1e-6,
    schedule: ConvolutionSchedule | None = None,
) -> Float[Array, "B T D"]:
    """Depthwise causal convolution, `bias + sum_i kernel[W - 1 - i] * x_{t - i}`, activation and norm, all in float32.

    Args:
        x: inputs, bfloat16 or float32.
        kernel: one filter of width W (at most 8) per channel; `kernel[-1]` weighs the present token.
        bias: added to every sum; None is zero.
        initial_state: the W - 1 inputs before the first; None is zero.
        segment_ids: no tap reaches across a change of id; the first token continues `initial_state`.
        activation: None, or "silu" of the sum.
        norm_size: `y * rsqrt(sum y^2 + eps)` over each `norm_size` consecutive channels of the activation, which divide
            D; None is no norm.
        eps: added to the squared norm.
        schedule: how the call is cut into programs.

    Returns:
        The result in `x`'s dtype, rounded once.

    Raises:
        NotImplementedError: `convolution_unsupported` has an objection.
    """
    reason = convolution_unsupported(x, kernel, bias, initial_state, activation=activation, norm_size=norm_size)
    if reason is not None:
        raise NotImplementedError(f"short_convolution: the Triton kernels do not support {reason}")
    if kernel.shape[0] == 1:  # a state of no tokens
        initial_state = None
    starts = segment_starts(segment_ids)
    options = Options(activation, norm_size, eps, schedule or choose_convolution_schedule())
    return _run(options, vary_alike(ConvolutionInputs(x, kernel, bias, initial_state, starts)))

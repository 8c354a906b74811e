"""The short causal convolution over time with what follows it, in one kernel: bias, SiLU, and the L2 norm of heads.

    a_t = bias + sum_i kernel[W - 1 - i] x_{t - i}      h_t = silu(a_t)      y_t = h_t / sqrt(|h_t|^2 + eps)

Inputs are read once and results written once, forward; the backward reads inputs and the gradient of the results once
and writes the gradient of the inputs. Nothing else is kept for it. The filter's and the bias's gradient are sums by
program, added up in a fixed order.

Several streams may lie side by side in one array, as one matrix product gives them (`fused_convolutions`). Each has
its own launch, which reads its columns there and writes their gradient into the gradient of the whole array.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from pallas_kernels.common.config import KernelConfig
from pallas_kernels.common.kernel_shape import cdiv, next_power_of_two, resets_of
from pallas_kernels.common.refusal import refuse
from pallas_kernels.common.triton.backend import Operand, call, interpreted, unsupported_arrays, whole
from pallas_kernels.common.vma import pvary_together
from pallas_kernels.short_convolution.branch import ConvolutionBranch, Epilogue
from pallas_kernels.short_convolution.triton import Cut, convolution_kernel, reverse_convolution_kernel

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
    launch: KernelConfig

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
class ConvolutionConfig:
    """How a call is cut into programs. The defaults are the fastest of those measured on an H200.

    Attributes:
        forward: of the forward's kernel.
        backward: of the backward's kernel.
        adapts: whether programs are shortened where they would be few.
    """

    forward: ConvolutionPrograms = ConvolutionPrograms(64, KernelConfig(num_warps=1, num_stages=1, block=8, inner=128))
    backward: ConvolutionPrograms = ConvolutionPrograms(
        128, KernelConfig(num_warps=1, num_stages=2, block=4, inner=128)
    )
    adapts: bool = True


def choose_convolution_config() -> ConvolutionConfig:
    """The schedule for the device at hand: interpreted, small blocks compile fast."""
    if interpreted():
        programs = ConvolutionPrograms(8, KernelConfig(num_stages=1, block=1, inner=32))
        return ConvolutionConfig(programs, programs, adapts=False)
    return ConvolutionConfig()


class Filter(NamedTuple):
    """The arrays of one stream.

    Attributes:
        kernel: `[W, D]`.
        bias: None or `[D]`.
        initial_state: None or `[B, W - 1, D]`.
    """

    kernel: Array
    bias: Array | None = None
    initial_state: Array | None = None


class ConvolutionInputs(NamedTuple):
    """Arguments.

    Attributes:
        x: `[B, T, N]`, N at least the sum of the streams' channels D: the first has the first columns, and so on.
        filters: of each stream.
        resets: None, or `[B, T]` int32, 1 at each token that starts a document.
    """

    x: Array
    filters: tuple[Filter, ...]
    resets: Array | None


@dataclasses.dataclass(frozen=True)
class Options:
    """Static options of a call.

    Attributes:
        epilogues: of each stream.
        config: how the call is cut.
    """

    epilogues: tuple[Epilogue, ...]
    config: ConvolutionConfig


def _cut(
    epilogue: Epilogue, config: ConvolutionConfig, stream: "_Stream", programs: ConvolutionPrograms
) -> tuple[Cut, tuple[int, int, int], KernelConfig]:
    """A kernel's static facts, its grid, and its launch with as many warps as its channels need."""
    (batch, length, _), channels = stream.x.shape, stream.channels
    launch = programs.launch
    size = min(_PLAIN, next_power_of_two(channels)) if epilogue.norm_size is None else epilogue.norm_size
    columns = 1 << (size - 1).bit_length()
    heads = max(1, min(launch.inner // columns, 1 << (cdiv(channels, size) - 1).bit_length()))
    tiles = cdiv(channels, size * heads)
    if config.adapts:
        programs = programs.shortened(tiles * batch, length)
    cut = Cut(
        width=stream.filter.kernel.shape[0],
        length=length,
        channels=channels,
        size=size,
        heads=heads,
        columns=columns,
        tokens=programs.tokens,
        block=launch.block,
        ahead=launch.num_stages > 1,
        activation=epilogue.activation,
        eps=None if epilogue.norm_size is None else epilogue.norm_eps,
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


class _Stream(NamedTuple):
    """One stream of a call: its columns of `x` are block `block` of as many as it has channels."""

    x: Array
    filter: Filter
    resets: Array | None
    block: int

    @property
    def channels(self) -> int:
        return self.filter.kernel.shape[1]

    def columns(self, x: Array | jax.ShapeDtypeStruct) -> Operand:
        """The stream's columns of one row of an array shaped as `x`."""
        block, size = self.block, (None, x.shape[1], self.channels)
        return Operand(x, size, lambda c, p, b: (b, 0, block))

    def operands(self) -> dict[str, Operand | None]:
        """Inputs of both kernels."""
        return {
            "x": self.columns(self.x),
            "kernel": whole(self.filter.kernel),
            "bias": whole(self.filter.bias),
            "initial_state": _of_row(self.filter.initial_state),
            "resets": _of_row(self.resets),
        }


def _streams(inputs: ConvolutionInputs) -> list[_Stream]:
    sizes = [filter.kernel.shape[1] for filter in inputs.filters]
    firsts = itertools.accumulate(sizes[:-1], initial=0)
    blocks = [first // size for first, size in zip(firsts, sizes)]  # whole: `fused_unsupported_reason`
    return [_Stream(inputs.x, filter, inputs.resets, block) for filter, block in zip(inputs.filters, blocks)]


def _like(x: Array | None) -> jax.ShapeDtypeStruct | None:
    return None if x is None else jax.ShapeDtypeStruct(x.shape, x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(options: Options, inputs: ConvolutionInputs) -> tuple[tuple[Array, ...], Array]:
    """The result of each stream, and the columns behind the streams."""
    results: list[Any] = []
    for epilogue, stream in zip(options.epilogues, _streams(inputs)):
        cut, grid, launch = _cut(epilogue, options.config, stream, options.config.forward)
        y = jax.ShapeDtypeStruct((*inputs.x.shape[:2], stream.channels), inputs.x.dtype)
        found = call(
            convolution_kernel, "short_convolution", grid, stream.operands(), {"y": _of_row(y)}, launch, cut=cut
        )
        results.append(found["y"])
    return tuple(results), inputs.x[..., _of_streams(inputs) :]


def _of_streams(inputs: ConvolutionInputs) -> int:
    return sum(filter.kernel.shape[1] for filter in inputs.filters)


def _forward(options: Options, inputs: ConvolutionInputs) -> tuple[tuple[tuple[Array, ...], Array], ConvolutionInputs]:
    return _run(options, inputs), inputs


def _backward(
    options: Options, inputs: ConvolutionInputs, cotangents: tuple[tuple[Array, ...], Array]
) -> tuple[ConvolutionInputs]:
    d_x: Array | None = None
    d_filters = []
    for epilogue, stream, d_y in zip(options.epilogues, _streams(inputs), cotangents[0]):
        d_x, d_filter = _stream_gradients(epilogue, options.config, stream, d_y, d_x)
        d_filters.append(d_filter)
    assert d_x is not None
    if cotangents[1].shape[-1]:
        d_x = jax.lax.dynamic_update_slice_in_dim(d_x, cotangents[1], _of_streams(inputs), axis=2)
    return (ConvolutionInputs(d_x, tuple(d_filters), None),)


def _stream_gradients(
    epilogue: Epilogue, config: ConvolutionConfig, stream: _Stream, d_y: Array, d_x: Array | None
) -> tuple[Array, Filter]:
    """The gradient of all of `x`, in which this stream's columns are written into `d_x`; and that of the filter."""
    cut, grid, launch = _cut(epilogue, config, stream, config.backward)
    batch, parts = stream.x.shape[0], grid[1]

    def partial_sums(x: Array | None) -> jax.ShapeDtypeStruct | None:
        return None if x is None else jax.ShapeDtypeStruct((batch, parts, *x.shape), jnp.float32)

    results = call(
        reverse_convolution_kernel,
        "short_convolution_reverse",
        grid,
        {**stream.operands(), "d_y": _of_row(d_y)},
        {
            "d_x": stream.columns(jax.ShapeDtypeStruct(stream.x.shape, stream.x.dtype)),
            "d_kernel": _of_program(partial_sums(stream.filter.kernel)),
            "d_bias": _of_program(partial_sums(stream.filter.bias)),
            "d_initial_state": _of_row(_like(stream.filter.initial_state)),
        },
        launch,
        updates=None if d_x is None else {"d_x": stream.columns(d_x)},
        cut=cut,
    )

    def total(name: str, like: Array | None) -> Array | None:
        parts = results[name]
        return None if parts is None or like is None else jnp.sum(parts, axis=(0, 1)).astype(like.dtype)

    d_filter = Filter(
        kernel=total("d_kernel", stream.filter.kernel),  # type: ignore[arg-type]
        bias=total("d_bias", stream.filter.bias),
        initial_state=results["d_initial_state"],
    )
    return results["d_x"], d_filter  # type: ignore[return-value]


_run.defvjp(_forward, _backward)


def unsupported_reason(
    x: Array | jax.ShapeDtypeStruct,
    kernel: Array,
    bias: Array | None = None,
    initial_state: Array | None = None,
    *,
    activation: str | None = None,
    norm_size: int | None = None,
) -> str | None:
    """Why `short_convolution` can't serve a call, as a noun phrase, or None if it can.

    Args:
        x: inputs `[B, T, D]`.
        kernel: filter `[W, D]`.
        bias: `[D]`, or None.
        initial_state: `[B, W - 1, D]`, or None.
        activation: None or "silu".
        norm_size: channels of a head whose results get unit length, or None.
    """
    reason = unsupported_arrays(x=x, kernel=kernel, bias=bias, initial_state=initial_state)
    if reason is not None:
        return reason
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
    config: ConvolutionConfig | None = None,
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
        config: how the call is cut into programs.

    Returns:
        The result in `x`'s dtype, rounded once.

    Raises:
        NotImplementedError: there is an `unsupported_reason`.
    """
    reason = unsupported_reason(x, kernel, bias, initial_state, activation=activation, norm_size=norm_size)
    refuse("short_convolution", reason)
    stream = ConvolutionBranch(kernel, bias, initial_state, Epilogue(activation, norm_size, eps))
    return _convolutions(x, (stream,), segment_ids, config)[0][0]


def fused_unsupported_reason(x: Array | jax.ShapeDtypeStruct, streams: Sequence[ConvolutionBranch]) -> str | None:
    """Why `fused_convolutions` can't serve a call, as a noun phrase, or None if it can."""
    first = 0
    for stream in streams:
        channels, epilogue = stream.kernel.shape[1], stream.epilogue
        options: dict[str, Any] = {"activation": epilogue.activation, "norm_size": epilogue.norm_size}
        reason = unsupported_reason(x, stream.kernel, stream.bias, stream.initial_state, **options)
        if reason is not None:
            return reason
        if first % channels:
            return f"a stream of {channels} channels from column {first} on (only from a multiple of them)"
        first += channels
    return f"{x.shape[-1]} columns for streams of {first} channels" if first > x.shape[-1] else None


def fused_convolutions(
    x: Float[Array, "B T N"],
    streams: Sequence[ConvolutionBranch],
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    config: ConvolutionConfig | None = None,
) -> tuple[tuple[Float[Array, "B T _"], ...], Float[Array, "B T rest"]]:
    """`short_convolution` of streams whose inputs lie side by side in one array.

    The gradient of `x` is one array too, into which each stream's kernel writes its columns.

    Args:
        x: inputs, the first stream's in the first columns, and so on; further columns may follow.
        streams: each starts at a multiple of its number of channels.
        segment_ids: as `short_convolution`.
        config: how the calls are cut into programs.

    Returns:
        Each stream's result in `x`'s dtype, and the columns behind the streams as they are.

    Raises:
        NotImplementedError: there is an `fused_unsupported_reason`.
    """
    refuse("fused_convolutions", fused_unsupported_reason(x, streams))
    return _convolutions(x, streams, segment_ids, config)


def _convolutions(
    x: Array, streams: Sequence[ConvolutionBranch], segment_ids: Array | None, config: ConvolutionConfig | None
) -> tuple[tuple[Array, ...], Array]:
    # The state of a filter of one tap has no tokens.
    states = [None if stream.kernel.shape[0] == 1 else stream.initial_state for stream in streams]
    filters = tuple(Filter(stream.kernel, stream.bias, state) for stream, state in zip(streams, states))
    options = Options(tuple(stream.epilogue for stream in streams), config or choose_convolution_config())
    return _run(options, pvary_together(ConvolutionInputs(x, filters, resets_of(segment_ids))))

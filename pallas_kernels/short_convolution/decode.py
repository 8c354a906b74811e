"""One token of several streams: their convolutions in one launch, with the inputs that the next token needs.

The new inputs are written over the old ones, as the delta rule's `decode` does with its state.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.common.config import KernelConfig
from pallas_kernels.common.kernel_shape import cdiv
from pallas_kernels.common.refusal import refuse
from pallas_kernels.common.triton.backend import (
    Operand,
    call,
    interpreted,
    iota,
    load_masked,
    sigmoid,
    store_masked,
    whole,
)
from pallas_kernels.common.vma import pvary_together
from pallas_kernels.short_convolution import api
from pallas_kernels.short_convolution.branch import Epilogue

_COLUMNS = 256  # channels of a program where there is no norm


@dataclass(frozen=True)
class TokenStream:
    """One stream's convolution of one token.

    Attributes:
        x: `[B, D]`, the token's inputs.
        kernel: `[W, D]`, W of at least 2.
        bias: None or `[D]`.
        state: `[B, W - 1, D]`, the inputs before, in `x`'s dtype.
        epilogue: activation and norm.
    """

    x: Array
    kernel: Array
    bias: Array | None
    state: Array
    epilogue: Epilogue


@dataclass(frozen=True)
class Cut:
    """Static facts of a stream.

    Attributes:
        width: W.
        channels: D.
        size: channels of a program: a head, if there is a norm.
        columns: the next power of two.
        activation: as the stream's.
        eps: of the norm; None is no norm.
        has_bias: whether there is a bias.
    """

    width: int
    channels: int
    size: int
    columns: int
    activation: str | None
    eps: float | None
    has_bias: bool

    @property
    def tiles(self) -> int:
        """Programs of a row."""
        return cdiv(self.channels, self.size)


def one_token_kernel(r, *, cuts: tuple[Cut, ...]):
    """Some channels of one row of one stream."""
    tile, row = pl.program_id(0), pl.program_id(1)
    first = 0
    for i, cut in enumerate(cuts):
        own = tile - first

        def run(i=i, cut=cut, own=own):
            _channels(r, i, cut, row, own)

        pl.when((own >= 0) & (own < cut.tiles))(run)
        first += cut.tiles


def _channels(r, i: int, cut: Cut, row: Array, tile: Array) -> None:
    lane = iota((cut.columns,), 0)
    column = tile * cut.size + lane
    mask = None
    if cut.columns != cut.size:
        mask = lane < cut.size
    if cut.channels % cut.size:
        mask = column < cut.channels if mask is None else mask & (column < cut.channels)

    def load(name: str, *index) -> Array:
        return load_masked(getattr(r, f"{name}_{i}"), (*index, column), mask).astype(jnp.float32)

    past = cut.width - 1
    inputs = [load("before_state", row, j) for j in range(past)] + [load("x", row)]
    y = load("bias") if cut.has_bias else jnp.zeros((cut.columns,), jnp.float32)
    for j, x in enumerate(inputs):
        y = y + load("kernel", j) * x
    if cut.activation == "silu":
        y = y * sigmoid(y)
    if cut.eps is not None:
        y = y * lax.rsqrt(jnp.sum(y * y, axis=0) + cut.eps)
    store_masked(getattr(r, f"y_{i}"), (row, column), y, mask)
    for j, x in enumerate(inputs[1:]):
        store_masked(getattr(r, f"state_{i}"), (row, j, column), x, mask)


def _cut(stream: TokenStream) -> Cut:
    (width, channels), (activation, norm_size, norm_eps) = stream.kernel.shape, stream.epilogue
    widest = 16 if interpreted() else _COLUMNS
    size = min(widest, channels) if norm_size is None else norm_size
    columns = 1 << (size - 1).bit_length()
    eps = None if norm_size is None else norm_eps
    return Cut(width, channels, size, columns, activation, eps, stream.bias is not None)


def unsupported_reason(streams: Sequence[TokenStream]) -> str | None:
    """Why `one_token_convolutions` can't serve some streams, as a noun phrase, or None if it can."""
    for s in streams:
        arrays = s.x, s.kernel, s.bias, s.state
        if reason := api.unsupported_reason(*arrays, activation=s.epilogue.activation, norm_size=s.epilogue.norm_size):
            return reason
        if s.kernel.shape[0] < 2:
            return "a filter of one token"
        if s.state.dtype != s.x.dtype:
            return "a state of another dtype than the inputs"
    return None


def one_token_convolutions(streams: Sequence[TokenStream]) -> list[tuple[Array, Array]]:
    """The results `[B, D]` and the next states `[B, W - 1, D]` of some streams of the same rows; no derivatives.

    Raises:
        NotImplementedError: there is an `unsupported_reason`.
    """
    refuse("one_token_convolutions", unsupported_reason(streams))
    cuts = tuple(map(_cut, streams))
    arrays = pvary_together([(s.x, s.kernel, s.bias, s.state) for s in streams])
    inputs: dict[str, Operand | None] = {}
    outputs: dict[str, Operand | None] = {}
    updates: dict[str, Operand] = {}
    for i, (x, kernel, bias, state) in enumerate(arrays):
        inputs |= {
            f"x_{i}": whole(x),
            f"kernel_{i}": whole(kernel),
            f"bias_{i}": whole(bias),
        }
        outputs[f"y_{i}"] = whole(jax.ShapeDtypeStruct(x.shape, x.dtype))
        outputs[f"state_{i}"] = whole(jax.ShapeDtypeStruct(state.shape, state.dtype))
        updates[f"state_{i}"] = whole(state)
    warps = max(1, min(4, max(cut.columns for cut in cuts) // 128))
    results = call(
        one_token_kernel,
        "short_convolution_one_token",
        (sum(cut.tiles for cut in cuts), streams[0].x.shape[0]),
        inputs,
        outputs,
        KernelConfig(num_warps=warps, num_stages=1),
        updates=updates,
        cuts=cuts,
    )
    return [(results[f"y_{i}"], results[f"state_{i}"]) for i in range(len(streams))]  # type: ignore[misc]

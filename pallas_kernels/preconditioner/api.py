"""The decayed diagonal of the keys' Gram matrix, and any function of it and of one row more, token by token.

    A_t = exp(log_decay_t) A_{t-1} + gain_t k_t^2        out_t = readout(A_{t-1}, A_t, x_t, parameter)

Keys are read twice and results written once; A itself never reaches memory. A program owns some tokens of one head:
one pass finds what each program's tokens do to A (an affine map), a second one applies the maps of the programs before
its own and then the recurrence itself, token by token in registers. The backward does the same from the last token to
the first, and computes A again in blocks of a few tokens.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from pallas_kernels.common.config import NUM_SMS, KernelConfig
from pallas_kernels.common.kernel_shape import cdiv, next_power_of_two, resets_of
from pallas_kernels.common.platform import is_hopper
from pallas_kernels.common.refusal import expect_backend, refuse
from pallas_kernels.common.triton.backend import Operand, call, interpreted, unsupported_arrays
from pallas_kernels.common.vma import batch_alike, pvary_together
from pallas_kernels.preconditioner.readouts import Preconditioner
from pallas_kernels.preconditioner.triton import Readout, apply_kernel, reverse_kernel, reverse_sums_kernel, sums_kernel

_MAX_CHANNELS = 256
_BUSY = 0.45
"""The part of a card's processors that must have a program for one pass to be faster than two: with 64 programs
on an H200 it takes 0.89 of their time, with 32 programs 1.5."""


@dataclasses.dataclass(frozen=True)
class GramConfig:
    """How a call is cut into programs.

    Attributes:
        tokens: of a program, a multiple of both blocks; None chooses by the number of heads.
        forward: warps of the forward's kernels; `block` is the number of tokens that they load at once, with two stages
            while they work on the ones before.
        backward: likewise of the backward's.
        programs: that fill the card, for the choice of `tokens`.
        parts: at most so many of one sequence, for that choice: each applies the maps of all before it.
        crowded: from this number of programs on, the backward pass loads no float32 gradient ahead: while one program
            waits for memory, others run.
    """

    tokens: int | None = None
    forward: KernelConfig = KernelConfig(num_warps=1, num_stages=2, block=16)
    backward: KernelConfig = KernelConfig(num_warps=1, num_stages=2, block=8)
    programs: int = 4096
    parts: int = 128
    crowded: int = 4096

    @property
    def block(self) -> int:
        """What a sequence is padded to a multiple of."""
        return max(self.forward.block, self.backward.block)

    def tokens_of(self, heads: int, length: int) -> int:
        """Tokens of a program, for `heads` sequences of one head each (all rows' together).

        Measured on an H200: 64 tokens or more, unless that leaves the card three quarters empty.
        """
        if self.tokens is not None:
            return self.tokens
        parts = min(self.parts, self.programs // heads, max(length // 64, self.programs // (4 * heads)))
        return self.block * cdiv(cdiv(length, self.block), max(1, parts))


def choose_gram_config() -> GramConfig:
    """The schedule for the device at hand: interpreted, small blocks compile fast and four programs keep all paths."""
    if interpreted():
        return GramConfig(
            forward=KernelConfig(num_stages=1, block=2), backward=KernelConfig(num_stages=1, block=2), programs=16
        )
    return GramConfig()


class GramInputs(NamedTuple):
    """Arguments, lengths padded to whole blocks and channels to powers of two.

    Attributes:
        k: `[B, T, H, K]`.
        x: None (`k`) or `[B, T, H, K]`, what the readout takes beside A.
        parameter: None or `[H]` float32, likewise.
        log_decay: None, `[B, T, H]` or `[B, T, H, K]`.
        gain: None, `[B, T, H]` or `[B, T, H, K]`.
        initial_state: None or `[B, H, K]` float32.
        resets: None, or `[B, T]` int32, 1 at each token that starts a document.
    """

    k: Array
    x: Array | None
    parameter: Array | None
    log_decay: Array | None
    gain: Array | None
    initial_state: Array | None
    resets: Array | None


@dataclasses.dataclass(frozen=True)
class Options:
    """Static options of a call.

    Attributes:
        readout: a function of rows.
        dtype: of its results and of their gradients.
        stored: the dtype that results are rounded to.
        config: how the call is cut.
        passes_key: whether `k` is returned too.
        backend: `"triton"` or `"mosaic"`.
    """

    readout: Readout
    dtype: Any
    stored: Any
    config: GramConfig
    passes_key: bool
    backend: str


class _Cut:
    """Where a program finds its part of each array; the grid is (heads, parts of the sequence, rows).

    `from_end` goes through the rows from the last to the first, as the kernels do through the parts.
    """

    def __init__(self, options: Options, x: GramInputs, from_end: bool = False):
        self.from_end = from_end
        self.batch, self.length, self.heads, self.channels = x.k.shape
        self.tokens = options.config.tokens_of(self.batch * self.heads, self.length)
        self.parts = cdiv(self.length, self.tokens)
        self.grid = (self.heads, self.parts, self.batch)

    def row(self, b):
        """The row that a program with this index along the grid's last axis has."""
        return self.batch - 1 - b if self.from_end else b

    def of_tokens(self, x: Array | jax.ShapeDtypeStruct | None) -> Operand | None:
        """One head of `[B, T, H]` or `[B, T, H, K]`."""
        if x is None:
            return None
        tail = (self.channels,) if len(x.shape) == 4 else ()
        return Operand(x, (None, self.length, None, *tail), lambda h, n, b: (self.row(b), 0, h, *(0 for _ in tail)))

    def of_head(self, x: Array | jax.ShapeDtypeStruct | None) -> Operand | None:
        """One head of `[B, H, ...]`."""
        if x is None:
            return None
        tail = x.shape[2:]
        return Operand(x, (None, None, *tail), lambda h, n, b: (self.row(b), h, *(0 for _ in tail)))

    def inputs(self, x: GramInputs) -> dict[str, Operand | None]:
        """All arguments."""
        resets = None if x.resets is None else Operand(x.resets, (None, self.length), lambda h, n, b: (self.row(b), 0))
        return {
            "k": self.of_tokens(x.k),
            "x": self.of_tokens(x.x),
            "log_decay": self.of_tokens(x.log_decay),
            "gain": self.of_tokens(x.gain),
            "resets": resets,
            "parameter": None if x.parameter is None else Operand(x.parameter, (None,), lambda h, n, b: (h,)),
            "initial_state": self.of_head(x.initial_state),
        }

    def per_head(self, *shape: int) -> jax.ShapeDtypeStruct:
        """Shape of a float32 array `[B, H, *shape]`."""
        return jax.ShapeDtypeStruct((self.batch, self.heads, *shape), jnp.float32)


def _like(x: Array | None) -> jax.ShapeDtypeStruct | None:
    return None if x is None else jax.ShapeDtypeStruct(x.shape, x.dtype)


def _static(cut: _Cut, launch: KernelConfig) -> dict[str, Any]:
    return {"tokens": cut.tokens, "block": launch.block, "ahead": launch.num_stages > 1}


def _forward(options: Options, inputs: GramInputs, with_states: bool = True) -> tuple[Any, Any]:
    if options.backend == "mosaic":
        from pallas_kernels.preconditioner.mosaic_gpu.forward import forward

        results = forward(inputs, options.readout, with_states=with_states)
        return _returned(options, inputs, results), (inputs, results["states"], None)
    cut, launch = _Cut(options, inputs), options.config.forward
    given, static = cut.inputs(inputs), _static(cut, launch)
    sums: dict[str, Any] = {"sums": None, "kept": None}
    if cut.parts > 1:
        back = _Cut(options, inputs, from_end=True)
        per_channel = inputs.log_decay is not None and inputs.log_decay.ndim == 4
        kept = cut.per_head(cut.parts, *((cut.channels,) if per_channel else ()))
        sums = call(
            sums_kernel,
            "gram_sums",
            cut.grid,
            {**back.inputs(inputs), "x": None, "parameter": None, "initial_state": None},
            {"sums": back.of_head(cut.per_head(cut.parts, cut.channels)), "kept": back.of_head(kept)},
            launch,
            **static,
        )
    results = call(
        apply_kernel,
        "gram_apply",
        cut.grid,
        {**given, **{name: cut.of_head(x) for name, x in sums.items()}},
        {
            "out": cut.of_tokens(jax.ShapeDtypeStruct(inputs.k.shape, options.stored)),
            "final_state": cut.of_head(cut.per_head(cut.channels)),
            "states": cut.of_head(cut.per_head(cut.parts, cut.channels)) if with_states else None,
        },
        launch,
        readout=options.readout,
        **static,
    )
    return _returned(options, inputs, results), (inputs, results["states"], sums["kept"])


def _returned(options: Options, inputs: GramInputs, results: dict[str, Any]) -> tuple[Array, ...]:
    # The wider dtype is for the gradient alone: XLA drops this cast together with a caller's cast back.
    out = results["out"].astype(options.dtype), results["final_state"]
    return batch_alike(inputs, (*out, inputs.k) if options.passes_key else out)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(options: Options, inputs: GramInputs) -> tuple[Array, ...]:
    """Readouts, A after the last token and, if asked for, `k`; for padded inputs."""
    return _forward(options, inputs, with_states=False)[0]


def _backward(options: Options, residuals: Any, cotangents: tuple[Array, ...]) -> tuple[GramInputs]:
    inputs, states, kept = residuals
    d_out, d_final_state, *d_passed = cotangents
    if options.backend == "mosaic":
        from pallas_kernels.preconditioner.mosaic_gpu.backward import backward

        d_key = d_passed[0] if d_passed else None
        results = backward(inputs, options.readout, states, d_out, d_key, d_final_state)
        return (_gradients(inputs, results),)
    cut, launch = _Cut(options, inputs), options.config.backward
    if d_out.dtype == jnp.float32 and math.prod(cut.grid) >= options.config.crowded:
        launch = launch.with_stages(1)
    given = {**cut.inputs(inputs), "d_out": cut.of_tokens(d_out), "initial_state": None}
    block_states = cut.per_head(cut.length // launch.block, cut.channels)
    static = {"readout": options.readout, **_static(cut, launch)}
    found = call(
        reverse_sums_kernel,
        "gram_reverse_sums",
        cut.grid,
        {**given, "states": cut.of_head(states)},
        {
            "d_sums": cut.of_head(cut.per_head(cut.parts, cut.channels)),
            "block_states": cut.of_head(block_states),
        },
        launch,
        **static,
    )
    if kept is None:  # one part: its map is never applied
        kept = jnp.ones((cut.batch, cut.heads, 1), jnp.float32)
    x, cut = inputs, _Cut(options, inputs, from_end=True)
    parts = None if x.parameter is None else cut.of_head(cut.per_head(cut.parts))
    results = call(
        reverse_kernel,
        "gram_reverse",
        cut.grid,
        {
            **cut.inputs(inputs),
            "initial_state": None,
            "d_out": cut.of_tokens(d_out),
            **{name: cut.of_head(array) for name, array in found.items()},
            "kept": cut.of_head(kept),
            "d_final_state": cut.of_head(d_final_state),
            "d_passed": cut.of_tokens(d_passed[0] if d_passed else None),
        },
        {
            "d_k": cut.of_tokens(_like(x.k)),
            "d_x": cut.of_tokens(_like(x.x)),
            "d_log_decay": cut.of_tokens(_like(x.log_decay)),
            "d_gain": cut.of_tokens(_like(x.gain)),
            "d_initial_state": cut.of_head(cut.per_head(cut.channels)),
            "d_parameter": parts,
        },
        launch,
        **static,
    )
    if results["d_parameter"] is not None:
        results["d_parameter"] = jnp.sum(results["d_parameter"], axis=(0, 2))
    return (_gradients(x, results),)


def _gradients(x: GramInputs, results: dict[str, Array | None]) -> GramInputs:
    return GramInputs(
        k=results["d_k"],  # type: ignore[arg-type]
        x=results.get("d_x"),
        parameter=results["d_parameter"],
        log_decay=results["d_log_decay"],
        gain=results["d_gain"],
        initial_state=None if x.initial_state is None else results["d_initial_state"],
        resets=None,
    )


_run.defvjp(_forward, _backward)


def unsupported_reason(
    k: Array,
    x: Array | None = None,
    parameter: Array | None = None,
    log_decay: Array | None = None,
    gain: Array | None = None,
    initial_state: Array | None = None,
    *,
    readout: Readout | None = None,
    stored: Any = None,
    backend: str = "triton",
) -> str | None:
    """Why `diagonal_gram_readout` can't serve a call, as a noun phrase, or None if it can; arguments as there.

    `readout` and `stored` matter to the backend `"mosaic"` alone.
    """
    gates = {"log_decay": log_decay, "gain": gain}
    reason = unsupported_arrays(k=k, x=x, parameter=parameter, **gates, initial_state=initial_state)
    if reason is None and k.shape[3] > _MAX_CHANNELS:
        return f"key size {k.shape[3]} (at most {_MAX_CHANNELS})"
    if reason is not None or backend == "triton":
        return reason
    if not is_hopper():
        return "this device (it runs on Hopper cards)"
    try:
        from pallas_kernels.preconditioner.mosaic_gpu.turns import CHANNELS
    except ImportError as error:
        return f"this jax: {error}"
    if not isinstance(readout, Preconditioner):
        return f"a readout {type(readout).__name__} (only Preconditioner)"
    for name, dtype in (("k", k.dtype), ("results stored", jnp.dtype(stored or jnp.float32))):
        if dtype != jnp.bfloat16:
            return f"{name} of dtype {dtype} (only bfloat16)"
    if x is not None:
        return "a row beside the key"
    if any(gate is not None and gate.ndim == 4 for gate in gates.values()):
        return "gates of one number a channel"
    return None if k.shape[3] == CHANNELS else f"key size {k.shape[3]} (only {CHANNELS})"


def is_mosaic_faster(k: Array | jax.ShapeDtypeStruct) -> bool:
    """Whether the Mosaic GPU kernels are the faster ones for keys `[B, T, H, K]` of a call that both backends serve.

    A head of a row is one program, so that they need as many as the card has processors, or nearly a multiple of it.
    """
    programs = k.shape[0] * k.shape[2]
    return programs >= _BUSY * NUM_SMS * cdiv(programs, NUM_SMS)


def diagonal_gram_readout(
    k: Float[Array, "B T H K"],
    x: Float[Array, "B T H K"] | None = None,
    parameter: Float[Array, " H"] | None = None,
    *,
    readout: Readout,
    dtype: Any = jnp.float32,
    stored: Any = None,
    log_decay: Float[Array, "B T H"] | Float[Array, "B T H K"] | None = None,
    gain: Float[Array, "B T H"] | Float[Array, "B T H K"] | None = None,
    initial_state: Float[Array, "B H K"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    with_key: bool = False,
    config: GramConfig | None = None,
    backend: str = "triton",
) -> tuple[Array, ...]:
    """`A_t = exp(log_decay_t) A_{t-1} + gain_t k_t^2` and `out_t = readout(A_{t-1}, A_t, x_t, parameter)`.

    Preconditioned DeltaNet (arXiv 2604.21100), equations 8 and 9, forward and backward in Triton kernels.

    Args:
        k: keys, bfloat16 or float32.
        x: what the readout takes beside A; None is `k`.
        parameter: a number a head that the readout takes, or None.
        readout: one of `pallas_kernels.preconditioner.readouts`.
        dtype: of the results and of their gradients.
        stored: the dtype that results are rounded to in memory; None is `dtype`.
        log_decay: natural logarithm of the decay, `<= 0`, -inf included; None is no decay.
        gain: weight of each token; None is 1.
        initial_state: A before the first token; None is zero.
        segment_ids: A restarts where the id changes; the first token continues `initial_state`.
        with_key: whether `k` is returned too. The kernel adds the gradient of that one to its own.
        config: how the call is cut into programs, in Triton.
        backend: `"mosaic"` reads each array once in Mosaic GPU kernels, where it has no `unsupported_reason`; else
            `"triton"`.

    Returns:
        `out` and A after the last token, `[B, H, K]` float32; `k`, where asked for.

    Raises:
        NotImplementedError: there is an `unsupported_reason`.
        ValueError: `backend` is neither.
    """
    expect_backend("diagonal_gram_readout", backend, "triton", "mosaic")
    kind: dict[str, Any] = {"readout": readout, "stored": stored or dtype, "backend": backend}
    reason = unsupported_reason(k, x, parameter, log_decay, gain, initial_state, **kind)
    refuse("diagonal_gram_readout", reason, backend)
    config = config or choose_gram_config()
    length, channels = k.shape[1], k.shape[3]
    resets = resets_of(segment_ids)
    block = config.block
    if backend == "mosaic":
        from pallas_kernels.preconditioner.mosaic_gpu.turns import TOKENS as block
    tokens, width = -length % block, next_power_of_two(channels) - channels

    def pad(array):
        """Appends tokens and channels that do nothing."""
        if array is None or not (tokens or width):
            return array
        return jnp.pad(array, [(0, 0), (0, tokens), (0, 0), (0, width)][: array.ndim])

    if initial_state is not None:
        initial_state = jnp.pad(initial_state.astype(jnp.float32), [(0, 0), (0, 0), (0, width)])
    inputs = GramInputs(
        k=pad(k),
        x=pad(x),
        parameter=None if parameter is None else parameter.astype(jnp.float32),
        log_decay=pad(log_decay),
        gain=pad(gain),
        initial_state=initial_state,
        resets=None if resets is None else pad(resets),
    )
    options = Options(readout, jnp.dtype(dtype), jnp.dtype(stored or dtype), config, with_key, backend)
    out, final, *passed = _run(options, pvary_together(inputs))
    return (out[:, :length, :, :channels], final[..., :channels], *(y[:, :length, :, :channels] for y in passed))

"""A log decay by channel from its projection, forward and backward."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from pallas_kernels.common.config import KernelConfig
from pallas_kernels.common.kernel_shape import cdiv, next_power_of_two
from pallas_kernels.common.refusal import refuse
from pallas_kernels.common.triton.backend import Operand, call, interpreted, unsupported_arrays, whole
from pallas_kernels.common.vma import pvary_together
from pallas_kernels.softplus_decay.triton import Cut, decay_kernel, reverse_decay_kernel


@dataclasses.dataclass(frozen=True)
class DecayConfig:
    """How a call is cut into programs.

    Attributes:
        columns: channels of a program, a power of two.
        rows: of a program, forward.
        reverse_rows: of a program, backward.
        num_warps: of a program.
    """

    columns: int = 1024
    rows: int = 4
    reverse_rows: int = 64
    num_warps: int = 8


class DecayInputs(NamedTuple):
    """Arguments.

    Attributes:
        p: `[N, F]`.
        rate: `[F]`.
        bias: `[F]`.
    """

    p: Array
    rate: Array
    bias: Array


def _cut(config: DecayConfig, p: Array, rows: int) -> tuple[Cut, tuple[int, int], KernelConfig]:
    """A kernel's static facts, its grid and its launch."""
    columns = min(config.columns, next_power_of_two(p.shape[1]))
    cut = Cut(p.shape[0], p.shape[1], columns, rows)
    warps = max(1, config.num_warps * columns // config.columns)
    return cut, (cdiv(p.shape[1], columns), cdiv(p.shape[0], rows)), KernelConfig(num_warps=warps, num_stages=1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(config: DecayConfig, inputs: DecayInputs) -> Array:
    cut, grid, launch = _cut(config, inputs.p, config.rows)
    outputs = {"g": whole(jax.ShapeDtypeStruct(inputs.p.shape, jnp.float32))}
    operands = {name: whole(x) for name, x in inputs._asdict().items()}
    return call(decay_kernel, "softplus_decay", grid, operands, outputs, launch, cut=cut)["g"]  # type: ignore[return-value]


def _forward(config: DecayConfig, inputs: DecayInputs) -> tuple[Array, tuple]:
    g = _run(config, inputs)
    # Of `p` its dtype alone is kept: the program does not read it again.
    return g, (g, inputs.rate, jnp.zeros((0,), inputs.p.dtype), jnp.zeros((0,), inputs.bias.dtype))


def _backward(config: DecayConfig, residuals: tuple, d_g: Array) -> tuple[DecayInputs]:
    g, rate, like_p, like_bias = residuals
    cut, grid, launch = _cut(config, g, config.reverse_rows)
    parts = jax.ShapeDtypeStruct((grid[1], cut.features), jnp.float32)
    of_program = Operand(parts, (None, cut.features), lambda c, n: (n, 0))
    results = call(
        reverse_decay_kernel,
        "softplus_decay_reverse",
        grid,
        {"g": whole(g), "rate": whole(rate), "d_g": whole(d_g)},
        {"d_p": whole(jax.ShapeDtypeStruct(g.shape, like_p.dtype)), "d_rate": of_program, "d_bias": of_program},
        launch,
        cut=cut,
    )
    d_rate, d_bias = (jnp.sum(results[name], axis=0) for name in ("d_rate", "d_bias"))  # type: ignore[arg-type]
    return (DecayInputs(results["d_p"], d_rate.astype(rate.dtype), d_bias.astype(like_bias.dtype)),)  # type: ignore[arg-type]


_run.defvjp(_forward, _backward)


def unsupported_reason(p: Array, rate: Array, bias: Array) -> str | None:
    """Why `softplus_decay` can't serve a call, as a noun phrase, or None if it can."""
    return unsupported_arrays(p=p, rate=rate, bias=bias)


def softplus_decay(
    p: Float[Array, "*rows F"],
    rate: Float[Array, " F"],
    bias: Float[Array, " F"],
    *,
    config: DecayConfig | None = None,
) -> Float[Array, "*rows F"]:
    """`-rate * softplus(p + bias)` by channel, computed in float32.

    The backward pass keeps the result in place of `p`. Where a rate is 0, its own gradient and those of `p` and `bias`
    are 0.

    Args:
        p: projections, bfloat16 or float32.
        rate: of each channel, not negative.
        bias: of each channel.
        config: how the call is cut into programs.

    Returns:
        The log decay, float32.

    Raises:
        NotImplementedError: there is an `unsupported_reason`.
    """
    refuse("softplus_decay", unsupported_reason(p, rate, bias))
    if config is None:
        config = DecayConfig(columns=32, rows=2, reverse_rows=4) if interpreted() else DecayConfig()
    flat = p.reshape(-1, p.shape[-1])
    return _run(config, pvary_together(DecayInputs(flat, rate, bias))).reshape(p.shape)

"""A ridge solve's arrays, its static facts, and the schedule of its kernels."""

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from pallas_kernels.common.config import KernelConfig
from pallas_kernels.common.kernel_shape import cdiv
from pallas_kernels.common.triton.decay_rows import Rows, decay_rows
from pallas_kernels.common.triton.kernel_shape import KernelShape

METHODS = ("chebyshev", "conjugate_gradient", "gradient_descent", "nesterov")
PRECISIONS = ("bfloat16", "split", "tf32", "float32", "mixed")

MOST_CONDITION = 256.0
"""Condition number up to which a chunk's systems are solved with products in float16 where precision is mixed."""
LEAST_RIDGE, MOST_NORM = 2.0**-6, 2.0**12
"""Other bounds of these chunks. Below the least ridge, what float16 loses of elements that are small for it would show
beside the ridge. Matrices of larger norms could be too large for it."""


class RidgeInputs(NamedTuple):
    """Arguments of a solve, lengths padded to whole chunks and channels to powers of two.

    Attributes:
        q: right-hand sides `[B, T, H, K]`.
        k: `[B, T, H, K]`.
        ridge: `[H, 1 or K]` float32.
        log_decay: None or `[B, T, H]` float32.
        initial_gram: None or `[B, H, K, K]` float32, symmetric.
        resets: None, or `[B, T]` int32, 1 at each token that starts a document; then there is a `log_decay`.
    """

    q: Array
    k: Array
    ridge: Array
    log_decay: Array | None = None
    initial_gram: Array | None = None
    resets: Array | None = None


@dataclass(frozen=True)
class Method:
    """How a solve iterates.

    Attributes:
        name: one of `METHODS`.
        iterations: their number.
        adaptive: whether the ridge is relative to the Gram matrix's Frobenius norm.
        epsilon: added to both divisors of conjugate gradients.
        precision: of the products, one of `PRECISIONS` but for mixed.
        mixed: whether well-conditioned chunks are solved with products in float16; then `precision` is split.
    """

    name: str = "chebyshev"
    iterations: int = 30
    adaptive: bool = True
    epsilon: float = 0.0
    precision: str = "bfloat16"
    mixed: bool = False

    @property
    def needs_norm(self) -> bool:
        """Whether the Gram matrix's norm is the ridge's unit or bounds the eigenvalues."""
        return self.adaptive or self.mixed or self.name != "conjugate_gradient"

    @property
    def parts(self) -> int:
        """In how many parts of bfloat16 a state is stored."""
        return 2 if self.precision == "split" else 1

    @property
    def state_dtype(self) -> Any:
        """The dtype of stored states."""
        return jnp.bfloat16 if self.precision in ("bfloat16", "split") else jnp.float32


@dataclass(frozen=True)
class RidgeConfig:
    """How a solve is cut into programs.

    Attributes:
        increments: what each chunk adds to the Gram matrix.
        scan: Gram matrices at the chunks' starts; `block` is a number of rows, `inner` the number of chunks whose loads
            are begun together.
        solve: the iterations.
        solve_mild: those with products in float16, of well-conditioned chunks.
        start_gradients: what each chunk adds to the gradient of the Gram matrix; `block` is a block of key channels.
        reverse_scan: that gradient; likewise.
        boundary_gradients: gradients of keys and decay through the chunks' ends; `block` is a block of key channels.
        gradients: through pairs of tokens; likewise.
        keeps_states: whether the Gram matrices at the chunks' starts are kept for the backward, or recomputed. They
            take as much memory as keys and solutions of 128 channels.
    """

    increments: KernelConfig = KernelConfig(num_warps=8, num_stages=1)
    scan: KernelConfig = KernelConfig(num_warps=4, num_stages=1, block=8, inner=8)
    solve: KernelConfig = KernelConfig(num_warps=4, num_stages=1)
    solve_mild: KernelConfig = KernelConfig(num_warps=4, num_stages=1)
    start_gradients: KernelConfig = KernelConfig(num_warps=8, num_stages=1, block=64)
    reverse_scan: KernelConfig = KernelConfig(num_warps=4, num_stages=1, block=8, inner=8)
    boundary_gradients: KernelConfig = KernelConfig(num_warps=4, num_stages=2, block=64)
    gradients: KernelConfig = KernelConfig(num_warps=4, num_stages=1, block=128)
    keeps_states: bool = True


def ridge_problem(inputs: RidgeInputs) -> KernelShape:
    """The static facts of a solve, as those of linear attention from keys to keys."""
    batch, length, heads, size = inputs.k.shape
    dtype = jnp.dtype(inputs.k.dtype)
    return KernelShape(batch, length, heads, heads, size, size, dtype, False, 1.0)


def ridge_rows(kernel_shape: KernelShape, inputs: RidgeInputs) -> Rows:
    """The numbers of a solve's decay."""
    return decay_rows(kernel_shape, inputs.log_decay, inputs.resets, name="ridge_decay", num_warps=1)


def choose_config(kernel_shape: KernelShape, precision: str = "bfloat16") -> RidgeConfig:
    """The schedule measured best on an H200.

    Where the scan has many programs, each loads further ahead. Matrices in more than one part take smaller blocks.
    """
    config = RidgeConfig()
    programs = kernel_shape.batch * kernel_shape.value_heads * cdiv(kernel_shape.key_size, config.scan.block)
    if programs >= 256:
        config = dataclasses.replace(config, scan=dataclasses.replace(config.scan, inner=16))
    if precision == "bfloat16":
        return config
    return dataclasses.replace(
        config,
        boundary_gradients=dataclasses.replace(config.boundary_gradients, block=32),
        gradients=dataclasses.replace(config.gradients, block=64),
    )

"""What a short convolution applies to a stream of inputs; without Pallas, so that callers without kernels have it."""

from typing import NamedTuple

from jax import Array


class Epilogue(NamedTuple):
    """The operations after a convolution's sums.

    Attributes:
        activation: None or "silu".
        norm_size: channels of a head whose results get unit length; None is no norm.
        norm_eps: added to the squared norm.
    """

    activation: str | None = None
    norm_size: int | None = None
    norm_eps: float = 1e-6


class ConvolutionBranch(NamedTuple):
    """One stream of `fused_convolutions`.

    Attributes:
        kernel: `[W, D]`.
        bias: None or `[D]`.
        initial_state: None or the W - 1 inputs before the first, `[B, W - 1, D]`.
        epilogue: activation and norm.
    """

    kernel: Array
    bias: Array | None = None
    initial_state: Array | None = None
    epilogue: Epilogue = Epilogue()

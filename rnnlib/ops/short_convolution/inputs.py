"""The short convolution's arguments, as its implementations take them."""

from typing import Literal, NamedTuple

from jax import Array

Activation = Literal["silu"] | None


class ConvolutionInputs(NamedTuple):
    """Arrays of a call.

    Attributes:
        x: `[B, T, D]`.
        kernel: `[W, D]`.
        bias: None or `[D]`.
        initial_state: None or `[B, W - 1, D]`.
        segment_ids: None or `[B, T]`.
    """

    x: Array
    kernel: Array
    bias: Array | None
    initial_state: Array | None
    segment_ids: Array | None


class Epilogue(NamedTuple):
    """The operations after the convolution's sums.

    Attributes:
        activation: None or "silu".
        norm_size: channels of a head whose results get unit length; None is no norm.
        norm_eps: added to the squared norm.
    """

    activation: Activation
    norm_size: int | None
    norm_eps: float

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

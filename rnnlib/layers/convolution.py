"""The short convolution before the recurrence: a depthwise causal filter over a few tokens."""

import dataclasses
from typing import Literal

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from rnnlib import ops
from rnnlib.fields import PositiveInteger, PositiveNumber
from rnnlib.layers.base import MixerShape
from rnnlib.layers.initializers import Initializer
from rnnlib.layers.part import PartConfig
from rnnlib.ops.short_convolution.inputs import ConvolutionInputs


@dataclasses.dataclass(frozen=True)
class ConvolutionConfig(PartConfig):
    """Which of a mixer's branches (queries, keys, values) are filtered, and how.

    Attributes:
        size: tokens that the filter spans, this one included.
        use_bias: whether there is a bias per channel.
        query: whether queries are filtered.
        key: whether keys are.
        value: whether values are.
        activation: of the filter's output, before the feature map.
        initializer: of the filter (fan-in is `size`).
        query_scale: factor on what the queries' filter reads (a multiplier of muP, arXiv 2203.03466), not on its bias.
        key_scale: likewise of the keys.
        value_scale: likewise of the values.
    """

    size: PositiveInteger = 4
    use_bias: bool = False
    query: bool = True
    key: bool = True
    value: bool = True
    activation: Literal["none", "silu"] = "none"
    initializer: Initializer = dataclasses.field(default_factory=Initializer)
    query_scale: PositiveNumber = 1.0
    key_scale: PositiveNumber = 1.0
    value_scale: PositiveNumber = 1.0


class ShortConvolution(nnx.Module):
    """`y_t = sum_i kernel_i * x_(t - size + 1 + i) (+ bias)`, channel by channel, within a segment."""

    def __init__(
        self, channels: int, config: ConvolutionConfig, shape: MixerShape, *, scale: float = 1.0, rngs: nnx.Rngs
    ):
        """Builds the filter of `channels`; `scale` multiplies its input."""
        self.channels = channels
        self.scale = scale
        self.size = config.size
        self.dtype = shape.dtype
        init = config.initializer.build()
        self.kernel = nnx.Param(init(rngs.params(), (config.size, channels), shape.param_dtype))
        self.bias = nnx.Param(jnp.zeros((channels,), shape.param_dtype)) if config.use_bias else None

    def __call__(
        self,
        x: Float[Array, "B T C"],
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        state: Float[Array, "B S C"] | None = None,
        activation: Literal["silu"] | None = None,
        norm_size: int | None = None,
    ) -> tuple[Float[Array, "B T C"], Float[Array, "B S C"]]:
        """Filters `x`.

        Args:
            x: inputs.
            segment_ids: ids of packed documents. The filter does not cross their boundaries. None is one document.
            state: the `size - 1` inputs before `x`; None is zeros.
            activation: of the filter's output; None is none.
            norm_size: channels of a head, each of which is scaled to unit length; None is no norm.

        Returns:
            Output and next state.
        """
        inputs = self.inputs(x, state)
        return ops.short_convolution(
            x,
            inputs.kernel,
            bias=inputs.bias,
            initial_state=state,
            segment_ids=segment_ids,
            activation=activation,
            norm_size=norm_size,
        )

    def inputs(self, x: Float[Array, "B T C"], state: Float[Array, "B S C"] | None) -> ConvolutionInputs:
        """The operator's arrays, in the compute dtype; arguments as the call's."""
        return ConvolutionInputs(x, *self.filter(), state, None)

    def filter(self) -> tuple[Float[Array, "W C"], Float[Array, " C"] | None]:
        """Kernel and bias in the compute dtype."""
        bias = None if self.bias is None else self.bias[...].astype(self.dtype)
        kernel = self.kernel[...]
        return (kernel if self.scale == 1 else kernel * self.scale).astype(self.dtype), bias

    def init_state(self, batch_size: int, dtype: DTypeLike) -> Float[Array, "B S C"]:
        """The state before the first token: zeros."""
        return jnp.zeros((batch_size, self.size - 1, self.channels), dtype)

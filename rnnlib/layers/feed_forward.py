"""The feed-forward half of a block: a SwiGLU or a plain one, and the base class of their configurations."""

import abc
import dataclasses
from typing import TypedDict, Unpack

from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from rnnlib.fields import PositiveInteger, PositiveNumber
from rnnlib.layers.feature_maps import ACTIVATIONS, Activation
from rnnlib.layers.linear import gated_product
from rnnlib.layers.part import PartConfig
from rnnlib.layers.tensor import current_tp_size, row_parallel_linear, shard_size
from rnnlib.ops.skinny_gemm import linear_product

_WIDTH = "the width of a feed-forward (--model.mlp-width)"


class MapOptions(TypedDict):
    """How the linear maps of a feed-forward are made.

    Attributes:
        initializer_std: standard deviation of the initial weights.
        dtype: dtype of the products.
        param_dtype: dtype of the weights.
        rngs: source of the initial weights.
    """

    initializer_std: float
    dtype: DTypeLike
    param_dtype: DTypeLike
    rngs: nnx.Rngs


def _linear(
    options: MapOptions, features_in: int, features: int, use_bias: bool, module: type[nnx.Linear] = nnx.Linear
) -> nnx.Linear:
    return module(
        features_in,
        features,
        use_bias=use_bias,
        kernel_init=nnx.initializers.normal(options["initializer_std"]),
        dtype=options["dtype"],
        param_dtype=options["param_dtype"],
        dot_general=linear_product,
        rngs=options["rngs"],
    )


class SwiGLU(nnx.Module):
    """Gated feed-forward `output_scale W_down (silu(gate_scale W_gate x) * W_up x)`, or with another activation."""

    def __init__(
        self,
        width: int,
        hidden_width: int,
        *,
        use_bias: bool = False,
        gate_scale: float = 1.0,
        output_scale: float = 1.0,
        activation: Activation = "silu",
        **options: Unpack[MapOptions],
    ):
        """Builds the three maps.

        Args:
            width: width of input and output, `D`.
            hidden_width: width in between.
            use_bias: whether the three maps have biases.
            gate_scale: factor on the gate's product and bias.
            output_scale: factor on the output.
            activation: of the gate.
            **options: see `MapOptions`.
        """
        hidden_width = shard_size(hidden_width, _WIDTH)
        self.gate_scale, self.output_scale, self.activation = gate_scale, output_scale, activation
        self.gate = _linear(options, width, hidden_width, use_bias)
        self.up = _linear(options, width, hidden_width, use_bias)
        self.down = _linear(options, hidden_width, width, use_bias, row_parallel_linear(current_tp_size()))

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Applies the block to `[B, T, D]` activations."""
        out = self.down(self.features(x))
        return out if self.output_scale == 1 else out * self.output_scale

    @property
    def output(self) -> nnx.Linear | None:
        """The map from `features` to the call's result; None where that is scaled."""
        return self.down if self.output_scale == 1 else None

    def features(
        self, x: Float[Array, "B T D"], *, added: tuple[Float[Array, "B T F"], Float[Array, "B T F"]] | None = None
    ) -> Float[Array, "B T F"]:
        """`silu(gate_scale W_gate x) * W_up x`, what `output` reads; `added` to the products of gate and up before."""
        if self.gate_scale == 1 and self.activation == "silu" and added is None:
            return gated_product(x, self.gate, self.up)
        gate, up = self.gate(x), self.up(x)
        if added is not None:
            gate, up = gate + added[0], up + added[1]
        return ACTIVATIONS[self.activation](gate if self.gate_scale == 1 else gate * self.gate_scale) * up


class MLP(nnx.Module):
    """Feed-forward without a gate, `W_down act(W_up x)`."""

    def __init__(
        self,
        width: int,
        hidden_width: int,
        *,
        activation: Activation,
        use_bias: bool = False,
        **options: Unpack[MapOptions],
    ):
        """Builds the two maps; `activation` is what stands between them, other arguments are as `SwiGLU`'s."""
        hidden_width = shard_size(hidden_width, _WIDTH)
        self.activation = activation
        self.up = _linear(options, width, hidden_width, use_bias)
        self.down = _linear(options, hidden_width, width, use_bias, row_parallel_linear(current_tp_size()))

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Applies the block to `[B, T, D]` activations."""
        return self.down(self.features(x))

    @property
    def output(self) -> nnx.Linear:
        """The map from `features` to the call's result."""
        return self.down

    def features(self, x: Float[Array, "B T D"]) -> Float[Array, "B T F"]:
        """`act(W_up x)`, what `output` reads."""
        return ACTIVATIONS[self.activation](self.up(x))


@dataclasses.dataclass(frozen=True)
class FeedForwardConfig(PartConfig, abc.ABC):
    """Configuration of a layer's feed-forward that is not the model's SwiGLU."""

    @abc.abstractmethod
    def build(self, width: int, hidden_width: int, **options: Unpack[MapOptions]) -> nnx.Module:
        """Builds the module, which maps `[B, T, D]` to `[B, T, D]`.

        Args:
            width: the model's width D.
            hidden_width: hidden width of the model's SwiGLUs, used if the configuration gives none; 0 for none.
            **options: see `MapOptions`.
        """

    def least_parameters(self, width: int, hidden_width: int) -> int:
        """A lower bound on the module's parameters; arguments as `build`'s."""
        return 0

    def describe(self, hidden_width: int) -> str:
        """The module in a few words, for a table of a model's parts."""
        return type(self).__name__


def own_or_model_width(
    config: FeedForwardConfig, own: int | None, models: int, expected: str = "the hidden width"
) -> int:
    """A feed-forward's width, else that of the model's SwiGLUs (0 for none).

    Raises:
        ValueError: neither is given; it names the configuration and what is `expected`.
    """
    if own is None and not models:
        name = type(config).__name__
        raise ValueError(f"{name}: width is None in a model whose mlp_width is 0, expected {expected}")
    return models if own is None else own


@dataclasses.dataclass(frozen=True)
class SwiGLUConfig(FeedForwardConfig):
    """A SwiGLU with options that the model's own (`"dense"`) does not have.

    Attributes:
        width: hidden width; None is that of the model's SwiGLUs.
        use_bias: whether the three maps have biases.
        gate_scale: factor on what the SiLU reads (a multiplier of muP, arXiv 2203.03466, as Falcon-H1 has them).
        output_scale: factor on the output.
    """

    width: PositiveInteger | None = None
    use_bias: bool = False
    gate_scale: PositiveNumber = 1.0
    output_scale: PositiveNumber = 1.0

    def build(self, width: int, hidden_width: int, **options: Unpack[MapOptions]) -> SwiGLU:
        """Builds the module; arguments as `FeedForwardConfig.build`.

        Raises:
            ValueError: neither this configuration nor the model gives a width.
        """
        return SwiGLU(
            width,
            self._width(hidden_width),
            use_bias=self.use_bias,
            gate_scale=self.gate_scale,
            output_scale=self.output_scale,
            **options,
        )

    def _width(self, hidden_width: int) -> int:
        return own_or_model_width(self, self.width, hidden_width)

    def least_parameters(self, width: int, hidden_width: int) -> int:
        """Parameters of the three maps."""
        return 3 * width * self._width(hidden_width)

    def describe(self, hidden_width: int) -> str:
        """The width."""
        return f"SwiGLU of width {self._width(hidden_width)}"


@dataclasses.dataclass(frozen=True)
class MLPConfig(FeedForwardConfig):
    """A feed-forward without a gate, `W_down act(W_up x)`.

    Attributes:
        width: hidden width; None is that of the model's SwiGLUs.
        activation: between the two maps. Nemotron's is `"squared_relu"` (Primer, arXiv 2109.08668).
        use_bias: whether the two maps have biases.
    """

    width: PositiveInteger | None = None
    activation: Activation = "squared_relu"
    use_bias: bool = False

    def build(self, width: int, hidden_width: int, **options: Unpack[MapOptions]) -> MLP:
        """Builds the module; arguments as `FeedForwardConfig.build`.

        Raises:
            ValueError: neither this configuration nor the model gives a width.
        """
        hidden_width = self._width(hidden_width)
        return MLP(width, hidden_width, activation=self.activation, use_bias=self.use_bias, **options)

    def _width(self, hidden_width: int) -> int:
        return own_or_model_width(self, self.width, hidden_width)

    def least_parameters(self, width: int, hidden_width: int) -> int:
        """Parameters of the two maps."""
        return 2 * width * self._width(hidden_width)

    def describe(self, hidden_width: int) -> str:
        """The activation and the width."""
        return f"MLP ({self.activation}) of width {self._width(hidden_width)}"

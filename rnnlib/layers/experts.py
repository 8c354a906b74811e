"""Experts: a router chooses a few of many feed-forwards for each token."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Annotated, Literal, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float, Int

from rnnlib import ops
from rnnlib.fields import NaturalNumber, PositiveInteger, PositiveNumber, Range
from rnnlib.layers.feature_maps import ACTIVATIONS, Activation
from rnnlib.layers.feed_forward import MLP, FeedForwardConfig, MapOptions, SwiGLU, own_or_model_width
from rnnlib.layers.part import PartConfig
from rnnlib.layers.tensor import current_tp_size, shard_size, sum_over_shards
from rnnlib.ops.sharding import dot_general_over_mesh

Coefficient = Annotated[float | int, Range(at_least=0)]

# Added to the divisor of the weights, as in DeepSeek-V3's code, since all sigmoids may be 0.
_SMALLEST_SUM = 1e-20


class RouterLoss(nnx.Variable):
    """A router's contribution to the training loss, coefficient included; see `with_router_losses`."""


@dataclasses.dataclass(frozen=True)
class RouterConfig(PartConfig):
    """How a router chooses experts and weighs their outputs, in float32 or wider.

    The default is the router of Qwen3-Next and Mixtral (arXiv 2401.04088): a softmax over all experts, of which the
    largest are chosen and divided by their sum. The router of DeepSeek-V3 (arXiv 2412.19437, section 2.1.2) and of Kimi
    Linear is
    `RouterConfig("sigmoid", correction_bias=True, groups=..., groups_kept=..., scale=...)`.

    Attributes:
        scores: `softmax(W x)` over all experts, or `sigmoid(W x)` of each.
        renormalize: whether the weights of the chosen experts are their scores divided by the sum of these scores; else
            they are the scores.
        correction_bias: experts are chosen by their score plus a bias per expert. The bias does not enter the weights,
            and its gradient is 0: losses do not train it.
        groups: the number of groups that the experts are divided into, in order.
        groups_kept: the number of groups that a token may choose from. The groups whose two best scores have the
            largest sum are kept.
        scale: multiplies the weights.
    """

    scores: Literal["softmax", "sigmoid"] = "softmax"
    renormalize: bool = True
    correction_bias: bool = False
    groups: PositiveInteger = 1
    groups_kept: PositiveInteger = 1
    scale: PositiveNumber = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.groups_kept > self.groups:
            raise ValueError(f"RouterConfig: groups_kept is {self.groups_kept}, expected at most groups={self.groups}")


@dataclasses.dataclass(frozen=True)
class Experts(FeedForwardConfig):
    """Each token goes through a few of many feed-forwards and, optionally, through one that all tokens share.

    `sum_e w_e expert_e(x) + shared(x)`, where the shared expert may have a gate, `sigmoid(w x)` (Qwen). Experts are
    SwiGLUs, or `W_down act(W_up x)` with `gated=False`. No token is dropped: see `rnnlib.ops.expert_mixture`.

    Attributes:
        num_experts: how many there are, E.
        experts_per_token: how many of them a token goes through.
        width: hidden width of each; None is that of the model's SwiGLUs.
        router: how they are chosen.
        shared_width: hidden width of the shared expert, 0 for none. Several shared experts equal one expert whose width
            is the sum of theirs.
        shared_gate: whether the shared expert's output is multiplied by a gate, one number per token.
        gated: whether experts, the shared one too, have a gate.
        activation: of the gate, or of `W_up x` without a gate.
        latent_size: channels L of a latent that the chosen experts work in, `W_out sum_e w_e expert_e(W_in x)`; router
            and shared expert see `x` (Nemotron 3). None is no latent.
        use_bias: whether the shared expert and the maps to and from the latent have biases; the others never do.
        load_balancing: coefficient of `E sum_e f_e p_e` in the training loss, where f_e is an expert's fraction of all
            choices and p_e its mean score over the tokens, with scores divided by their sum (Switch Transformer, arXiv
            2101.03961, equation 4). The sum is 1 if all experts are chosen equally often. Layers add up.
        z_loss: coefficient of the mean of `logsumexp(W x)^2` over the tokens (ST-MoE, arXiv 2202.08906, equation 5).
    """

    num_experts: PositiveInteger = 8
    experts_per_token: PositiveInteger = 2
    width: PositiveInteger | None = None
    router: RouterConfig = dataclasses.field(default_factory=RouterConfig)
    shared_width: NaturalNumber = 0
    shared_gate: bool = False
    gated: bool = True
    activation: Activation = "silu"
    latent_size: PositiveInteger | None = None
    use_bias: bool = False
    load_balancing: Coefficient = 0.0
    z_loss: Coefficient = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        experts, router = self.num_experts, self.router
        if experts % router.groups:
            raise ValueError(f"Experts: num_experts is {experts}, expected a multiple of router.groups={router.groups}")
        most = experts // router.groups * router.groups_kept
        if self.experts_per_token > most:
            raise ValueError(
                f"Experts: experts_per_token is {self.experts_per_token}, expected at most the {most} to choose from"
            )
        if self.shared_gate and not self.shared_width:
            raise ValueError("Experts: shared_gate is True, expected shared_width above 0 with it")
        if self.gated and self.activation != "silu":
            raise ValueError(f"Experts: activation is {self.activation!r}, expected 'silu' with gated=True")

    def build(self, width: int, hidden_width: int, **options: Unpack[MapOptions]) -> "ExpertMixture":
        """Builds the module; arguments as `FeedForwardConfig.build`.

        Raises:
            ValueError: neither this configuration nor the model gives the width of an expert.
        """
        return ExpertMixture(self, width, self._width(hidden_width), **options)

    def _width(self, hidden_width: int) -> int:
        return own_or_model_width(self, self.width, hidden_width, "the experts' width")

    def least_parameters(self, width: int, hidden_width: int) -> int:
        """Parameters of all experts."""
        matrices, inner = 3 if self.gated else 2, self.latent_size or width
        return matrices * (inner * self.num_experts * self._width(hidden_width) + width * self.shared_width)

    def describe(self, hidden_width: int) -> str:
        """The number and width of the experts."""
        shared = f", one shared of {self.shared_width}" if self.shared_width else ""
        return f"{self.experts_per_token} of {self.num_experts} experts of width {self._width(hidden_width)}{shared}"


class Router(nnx.Module):
    """Chooses experts for tokens.

    Attributes:
        projection: from the model's width to one logit an expert.
        correction_bias: `[E]` float32, or None.
    """

    def __init__(self, config: Experts, width: int, **options: Unpack[MapOptions]):
        """Builds the projection; arguments as `FeedForwardConfig.build`."""
        self.config = config
        self.projection = nnx.Linear(
            width,
            config.num_experts,
            use_bias=False,
            kernel_init=nnx.initializers.normal(options["initializer_std"]),
            dtype=jnp.promote_types(options["dtype"], jnp.float32),
            param_dtype=options["param_dtype"],
            precision=jax.lax.Precision.HIGHEST,  # In float32: rounding a logit could change the choice.
            dot_general=dot_general_over_mesh,
            rngs=options["rngs"],
        )
        has_bias = config.router.correction_bias
        self.correction_bias = nnx.Param(jnp.zeros([config.num_experts], jnp.float32)) if has_bias else None

    def __call__(
        self, x: Float[Array, "B T D"]
    ) -> tuple[Int[Array, "B T S"], Float[Array, "B T S"], Float[Array, "B T E"]]:
        """The chosen experts of each token, their weights, and the logits of all experts."""
        config = self.config.router
        logits = self.projection(x)
        scores = jax.nn.softmax(logits) if config.scores == "softmax" else jax.nn.sigmoid(logits)
        choices = self._choose(jax.lax.stop_gradient(scores))
        # Selected by comparison, because the gradient of indexing is a scatter-add.
        is_chosen = choices[..., None] == jnp.arange(self.config.num_experts)
        weights = jnp.sum(jnp.where(is_chosen, scores[..., None, :], 0), axis=-1)
        if config.renormalize:
            weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + _SMALLEST_SUM)
        return choices, weights * config.scale, logits

    def _choose(self, scores: Array) -> Array:
        config = self.config.router
        if self.correction_bias is not None:
            scores = scores + jax.lax.stop_gradient(self.correction_bias[...])
        if config.groups > 1:
            groups = scores.reshape(*scores.shape[:-1], config.groups, -1)
            best = jax.lax.top_k(groups, min(2, groups.shape[-1]))[0].sum(axis=-1)
            kept = jax.lax.top_k(best, config.groups_kept)[1]
            is_kept = jnp.any(kept[..., None] == jnp.arange(config.groups), axis=-2)
            scores = jnp.where(is_kept[..., None], groups, -jnp.inf).reshape(scores.shape)
        return jax.lax.top_k(scores, self.config.experts_per_token)[1]


class ExpertMixture(nnx.Module):
    """`sum_e w_e expert_e(x)`, and the shared expert's output where there is one; see `Experts`.

    Attributes:
        router: chooses experts and weighs them.
        gate: `[E, D, F]`, the experts' matrices in front of the SiLU; None for experts without a gate.
        up: `[E, D, F]`; like the others with L in place of D where experts work in a latent.
        down: `[E, F, D]`.
        latent_in: from the input to the latent, or None.
        latent_out: from the latent to the output, or None.
        shared: a `SwiGLU`, an `MLP`, or None.
        shared_gate: a projection to one channel, or None.
    """

    def __init__(self, config: Experts, width: int, hidden_width: int, **options: Unpack[MapOptions]):
        """Builds router and experts of `hidden_width`; other arguments as `FeedForwardConfig.build`."""
        self.config = config
        self.dtype, param_dtype, rngs = options["dtype"], options["param_dtype"], options["rngs"]
        self.tp_size = current_tp_size()
        hidden_width = shard_size(hidden_width, "the width of an expert (Experts.width)")
        init = nnx.initializers.normal(options["initializer_std"])
        inner = config.latent_size or width
        wide, narrow = (config.num_experts, inner, hidden_width), (config.num_experts, hidden_width, inner)
        self.router = Router(config, width, **options)
        self.gate = nnx.Param(init(rngs.params(), wide, param_dtype)) if config.gated else None
        self.up = nnx.Param(init(rngs.params(), wide, param_dtype))
        self.down = nnx.Param(init(rngs.params(), narrow, param_dtype))
        linear = functools.partial(
            nnx.Linear,
            kernel_init=init,
            dtype=self.dtype,
            param_dtype=param_dtype,
            dot_general=dot_general_over_mesh,
            rngs=rngs,
        )
        has_latent, bias = config.latent_size is not None, config.use_bias
        self.latent_in = linear(width, inner, use_bias=bias) if has_latent else None
        self.latent_out = linear(inner, width, use_bias=bias) if has_latent else None
        make = SwiGLU if config.gated else functools.partial(MLP, activation=config.activation)
        self.shared = make(width, config.shared_width, use_bias=bias, **options) if config.shared_width else None
        self.shared_gate = linear(width, 1, use_bias=False) if config.shared_gate else None

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Applies the experts to `[B, T, D]` activations; the result has the compute dtype."""
        x = x.astype(self.dtype)
        choices, weights, logits = self.router(x)
        gate = None if self.gate is None else self.gate[...]
        seen = x if self.latent_in is None else self.latent_in(x)
        activation = ACTIVATIONS[self.config.activation]
        out = ops.expert_mixture(seen, choices, weights, gate, self.up[...], self.down[...], activation=activation)
        out = sum_over_shards(out, self.tp_size)
        if self.latent_out is not None:
            out = self.latent_out(out)
        if self.has_losses and hasattr(self, "__captures__"):  # Read by `nnx.capture`.
            self.sow(RouterLoss, "router_loss", self._losses(choices, logits))
        if self.shared is None:
            return out
        shared = self.shared(x)
        if self.shared_gate is not None:
            wide = jnp.promote_types(x.dtype, jnp.float32)
            shared = shared * jax.nn.sigmoid(self.shared_gate(x).astype(wide)).astype(shared.dtype)
        return out + shared

    @property
    def has_losses(self) -> bool:
        """Whether the router adds to the training loss."""
        return bool(self.config.load_balancing or self.config.z_loss)

    def _losses(self, choices: Array, logits: Array) -> Array:
        config = self.config
        axes = tuple(range(logits.ndim - 1))
        loss = config.z_loss * jnp.mean(jnp.square(jax.nn.logsumexp(logits, axis=-1)))
        if config.load_balancing:
            scores = jax.nn.softmax(logits) if config.router.scores == "softmax" else jax.nn.sigmoid(logits)
            scores = scores / (jnp.sum(scores, axis=-1, keepdims=True) + _SMALLEST_SUM)
            share = jnp.mean(choices[..., None] == jnp.arange(config.num_experts), axis=(*axes, -2), dtype=scores.dtype)
            balance = config.num_experts * jnp.sum(share * jnp.mean(scores, axis=axes))
            loss = loss + config.load_balancing * balance
        return loss


def with_router_losses[Result](function: Callable[[nnx.Module], Result], model: nnx.Module) -> tuple[Result, Array]:
    """`function(model)`, and the sum of the routers' losses times their coefficients.

    Args:
        function: runs the model, such as `lambda model: model.hidden(tokens)`.
        model: any module. Give a copy: it gets empty variables for the values that its parts sow.

    Returns:
        The result, and a scalar: 0 where no router has a coefficient.
    """
    parts = (part for _, part in nnx.iter_modules(model))
    if not any(isinstance(part, ExpertMixture) and part.has_losses for part in parts):
        return function(model), jnp.zeros([])
    result, losses = nnx.capture(function, RouterLoss)(model)
    return result, sum(jax.tree.leaves(losses), jnp.zeros([]))

"""A layer of a language model: a token mixer and a feed-forward, each with its norm, added to the residual stream."""

from collections.abc import Iterable
from typing import Any

from flax import nnx
from jaxtyping import Array, Float, Int

from rnnlib.layers import Attention, LatentAttention, RecurrentMixer, TokenMixer
from rnnlib.layers.base import Carried, CarryingMixer
from rnnlib.layers.feed_forward import MLP, FeedForwardConfig, SwiGLU
from rnnlib.layers.normalization import RMSNorm, norm_and_stream
from rnnlib.layers.residual import residual_add
from rnnlib.models.config import NONE, FeedForwardName, ModelConfig, NormPosition
from rnnlib.models.mixers import build_mixer

# Mixers and feed-forwards that end in a map `output` of their `features`.
_WITH_OUTPUT = (RecurrentMixer, Attention, LatentAttention, SwiGLU, MLP)


def residual_norm(config: ModelConfig, rngs: nnx.Rngs) -> nnx.RMSNorm | RMSNorm | nnx.LayerNorm:
    """A norm of the residual stream."""
    dtypes: dict[str, Any] = {"dtype": config.compute_dtype, "param_dtype": config.storage_dtype}
    if config.norm == "layer":
        options: dict[str, Any] = {"use_bias": config.norm_bias, "use_fast_variance": False, "rngs": rngs, **dtypes}
        return nnx.LayerNorm(config.width, epsilon=config.norm_eps, **options)
    if config.zero_centred_norms:
        return RMSNorm(config.width, eps=config.norm_eps, zero_centred=True, **dtypes)
    return nnx.RMSNorm(config.width, epsilon=config.norm_eps, rngs=rngs, **dtypes)


def scaled(x: Array, scale: float) -> Array:
    """`x * scale`; `x` itself where that is 1."""
    return x if scale == 1 else x * scale


class Block(nnx.Module):
    """`x + mixer(norm(x))`, then `x + feed_forward(norm(x))`; or with the norms behind mixer and feed-forward.

    Attributes:
        mixer: mixes tokens; None in a layer that is a feed-forward alone.
        mixer_norm: its norm; None where it is, or has a norm of its own.
        feed_forward: maps each token; None in a layer that is a mixer alone.
        feed_forward_norm: its norm, None where it is.
    """

    def __init__(
        self,
        config: ModelConfig,
        mixer: str,
        *,
        norm_position: NormPosition = "input",
        feed_forward: FeedForwardName = "dense",
        rngs: nnx.Rngs,
    ):
        """Builds one layer.

        Args:
            config: the model's configuration.
            mixer: name of this layer's mixer, or `"none"`.
            norm_position: whether the norms stand before mixer and feed-forward or behind them.
            feed_forward: the model's SwiGLU, another feed-forward's configuration, or `"none"`.
            rngs: source of the initial weights.
        """
        self.norm_position = norm_position
        self.residual_scale = config.residual_scale
        dtypes: dict[str, Any] = {"dtype": config.compute_dtype, "param_dtype": config.storage_dtype}
        self.mixer_norm = None if mixer == NONE else residual_norm(config, rngs)
        self.mixer = None if mixer == NONE else build_mixer(config, mixer, rngs=rngs)
        if getattr(self.mixer, "reads_stream", False):  # it has a norm of its own
            self.mixer_norm = None
            if norm_position != "input":
                raise ValueError(f"norm_positions: {norm_position!r} with the mixer {mixer}, expected 'input'")
        hidden_width = config.feed_forward_width
        has_feed_forward = bool(hidden_width) if feed_forward == "dense" else feed_forward != NONE
        self.feed_forward_norm = residual_norm(config, rngs) if has_feed_forward else None
        make = feed_forward.build if isinstance(feed_forward, FeedForwardConfig) else SwiGLU
        self.feed_forward = (
            make(config.width, hidden_width, initializer_std=config.initializer_std, rngs=rngs, **dtypes)
            if has_feed_forward
            else None
        )

    @property
    def mixers(self) -> tuple[TokenMixer, ...]:
        """Its mixers: those that stand side by side or within another, one, or none."""
        return () if self.mixer is None else tuple(getattr(self.mixer, "mixers", (self.mixer,)))

    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        positions: Int[Array, "B T"] | None = None,
        cache: Any = None,
    ) -> tuple[Float[Array, "B T D"], Any]:
        """Runs the layer over a sequence, from a cache when one is given.

        Args:
            x: residual stream `[B, T, D]`.
            segment_ids: documents of a packed sequence, see `DecoderLM.__call__`.
            positions: position of each token in its document.
            cache: what `mixer.init_cache` or an earlier call returned, None in training.

        Returns:
            The residual stream `[B, T, D]` and the new cache (None without one).
        """
        normed, x = self.enter(x)
        x, _, cache, _ = self.run(x, normed, segment_ids=segment_ids, positions=positions, cache=cache)
        return x, cache

    @property
    def first_norm(self) -> nnx.Module | None:
        """The norm with which the layer begins; None with the norms behind mixer and feed-forward."""
        if self.norm_position == "output":
            return None
        return self.feed_forward_norm if self.mixer is None else self.mixer_norm

    def enter(self, x: Float[Array, "B T D"]) -> tuple[Float[Array, "B T D"], Float[Array, "B T D"]]:
        """What the layer's first half reads of a residual stream `[B, T, D]`, its first norm or itself; the stream."""
        return (x, x) if self.first_norm is None else norm_and_stream(self.first_norm, x)

    def inputs_of_mixers(
        self,
        x: Float[Array, "B T D"],
        *,
        carried: Carried,
        segment_ids: Int[Array, "B T"] | None = None,
        positions: Int[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T ..."], ...]:
        """What each of `mixers` reads of a residual stream; arguments as for `run`, without a cache."""
        normed, _ = self.enter(x)
        if not hasattr(self.mixer, "mixers"):
            return () if self.mixer is None else (normed,)
        within: Any = self.mixer
        return within.inputs_of_mixers(normed, carried, segment_ids=segment_ids, positions=positions)

    def run(
        self,
        x: Float[Array, "B T D"],
        normed: Float[Array, "B T D"],
        *,
        carried: Carried | None = None,
        next_norm: nnx.Module | None = None,
        **options: Any,
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T D"] | None, Any, Carried]:
        """The layer after its first norm, up to the norm that follows the layer.

        Args:
            x: residual stream `[B, T, D]`.
            normed: what the mixer reads: `mixer_norm(x)`, or `x` itself with the norms behind mixer and feed-forward.
            carried: what layers before give to this one, see `CarryingMixer`; None for nothing.
            next_norm: that reads the layer's output; None for none.
            **options: `segment_ids`, `positions` and `cache`, as for the call.

        Returns:
            The residual stream, `next_norm` of it (None without one), the new cache, and `carried` for later layers.
        """
        scale, cache = self.residual_scale, options["cache"]
        carried = {} if carried is None else carried
        mixer: Any = self.mixer
        feed_forward: Any = self.feed_forward
        inner_norm = self.feed_forward_norm
        after: Any
        if self.norm_position == "output":
            if mixer is not None and self.mixer_norm is not None:
                mixed, cache, carried = _mix(mixer, x, carried, options)
                x = x + scaled(self.mixer_norm(mixed), scale)
            if feed_forward is not None and inner_norm is not None:
                x = x + scaled(inner_norm(feed_forward(x)), scale)
            after, x = (None, x) if next_norm is None else norm_and_stream(next_norm, x)
            return x, after, cache, carried
        after = normed
        if mixer is not None:
            output = _output_of(mixer)
            y, cache, carried = _mix(mixer if output is None else mixer.features, normed, carried, options)
            x, after = residual_add(x, y, output, next_norm if feed_forward is None else inner_norm, scale=scale)
        if feed_forward is not None:
            output = _output_of(feed_forward)
            y = (feed_forward if output is None else feed_forward.features)(after)
            x, after = residual_add(x, y, output, next_norm, scale=scale)
        return x, after, cache, carried


def _mix(mixer: Any, x: Array, carried: Carried, options: dict[str, Any]) -> tuple[Array, Any, Carried]:
    """A mixer's output, its next cache, and what it gives to later layers: `carried` itself by all but few."""
    if isinstance(mixer, CarryingMixer):
        return mixer.carry(x, carried, **options)
    return *mixer(x, **options), carried


def _output_of(module: Any) -> nnx.Module | None:
    """The linear map with which a mixer or feed-forward ends, after its `features`; None for other modules."""
    return module.output if type(module) in _WITH_OUTPUT else None


def share_variables(blocks: Iterable[nnx.Module]) -> None:
    """Gives variables that layers share to all of them: those of the first part that names one.

    A part names such variables in `shared_variables`, as `rnnlib.layers.decay.KeyDecayGate` does, or modules whose
    variables these are. Parts with different numbers `shared_group` share nothing.

    Raises:
        ValueError: variables that are to be one have different shapes.
    """
    first: dict[tuple[Any, ...], nnx.Variable] = {}
    for block in blocks:
        for _, part in list(nnx.iter_modules(block)):
            for name in getattr(part, "shared_variables", ()):
                group = (type(part), getattr(part, "shared_group", 0))
                for path, variable in _variables_within(part, name):
                    shared = first.setdefault((*group, *path), variable)
                    if shared.shape != variable.shape:
                        raise ValueError(
                            f"{type(part).__name__}: {'.'.join(map(str, path))} has shape {variable.shape}, expected "
                            f"{shared.shape} as in the layer before that shares it"
                        )
                    _assign(part, path, shared)


def _variables_within(part: nnx.Module, name: str) -> list[tuple[tuple[Any, ...], nnx.Variable]]:
    """A part's variable of a name, or those of its module of this name, with their paths from the part on."""
    found = getattr(part, name)
    if found is None or isinstance(found, nnx.Variable):
        return [] if found is None else [((name,), found)]
    return [((name, *path), node) for path, node in nnx.iter_graph(found) if isinstance(node, nnx.Variable)]


def _assign(part: Any, path: tuple[Any, ...], variable: nnx.Variable) -> None:
    """Gives a part's variable at a path another in its place."""
    *owners, name = path
    for owner in owners:
        part = getattr(part, owner)
    setattr(part, name, variable)

"""A recurrent mixer behind a transformer layer that several layers of a model share (Zamba2)."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from rnnlib.fields import NaturalNumber, PositiveInteger, PositiveNumber
from rnnlib.layers.attention import Attention, AttentionCache, AttentionConfig
from rnnlib.layers.base import Carried, MixerShape, check_cache_size, check_input, exact_quotient
from rnnlib.layers.feature_maps import Activation
from rnnlib.layers.feed_forward import SwiGLU
from rnnlib.layers.linear import LowRank
from rnnlib.layers.mixer import MixerCache, RecurrentMixer, RecurrentMixerConfig
from rnnlib.layers.normalization import RMSNorm
from rnnlib.layers.part import PartConfig
from rnnlib.layers.rotary import RotaryBase
from rnnlib.layers.tensor import shard_size

# What layers behind the embedding are given of it, by this name (`Carried`).
EMBEDDING = "embedding"


@dataclasses.dataclass(frozen=True)
class SharedTransformer(PartConfig):
    """A transformer layer of twice the model's width, without residual sums, that layers of one group share.

    It maps the stream `x` and the embeddings `x_0` to `feed_forward(norm(attention(norm([x, x_0]))))`. Layers that
    share it may have adapters of low rank of their own.

    Attributes:
        group: layers with the same number share one transformer layer.
        num_heads: of attention; None is the model's.
        key_heads: key and value heads, a divisor of the query heads; None is one for each query head.
        head_dim: channels h of a head; None is `2 * width / num_heads`. Scores are multiplied by `(h / 2)**-0.5`.
        rope_base: of attention's rotary positions; None is no positions.
        hidden_width: of the feed-forward; None is `4 * width`.
        activation: of the feed-forward's gate.
        use_bias: whether the feed-forward's maps have biases.
        adapter_rank: of the adapters of each layer; None is no adapters.
        adapts_attention: whether queries, keys and values have adapters, too, not the feed-forward alone.
        eps: of the norms.
        initializer_std: of the feed-forward's initial weights.
    """

    group: NaturalNumber = 0
    num_heads: PositiveInteger | None = None
    key_heads: PositiveInteger | None = None
    head_dim: PositiveInteger | None = None
    rope_base: RotaryBase | None = None
    hidden_width: PositiveInteger | None = None
    activation: Activation = "gelu_exact"
    use_bias: bool = False
    adapter_rank: PositiveInteger | None = 128
    adapts_attention: bool = False
    eps: PositiveNumber = 1e-5
    initializer_std: PositiveNumber = 0.02

    def sized(self, width: int, num_heads: int) -> "SharedTransformer":
        """The same with every size as a number.

        Raises:
            ValueError: the width does not divide into heads of equal size.
        """
        heads = num_heads if self.num_heads is None else self.num_heads
        head_dim = self.head_dim
        if head_dim is None:
            head_dim = exact_quotient(2 * width, heads, "attention channels (2 * width)")
        return dataclasses.replace(
            self,
            num_heads=heads,
            key_heads=heads if self.key_heads is None else self.key_heads,
            head_dim=head_dim,
            hidden_width=4 * width if self.hidden_width is None else self.hidden_width,
        )


@dataclasses.dataclass(frozen=True)
class SharedInputMixerConfig(RecurrentMixerConfig):
    """A recurrent mixer that reads `norm(x + W f(x, x_0))`, with a transformer layer f that several layers share.

    Zamba2 (Glorioso et al., 2024, arXiv 2411.15242). The other fields are the recurrent mixer's.

    Attributes:
        transformer: the shared layer f.
    """

    transformer: SharedTransformer = dataclasses.field(default_factory=SharedTransformer)

    def build(  # type: ignore[override]
        self,
        width: int,
        num_heads: int,
        *,
        rngs: nnx.Rngs,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
    ) -> "SharedInputMixer":
        """Builds the module, with a transformer layer of its own: a model shares it afterwards.

        Arguments and errors are those of `RecurrentMixerConfig.build`.
        """
        dtypes: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype}
        mixer = super().build(width, num_heads, rngs=rngs, **dtypes)
        return SharedInputMixer(self, width, num_heads, mixer, rngs=rngs, **dtypes)


class TransformerLayer(nnx.Module):
    """`feed_forward(norm(attention(norm([x, x_0]))))`.

    Attributes:
        norm: of `[x, x_0]`.
        attention: from 2 D channels to D.
        feed_forward_norm: of attention's output.
        feed_forward: from D channels to D.
    """

    def __init__(
        self, config: SharedTransformer, width: int, *, rngs: nnx.Rngs, dtype: DTypeLike, param_dtype: DTypeLike, **rest
    ):
        dtypes: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype}
        sizes = config.sized(width, 1)
        assert sizes.num_heads and sizes.head_dim and sizes.hidden_width
        self.norm = RMSNorm(2 * width, eps=config.eps, **dtypes)
        attention = AttentionConfig(
            num_heads=sizes.num_heads,
            key_heads=sizes.key_heads,
            head_dim=sizes.head_dim,
            rope_base=config.rope_base,
            scale=(sizes.head_dim / 2) ** -0.5,
            output_width=width,
            **rest,
        )
        self.attention = attention.build(2 * width, sizes.num_heads, rngs=rngs, **dtypes)
        self.feed_forward_norm = RMSNorm(width, eps=config.eps, **dtypes)
        self.feed_forward = SwiGLU(
            width,
            sizes.hidden_width,
            activation=config.activation,
            use_bias=config.use_bias,
            initializer_std=config.initializer_std,
            rngs=rngs,
            **dtypes,
        )

    def __call__(
        self,
        x: Float[Array, "B T E"],
        adapters: "TransformerAdapters | None",
        *,
        segment_ids: Int[Array, "B T"] | None,
        positions: Int[Array, "B T"] | None,
        cache: AttentionCache | None,
    ) -> tuple[Float[Array, "B T D"], AttentionCache | None]:
        """The layer's output, and the next cache.

        Args:
            x: stream and embeddings side by side `[B, T, 2 D]`.
            adapters: of the layer that calls; None for none.
            segment_ids: as for `Attention`.
            positions: as for `Attention`.
            cache: as for `Attention`.
        """
        options: dict[str, Any] = {"segment_ids": segment_ids, "positions": positions, "cache": cache}
        z = self.norm(x)
        features, cache = self.attention.features(
            z, added=None if adapters is None else adapters.attention(z), **options
        )
        z = self.feed_forward_norm(self.attention.output(features))
        added = None if adapters is None else adapters.feed_forward(z)
        return self.feed_forward.down(self.feed_forward.features(z, added=added)), cache


class TransformerAdapters(nnx.Module):
    """A layer's own maps of low rank, which are added to products of the transformer layer that it shares.

    Attributes:
        query: None where attention has no adapters, as the next two.
        key: see there.
        value: see there.
        down: from the feed-forward's input to the rank.
        gate: from the rank to the feed-forward's gate.
        up: from the rank to the feed-forward's other map.
    """

    def __init__(self, config: SharedTransformer, shape: MixerShape, attention: Attention, *, rngs: nnx.Rngs):
        rank, wide = config.adapter_rank, attention.shape

        def adapter(heads: int) -> nnx.Linear | LowRank | None:
            return wide.project(heads * wide.key_size, rank=rank, rngs=rngs) if config.adapts_attention else None

        self.query, self.key, self.value = (
            adapter(heads) for heads in (wide.value_heads, wide.key_heads, wide.key_heads)
        )
        hidden = shard_size(config.hidden_width or 4 * shape.width, "the width of a shared transformer's feed-forward")
        assert rank is not None
        self.down = shape.linear(shape.width, rank, rngs=rngs)
        self.gate = shape.linear(rank, hidden, rngs=rngs)
        self.up = shape.linear(rank, hidden, rngs=rngs)

    def attention(self, x: Float[Array, "B T E"]) -> Mapping[str, Array]:
        """What is added to queries, keys and values, by name."""
        maps = {"query": self.query, "key": self.key, "value": self.value}
        return {name: adapter(x) for name, adapter in maps.items() if adapter is not None}

    def feed_forward(self, x: Float[Array, "B T D"]) -> tuple[Float[Array, "B T F"], Float[Array, "B T F"]]:
        """What is added to the products of gate and up."""
        inner = self.down(x)
        return self.gate(inner), self.up(inner)


class SharedInputMixer(nnx.Module):
    """A recurrent mixer that reads `norm(x + W f(x, x_0))`; see `SharedInputMixerConfig`.

    It reads the residual stream itself, since the norm stands behind the sum. Its cache is attention's and the
    recurrent mixer's.

    Attributes:
        transformer: the layer f, of which layers of one group have the same variables.
        adapters: this layer's own; None for none.
        projection: the map W.
        norm: of the sum.
        mixer: the recurrent mixer.
    """

    shared_variables = ("transformer",)
    reads_stream = True
    reads_embedding = True

    def __init__(
        self,
        config: SharedInputMixerConfig,
        width: int,
        num_heads: int,
        mixer: RecurrentMixer,
        *,
        rngs: nnx.Rngs,
        dtype: DTypeLike,
        param_dtype: DTypeLike,
    ):
        dtypes: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype}
        sizes = config.transformer.sized(width, num_heads)
        self.config = config
        self.shape = mixer.shape
        self.transformer = TransformerLayer(sizes, width, initializer=config.initializer, rngs=rngs, **dtypes)
        has_adapters, attention = sizes.adapter_rank is not None, self.transformer.attention
        self.adapters = TransformerAdapters(sizes, mixer.shape, attention, rngs=rngs) if has_adapters else None
        self.projection = mixer.shape.linear(width, width, rngs=rngs)
        self.norm = RMSNorm(width, eps=sizes.eps, **dtypes)
        self.mixer = mixer

    @property
    def shared_group(self) -> int:
        """The number of the group of layers that share the transformer layer."""
        return self.config.transformer.group

    @property
    def mixers(self) -> tuple[Attention, RecurrentMixer]:
        """The mixers within, in the order of their caches."""
        return self.transformer.attention, self.mixer

    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        positions: Int[Array, "B T"] | None = None,
        cache: tuple[AttentionCache, MixerCache] | None = None,
    ) -> tuple[Float[Array, "B T D"], tuple[AttentionCache, MixerCache] | None]:
        """Mixes the tokens of `x`, as a model's first layer, whose stream is the embeddings.

        Args:
            x: residual stream `[B, T, D]`, without a norm.
            segment_ids: as for `RecurrentMixer` and `Attention`.
            positions: as for `Attention`.
            cache: None for the parallel pass; else the cache of `init_cache` or of the previous call.

        Returns:
            Output `[B, T, D]`, and the next cache (None where none was given).

        Raises:
            ValueError: `x` is not as wide as the mixer or empty, or the cache is of another batch or mixer.
        """
        y, cache, _ = self.carry(x, {}, segment_ids=segment_ids, positions=positions, cache=cache)
        return y, cache

    def carry(
        self,
        x: Float[Array, "B T D"],
        carried: Carried,
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        positions: Int[Array, "B T"] | None = None,
        cache: tuple[AttentionCache, MixerCache] | None = None,
    ) -> tuple[Float[Array, "B T D"], tuple[AttentionCache, MixerCache] | None, Carried]:
        """The call of a layer of a model, whose embeddings `carried` has; other arguments and errors as the call's."""
        check_input("SharedInputMixer", x, self.shape.width)
        if cache is not None and (not isinstance(cache, tuple) or len(cache) != 2):
            raise ValueError("SharedInputMixer: cache is not a pair, expected attention's and the mixer's: init_cache")
        options: dict[str, Any] = {"segment_ids": segment_ids, "positions": positions}
        of_attention, of_mixer = (None, None) if cache is None else cache
        both = jnp.concatenate([x, carried.get(EMBEDDING, x)], axis=-1)
        z, of_attention = self.transformer(both, self.adapters, cache=of_attention, **options)
        y, of_mixer = self.mixer(self.norm(x + self.projection(z)), cache=of_mixer, **options)
        if of_attention is None or of_mixer is None:
            return y, None, carried
        return y, (of_attention, of_mixer), carried

    def inputs_of_mixers(
        self,
        x: Float[Array, "B T D"],
        carried: Carried,
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        positions: Int[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T E"], Float[Array, "B T D"]]:
        """What each of `mixers` reads; arguments as for `carry`, without a cache."""
        both = jnp.concatenate([x, carried.get(EMBEDDING, x)], axis=-1)
        options: dict[str, Any] = {"segment_ids": segment_ids, "positions": positions, "cache": None}
        z, _ = self.transformer(both, self.adapters, **options)
        return self.transformer.norm(both), self.norm(x + self.projection(z))

    def init_cache(
        self, batch_size: int, max_length: int, dtype: DTypeLike | None = None
    ) -> tuple[AttentionCache, MixerCache]:
        """The caches before the first token; arguments and errors as `Attention.init_cache`'s."""
        check_cache_size("SharedInputMixer", batch_size, max_length)
        attention = self.transformer.attention.init_cache(batch_size, max_length, dtype)
        return attention, self.mixer.init_cache(batch_size, max_length, dtype)

"""RWKV-7: a mixer with a diagonal-plus-low-rank transition, and its feed-forward, which sees the token before."""

import dataclasses
import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from rnnlib import ops
from rnnlib.fields import PositiveInteger, PositiveNumber, check_fields
from rnnlib.layers.base import (
    Carried,
    MixerConfig,
    MixerShape,
    check_cache,
    check_cache_size,
    check_input,
    exact_quotient,
)
from rnnlib.layers.feature_maps import ACTIVATIONS, Activation
from rnnlib.layers.initializers import Initializer
from rnnlib.layers.normalization import l2_normalize
from rnnlib.layers.tensor import current_tp_size, row_parallel_linear, shard_size

# The log decay is this times a sigmoid.
_LEAST_LOG_DECAY = -math.exp(-0.5)
# The name under which later layers are given the values of the first.
_VALUES = "rwkv7_values"
_Between = Literal["identity", "tanh", "sigmoid"]
# What each projection reads has a mixture of its own of the token and the one before.
_READERS = ("query", "decay", "key", "value", "gain", "gate")


def token_before(
    x: Float[Array, "B T D"], tail: Float[Array, "B 1 D"] | None, segment_ids: Int[Array, "B T"] | None
) -> tuple[Float[Array, "B T D"], Float[Array, "B 1 D"]]:
    """Each token's predecessor in its document, zeros for the first, and the last token.

    Args:
        x: tokens.
        tail: the token before them; None is zeros.
        segment_ids: documents.
    """
    kernel = jnp.zeros((2, x.shape[-1]), x.dtype).at[0].set(1)
    return ops.short_convolution(x, kernel, initial_state=tail, segment_ids=segment_ids)


class RWKV7Cache(NamedTuple):
    """The state of the mixer between calls; its size is fixed.

    Attributes:
        tail: the last input `[B, 1, D]`.
        state: `[B, H, K, V]` float32.
    """

    tail: Array
    state: Array


@dataclasses.dataclass(frozen=True)
class RWKV7Config(MixerConfig):
    """RWKV-7's time mixing (Peng et al. 2025, arXiv 2503.14456).

    `S_t = (Diag(w_t) - (kk_t * a_t) kk_t^T) S_{t-1} + k_t v_t^T`, `o_t = S_t^T r_t`, where `kk` is a key of unit
    length that removes, and `k` the key that is written. Each projection reads its own mixture of the token and the
    one before.

    Attributes:
        num_heads: None is the model's.
        head_dim: channels K = V of a head; None is `width / num_heads`.
        decay_rank: of the decay's map, tanh in between.
        gain_rank: of the removal rate's.
        gate_rank: of the output gate's, a sigmoid in between.
        value_rank: of the map that mixes values with those of the model's first such layer
            (`v + (v_first - v) sigmoid(W x)`); None in a layer that keeps its values, as the first.
        eps: of the norm of each head, times `head_dim`.
        key_norm: `kk / sqrt(sum kk^2 + 1e-6)`, or with `"floor"` `kk / max(|kk|, 1e-12)`.
        initializer: of the projections.
        chunk_size: tokens in a chunk of the chunked implementations.
        implementation: of `rnnlib.ops.dplr`.
    """

    num_heads: PositiveInteger | None = None
    head_dim: PositiveInteger | None = None
    decay_rank: PositiveInteger = 64
    gain_rank: PositiveInteger = 64
    gate_rank: PositiveInteger = 128
    value_rank: PositiveInteger | None = None
    eps: PositiveNumber = 1e-5
    key_norm: Literal["sum", "floor"] = "sum"
    initializer: Initializer = dataclasses.field(default_factory=Initializer)
    chunk_size: int = 64
    implementation: str | None = None

    def __post_init__(self) -> None:
        check_fields(self)

    def build(
        self,
        width: int,
        num_heads: int,
        *,
        rngs: nnx.Rngs,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
    ) -> "RWKV7":
        """Builds the module; arguments as `MixerConfig.build`.

        Raises:
            ValueError: the width does not divide into heads of equal size.
        """
        heads = num_heads if self.num_heads is None else self.num_heads
        size = exact_quotient(width, heads, "key channels") if self.head_dim is None else self.head_dim
        shape = MixerShape(width, heads, heads, size, size, dtype, param_dtype, self.initializer)
        return RWKV7(self, shape.own_shard(), rngs=rngs)


class LowRankMap(nnx.Module):
    """`W_up act(W_down x)`, with a bias behind."""

    def __init__(
        self,
        shape: MixerShape,
        rank: int,
        features: int,
        *,
        activation: _Between = "identity",
        use_bias: bool = True,
        rngs: nnx.Rngs,
    ):
        self.activation = activation
        self.down = shape.linear(shape.width, rank, rngs=rngs)
        self.up = shape.linear(rank, features, use_bias=use_bias, rngs=rngs)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T F"]:
        """Maps each token."""
        acts = {"identity": lambda y: y, "tanh": jnp.tanh, "sigmoid": jax.nn.sigmoid}
        return self.up(acts[self.activation](self.down(x)))


class RWKV7(nnx.Module):
    """RWKV-7's time mixing.

    Attributes:
        mixtures: `[6, D]`, how much of the token before queries, decay, keys, values, removal rate and gate read.
        key_removal: `[H * K]`, factor on the key that removes.
        key_gain: `[H * K]`, how much the removal rate weakens the key that is written.
        bonus: `[H, K]`, weight of the token's own value in its output.
        norm_scale: `[H * V]`.
        norm_bias: `[H * V]`.
    """

    def __init__(self, config: RWKV7Config, shape: MixerShape, *, rngs: nnx.Rngs):
        self.config = config
        self.shape = shape
        features, dtype = shape.key_heads * shape.key_size, shape.param_dtype

        def low_rank(rank: int, activation: _Between, use_bias: bool = True) -> LowRankMap:
            return LowRankMap(shape, rank, features, activation=activation, use_bias=use_bias, rngs=rngs)

        self.mixtures = nnx.Param(jnp.full((len(_READERS), shape.width), 0.5, dtype))
        self.query = shape.linear(shape.width, features, rngs=rngs)
        self.key = shape.linear(shape.width, features, rngs=rngs)
        self.value = shape.linear(shape.width, features, rngs=rngs)
        self.decay = low_rank(config.decay_rank, "tanh")
        # Half-lives from a token to hundreds, over the channels.
        self.decay.up.bias = nnx.Param((-6 + 5 * jnp.linspace(0, 1, features) ** 0.85).astype(dtype))
        self.gain = low_rank(config.gain_rank, "identity")
        self.gate = low_rank(config.gate_rank, "sigmoid", use_bias=False)
        self.value_gate = None if config.value_rank is None else low_rank(config.value_rank, "identity")
        self.key_removal = nnx.Param(jnp.full((features,), 0.85, dtype))
        self.key_gain = nnx.Param(jnp.ones((features,), dtype))
        self.bonus = nnx.Param(jnp.zeros((shape.key_heads, shape.key_size), dtype))
        self.norm_scale = nnx.Param(jnp.ones((features,), dtype))
        self.norm_bias = nnx.Param(jnp.zeros((features,), dtype))
        self.output = shape.output(features, rngs=rngs)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        positions: Int[Array, "B T"] | None = None,
        cache: RWKV7Cache | None = None,
    ) -> tuple[Float[Array, "B T D"], RWKV7Cache | None]:
        """Mixes the tokens of `x`, as a layer without others before it.

        Args:
            x: input `[B, T, D]`, T >= 1.
            segment_ids: ids of packed documents: the state restarts where the id changes, and the first token of a
                document has none before it. The first token of a call continues the cache, regardless of its id.
            positions: not used.
            cache: None for the parallel pass; otherwise the cache of `init_cache` or of the previous call.

        Returns:
            Output `[B, T, D]`, and the next cache (None where none was given).

        Raises:
            ValueError: `x` is not as wide as the mixer or empty, the cache is of another batch or mixer, or the layer
                mixes its values with those of an earlier one.
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
        cache: RWKV7Cache | None = None,
    ) -> tuple[Float[Array, "B T D"], RWKV7Cache | None, Carried]:
        """The call of a layer of a model; errors as for the call.

        Args:
            x: input.
            carried: has the values of the model's first layer of this kind behind that layer.
            segment_ids: as for the call.
            positions: as for the call.
            cache: as for the call.

        Returns:
            Output, next cache, and what later layers are given as `carried`.
        """
        check_input("RWKV7", x, self.shape.width)
        if cache is not None:
            check_cache("RWKV7", cache, jax.eval_shape(lambda: self.init_cache(x.shape[0], 1)))
        if self.value_gate is not None and _VALUES not in carried:
            raise ValueError(
                "RWKV7: value_rank is set in the first layer of this kind, expected None: no values before"
            )
        wide = self.shape.gate_dtype
        x = x.astype(self.shape.dtype)
        before, tail = token_before(x, None if cache is None else cache.tail, segment_ids)
        difference = before - x
        mixtures = zip(_READERS, self.mixtures[...].astype(x.dtype))
        read = {name: x + difference * mixture for name, mixture in mixtures}

        query, key, value = self.query(read["query"]), self.key(read["key"]), self.value(read["value"])
        log_decay = _LEAST_LOG_DECAY * jax.nn.sigmoid(self.decay(read["decay"]).astype(wide))
        rate = jax.nn.sigmoid(self.gain(read["gain"]).astype(wide))
        first = carried.get(_VALUES, value)
        if self.value_gate is not None:
            opened = jax.nn.sigmoid(self.value_gate(read["value"]).astype(wide)).astype(value.dtype)
            value = value + (first - value) * opened
        removal = self._removal_key(self._heads(key.astype(wide) * self.key_removal[...].astype(wide)))
        key = (key.astype(wide) * (1 + (rate - 1) * self.key_gain[...].astype(wide))).astype(self.shape.dtype)
        query, key, value, log_decay, rate = map(self._heads, (query, key, value, log_decay, rate))
        out, state = ops.dplr(
            query,
            key,
            value,
            a=removal.astype(key.dtype),
            b=(removal * rate).astype(key.dtype),
            log_decay=log_decay,
            least_log_decay=_LEAST_LOG_DECAY,
            initial_state=None if cache is None else cache.state,
            segment_ids=segment_ids,
            scale=1.0,
            chunk_size=self.config.chunk_size,
            implementation=self.config.implementation,
        )
        out = checkpoint_name(out, "recurrence")  # for checkpoint policies that keep it
        y = self._normalised(out.astype(wide))
        own = jnp.sum((query * key).astype(wide) * self.bonus[...].astype(wide), axis=-1, keepdims=True)
        y = (y + own * value.astype(wide)).reshape(*x.shape[:2], -1).astype(self.shape.dtype)
        y = self.output(y * self.gate(read["gate"]))
        return y, None if cache is None else RWKV7Cache(tail, state), {**carried, _VALUES: first}

    def _heads(self, x: Array) -> Array:
        """`[B, T, H * K]` as `[B, T, H, K]`."""
        return x.reshape(*x.shape[:2], self.shape.key_heads, self.shape.key_size)

    def _removal_key(self, x: Array) -> Array:
        """Keys of unit length."""
        if self.config.key_norm == "sum":
            return l2_normalize(x)
        return x / jnp.sqrt(jnp.maximum(jnp.sum(x * x, axis=-1, keepdims=True), 1e-24))

    def _normalised(self, out: Float[Array, "B T H V"]) -> Float[Array, "B T H V"]:
        """The norm of each head, with its mean taken out, a scale and a bias."""
        out = out - jnp.mean(out, axis=-1, keepdims=True)
        variance = jnp.mean(jnp.square(out), axis=-1, keepdims=True)
        out = out * jax.lax.rsqrt(variance + self.config.eps * self.shape.value_size)
        scale, bias = (p[...].astype(out.dtype).reshape(out.shape[2:]) for p in (self.norm_scale, self.norm_bias))
        return out * scale + bias

    def init_cache(self, batch_size: int, max_length: int, dtype: DTypeLike | None = None) -> RWKV7Cache:
        """The cache before the first token.

        Args:
            batch_size: sequences B.
            max_length: of the sequences; the cache does not depend on it.
            dtype: of the last input; None is the compute dtype. States are always float32.

        Raises:
            ValueError: `batch_size` or `max_length` is no integer of at least 1.
        """
        check_cache_size("RWKV7", batch_size, max_length)
        shape = self.shape
        tail = jnp.zeros((batch_size, 1, shape.width), shape.dtype if dtype is None else dtype)
        state = (batch_size, shape.key_heads, shape.key_size, shape.value_size)
        return RWKV7Cache(tail, jnp.zeros(state, shape.gate_dtype))


@dataclasses.dataclass(frozen=True)
class ChannelMixConfig(MixerConfig):
    """RWKV's channel mixing: a feed-forward of a mixture of the token and the one before, `W_down act(W_up x')`.

    It stands in a layer of its own, as a mixer, since its last token is part of the cache.

    Attributes:
        hidden_width: None is four times the model's width.
        activation: between the two maps.
        initializer: of the maps.
    """

    hidden_width: PositiveInteger | None = None
    activation: Activation = "squared_relu"
    initializer: Initializer = dataclasses.field(default_factory=Initializer)

    def __post_init__(self) -> None:
        check_fields(self)

    def build(
        self,
        width: int,
        num_heads: int,
        *,
        rngs: nnx.Rngs,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
    ) -> "ChannelMix":
        """Builds the module; arguments as `MixerConfig.build`."""
        hidden = 4 * width if self.hidden_width is None else self.hidden_width
        shape = MixerShape(width, 1, 1, hidden, hidden, dtype, param_dtype, self.initializer)
        return ChannelMix(self, shape, rngs=rngs)


class ChannelMixCache(NamedTuple):
    """The state between calls.

    Attributes:
        tail: the last input `[B, 1, D]`.
    """

    tail: Array


class ChannelMix(nnx.Module):
    """RWKV's channel mixing.

    Attributes:
        mixture: `[D]`, how much of the token before is read.
    """

    def __init__(self, config: ChannelMixConfig, shape: MixerShape, *, rngs: nnx.Rngs):
        self.config = config
        self.shape = shape
        hidden = shard_size(shape.key_size, "the width of RWKV's channel mixing (ChannelMixConfig.hidden_width)")
        self.mixture = nnx.Param(jnp.full((shape.width,), 0.5, shape.param_dtype))
        self.up = shape.linear(shape.width, hidden, rngs=rngs)
        self.down = shape.linear(hidden, shape.width, rngs=rngs, module=row_parallel_linear(current_tp_size()))

    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        positions: Int[Array, "B T"] | None = None,
        cache: ChannelMixCache | None = None,
    ) -> tuple[Float[Array, "B T D"], ChannelMixCache | None]:
        """Mixes the channels of `x`; arguments, results and errors as `RWKV7`'s."""
        check_input("ChannelMix", x, self.shape.width)
        if cache is not None:
            check_cache("ChannelMix", cache, jax.eval_shape(lambda: self.init_cache(x.shape[0], 1)))
        x = x.astype(self.shape.dtype)
        before, tail = token_before(x, None if cache is None else cache.tail, segment_ids)
        read = x + (before - x) * self.mixture[...].astype(x.dtype)
        y = self.down(ACTIVATIONS[self.config.activation](self.up(read)))
        return y, None if cache is None else ChannelMixCache(tail)

    def init_cache(self, batch_size: int, max_length: int, dtype: DTypeLike | None = None) -> ChannelMixCache:
        """The cache before the first token; arguments and errors as `RWKV7`'s."""
        check_cache_size("ChannelMix", batch_size, max_length)
        return ChannelMixCache(
            jnp.zeros((batch_size, 1, self.shape.width), self.shape.dtype if dtype is None else dtype)
        )

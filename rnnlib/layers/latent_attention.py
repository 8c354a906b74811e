"""Latent attention: one small vector per token gives the keys and values of all heads, and is all that is cached."""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from rnnlib.fields import NaturalNumber, PositiveInteger, PositiveNumber, check_fields
from rnnlib.layers.attention_cache import LatentCache, check_call_length, empty_ring, extend_ring
from rnnlib.layers.base import (
    MixerConfig,
    MixerShape,
    MixerWithOutput,
    check_cache,
    check_cache_size,
    check_input,
    exact_quotient,
)
from rnnlib.layers.initializers import Initializer
from rnnlib.layers.normalization import RMSNorm
from rnnlib.layers.rotary import Rotary, RotaryBase, running_positions
from rnnlib.ops.arguments import check_segment_ids
from rnnlib.ops.causal_attention import attention_of_layer, masked_attention
from rnnlib.ops.sharding import broadcast_like


@dataclasses.dataclass(frozen=True)
class LatentAttentionConfig(MixerConfig):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1, equations 9 to 19).

    With the latent `c = norm(W_DKV x)` of L channels and one key part `r = rotate(W_KR x)` of R channels for all heads,
    head h has the key `[W_UK_h c; r]` of N + R channels, the value `W_UV_h c`, and the query
    `[W_UQ_h x; rotate(W_QR_h x)]`. Scores are over `sqrt(N + R)`. Sizes that are left out have the paper's proportions:
    L = 4 N, R = N / 2.

    Attributes:
        num_heads: heads; None is the model's attention heads.
        head_dim: channels N of a head's own part of query and key; None is `width / num_heads`.
        shared_key_dim: channels R of the key part that heads share, which is rotated by position; None is half of
            `head_dim`, made even.
        value_head_dim: channels of a value head; None is `head_dim`.
        latent_size: channels L of the latent; None is four times `head_dim`.
        query_latent_size: channels of a latent `norm(W_DQ x)` that queries are projected from, which saves memory in
            training; None projects queries from x.
        rope_base: of the shared part's rotary positions; None is no positions (Kimi Linear, arXiv 2510.26692).
        head_gate: multiplies each head's output by `sigmoid(w_h x)`, one number per head, before the output projection
            (Qiu et al., 2025, arXiv 2505.06708).
        eps: of the latents' norms.
        use_bias: the projections to latents have biases.
        output_bias: the output's projection has a bias.
        initializer: of the projections.
    """

    num_heads: PositiveInteger | None = None
    head_dim: PositiveInteger | None = None
    shared_key_dim: NaturalNumber | None = None
    value_head_dim: PositiveInteger | None = None
    latent_size: PositiveInteger | None = None
    query_latent_size: PositiveInteger | None = None
    rope_base: RotaryBase | None = 10000.0
    head_gate: bool = False
    eps: PositiveNumber = 1e-6
    use_bias: bool = False
    output_bias: bool = False
    initializer: Initializer = dataclasses.field(default_factory=Initializer)

    def __post_init__(self) -> None:
        check_fields(self)

    def sized(self, width: int, num_heads: int) -> "LatentAttentionConfig":
        """This configuration with all sizes in numbers, but for a missing `query_latent_size`.

        Args:
            width: the model's width D.
            num_heads: heads, where the configuration does not give them.

        Raises:
            ValueError: the width does not divide into heads of equal size.
        """
        heads = num_heads if self.num_heads is None else self.num_heads
        if heads < 1:
            raise ValueError(f"LatentAttentionConfig: num_heads is {heads}, expected at least 1")
        own = self.head_dim
        if own is None:
            own = exact_quotient(width, heads, "attention channels (width)")
        return dataclasses.replace(
            self,
            num_heads=heads,
            head_dim=own,
            shared_key_dim=own // 4 * 2 if self.shared_key_dim is None else self.shared_key_dim,
            value_head_dim=own if self.value_head_dim is None else self.value_head_dim,
            latent_size=4 * own if self.latent_size is None else self.latent_size,
        )

    def build(
        self,
        width: int,
        num_heads: int,
        *,
        rngs: nnx.Rngs,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
    ) -> "LatentAttention":
        """Builds the module; arguments as `MixerConfig.build`.

        Raises:
            ValueError: the width does not divide into heads of equal size, or rotary positions need an even number of
                shared channels.
        """
        sized = self.sized(width, num_heads)
        heads, own, shared, value = (
            size or 0 for size in (sized.num_heads, sized.head_dim, sized.shared_key_dim, sized.value_head_dim)
        )
        if self.rope_base is not None and shared % 2 != 0:
            raise ValueError(
                f"LatentAttentionConfig: shared_key_dim is {shared}, expected an even one for rotary positions"
            )
        shape = MixerShape(width, heads, heads, own + shared, value, dtype, param_dtype, self.initializer)
        return LatentAttention(sized, shape.own_shard(), rngs=rngs)


class LatentQuery(nnx.Module):
    """Queries through a latent, `W norm(W_DQ x)`.

    Attributes:
        down: to the latent.
        norm: of the latent.
        up: to the queries of all heads.
    """

    def __init__(self, config: LatentAttentionConfig, shape: MixerShape, size: int, *, rngs: nnx.Rngs):
        self.down = shape.project(size, use_bias=config.use_bias, rngs=rngs)
        self.norm = RMSNorm(size, eps=config.eps, dtype=shape.dtype, param_dtype=shape.param_dtype)
        self.up = shape.linear(size, shape.value_heads * shape.key_size, rngs=rngs)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T F"]:
        """Queries of all heads, one after the other."""
        return self.up(self.norm(self.down(x)))


class LatentAttention(MixerWithOutput):
    """Causal softmax attention whose keys and values are read from latents; see `LatentAttentionConfig`.

    A cache keeps the latents. `W_UK` is then applied to the query in place of the keys, and `W_UV` to the weighted mean
    of the latents in place of the values (section 2.1.2): no key and no value of an earlier token is computed again.

    Attributes:
        number: among the attention layers of a program, see `rnnlib.ops.causal_attention.attention_of_layer`.
        query: to H (N + R) channels, head by head the own part, then the rotated one.
        latent: to L + R channels, the latent and the shared key part.
        latent_norm: of the latent.
        key: `W_UK`, from the latent to H N channels.
        value: `W_UV`, from the latent to H V channels.
        gate: to one number per head, or None.
        output: to the model's width.
    """

    def __init__(self, config: LatentAttentionConfig, shape: MixerShape, *, rngs: nnx.Rngs):
        """Builds the projections.

        Args:
            config: with sizes in numbers.
            shape: heads, N + R channels of a key and those of a value.
            rngs: source of parameters.
        """
        self.config = config
        self.shape = shape
        self.number = 0
        heads, size = shape.value_heads, config.latent_size or 0
        self.shared_size = config.shared_key_dim or 0
        self.own_size = shape.key_size - self.shared_size
        self.query = (
            shape.project(heads * shape.key_size, rngs=rngs)
            if config.query_latent_size is None
            else LatentQuery(config, shape, config.query_latent_size, rngs=rngs)
        )
        self.latent = shape.linear(shape.width, size + self.shared_size, use_bias=config.use_bias, rngs=rngs)
        self.latent_norm = RMSNorm(size, eps=config.eps, dtype=shape.dtype, param_dtype=shape.param_dtype)
        self.key = shape.linear(size, heads * self.own_size, rngs=rngs)
        self.value = shape.linear(size, heads * shape.value_size, rngs=rngs)
        self.output = shape.output(heads * shape.value_size, use_bias=config.output_bias, rngs=rngs)
        self.gate = shape.project(heads, rngs=rngs) if config.head_gate else None
        turns = config.rope_base is not None and self.shared_size > 0
        self.rotary = Rotary(config.rope_base) if turns and config.rope_base else None

    def features(
        self,
        x: Float[Array, "B T D"],
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        positions: Int[Array, "B T"] | None = None,
        cache: LatentCache | None = None,
    ) -> tuple[Float[Array, "B T F"], LatentCache | None]:
        """What `output` reads `[B, T, H * V]`, and the next cache; see `MixerWithOutput`."""
        check_input("LatentAttention", x, self.shape.width)
        batch, length = x.shape[:2]
        check_segment_ids("LatentAttention", segment_ids, batch, length)
        if cache is not None:
            capacity = cache.latent.shape[1] if isinstance(cache, LatentCache) else 1
            check_cache("LatentAttention", cache, jax.eval_shape(lambda: self.init_cache(batch, capacity)))
        if positions is None:
            positions = running_positions(None if cache is None else cache.position, batch, length)
        own, turned = jnp.split(self.query(x).reshape(batch, length, -1, self.shape.key_size), [self.own_size], axis=-1)
        latent, shared = jnp.split(self.latent(x), [self.latent.out_features - self.shared_size], axis=-1)
        latent, shared = self.latent_norm(latent), shared[:, :, None]
        if self.rotary is not None:
            turned, shared = self.rotary(turned, positions), self.rotary(shared, positions)

        if cache is None:
            key = self.key(latent).reshape(own.shape)
            shared = broadcast_like(shared, (*key.shape[:-1], self.shared_size), key)
            value = self.value(latent).reshape(batch, length, -1, self.shape.value_size)
            query, key = (jnp.concatenate(parts, axis=-1) for parts in ((own, turned), (key, shared)))
            out = attention_of_layer(query, key, value, segment_ids=segment_ids, number=self.number)
        else:
            check_call_length("LatentAttention", cache, length)
            query = jnp.concatenate([jnp.einsum("bthn,lhn->bthl", own, self._up(self.key)), turned], axis=-1)
            kept = {"latent": jnp.concatenate([latent, shared[:, :, 0]], axis=-1)}
            mean, cache = extend_ring(cache, query, kept, self._attend, segment_ids)
            cache = cache._replace(position=positions[:, -1] + 1)
            out = jnp.einsum("bthl,lhv->bthv", mean, self._up(self.value))
        if self.gate is not None:
            gate = jax.nn.sigmoid(self.gate(x).astype(self.shape.gate_dtype))
            out = out * gate.astype(out.dtype)[..., None]
        return out.reshape(batch, length, -1), cache

    def _up(self, projection: nnx.Linear) -> Array:
        """A projection from the latent, `[L, H, channels]`."""
        kernel = projection.kernel[...].astype(self.shape.dtype)
        return kernel.reshape(kernel.shape[0], self.shape.value_heads, -1)

    def _attend(self, query: Array, seen: Mapping[str, Array], mask: Array) -> Array:
        """Weighted means of the latents that queries see, `[B, T, H, L]`: all heads have the same keys and values."""
        keys = seen["latent"][:, :, None]
        # A value needs as many channels as a key.
        out = masked_attention(query, keys, keys, mask=mask, scale=self.shape.key_size**-0.5)
        return out[..., : out.shape[-1] - self.shared_size]

    def init_cache(self, batch_size: int, max_length: int, dtype: DTypeLike | None = None) -> LatentCache:
        """The cache before the first token.

        Args:
            batch_size: sequences B.
            max_length: greatest length of the sequences. Beyond it each token sees the last `max_length`, itself
                included, however the sequence is split into calls.
            dtype: of what is kept; None is the layer's compute dtype.

        Raises:
            ValueError: `batch_size` or `max_length` is no integer of at least 1.
        """
        check_cache_size("LatentAttention", batch_size, max_length)
        dtype = self.shape.dtype if dtype is None else dtype
        latent = jnp.zeros((batch_size, max_length, self.latent.out_features), dtype)
        return LatentCache(latent=latent, **empty_ring(batch_size, max_length))

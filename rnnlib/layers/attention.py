"""Softmax attention, full or over a sliding window, with a key-value cache that is a ring for windows."""

import dataclasses
from collections.abc import Mapping
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from rnnlib.fields import PositiveInteger, PositiveNumber, check_fields
from rnnlib.layers.attention_cache import AttentionCache, check_call_length, empty_ring, extend_ring
from rnnlib.layers.base import (
    MixerConfig,
    MixerShape,
    MixerWithOutput,
    check_cache,
    check_cache_size,
    check_input,
    exact_quotient,
)
from rnnlib.layers.convolution import ConvolutionConfig, ShortConvolution
from rnnlib.layers.initializers import Initializer
from rnnlib.layers.input_projection import InputProjection, ProjectedInput
from rnnlib.layers.normalization import RMSNorm
from rnnlib.layers.rotary import Rotary, RotaryBase, running_positions
from rnnlib.ops.arguments import check_segment_ids
from rnnlib.ops.causal_attention import (
    Ring,
    attention_of_layer,
    masked_attention,
    token_attention,
    token_attention_supports,
)
from rnnlib.ops.forgetting_attention import decayed_attention


@dataclasses.dataclass(frozen=True)
class AttentionConfig(MixerConfig):
    """Softmax attention; by default Transformer++'s, with rotary positions and no biases.

    Attributes:
        window: number of tokens that each token sees, itself included; None is itself and all tokens before it.
        num_heads: query heads; None is the model's attention heads.
        key_heads: key and value heads, a divisor of the query heads (grouped queries); None is the number of query
            heads.
        head_dim: channels of a head; None is `width / num_heads`.
        rope_base: of the rotary positions; None is no positions.
        rope_channels: how many channels of a head are rotated, counted from the first; None is all.
        qk_norm: RMS norm of queries and keys, before the rotation (Dehghani et al., 2023, arXiv 2302.05442). True norms
            each head, with one scale for all heads, `"each"` with a scale of its own for each; `"all"` norms all heads
            together (OLMo 2, arXiv 2501.00656).
        zero_centred: whether the factor of `qk_norm` is `1 + scale`, see `RMSNorm`.
        eps: epsilon of `qk_norm`.
        scale: of the scores; None is `head_dim**-0.5`.
        output_gate: multiplies attention's output by `sigmoid(W x)`, channel by channel, before the output projection
            (Qiu et al., 2025, arXiv 2505.06708).
        gate_bias: whether the output gate's projection has a bias; None is as `use_bias`.
        forget_gate: weights decay with the distance, by `sigmoid(W x + b)` of each query head at each token in between
            (Forgetting Transformer, Lin et al., 2025, arXiv 2503.02130).
        convolution: short convolutions of queries, keys and values, before norm and rotation, as the recurrent mixers
            have them; None is none.
        use_bias: the projections of queries, keys and values have biases.
        output_bias: the output's projection has a bias.
        output_width: channels of the output; None is the input's.
        initializer: of the projections.
    """

    window: PositiveInteger | None = None
    num_heads: PositiveInteger | None = None
    key_heads: int | None = None
    head_dim: int | None = None
    rope_base: RotaryBase | None = 10000.0
    rope_channels: PositiveInteger | None = None
    qk_norm: bool | Literal["all", "each"] = False
    zero_centred: bool = False
    eps: float = 1e-6
    scale: PositiveNumber | None = None
    output_gate: bool = False
    forget_gate: bool = False
    gate_bias: bool | None = None
    convolution: ConvolutionConfig | None = None
    use_bias: bool = False
    output_bias: bool = False
    output_width: PositiveInteger | None = None
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
    ) -> "Attention":
        """Builds the module; arguments as `MixerConfig.build`.

        Raises:
            ValueError: the width does not divide into heads of equal size, or rotary positions need an even head size.
        """
        num_heads = num_heads if self.num_heads is None else self.num_heads
        if num_heads < 1:
            raise ValueError(f"AttentionConfig: num_heads is {num_heads}, expected at least 1")
        key_heads = num_heads if self.key_heads is None else self.key_heads
        if key_heads < 1 or num_heads % key_heads != 0:
            raise ValueError(
                f"AttentionConfig: key_heads is {key_heads}, expected a divisor of num_heads = {num_heads}"
            )
        head_dim = self.head_dim
        if head_dim is None:
            head_dim = exact_quotient(width, num_heads, "attention channels (width)")
        turned = head_dim if self.rope_channels is None else self.rope_channels
        if self.rope_base is not None and (turned % 2 != 0 or turned > head_dim):
            name = "head_dim" if self.rope_channels is None else "rope_channels"
            limit = "" if self.rope_channels is None else f" of at most head_dim = {head_dim}"
            raise ValueError(f"AttentionConfig: {name} is {turned}, expected an even one{limit} for rotary positions")
        # Unlike in recurrent mixers, query heads share key heads: `value_heads` of the shape are the query heads.
        shape = MixerShape(width, key_heads, num_heads, head_dim, head_dim, dtype, param_dtype, self.initializer)
        return Attention(self, shape.own_shard(), rngs=rngs)


class Attention(MixerWithOutput):
    """Causal softmax attention, full or over a sliding window.

    Attributes:
        number: among the attention layers of a program, see `rnnlib.ops.causal_attention.attention_of_layer`.
    """

    def __init__(self, config: AttentionConfig, shape: MixerShape, *, rngs: nnx.Rngs):
        self.config = config
        self.shape = shape
        self.number = 0
        size = shape.key_size
        bias = config.use_bias
        gate_bias = bias if config.gate_bias is None else config.gate_bias
        maps = {
            "query": shape.project(shape.value_heads * size, use_bias=bias, rngs=rngs),
            "key": shape.project(shape.key_heads * size, use_bias=bias, rngs=rngs),
            "value": shape.project(shape.key_heads * size, use_bias=bias, rngs=rngs),
        }
        self.output = shape.output(
            shape.value_heads * size, use_bias=config.output_bias, features=config.output_width, rngs=rngs
        )
        if config.output_gate:
            maps["output_gate"] = shape.project(shape.value_heads * size, use_bias=gate_bias, rngs=rngs)
        if config.forget_gate:
            maps["forget_gate"] = shape.project(shape.value_heads, use_bias=True, rngs=rngs)
        self.input_projection = InputProjection(shape, maps)
        heads = {"query": shape.value_heads, "key": shape.key_heads, "value": shape.key_heads}
        self.query_convolution, self.key_convolution, self.value_convolution = (
            self._convolution(name, count * size, rngs) for name, count in heads.items()
        )
        self.rotary = None if config.rope_base is None else Rotary(config.rope_base, config.rope_channels)
        self.query_norm = self._norm(shape.value_heads, shape.tp_size)
        self.key_norm = self._norm(shape.key_heads, shape.tp_size_of_keys)

    def _convolution(self, name: str, channels: int, rngs: nnx.Rngs) -> ShortConvolution | None:
        """The convolution of queries, keys or values."""
        config = self.config.convolution
        if config is None or not getattr(config, name):
            return None
        return ShortConvolution(channels, config, self.shape, scale=getattr(config, f"{name}_scale"), rngs=rngs)

    def _filtered(
        self,
        inputs: ProjectedInput,
        tails: Mapping[str, Array],
        segment_ids: Array | None,
        added: Mapping[str, Array] | None,
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        """Queries, keys and values behind their convolutions, and the inputs that the next call's continue from."""
        found = {name: inputs[name] for name in ("query", "key", "value")}
        found |= {name: found[name] + more for name, more in (added or {}).items()}
        after = {}
        config = self.config.convolution
        activation: Literal["silu"] | None = "silu" if config is not None and config.activation == "silu" else None
        for name, convolution in self._convolutions().items():
            tail = tails.get(name)
            found[name], after[name] = convolution(
                found[name], segment_ids=segment_ids, state=tail, activation=activation
            )
            if tail is not None:  # a cache keeps its dtype
                after[name] = after[name].astype(tail.dtype)
        return found, after

    def _convolutions(self) -> dict[str, ShortConvolution]:
        """The convolutions that there are, by the name of what they filter."""
        named = {"query": self.query_convolution, "key": self.key_convolution, "value": self.value_convolution}
        return {name: one for name, one in named.items() if one is not None}

    def _norm(self, heads: int, tp_size: int) -> RMSNorm | None:
        """The norm of queries or keys with `heads` heads on this device, out of `tp_size` devices."""
        config, shape = self.config, self.shape
        if not config.qk_norm:
            return None
        return RMSNorm(
            shape.key_size * (1 if config.qk_norm is True else heads),
            eps=config.eps,
            groups=heads if config.qk_norm == "each" else 1,
            zero_centred=config.zero_centred,
            tp_size=tp_size if config.qk_norm == "all" else 1,
            dtype=shape.dtype,
            param_dtype=shape.param_dtype,
        )

    def _heads(self, y: Array, norm: RMSNorm | None = None) -> Array:
        """`[B, T, H * K]` as heads `[B, T, H, K]`, normalised as the configuration says."""
        heads = (*y.shape[:2], -1, self.shape.key_size)
        if norm is None:
            return y.reshape(heads)
        return norm(y.reshape(heads)) if self.config.qk_norm is True else norm(y).reshape(heads)

    def features(
        self,
        x: Float[Array, "B T D"],
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        positions: Int[Array, "B T"] | None = None,
        cache: AttentionCache | None = None,
        added: Mapping[str, Array] | None = None,
    ) -> tuple[Float[Array, "B T F"], AttentionCache | None]:
        """What `output` reads `[B, T, H * K]`, and the next cache; see `MixerWithOutput`.

        `added` is added to the projections of its names, such as "query".
        """
        check_input("Attention", x, self.shape.width)
        batch, length = x.shape[:2]
        check_segment_ids("Attention", segment_ids, batch, length)
        if cache is not None:
            capacity = cache.key.shape[1] if isinstance(cache, AttentionCache) else 1
            check_cache("Attention", cache, jax.eval_shape(lambda: self.init_cache(batch, capacity)))
        inputs = self.input_projection(x)
        branches, tails = self._filtered(inputs, {} if cache is None else cache.tails, segment_ids, added)
        query = self._heads(branches["query"], self.query_norm)
        key = self._heads(branches["key"], self.key_norm)
        value = self._heads(branches["value"])
        if self.config.scale is not None:  # the operators multiply by K**-0.5
            query = query * (self.config.scale * self.shape.key_size**0.5)
        log_decay = None
        if self.config.forget_gate:
            log_decay = jax.nn.log_sigmoid(inputs["forget_gate"].astype(self.shape.gate_dtype))
        if positions is None:
            positions = running_positions(None if cache is None else cache.position, batch, length)
        angle, ring = None, None if cache is None else Ring(cache.key, cache.value, cache.segment)
        if ring is not None and (log_decay is not None or not token_attention_supports(query, key, value, ring)):
            ring = None  # it is for the kernel alone
        if self.rotary is not None and ring is not None and self.rotary.channels in (None, self.shape.key_size):
            angle = self.rotary.angle(query, positions)  # the kernel turns queries and keys
        elif self.rotary is not None:
            query, key = self.rotary(query, positions), self.rotary(key, positions)

        if cache is None:
            out = attention_of_layer(
                query,
                key,
                value,
                log_decay=log_decay,
                window=self.config.window,
                segment_ids=segment_ids,
                number=self.number,
            )
        else:
            if self.config.window is None:
                check_call_length("Attention", cache, length)
            if ring is not None:
                out, ring = token_attention(query, key, value, ring, cache.length, cache.current, angle=angle)
                cache = cache._replace(**ring._asdict(), length=cache.length + 1)
            elif log_decay is not None and cache.decay is not None:
                sums = jnp.cumsum(log_decay, axis=1)
                kept = {"key": key, "value": value, "decay": sums}
                out, cache = extend_ring(cache, (query, sums), kept, self._attend_with_decay, segment_ids)
                assert cache.decay is not None
                cache = cache._replace(decay=cache.decay - sums[:, -1:])
            else:
                out, cache = extend_ring(cache, query, {"key": key, "value": value}, self._attend, segment_ids)
            cache = cache._replace(position=positions[:, -1] + 1, tails=tails)
        out = out.reshape(batch, length, -1)
        if self.config.output_gate:
            out = out * jax.nn.sigmoid(inputs["output_gate"].astype(self.shape.gate_dtype)).astype(out.dtype)
        return out, cache

    def _attend(self, query: Array, seen: Mapping[str, Array], mask: Array) -> Array:
        """The output of queries that attend to a cache's keys under a mask."""
        return masked_attention(query, seen["key"], seen["value"], mask=mask)

    def _attend_with_decay(self, query: tuple[Array, Array], seen: Mapping[str, Array], mask: Array) -> Array:
        """The same with forget gates; each query with the sum of the log decays from the call's first token on."""
        q, sums = query
        value = seen["value"].astype(q.dtype)
        return decayed_attention(q, seen["key"], value, query_sums=sums, key_sums=seen["decay"], mask=mask)

    def init_cache(self, batch_size: int, max_length: int, dtype: DTypeLike | None = None) -> AttentionCache:
        """The cache before the first token.

        Args:
            batch_size: sequences B.
            max_length: greatest length of the sequences. In longer sequences each token sees the last `max_length`
                tokens, itself included (with a window, the last `min(window, max_length)`), for any split of the
                sequence into calls.
            dtype: of keys and values; None is the layer's compute dtype.

        Raises:
            ValueError: `batch_size` or `max_length` is no integer of at least 1.
        """
        check_cache_size("Attention", batch_size, max_length)
        window = self.config.window
        capacity = max_length if window is None else min(window, max_length)
        dtype = self.shape.dtype if dtype is None else dtype
        keys = jnp.zeros((batch_size, capacity, self.shape.key_heads, self.shape.key_size), dtype)
        decay = None
        if self.config.forget_gate:
            decay = jnp.zeros((batch_size, capacity, self.shape.value_heads), self.shape.gate_dtype)
        tails = {name: one.init_state(batch_size, dtype) for name, one in self._convolutions().items()}
        return AttentionCache(keys, jnp.zeros_like(keys), **empty_ring(batch_size, capacity), tails=tails, decay=decay)

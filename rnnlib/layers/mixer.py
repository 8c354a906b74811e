"""The token mixer of every recurrent model here: it projects, wires the axes, and reads out."""

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from rnnlib.fields import PositiveInteger, PositiveNumber, check_fields
from rnnlib.layers.base import MixerConfig, MixerShape, check_cache, check_cache_size, check_input, exact_quotient
from rnnlib.layers.check_parts import check_decay, check_decay_is_no_growth, check_gates, check_keys, expect_type
from rnnlib.layers.convolution import ConvolutionConfig, ShortConvolution
from rnnlib.layers.decay import DecayConfig, NoDecay
from rnnlib.layers.gain import GainConfig, SigmoidGain
from rnnlib.layers.gates import Gates
from rnnlib.layers.initializers import Initializer
from rnnlib.layers.keys import KeysConfig, PlainKeys
from rnnlib.layers.normalization import RMSNorm, l2_normalize
from rnnlib.layers.readout import ReadoutConfig
from rnnlib.layers.rotary import Rotary, running_positions
from rnnlib.layers.solve import Online, OperatorOptions, Signals, SolveConfig

FeatureMap = Literal["identity", "silu", "relu", "elu_plus_one"]
StreamNorm = Literal["none", "l2", "rms"]

_FEATURE_MAPS = {
    "identity": lambda x: x,
    "silu": jax.nn.silu,
    "relu": jax.nn.relu,
    "elu_plus_one": lambda x: jax.nn.elu(x) + 1.0,
}
# Those that the convolution's operator has itself.
_FUSED: dict[str, Literal["silu"] | None] = {"identity": None, "silu": "silu"}


class MixerCache(NamedTuple):
    """What a recurrent mixer carries from one call to the next; its size does not grow.

    Attributes:
        query_tail: the last inputs `[B, size - 1, H * K]` of the query's convolution, or None.
        key_tail: likewise of the key's.
        value_tail: likewise of the value's, `[B, size - 1, HV * V]`.
        keys: the keys axis's state, or None.
        state: the solve axis's state: `[B, HV, K, V]` float32 for the matrix-valued ones.
        position: the next token's position `[B]` int32, for mixers with rotary positions; else None.
    """

    query_tail: Array | None
    key_tail: Array | None
    value_tail: Array | None
    keys: Any
    state: Any
    position: Array | None


@dataclasses.dataclass(frozen=True)
class RecurrentMixerConfig(MixerConfig):
    """A recurrent mixer: a choice on each axis, and how their inputs and output are made.

    Attributes:
        decay: how much of the state is kept.
        gain: how strongly tokens erase and write.
        keys: which key is written and which query reads.
        solve: which recurrence.
        readout: skip, gate and norm of the output.
        convolution: the short convolution of queries, keys and values; None is none.
        feature_map: activation of queries and keys, after the convolution.
        value_map: activation of values, after the convolution.
        query_norm: `"l2"` gives queries unit length; `"rms"` is an RMS norm of each head with a learned scale.
        key_norm: likewise keys.
        rotary: rotary positions of queries and keys; None is none.
        key_expansion: `num_heads` key heads together have `key_expansion * width` channels.
        value_expansion: `num_heads` value heads together have `value_expansion * width` channels.
        key_heads: query and key heads H; None is the model's `num_heads`.
        value_heads: value heads HV, a multiple of H; None is the model's `num_heads`.
        head_dim: channels of a head where it does not follow from the width: K is `head_dim`, V is
            `head_dim * value_expansion / key_expansion`.
        key_head_dim: channels K of a key head, whatever the above say.
        value_head_dim: channels V of a value head, likewise.
        initializer: of the projections.
        scale: factor on the recurrence's output; None is `K**-0.5`.
        chunk_size: tokens in a chunk of the chunked implementations.
        implementation: of the solve axis's operator: `"scan"`, `"chunked"`, `"triton"`, or None for the best that
            supports the case. Convolutions and preconditioners choose theirs.
    """

    decay: DecayConfig = dataclasses.field(default_factory=NoDecay)
    gain: GainConfig = dataclasses.field(default_factory=SigmoidGain)
    keys: KeysConfig = dataclasses.field(default_factory=PlainKeys)
    solve: SolveConfig = dataclasses.field(default_factory=Online)
    readout: ReadoutConfig = dataclasses.field(default_factory=ReadoutConfig)
    convolution: ConvolutionConfig | None = dataclasses.field(default_factory=ConvolutionConfig)
    feature_map: FeatureMap = "silu"
    value_map: FeatureMap = "silu"
    query_norm: StreamNorm = "l2"
    key_norm: StreamNorm = "l2"
    rotary: Rotary | None = None
    key_expansion: PositiveNumber = 1.0
    value_expansion: PositiveNumber = 1.0
    key_heads: PositiveInteger | None = None
    value_heads: PositiveInteger | None = None
    head_dim: PositiveInteger | None = None
    key_head_dim: PositiveInteger | None = None
    value_head_dim: PositiveInteger | None = None
    initializer: Initializer = dataclasses.field(default_factory=Initializer)
    scale: float | None = None
    chunk_size: int = 64
    implementation: str | None = None

    def __post_init__(self) -> None:
        check_fields(self)

    def shape(
        self,
        width: int,
        num_heads: int,
        *,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
    ) -> MixerShape:
        """The sizes that this configuration gives in a model of `width` and `num_heads`.

        Raises:
            ValueError: heads or sizes do not come out whole.
        """
        if num_heads < 1:
            raise ValueError(f"RecurrentMixerConfig: num_heads is {num_heads}, expected at least 1")
        key_heads = num_heads if self.key_heads is None else self.key_heads
        value_heads = num_heads if self.value_heads is None else self.value_heads
        # All key channels of `num_heads` heads, for sizes that are not given outright.
        channels = self.key_expansion * width if self.head_dim is None else float(self.head_dim * num_heads)
        ratio = self.value_expansion / self.key_expansion
        key_size, value_size = self.key_head_dim, self.value_head_dim
        if key_size is None:
            key_size = exact_quotient(channels, num_heads, "key channels")
        if value_size is None:
            value_size = exact_quotient(channels * ratio, num_heads, "value channels")
        return MixerShape(
            width=width,
            key_heads=key_heads,
            value_heads=value_heads,
            key_size=key_size,
            value_size=value_size,
            dtype=dtype,
            param_dtype=param_dtype,
            initializer=self.initializer,
            pairs=self.solve.pairs(),
        )

    def build(
        self,
        width: int,
        num_heads: int,
        *,
        rngs: nnx.Rngs,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
    ) -> "RecurrentMixer":
        """Builds the module; arguments as `MixerConfig.build`."""
        return RecurrentMixer(self, self.shape(width, num_heads, dtype=dtype, param_dtype=param_dtype), rngs=rngs)


class Stream(nnx.Module):
    """One of queries, keys and values: projection, convolution, activation, heads, norm."""

    def __init__(
        self,
        shape: MixerShape,
        heads: int,
        size: int,
        *,
        convolution: ConvolutionConfig | None,
        feature_map: FeatureMap,
        norm: StreamNorm,
        rngs: nnx.Rngs,
    ):
        self.heads = heads
        self.size = size
        self.feature_map = feature_map
        self.unit_length = norm == "l2"
        self.norm = RMSNorm(size, eps=1e-5, dtype=shape.dtype, param_dtype=shape.param_dtype) if norm == "rms" else None
        self.projection = shape.project(heads * size, rngs=rngs)
        self.convolution = (
            None if convolution is None else ShortConvolution(heads * size, convolution, shape, rngs=rngs)
        )

    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        tail: Float[Array, "B S C"] | None = None,
    ) -> tuple[Float[Array, "B T H X"], Float[Array, "B S C"] | None]:
        """The stream's heads, and the convolution's next tail."""
        y = self.projection(x)
        heads = (*x.shape[:2], self.heads, self.size)
        if self.convolution is not None and self.feature_map in _FUSED:
            # One operator, whose kernel goes over memory once; the norm's eps is `l2_normalize`'s.
            y, tail = self.convolution(
                y,
                segment_ids=segment_ids,
                state=tail,
                activation=_FUSED[self.feature_map],
                norm_size=self.size if self.unit_length else None,
            )
            y = y.reshape(heads)
            return (y if self.norm is None else self.norm(y)), tail
        if self.convolution is not None:
            y, tail = self.convolution(y, segment_ids=segment_ids, state=tail)
        y = _FEATURE_MAPS[self.feature_map](y).reshape(heads)
        if self.norm is not None:
            y = self.norm(y)
        return (l2_normalize(y) if self.unit_length else y), tail

    def init_tail(self, batch_size: int, dtype: DTypeLike) -> Array | None:
        """The convolution's tail before the first token."""
        return None if self.convolution is None else self.convolution.init_state(batch_size, dtype)


class RecurrentMixer(nnx.Module):
    """A token mixer over the axes: decay, gain, keys, solve."""

    def __init__(self, config: RecurrentMixerConfig, shape: MixerShape, *, rngs: nnx.Rngs):
        self.config = config
        self.shape = shape
        convolution = config.convolution
        self.query = Stream(
            shape,
            shape.key_heads * shape.pairs,
            shape.key_size,
            convolution=convolution if convolution is not None and convolution.query else None,
            feature_map=config.feature_map,
            norm=config.query_norm,
            rngs=rngs,
        )
        self.key = Stream(
            shape,
            shape.key_heads * shape.pairs,
            shape.key_size,
            convolution=convolution if convolution is not None and convolution.key else None,
            feature_map=config.feature_map,
            norm=config.key_norm,
            rngs=rngs,
        )
        self.value = Stream(
            shape,
            shape.value_heads,
            shape.value_size,
            convolution=convolution if convolution is not None and convolution.value else None,
            feature_map=config.value_map,
            norm="none",
            rngs=rngs,
        )
        check_decay_is_no_growth(config.decay, shape)
        self.decay = config.decay.build(shape, rngs=rngs)
        self.gain = config.gain.build(shape, rngs=rngs)
        self.keys = config.keys.build(shape, rngs=rngs)
        options = OperatorOptions(config.scale, config.chunk_size, config.implementation)
        self.solve = config.solve.build(shape, options, rngs=rngs)
        self.readout = config.readout.build(shape, rngs=rngs)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        positions: Int[Array, "B T"] | None = None,
        cache: MixerCache | None = None,
    ) -> tuple[Float[Array, "B T D"], MixerCache | None]:
        """Mixes the tokens of `x`.

        Args:
            x: input `[B, T, D]`, T >= 1.
            segment_ids: ids of packed documents; convolution and state restart where the id changes. The first token
                of a call continues the cache, whatever its id.
            positions: of each token, for mixers with rotary positions; None counts on from the cache, or from 0.
            cache: None for the parallel pass; else what `init_cache` or the previous call gave, to continue from.

        Returns:
            Output `[B, T, D]`, and the next cache (None where none was given).

        Raises:
            ValueError: `x` is not as wide as the mixer or empty, or the cache is of another batch or mixer.
        """
        check_input("RecurrentMixer", x, self.shape.width)
        if cache is not None:
            check_cache("RecurrentMixer", cache, jax.eval_shape(lambda: self.init_cache(x.shape[0], 1)))
        signals, partial = self.signals(x, segment_ids=segment_ids, positions=positions, cache=cache)
        state = None if cache is None else cache.state
        out, state = self.solve(x, signals, segment_ids=segment_ids, state=state)
        out = checkpoint_name(out, "recurrence")  # for checkpoint policies that keep it
        y = self.readout(x, out, signals.value)
        return y, (None if cache is None else partial._replace(state=state))

    def signals(
        self,
        x: Float[Array, "B T D"],
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        positions: Int[Array, "B T"] | None = None,
        cache: MixerCache | None = None,
    ) -> tuple[Signals, MixerCache]:
        """What the recurrence takes: keys, values, gates and decay.

        Args:
            x: input `[B, T, D]`.
            segment_ids: as for the call.
            positions: as for the call.
            cache: as for the call.

        Returns:
            The signals, and the next cache but for its `state`, which is None.
        """
        check_input("RecurrentMixer", x, self.shape.width)
        tails = (None, None, None) if cache is None else (cache.query_tail, cache.key_tail, cache.value_tail)
        query, query_tail = self.query(x, segment_ids=segment_ids, tail=tails[0])
        key, key_tail = self.key(x, segment_ids=segment_ids, tail=tails[1])
        value, value_tail = self.value(x, segment_ids=segment_ids, tail=tails[2])

        position = None
        if self.config.rotary is not None:
            if positions is None:
                positions = running_positions(None if cache is None else cache.position, *x.shape[:2])
            query, key = self.config.rotary(query, positions), self.config.rotary(key, positions)
            position = positions[:, -1] + 1

        decay = self.decay(x)
        check_decay(self.config.decay, decay, self.shape, x.shape[:2])
        gates = self.gain(x, decay)
        expect_type("gain", self.config.gain, gates, Gates)
        keys, keys_state = self.keys(
            x,
            query,
            key,
            decay=decay,
            gates=gates,
            segment_ids=segment_ids,
            state=None if cache is None else cache.keys,
        )
        check_keys(self.config.keys, keys)
        gates = self.gain.normalize(gates, keys.key, keys.write_key)
        check_gates(self.config.gain, gates, self.shape, x.shape[:2])
        carried = MixerCache(query_tail, key_tail, value_tail, keys_state, None, position)
        return Signals(keys, value, gates, decay), carried

    def init_cache(self, batch_size: int, max_length: int, dtype: DTypeLike | None = None) -> MixerCache:
        """The cache before the first token.

        Args:
            batch_size: sequences B.
            max_length: of the sequences; a recurrent cache does not depend on it.
            dtype: of the convolutions' tails; None is what the mixer computes in, which every call gives them. States
                are float32 whatever it is.

        Raises:
            ValueError: `batch_size` or `max_length` is no integer of at least 1.
        """
        check_cache_size("RecurrentMixer", batch_size, max_length)
        dtype = self.shape.dtype if dtype is None else dtype
        return MixerCache(
            query_tail=self.query.init_tail(batch_size, dtype),
            key_tail=self.key.init_tail(batch_size, dtype),
            value_tail=self.value.init_tail(batch_size, dtype),
            keys=self.keys.init_state(batch_size),
            state=self.solve.init_state(batch_size),
            position=None if self.config.rotary is None else jnp.zeros((batch_size,), jnp.int32),
        )

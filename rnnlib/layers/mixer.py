"""The token mixer of every recurrent model here: projections, the four axes, and the output projection."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from rnnlib.fields import PositiveInteger, PositiveNumber, check_fields
from rnnlib.layers.array_types import Gates
from rnnlib.layers.base import (
    MixerConfig,
    MixerShape,
    MixerWithOutput,
    check_cache,
    check_cache_size,
    check_input,
    exact_quotient,
)
from rnnlib.layers.convolution import ConvolutionConfig
from rnnlib.layers.decay import DecayConfig, NoDecay
from rnnlib.layers.delta_product import (
    decay_in_turn,
    documents_of_steps,
    for_each_step,
    gates_in_turn,
    in_turn,
    of_last_steps,
    shape_of_steps,
)
from rnnlib.layers.feature_maps import Activation, FeatureMap, FeatureMapConfig
from rnnlib.layers.gain import GainConfig, SigmoidGain, UnitGain
from rnnlib.layers.initializers import Initializer
from rnnlib.layers.input_projection import InputProjection, ProjectedInput, columns_of, epilogues_of, shared_columns
from rnnlib.layers.keys import Keys, KeysConfig, PlainKeys
from rnnlib.layers.output_projection import OutputProjection, OutputProjectionConfig
from rnnlib.layers.part import PartConfig
from rnnlib.layers.qkv_branch import BranchNorm, QKVBranch, columns_in_place, run_branches
from rnnlib.layers.rotary import Rotary, running_positions
from rnnlib.layers.solve import DeltaRule, OperatorOptions, RecurrenceInputs, SolveConfig
from rnnlib.layers.validation import check_decay, check_decay_is_no_growth, check_gates, check_keys, expect_type
from rnnlib.ops.delayed_update import DelayedState
from rnnlib.ops.skinny_gemm import Epilogue


class MixerCache(NamedTuple):
    """The state of a recurrent mixer between calls; its size is fixed.

    Attributes:
        query_tail: the last inputs `[B, size - 1, H * K]` of the query's convolution, or None.
        key_tail: likewise of the key's.
        value_tail: likewise of the value's, `[B, size - 1, HV * V]`.
        keys: the keys axis's state, or None.
        state: the solve axis's state. A matrix-valued state is `[B, HV, K, V]` float32.
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
        output_projection: skip, gate and norm of the output.
        convolution: the short convolution of queries, keys and values; None is none.
        feature_map: activation of queries and keys after the convolution; or a learned map of each head, with separate
            parameters for queries and keys.
        key_feature_map: activation of keys, if it is not the queries'; None is `feature_map`.
        value_map: activation of values, after the convolution.
        query_norm: `"l2"` gives queries unit length; `"rms"` is an RMS norm of each head with a learned scale; `"l1"`
            and `"sum"` divide by `max(sum |q|, 1e-6)` and `sum q + 1e-4`.
        key_norm: likewise keys.
        rotary: rotary positions of queries and keys; None is none.
        key_expansion: `num_heads` key heads together have `key_expansion * width` channels.
        value_expansion: `num_heads` value heads together have `value_expansion * width` channels.
        key_heads: query and key heads H; None is the model's `num_heads`.
        value_heads: value heads HV, a multiple of H; None is the model's `num_heads`.
        shared_heads: the number of projected heads of keys and values, a divisor of H. Consecutive key and value heads
            then share a projected head, and have their own queries, decays and states. None is one for each.
        head_dim: channels of a head, if they do not follow from the width: K is `head_dim`, V is
            `head_dim * value_expansion / key_expansion`.
        key_head_dim: channels K of a key head, overriding the fields above. This, like those, is the size before a
            feature map, which may change it.
        value_head_dim: channels V of a value head, likewise.
        steps: delta-rule steps a token, each with a key, a value and a gain of its own; the state decays before the
            first, the query reads after the last (DeltaProduct, see `rnnlib.layers.delta_product`).
        use_bias: the projections of queries, keys and values have biases.
        tie_feature_maps: whether keys use the queries' map, if it is a map of heads.
        initializer: of the projections.
        scale: factor on the recurrence's output; None is `K**-0.5`.
        chunk_size: tokens in a chunk of the chunked implementations.
        implementation: of the solve axis's operator: `"scan"`, `"chunked"`, `"triton"`, `"mosaic"`, or None for the
            best that supports the case. Convolutions and preconditioners choose their own.
    """

    decay: DecayConfig = dataclasses.field(default_factory=NoDecay)
    gain: GainConfig = dataclasses.field(default_factory=SigmoidGain)
    keys: KeysConfig = dataclasses.field(default_factory=PlainKeys)
    solve: SolveConfig = dataclasses.field(default_factory=DeltaRule)
    output_projection: OutputProjectionConfig = dataclasses.field(default_factory=OutputProjectionConfig)
    convolution: ConvolutionConfig | None = dataclasses.field(default_factory=ConvolutionConfig)
    feature_map: FeatureMap = "silu"
    key_feature_map: Activation | None = None
    value_map: Activation = "silu"
    query_norm: BranchNorm = "l2"
    key_norm: BranchNorm = "l2"
    rotary: Rotary | None = None
    key_expansion: PositiveNumber = 1.0
    value_expansion: PositiveNumber = 1.0
    key_heads: PositiveInteger | None = None
    value_heads: PositiveInteger | None = None
    head_dim: PositiveInteger | None = None
    key_head_dim: PositiveInteger | None = None
    value_head_dim: PositiveInteger | None = None
    steps: PositiveInteger = 1
    use_bias: bool = False
    tie_feature_maps: bool = False
    shared_heads: PositiveInteger | None = None
    initializer: Initializer = dataclasses.field(default_factory=Initializer)
    scale: float | None = None
    chunk_size: int = 64
    implementation: str | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.steps > 1:
            self._check_steps()

    def _check_steps(self) -> None:
        """Raises ValueError unless the parts know nothing of the token beside its keys, values and gains."""
        served: tuple[tuple[str, Any, tuple[type, ...]], ...] = (
            ("solve", self.solve, (DeltaRule,)),
            ("keys", self.keys, (PlainKeys,)),
            ("gain", self.gain, (SigmoidGain, UnitGain)),
        )
        for name, part, kinds in served:
            if not isinstance(part, kinds):
                found, expected = type(part).__name__, " or ".join(kind.__name__ for kind in kinds)
                raise ValueError(
                    f"RecurrentMixerConfig: {name} is {found}, with steps={self.steps} expected {expected}"
                )
        for name, value in (("rotary", self.rotary), ("shared_heads", self.shared_heads)):
            if value is not None:
                raise ValueError(f"RecurrentMixerConfig: {name} is {value}, with steps={self.steps} expected None")

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
            ValueError: the width does not divide into heads of equal size.
        """
        if num_heads < 1:
            raise ValueError(f"RecurrentMixerConfig: num_heads is {num_heads}, expected at least 1")
        key_heads = num_heads if self.key_heads is None else self.key_heads
        value_heads = num_heads if self.value_heads is None else self.value_heads
        # The key channels of all `num_heads` heads, for sizes that are not given explicitly.
        channels = self.key_expansion * width if self.head_dim is None else float(self.head_dim * num_heads)
        ratio = self.value_expansion / self.key_expansion
        key_size, value_size = self.key_head_dim, self.value_head_dim
        if key_size is None:
            key_size = exact_quotient(channels, num_heads, "key channels")
        if value_size is None:
            value_size = exact_quotient(channels * ratio, num_heads, "value channels")
        mapped_size = key_size
        if isinstance(self.feature_map, FeatureMapConfig):
            mapped_size = self.feature_map.features(key_size)
        return MixerShape(
            width=width,
            key_heads=key_heads,
            value_heads=value_heads,
            key_size=mapped_size,
            value_size=value_size,
            dtype=dtype,
            param_dtype=param_dtype,
            initializer=self.initializer,
            mimo_rank=self.solve.mimo_rank(),
            projected_key_size=key_size,
            shared_heads=self.shared_heads,
            decay_size=self.solve.decay_size(),
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
        shape = self.shape(width, num_heads, dtype=dtype, param_dtype=param_dtype)
        self._check_tp_size(shape.own_shard().tp_size)
        return RecurrentMixer(self, shape.own_shard(), rngs=rngs)

    def _check_tp_size(self, tp_size: int) -> None:
        """Raises ValueError if heads are to be divided over devices and a part may mix heads."""
        for field in dataclasses.fields(self) if tp_size > 1 else ():
            part = getattr(self, field.name)
            if isinstance(part, PartConfig) and not (part.heads_apart or type(part).__module__.startswith("rnnlib.")):
                raise ValueError(
                    f"mesh.tensor={tp_size}: {field.name} is {type(part).__name__}, a part of your own; expected "
                    "heads_apart = True in its class, if its module mixes no heads and reads out by MixerShape.output"
                )


def _plain(cache: MixerCache) -> MixerCache:
    """The cache without pending writes."""
    is_delayed = isinstance(cache, MixerCache) and isinstance(cache.state, DelayedState)
    return cache._replace(state=cache.state.state) if is_delayed else cache


class RecurrentMixer(MixerWithOutput):
    """A token mixer over the axes: decay, gain, keys, solve."""

    def __init__(self, config: RecurrentMixerConfig, shape: MixerShape, *, rngs: nnx.Rngs):
        self.config = config
        self.shape = shape
        convolution = config.convolution
        projected = shape.key_size if shape.projected_key_size is None else shape.projected_key_size
        self.tied_map = config.tie_feature_maps and isinstance(config.feature_map, FeatureMapConfig)

        def branch(
            kind: str, heads: int, size: int, feature_map: FeatureMap, norm: BranchNorm, borrows_map: bool = False
        ) -> QKVBranch:
            own = convolution if convolution is not None and getattr(convolution, kind) else None
            options: dict[str, Any] = {"norm": norm, "use_bias": config.use_bias, "borrows_map": borrows_map}
            options["scale"] = 1.0 if convolution is None else getattr(convolution, f"{kind}_scale")
            return QKVBranch(kind, shape, heads, size, convolution=own, feature_map=feature_map, rngs=rngs, **options)

        heads, shared = shape.key_heads * shape.mimo_rank, shape.shared_heads
        self.query = branch("query", heads, projected, config.feature_map, config.query_norm)
        per_step = shape_of_steps(shape, config.steps)
        keys, values = shared or heads * config.steps, shared or per_step.value_heads
        key_map = config.feature_map if config.key_feature_map is None else config.key_feature_map
        self.key = branch("key", keys, projected, key_map, config.key_norm, self.tied_map)
        self.value = branch("value", values, shape.value_size, config.value_map, "none")
        check_decay_is_no_growth(config.decay, shape)
        self.decay = config.decay.build(shape, rngs=rngs)
        self.gain = config.gain.build(per_step, rngs=rngs)
        self.keys = config.keys.build(shape, rngs=rngs)
        options = OperatorOptions(config.scale, config.chunk_size, config.implementation)
        self.solve = config.solve.build(shape, options, rngs=rngs)
        self.output_projection = config.output_projection.build(shape, rngs=rngs)
        branches = (self.query, self.key, self.value)
        maps = columns_of(*branches, self.decay, self.gain, self.keys, self.solve, self.output_projection)
        in_place = columns_in_place(branches)
        self.input_projection = InputProjection(
            shape, maps, shared=shared_columns(in_place, maps), stores_shared=bool(in_place)
        )

    @property
    def output(self) -> nnx.Module | None:
        """The map from `features` to the result; None if an output projection of your own gives the result itself."""
        return self.output_projection.output if type(self.output_projection) is OutputProjection else None

    def features(
        self,
        x: Float[Array, "B T D"],
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        positions: Int[Array, "B T"] | None = None,
        cache: MixerCache | None = None,
    ) -> tuple[Float[Array, "B T F"], MixerCache | None]:
        """What `output` reads `[B, T, HV * V]`, and the next cache; see `MixerWithOutput`."""
        check_input("RecurrentMixer", x, self.shape.width)
        if cache is not None:
            check_cache("RecurrentMixer", _plain(cache), jax.eval_shape(lambda: self.init_cache(x.shape[0], 1)))
        inputs = self.input_projection(x, self.epilogues())
        recurrence_inputs, inputs, partial = self._recurrence_inputs(inputs, segment_ids, positions, cache)
        state = None if cache is None else cache.state
        steps = self.config.steps
        out, state = self.solve(
            inputs, recurrence_inputs, segment_ids=documents_of_steps(segment_ids, steps), state=state
        )
        out = of_last_steps(out, steps)
        out = checkpoint_name(out, "recurrence")  # for checkpoint policies that keep it
        read = (
            self.output_projection.features
            if type(self.output_projection) is OutputProjection
            else self.output_projection
        )
        y = read(inputs, out, of_last_steps(recurrence_inputs.value, steps))
        return y, (None if cache is None else partial._replace(state=state))

    def epilogues(self) -> dict[str, Epilogue]:
        """What the parts ask of a matmul of few rows, by the names of columns."""
        return epilogues_of(self.decay, self.gain, self.keys, self.solve, self.output_projection)

    def recurrence_inputs(
        self,
        x: Float[Array, "B T D"],
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        positions: Int[Array, "B T"] | None = None,
        cache: MixerCache | None = None,
    ) -> tuple[RecurrenceInputs, MixerCache]:
        """The inputs of the recurrence: keys, values, gates and decay.

        Args:
            x: input `[B, T, D]`.
            segment_ids: as for the call.
            positions: as for the call.
            cache: as for the call.

        Returns:
            The inputs, of `steps` tokens for each where the mixer has several, and the next cache without its `state`,
            which is None.
        """
        check_input("RecurrentMixer", x, self.shape.width)
        inputs = self.input_projection(x, self.epilogues())
        recurrence_inputs, _, cache = self._recurrence_inputs(inputs, segment_ids, positions, cache)
        return recurrence_inputs, cache

    def _recurrence_inputs(
        self, inputs: ProjectedInput, segment_ids: Array | None, positions: Array | None, cache: MixerCache | None
    ) -> tuple[RecurrenceInputs, ProjectedInput, MixerCache]:
        """The inputs of the recurrence, what the parts after it read, and the next cache without its `state`."""
        batch = inputs.x.shape[:2]
        tails = (None, None, None) if cache is None else (cache.query_tail, cache.key_tail, cache.value_tail)
        borrowed = self.query.feature_map if self.tied_map else None
        branches, inputs = run_branches(
            (self.query, self.key, self.value),
            inputs,
            segment_ids=segment_ids,
            tails=tails,
            feature_maps=(None, borrowed, None),
        )
        (query, query_tail), (key, key_tail), (value, value_tail) = branches

        position = None
        if self.config.rotary is not None:
            if positions is None:
                positions = running_positions(None if cache is None else cache.position, *batch)
            query, key = self.config.rotary(query, positions), self.config.rotary(key, positions)
            position = positions[:, -1] + 1
        if self.shape.shared_heads is not None:
            key = jnp.repeat(key, self.shape.key_heads // key.shape[2], axis=2)
            value = self.shape.repeat_key_heads(value)

        decay, key = self.decay.with_key(inputs, key)
        check_decay(self.config.decay, decay, self.shape, batch)
        gates = self.gain(inputs, decay)
        expect_type("gain", self.config.gain, gates, Gates)
        steps, state = self.config.steps, None if cache is None else cache.keys
        if steps > 1:
            keys, keys_state = Keys(for_each_step(query, steps), in_turn(key, steps)), state
            value, decay, gates = in_turn(value, steps), decay_in_turn(decay, steps), gates_in_turn(gates, steps)
        else:
            options: dict[str, Any] = {"decay": decay, "gates": gates, "segment_ids": segment_ids, "state": state}
            keys, keys_state = self.keys(inputs, query, key, **options)
        check_keys(self.config.keys, keys)
        gates = self.gain.normalize(gates, keys.key, keys.write_key)
        check_gates(self.config.gain, gates, self.shape, value.shape[:2])
        carried = MixerCache(query_tail, key_tail, value_tail, keys_state, None, position)
        return RecurrenceInputs(keys, value, gates, decay), inputs, carried

    def delay_updates(self, cache: MixerCache) -> MixerCache:
        """The cache as a loop over single tokens carries it: see `Solver.delay_updates`. Not with several steps."""
        if self.config.steps > 1:
            return cache
        batch = jax.tree.leaves(cache)[0].shape[0]
        # Of a token's arrays only shapes are read, so that a compiled loop computes none.
        recurrence_inputs, _ = self.recurrence_inputs(
            jnp.zeros((batch, 1, self.shape.width), self.shape.dtype), cache=cache
        )
        return cache._replace(state=self.solve.delay_updates(cache.state, recurrence_inputs))

    def init_cache(self, batch_size: int, max_length: int, dtype: DTypeLike | None = None) -> MixerCache:
        """The cache before the first token.

        Args:
            batch_size: sequences B.
            max_length: of the sequences; a recurrent cache does not depend on it.
            dtype: of the convolutions' tails; None is the mixer's compute dtype, in which every call returns them.
                States are always float32.

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

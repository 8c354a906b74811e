"""Base classes of token mixers: a configuration that builds a module, and the sizes that its parts share."""

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from rnnlib.fields import PositiveInteger, check_fields, check_value, in_words, matches
from rnnlib.layers.initializers import Initializer
from rnnlib.layers.linear import LowRank
from rnnlib.layers.tensor import current_tp_size, row_parallel_linear, shard_size
from rnnlib.ops.context_parallel import expect_whole_rows
from rnnlib.ops.skinny_gemm import linear_product

# Of a projection: None is full rank, `"value_size"` is V.
Rank = PositiveInteger | Literal["value_size"] | None


@runtime_checkable
class TokenMixer(Protocol):
    """A module that mixes tokens of a sequence: recurrent or attention."""

    def __call__(
        self, x: Array, *, segment_ids: Array | None = None, positions: Array | None = None, cache: Any = None
    ) -> tuple[Array, Any]:
        """Mixes `x` `[B, T, D]`; see `rnnlib.layers.mixer.RecurrentMixer`."""
        ...

    def init_cache(self, batch_size: int, max_length: int, dtype: DTypeLike) -> Any:
        """A cache of constant size for `batch_size` sequences of up to `max_length` tokens."""
        ...


class MixerWithOutput(nnx.Module, abc.ABC):
    """A mixer that ends in a map, `output`, of its `features`: a block can add what follows to that map's matmul.

    Attributes:
        output: the map; None where `features` gives the result itself.
    """

    output: Any

    @abc.abstractmethod
    def features(
        self,
        x: Float[Array, "B T D"],
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        positions: Int[Array, "B T"] | None = None,
        cache: Any = None,
    ) -> tuple[Float[Array, "B T F"], Any]:
        """The call without its output map: what `output` reads `[B, T, F]`, and the next cache.

        Arguments and errors are those of the call.
        """

    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        positions: Int[Array, "B T"] | None = None,
        cache: Any = None,
    ) -> tuple[Float[Array, "B T D"], Any]:
        """Mixes the tokens of `x`.

        Args:
            x: input `[B, T, D]`, T >= 1.
            segment_ids: ids of packed documents. Convolutions and states restart where the id changes, and attention
                sees no token before the last change. The first token of a call continues the cache, regardless of its
                id.
            positions: of each token, for rotary positions; None continues from the cache, or from 0.
            cache: None for the parallel pass; otherwise the cache of `init_cache` or of the previous call.
                `init_cache` documents which tokens attention sees beyond its `max_length`.

        Returns:
            Output `[B, T, D]`, and the next cache (None where none was given).

        Raises:
            ValueError: `x` is not as wide as the mixer or is empty, the cache is of another batch or mixer, or a single
                call is longer than a full-attention cache.
        """
        y, cache = self.features(x, segment_ids=segment_ids, positions=positions, cache=cache)
        return (y if self.output is None else self.output(y)), cache


# What layers give to later ones, by name; the model gives the first layer its embeddings where one reads them.
Carried = Mapping[str, Array]


@runtime_checkable
class CarryingMixer(TokenMixer, Protocol):
    """A mixer that layers behind it are given something of, such as RWKV-7's values of the first layer."""

    def carry(
        self,
        x: Array,
        carried: Carried,
        *,
        segment_ids: Array | None = None,
        positions: Array | None = None,
        cache: Any = None,
    ) -> tuple[Array, Any, Carried]:
        """The call, given what earlier layers carry; the last result is that for later ones."""
        ...


@dataclasses.dataclass(frozen=True)
class MixerConfig(abc.ABC):
    """Configuration of a token mixer."""

    @abc.abstractmethod
    def build(
        self,
        width: int,
        num_heads: int,
        *,
        rngs: nnx.Rngs,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
    ) -> TokenMixer:
        """Builds the module.

        Args:
            width: the model's width D.
            num_heads: number of heads, if the configuration does not give one.
            rngs: source of parameters.
            dtype: compute dtype of the projections.
            param_dtype: dtype of the stored parameters; decay parameters are always float32.
        """


def exact_quotient(total: float | int, parts: int, what: str) -> int:
    """`total / parts` if it is a positive integer; otherwise a ValueError that names `what`."""
    quotient = round(total / parts) if parts > 0 else 0
    if quotient < 1 or abs(quotient * parts - total) > 1e-6 * max(1.0, abs(total)):
        raise ValueError(
            f"{what}: {total:g} does not divide into {parts} heads of a whole size; choose another width or "
            "num_heads (--model.width, --model.num-heads), or give the heads' size"
        )
    return quotient


def check_input(mixer: str, x: Array, width: int) -> None:
    """Raises ValueError, naming `mixer`, unless `x` is `[B, T, D]` with D = `width` and no empty axis."""
    if x.ndim != 3 or 0 in x.shape or x.shape[-1] != width:
        raise ValueError(f"{mixer}: x has shape {x.shape}, expected [B, T, D] with D = {width} and no empty axis")


def check_cache(mixer: str, cache: Any, expected: Any) -> None:
    """Raises an error that names `mixer`, unless a cache has the expected arrays, of any dtypes.

    Args:
        mixer: begins the message.
        cache: the argument.
        expected: the result of `init_cache` for the batch, or its shapes.

    Raises:
        ValueError: the cache has other arrays or shapes.
        NotImplementedError: tokens are split over devices.
    """
    expect_whole_rows(f"{mixer}: a cache")
    found, wanted = _shapes(cache), _shapes(expected)
    if type(cache) is not type(expected) or found.keys() != wanted.keys():
        raise ValueError(
            f"{mixer}: cache is {type(cache).__name__}({', '.join(found)}), expected what init_cache gives, "
            f"{type(expected).__name__}({', '.join(wanted)})"
        )
    for name, shape in wanted.items():
        if len(found[name]) != len(shape) or found[name][1:] != shape[1:]:
            raise ValueError(f"{mixer}: cache{name} has shape {found[name]}, expected {shape} as init_cache gives")
        if found[name] != shape:
            raise ValueError(f"{mixer}: cache is of a batch of {found[name][0]}, expected {shape[0]} as in x")


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    leaves = jax.tree.leaves_with_path(tree)
    return {jax.tree_util.keystr(path): getattr(leaf, "shape", ()) for path, leaf in leaves}


def check_cache_size(mixer: str, batch_size: int, max_length: int) -> None:
    """Raises ValueError, naming `mixer`, unless the arguments of `init_cache` are integers of at least 1."""
    for name, value in (("batch_size", batch_size), ("max_length", max_length)):
        check_value(f"{mixer}.init_cache", name, value, PositiveInteger)


@dataclasses.dataclass(frozen=True)
class MixerShape:
    """The sizes that a recurrent mixer's parts share, and how their projections are made.

    Attributes:
        width: the model's width D.
        key_heads: query and key heads H.
        value_heads: value heads HV, a multiple of H; value head `j` uses key head `j // (HV // H)`.
        key_size: channels K of a key head.
        value_size: channels V of a value head.
        dtype: compute dtype of the projections.
        param_dtype: dtype of their stored parameters.
        initializer: of their kernels.
        mimo_rank: number of key-value pairs that a token writes into each head's state, and of queries that read it.
            The branches of queries and keys have H * mimo_rank heads, ordered by key head.
        projected_key_size: channels of a query or key head before a feature map that changes their number; None is K.
        shared_heads: number of projected key and value heads, each used by several consecutive heads; None is one
            projected head for each head.
        decay_size: channels of a decay per channel; None is K.
        tp_size: number of devices that the heads are sharded over (tensor parallel). The heads above are those of
            one device.
        one_key_head: whether the layer has a single key head, which is whole on each of these devices.
    """

    width: PositiveInteger
    key_heads: PositiveInteger
    value_heads: PositiveInteger
    key_size: PositiveInteger
    value_size: PositiveInteger
    dtype: DTypeLike = jnp.float32
    param_dtype: DTypeLike = jnp.float32
    initializer: Initializer = dataclasses.field(default_factory=Initializer)
    mimo_rank: PositiveInteger = 1
    projected_key_size: PositiveInteger | None = None
    shared_heads: PositiveInteger | None = None
    decay_size: PositiveInteger | None = None
    tp_size: PositiveInteger = 1
    one_key_head: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        if self.value_heads % self.key_heads != 0:
            raise ValueError(
                f"MixerShape: value_heads is {self.value_heads}, expected a multiple of key_heads = {self.key_heads}"
            )

        if self.shared_heads is not None and (self.key_heads % self.shared_heads != 0 or self.mimo_rank != 1):
            raise ValueError(
                f"MixerShape: shared_heads is {self.shared_heads}, expected a divisor of key_heads = {self.key_heads}, "
                f"and a solve axis that takes one key a token and head, not {self.mimo_rank}"
            )

    def own_shard(self) -> "MixerShape":
        """The sizes of a device's shard, within `tensor_shards`: its part of the heads.

        A single key head is whole on each device. Several key heads are divided, so that each device has the key heads
        of its value heads.

        Raises:
            ValueError: the heads do not divide evenly over the devices.
        """
        tp_size = current_tp_size()
        if tp_size == 1:
            return self

        def own(heads: int, what: str) -> int:
            return 1 if heads == 1 else shard_size(heads, f"the {what} heads of a mixer (--model.num-heads)")

        return dataclasses.replace(
            self,
            value_heads=shard_size(self.value_heads, "the value heads of a mixer (--model.num-heads)"),
            key_heads=own(self.key_heads, "key"),
            shared_heads=None if self.shared_heads is None else own(self.shared_heads, "shared key"),
            tp_size=tp_size,
            one_key_head=self.key_heads == 1,
        )

    @property
    def tp_size_of_keys(self) -> int:
        """The number of devices that the key heads are divided over: 1 if there is a single key head."""
        return 1 if self.one_key_head else self.tp_size

    @property
    def decay_channels(self) -> int:
        """Channels of a decay per channel."""
        return self.key_size if self.decay_size is None else self.decay_size

    @property
    def group(self) -> int:
        """Value heads that share a key head."""
        return self.value_heads // self.key_heads

    @property
    def gate_dtype(self) -> Any:
        """The dtype of decays, gates and states: float32, or float64 if the mixer computes in float64."""
        return jnp.promote_types(self.dtype, jnp.float32)

    def output(
        self, features_in: int, *, rngs: nnx.Rngs, use_bias: bool = False, features: int | None = None
    ) -> nnx.Linear:
        """A linear map from all heads' channels to the width or `features`: a sum over the devices that hold them."""
        features = self.width if features is None else features
        return self.linear(
            features_in, features, rngs=rngs, use_bias=use_bias, module=row_parallel_linear(self.tp_size)
        )

    def linear(
        self,
        features_in: int,
        features: int,
        *,
        rngs: nnx.Rngs,
        use_bias: bool = False,
        module: type[nnx.Linear] = nnx.Linear,
        kernel_init: nnx.Initializer | None = None,
    ) -> nnx.Linear:
        """A linear map in this mixer's dtypes, with the initial values of this mixer's initializer or another."""
        return module(
            features_in,
            features,
            use_bias=use_bias,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            kernel_init=self.initializer.build() if kernel_init is None else kernel_init,
            dot_general=linear_product,
            rngs=rngs,
        )

    def project(
        self, features: int, *, rngs: nnx.Rngs, rank: Rank = None, use_bias: bool = False
    ) -> nnx.Linear | LowRank:
        """A projection of the mixer's input to `features` channels, through `rank` channels where one is given."""
        if not matches(Rank, rank):
            raise ValueError(f"MixerShape.project: rank is {rank!r}, expected {in_words(Rank)}")
        if rank is None:
            return self.linear(self.width, features, rngs=rngs, use_bias=use_bias)
        if rank == "value_size":
            rank = self.value_size
        return LowRank(
            self.linear(self.width, rank, rngs=rngs),
            self.linear(rank, features, rngs=rngs, use_bias=use_bias),
        )

    def expect_one_pair(self, part: str) -> None:
        """Raises a ValueError that names `part` if a token writes several keys into a head's state."""
        if self.mimo_rank != 1:
            raise ValueError(f"{part}: the solve axis takes {self.mimo_rank} keys a token and head, expected 1")

    def repeat_key_heads(self, x: Array) -> Array:
        """Repeats an array of key heads for each value head: `[B, T, H, ...]` to `[B, T, HV, ...]`."""
        group = self.value_heads // x.shape[2]
        return x if group == 1 else jnp.repeat(x, group, axis=2)

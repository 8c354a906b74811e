"""Mixers side by side in one layer: each reads the layer's input, and their outputs are added up."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from rnnlib.fields import PositiveNumber, check_fields
from rnnlib.layers.base import Carried, MixerConfig, TokenMixer, check_cache_size, check_input

# Between the names of mixers that stand side by side, as in "mamba2+attention".
SIDE_BY_SIDE = "+"


@dataclasses.dataclass(frozen=True)
class ParallelConfig(MixerConfig):
    """`sum_i output_scale_i mixer_i(input_scale_i x)` (Falcon-H1, arXiv 2507.22448; Hymba, arXiv 2411.13676).

    Attributes:
        mixers: the mixers, at least one.
        input_scales: of each; empty is 1.
        output_scales: of each; empty is 1.
    """

    mixers: tuple[MixerConfig, ...]
    input_scales: tuple[PositiveNumber, ...] = ()
    output_scales: tuple[PositiveNumber, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.mixers:
            raise ValueError("ParallelConfig: mixers is (), expected at least one")
        for name in ("input_scales", "output_scales"):
            found = getattr(self, name)
            if found and len(found) != len(self.mixers):
                raise ValueError(f"ParallelConfig: {name} has {len(found)} entries, expected {len(self.mixers)}")

    def build(
        self,
        width: int,
        num_heads: int,
        *,
        rngs: nnx.Rngs,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
    ) -> "ParallelMixer":
        """Builds the module; arguments as `MixerConfig.build`, for each of the mixers."""
        dtypes: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype}
        return ParallelMixer(self, [mixer.build(width, num_heads, rngs=rngs, **dtypes) for mixer in self.mixers], width)


class ParallelMixer(nnx.Module):
    """Mixers whose outputs are added up.

    Attributes:
        mixers: one after another; the cache is a tuple of theirs.
    """

    def __init__(self, config: ParallelConfig, mixers: Sequence[TokenMixer], width: int):
        ones = (1.0,) * len(mixers)
        self.width = width
        self.scales = tuple(zip(config.input_scales or ones, config.output_scales or ones))
        self.mixers = nnx.List(mixers)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        positions: Int[Array, "B T"] | None = None,
        cache: tuple[Any, ...] | None = None,
    ) -> tuple[Float[Array, "B T D"], tuple[Any, ...] | None]:
        """Mixes the tokens of `x`; arguments, results and errors are those of the mixers."""
        check_input("ParallelMixer", x, self.width)
        if cache is not None and len(cache) != len(self.mixers):
            raise ValueError(f"ParallelMixer: cache has {len(cache)} entries, expected {len(self.mixers)}")
        entries = cache or (None,) * len(self.mixers)
        outputs, caches = [], []
        for mixer, (input_scale, output_scale), entry in zip(self.mixers, self.scales, entries):
            y, entry = mixer(_scaled(x, input_scale), segment_ids=segment_ids, positions=positions, cache=entry)
            outputs.append(_scaled(y, output_scale))
            caches.append(entry)
        return sum(outputs[1:], outputs[0]), None if cache is None else tuple(caches)

    def inputs_of_mixers(
        self,
        x: Float[Array, "B T D"],
        carried: Carried,
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        positions: Int[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T D"], ...]:
        """What each of `mixers` reads; arguments as for the call."""
        return tuple(_scaled(x, input_scale) for input_scale, _ in self.scales)

    def init_cache(self, batch_size: int, max_length: int, dtype: DTypeLike | None = None) -> tuple[Any, ...]:
        """The caches of the mixers before the first token; arguments and errors are theirs."""
        check_cache_size("ParallelMixer", batch_size, max_length)
        mixers: list[Any] = list(self.mixers)
        return tuple(mixer.init_cache(batch_size, max_length, dtype) for mixer in mixers)


def _scaled(x: Array, scale: float) -> Array:
    return x if scale == 1 else x * scale

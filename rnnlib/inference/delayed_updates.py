"""Caches as a loop over single tokens carries them: writes to states may wait, and tokens are counted once.

A loop that carries a number for each layer counts it in a launch for each. So within the loop all layers have the
numbers of one, and what the others carry is never read, which XLA drops.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax import Array

from rnnlib.layers.attention import Attention
from rnnlib.layers.latent_attention import LatentAttention
from rnnlib.layers.mixer import MixerCache, RecurrentMixer
from rnnlib.models.decoder import DecoderCache, DecoderLM
from rnnlib.ops.delayed_update import PERIOD, DelayedState, flush


def delay_updates(model: DecoderLM, cache: DecoderCache) -> DecoderCache:
    """The cache as a loop carries it: writes wait where a layer's kernel gains by that."""
    return _of_mixers(
        model,
        cache,
        lambda mixer, entry: _delayed(*nnx.split(mixer), entry) if isinstance(mixer, RecurrentMixer) else entry,
    )


def _of_mixers(model: DecoderLM, cache: DecoderCache, change: Callable[[Any, Any], Any]) -> DecoderCache:
    """The cache with each mixer's entry changed, in the order of the layers."""
    entries = []
    for block, entry in zip(model.blocks, cache):
        if hasattr(block.mixer, "mixers"):
            entries.append(tuple(change(mixer, own) for mixer, own in zip(block.mixers, entry)))
        else:
            entries.append(change(block.mixer, entry))
    return tuple(entries)


# Mixers of equal structure share one trace.
@functools.partial(jax.jit, static_argnums=0)
def _delayed(graphdef, state, entry: MixerCache) -> MixerCache:
    return nnx.merge(graphdef, state).delay_updates(entry)


def after_tokens(model: DecoderLM, cache: DecoderCache, tokens: Array) -> DecoderCache:
    """The cache after so many tokens of the loop, `[]` int32: all its layers get one array for what waits.

    They also get one for each count of their tokens: layers of a model have read the same tokens.
    """
    return _counted_once(model, _changed(cache, lambda state: state._replace(num_pending=tokens % PERIOD)))


_COUNTS = ("length", "current", "position")  # of rows, in the caches of the mixers below
_COUNTING = (Attention, LatentAttention, RecurrentMixer)


def _counted_once(model: DecoderLM, cache: DecoderCache) -> DecoderCache:
    """The cache with the first layer's counts in all layers; a mixer of a user's own may count something else."""
    found: dict[str, Any] = {}

    def counted(mixer: Any, entry: Any) -> Any:
        if type(mixer) not in _COUNTING:
            return entry
        own = {name: count for name in _COUNTS if (count := getattr(entry, name, None)) is not None}
        found.update(own | found)
        return entry._replace(**{name: found[name] for name in own})

    return _of_mixers(model, cache, counted)


def flushed(model: DecoderLM, cache: DecoderCache, tokens: Array) -> DecoderCache:
    """A cache that `DecoderLM.extend` gives, after so many tokens of the loop."""
    return _changed(after_tokens(model, cache, tokens), flush)


def _changed(cache: DecoderCache, change: Callable[[DelayedState], object]) -> DecoderCache:
    def is_delayed(x: object) -> bool:
        return isinstance(x, DelayedState)

    return jax.tree.map(lambda x: change(x) if is_delayed(x) else x, cache, is_leaf=is_delayed)

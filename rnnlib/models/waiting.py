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
from rnnlib.ops.deferred_writes import PERIOD, DeferredState, settle_writes


def defer_writes(model: DecoderLM, cache: DecoderCache) -> DecoderCache:
    """The cache as a loop carries it: writes wait where a layer's kernel gains by that."""
    return tuple(
        _deferred(*nnx.split(block.mixer), entry) if isinstance(block.mixer, RecurrentMixer) else entry
        for block, entry in zip(model.blocks, cache)
    )


# Mixers of equal structure share one trace.
@functools.partial(jax.jit, static_argnums=0)
def _deferred(graphdef, state, entry: MixerCache) -> MixerCache:
    return nnx.merge(graphdef, state).defer_writes(entry)


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
    entries = []
    for block, entry in zip(model.blocks, cache):
        if type(block.mixer) in _COUNTING:
            own = {name: getattr(entry, name, None) for name in _COUNTS}
            found = {name: count for name, count in own.items() if count is not None} | found
            entry = entry._replace(**{name: found[name] for name, count in own.items() if count is not None})
        entries.append(entry)
    return tuple(entries)


def settled(model: DecoderLM, cache: DecoderCache, tokens: Array) -> DecoderCache:
    """A cache that `DecoderLM.extend` gives, after so many tokens of the loop."""
    return _changed(after_tokens(model, cache, tokens), settle_writes)


def _changed(cache: DecoderCache, change: Callable[[DeferredState], object]) -> DecoderCache:
    def is_deferred(x: object) -> bool:
        return isinstance(x, DeferredState)

    return jax.tree.map(lambda x: change(x) if is_deferred(x) else x, cache, is_leaf=is_deferred)

"""Caches whose layers let writes to their states wait, for the length of a loop over single tokens."""

import functools
from collections.abc import Callable

import jax
from flax import nnx
from jax import Array

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


def after_tokens(cache: DecoderCache, tokens: Array) -> DecoderCache:
    """The cache after so many tokens of the loop, `[]` int32: all its layers get one array for what waits.

    A loop that carries the number for each layer would count it in a launch for each.
    """
    return _changed(cache, lambda state: state._replace(waiting=tokens % PERIOD))


def settled(cache: DecoderCache, tokens: Array) -> DecoderCache:
    """A cache that `DecoderLM.extend` gives, after so many tokens of the loop."""
    return _changed(after_tokens(cache, tokens), settle_writes)


def _changed(cache: DecoderCache, change: Callable[[DeferredState], object]) -> DecoderCache:
    def is_deferred(x: object) -> bool:
        return isinstance(x, DeferredState)

    return jax.tree.map(lambda x: change(x) if is_deferred(x) else x, cache, is_leaf=is_deferred)

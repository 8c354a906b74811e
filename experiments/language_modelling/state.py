"""How much a model keeps of the text before."""

import functools

import jax

from rnnlib.models import ModelConfig, abstract_model


@functools.cache
def state_numbers(config: ModelConfig, length: int) -> int:
    """Numbers that a model keeps of a text of so many tokens: states, filters' windows, attention's keys and values."""
    # Layers repeat after as many as there are names: one round of them, built by shapes, stands for all.
    rounds = config.num_layers // len(config.mixers)
    if rounds > 1 and config.num_layers % len(config.mixers) == 0:
        return rounds * state_numbers(config.replace(num_layers=len(config.mixers)), length)
    model = abstract_model(config)
    return sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(lambda: model.init_cache(1, length))))

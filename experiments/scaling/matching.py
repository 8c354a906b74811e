"""Models of as many parameters, or of as large a state, whatever their mixer."""

import functools

from experiments.language_modelling.state import state_numbers
from rnnlib.models import ModelConfig, count_parameters

MULTIPLE = 8
"""Of which a feed-forward's hidden width is a multiple: tensor cores want it, and it is far finer than 1 %."""


@functools.cache
def parameters(config: ModelConfig) -> int:
    """All parameters of a model whose layers repeat after as many as there are names of mixers."""
    rounds, rest = divmod(config.num_layers, len(config.mixers))
    if rounds <= 2 or rest:
        return count_parameters(config).total
    # By shapes alone a model of many layers takes seconds: one round and a second one stand for all.
    one, two = (count_parameters(config.replace(num_layers=n * len(config.mixers))).total for n in (1, 2))
    return one + (rounds - 1) * (two - one)


def match_parameters(config: ModelConfig, count: int) -> ModelConfig:
    """The model with the hidden width of its feed-forwards at which it comes closest to so many parameters.

    Raises:
        ValueError: the rest of the model has more than them already.
    """
    least, next_one = (parameters(config.replace(mlp_width=n * MULTIPLE)) for n in (1, 2))
    steps = round((count - least) / (next_one - least))
    if steps < 0:
        raise ValueError(f"{count:,} parameters are too few: {least:,} with the narrowest feed-forwards")
    return config.replace(mlp_width=MULTIPLE * (1 + steps))


def match_state(config: ModelConfig, mixer: str, numbers: int) -> ModelConfig:
    """The model with the channels of its heads at which its state comes closest to so many numbers.

    Keys and values have as many channels, a multiple of `MULTIPLE` up to those that the model has.

    Args:
        config: of one recurrent mixer, whose state grows with its heads' channels.
        mixer: its name.
        numbers: of the state, for one text.

    Raises:
        ValueError: the state is larger with the fewest channels.
    """
    sizes = range(MULTIPLE, config.width // config.num_heads + 1, MULTIPLE)
    overrides = {name: dict(options) for name, options in config.mixer_overrides}
    of_mixer = overrides.get(mixer, {})
    layer, of_layer = config.replace(num_layers=1), numbers / config.num_layers  # all layers are alike

    def with_size(model: ModelConfig, size: int) -> ModelConfig:
        return model.replace(mixer_overrides={**overrides, mixer: {**of_mixer, "head_dim": size}})

    found = {size: state_numbers(with_size(layer, size), 1) for size in sizes}
    best = min(found, key=lambda size: abs(found[size] - of_layer))
    if found[best] > 1.1 * of_layer:
        raise ValueError(f"{mixer}: a state of {numbers:,} numbers is less than that of {MULTIPLE} channels a head")
    return with_size(config, best)

"""Which parameters an optimizer decays."""

from typing import Any

from jax import Array

# Decay rates, steps and filters' biases are set by name as well as by shape, should a module stack them over layers.
_NEVER = frozenset({"A_log", "dt_bias", "bias", "scale", "skip", "feedback", "correction"})


def takes_weight_decay(path: tuple[Any, ...], value: Array) -> bool:
    """Whether weight decay applies to a parameter of a mixer.

    It applies to matrices (projections, embeddings, convolution filters) and to nothing else: not to norms' `scale`, to
    any `bias`, to `A_log` and `dt_bias`, nor to the learned scalars per head (`skip`, `feedback`, `correction`).

    Args:
        path: names from the model down to the parameter, as `nnx.to_flat_state` gives; other entries are ignored.
        value: the parameter.
    """
    return value.ndim >= 2 and not _NEVER.intersection(str(part) for part in path)

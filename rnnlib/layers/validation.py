"""Checks of the types and shapes of an axis's results, so that an error names the user's part that is wrong."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from rnnlib.layers.array_types import Gates
from rnnlib.layers.base import MixerShape
from rnnlib.layers.decay import Decay, DecayConfig
from rnnlib.layers.input_projection import InputProjection, columns_of
from rnnlib.layers.keys import Keys


def expect_type(axis: str, config: Any, value: Any, expected: type) -> None:
    """Raises a TypeError that names the axis and its configuration, unless the result has the expected type."""
    if not isinstance(value, expected):
        given = "an array" if isinstance(value, jax.Array) else f"a {type(value).__name__}"
        raise TypeError(f"{axis} ({type(config).__name__}) gave {given}, expected {expected.__name__}")


def expect_shape(axis: str, config: Any, name: str, value: Any, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """TypeError or ValueError, naming the axis, unless a value is None or an array of floats of one of some shapes."""
    if value is None:
        return
    where = f"{axis} ({type(config).__name__})"
    if not hasattr(value, "shape") or not jnp.issubdtype(value.dtype, jnp.floating):
        kind = value.dtype if hasattr(value, "dtype") else type(value).__name__
        raise TypeError(f"{where}: {name} is of {kind}, expected an array of floats")
    if value.shape not in shapes.values():
        expected = " or ".join(f"[{axes}] = {shape}" for axes, shape in shapes.items())
        raise ValueError(f"{where}: {name} has shape {value.shape}, expected {expected}")


def check_decay(config: Any, decay: Any, shape: MixerShape, batch: tuple[int, ...]) -> None:
    """TypeError or ValueError unless the decay axis gave a Decay whose log decay is per head or per key channel."""
    expect_type("decay", config, decay, Decay)
    heads = (*batch, shape.value_heads)
    shapes = {"B, T, HV": heads, "B, T, HV, K": (*heads, shape.decay_channels)}
    expect_shape("decay", config, "log_decay", decay.log_decay, shapes)


def check_gates(config: Any, gates: Any, shape: MixerShape, batch: tuple[int, ...]) -> None:
    """TypeError or ValueError unless the gain axis gave Gates of the recurrence's shapes."""
    expect_type("gain", config, gates, Gates)
    heads = (*batch, shape.value_heads)
    per_head: dict[str, tuple[int, ...]] = {"B, T, HV": heads}
    expect_shape("gain", config, "beta", gates.beta, per_head)
    expect_shape("gain", config, "erase", gates.erase, per_head | {"B, T, HV, K": (*heads, shape.key_size)})
    expect_shape("gain", config, "write", gates.write, per_head | {"B, T, HV, V": (*heads, shape.value_size)})


def check_keys(config: Any, keys: Any) -> None:
    """TypeError unless the keys axis gave Keys."""
    expect_type("keys", config, keys, Keys)


def check_decay_is_no_growth(config: DecayConfig, shape: MixerShape) -> None:
    """Raises a ValueError if a user's decay gives a positive log decay, with which the state would grow without bound.

    The check runs when a mixer is built, with initial weights and random inputs, because values are not known while a
    model is traced. It skips this library's own decays, whose formulas cannot be positive.
    """
    if type(config).__module__.startswith("rnnlib.") or shape.tp_size > 1:  # of shards, the whole layer was checked
        return
    with jax.ensure_compile_time_eval():
        gate = config.build(shape, rngs=nnx.Rngs(0))
        x = jax.random.normal(jax.random.key(1), (2, 8, shape.width), shape.dtype)
        decay = gate(InputProjection(shape, columns_of(gate))(x))
        check_decay(config, decay, shape, (2, 8))
        highest = 0.0 if decay.log_decay is None else float(np.max(np.asarray(decay.log_decay, np.float32)))
    if highest > 0:
        raise ValueError(
            f"decay ({type(config).__name__}): log_decay is {highest:g} at some tokens, expected at most 0: the decay "
            "is exp(log_decay), and above 1 the state grows"
        )

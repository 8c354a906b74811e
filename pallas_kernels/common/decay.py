"""What all backends agree on about decays and gates: their limits, and how a log decay is split to add up exactly."""

import math

import jax.numpy as jnp
from jax import Array

LOG2_E = math.log2(math.e)
# Largest exponent on either side of a product of pairs taken relative to the middle row of a chunk with a channel-wise
# decay; beyond it a chunk is extreme. The backward pass sets it: a cotangent of 1e-8 times `exp(-70)` would be below
# float32's range, one of 1e-12 times `exp(-50)` is well above.
MAX_EXPONENT = 50.0
# Log decays are raised to this. exp(-100) is already zero in float32 (flushed). Smaller numbers, -inf included, would
# only make the sums less exact.
MIN_LOG_DECAY = -100.0
# A state counts as forgotten where less than this part of it is left: the log of 1e-15, far below float32's rounding.
FORGOTTEN = -34.5
# Replaces smaller gates, both where a kernel multiplies by a gate and where a later one divides by it.
_SMALLEST_GATE = 2.0**-32


def divisible(gate: Array) -> Array:
    """A gate `[C]`, kept away from zero, so that a product with it can be divided by it again."""
    return jnp.where(jnp.abs(gate) < _SMALLEST_GATE, _SMALLEST_GATE, gate)


def split_gate(gate: Array) -> tuple[Array, Array]:
    """Two factors of a gate: one that is safe to divide by, and the rest.

    The rest is 1, except where the gate is nearly zero: there it is the gate, and the first factor is 1.
    """
    is_small = jnp.abs(gate) < 1e-30
    return jnp.where(is_small, 1.0, gate), jnp.where(is_small, gate, 1.0)


def split_steps(log_decay: Array) -> tuple[Array, Array]:
    """A token's log decay as a multiple of 1/16 and the rest, float32.

    Multiples of 1/16 add up without rounding, so a strong decay early on costs later tokens no accuracy.
    """
    step = jnp.maximum(log_decay, MIN_LOG_DECAY)
    coarse = jnp.floor(step * 16.0) * 0.0625
    return coarse, step - coarse

"""Several delta-rule steps a token (DeltaProduct, Siems et al. 2025, arXiv 2502.10297, equation 6).

A token has n keys, values and writing strengths, which are written one after the other. The state decays before the
first of them, and the query reads after the last. That is the delta rule over a sequence n times as long, so the
operators, their kernels and their states serve it as they are. A head's steps are next to each other in the
projections.
"""

import dataclasses

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from rnnlib.layers.array_types import Gates
from rnnlib.layers.base import MixerShape
from rnnlib.layers.decay import Decay


def shape_of_steps(shape: MixerShape, steps: int) -> MixerShape:
    """The sizes of parts that have numbers of their own for each step: n times the heads."""
    if steps == 1:
        return shape
    return dataclasses.replace(shape, key_heads=shape.key_heads * steps, value_heads=shape.value_heads * steps)


def in_turn(x: Float[Array, "B T HN ..."], steps: int) -> Float[Array, "B TN H ..."]:
    """The steps of tokens `[B, T, H * n, ...]` as a sequence `[B, T * n, H, ...]`."""
    batch, length, heads = x.shape[:3]
    apart = x.reshape(batch, length, heads // steps, steps, *x.shape[3:])
    return jnp.moveaxis(apart, 3, 2).reshape(batch, length * steps, heads // steps, *x.shape[3:])


def for_each_step(x: Array, steps: int) -> Array:
    """What a token's steps share, `[B, T, ...]`, for each of them `[B, T * n, ...]`."""
    return x if steps == 1 else jnp.repeat(x, steps, axis=1)


def of_last_steps(x: Float[Array, "B TN ..."], steps: int) -> Float[Array, "B T ..."]:
    """What follows each token's last step."""
    return x if steps == 1 else x[:, steps - 1 :: steps]


def decay_in_turn(decay: Decay, steps: int) -> Decay:
    """The decay of each step: the token's before its first, none before the others."""
    if decay.log_decay is None:
        return Decay()
    log_decay = decay.log_decay
    rest = jnp.zeros((*log_decay.shape[:2], steps - 1, *log_decay.shape[2:]), log_decay.dtype)
    whole = jnp.concatenate([log_decay[:, :, None], rest], axis=2)
    return Decay(log_decay=whole.reshape(log_decay.shape[0], -1, *log_decay.shape[2:]))


def gates_in_turn(gates: Gates, steps: int) -> Gates:
    """The gates of each step, from those of `shape_of_steps`."""
    return Gates(*(None if gate is None else in_turn(gate, steps) for gate in gates))


def documents_of_steps(segment_ids: Int[Array, "B T"] | None, steps: int) -> Int[Array, "B TN"] | None:
    """The document of each step."""
    return None if segment_ids is None else for_each_step(segment_ids, steps)

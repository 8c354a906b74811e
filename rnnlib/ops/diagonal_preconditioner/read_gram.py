"""A readout of the diagonal Gram in XLA."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array

from rnnlib.ops.arguments import segment_starts
from rnnlib.ops.diagonal_preconditioner.inputs import DiagonalGramInputs


def read_gram(
    recurrence: Callable[..., tuple[Array, Array]],
    inputs: DiagonalGramInputs,
    x: Array | None,
    parameter: Array | None,
    initial_state: Array | None,
    segment_ids: Array | None,
    *,
    readout: Any,
    dtype: Any,
) -> tuple[Array, Array]:
    """The readout `[B, T, H, K]` and A after the last token `[B, H, K]`; arguments as `evaluate`.

    Args:
        recurrence: gives A after each token and after the last.
        inputs: token-wise arguments of the recurrence.
        x: the readout's second argument, beside A; None is `inputs.k`.
        parameter: a number a head that the readout takes, or None.
        initial_state: None (zero) or `[B, H, K]`.
        segment_ids: None or `[B, T]`.
        readout: of `rnnlib.ops.diagonal_preconditioner.readouts`.
        dtype: of the readout; None is that of accumulation.
    """
    grams, final = recurrence(inputs, initial_state, segment_ids)
    first = jnp.zeros_like(final) if initial_state is None else initial_state.astype(grams.dtype)
    previous = jnp.concatenate([first[:, None], grams[:, :-1]], axis=1)
    if segment_ids is not None:
        previous = jnp.where(segment_starts(segment_ids)[:, :, None, None], 0.0, previous)
    row = (inputs.k if x is None else x).astype(grams.dtype)
    out = readout(previous, grams, row, None if parameter is None else parameter.astype(grams.dtype)[:, None])
    return out.astype(dtype or out.dtype), final

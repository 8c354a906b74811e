"""A readout of the diagonal Gram in XLA."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.common.vma import pvary_together
from rnnlib.ops.arguments import accumulation_dtype, resets_of
from rnnlib.ops.chunk_blocks import in_blocks
from rnnlib.ops.diagonal_preconditioner.inputs import DiagonalGramInputs

_CHUNK_SIZE = 64
_CHUNKS = 128
"""Of a block, over its rows and heads. No matrix products make it slow to compile; docs/tpu.md has a table."""


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
        previous = jnp.where(resets_of(segment_ids)[:, :, None, None], 0.0, previous)
    row = (inputs.k if x is None else x).astype(grams.dtype)
    out = readout(previous, grams, row, None if parameter is None else parameter.astype(grams.dtype)[:, None])
    return out.astype(dtype or out.dtype), final


def read_gram_in_blocks(
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
    """`read_gram` for a TPU: A and what is made of it stay on the chip, block by block (`in_blocks`).

    The backward pass keeps the arguments and the state that enters each block.
    """
    batch, _, heads, channels = inputs.k.shape
    state_dtype = accumulation_dtype(*inputs, initial_state)
    zero = jnp.zeros((batch, heads, channels), state_dtype)
    state = zero if initial_state is None else initial_state.astype(state_dtype)

    def evaluate(arrays: Any, resets: Array | None, state: Any) -> tuple[Array, Any]:
        inputs, x = arrays
        gram, parameter = state
        segment_ids = None
        if resets is not None:  # the block's first token may be one
            gram = jnp.where(resets[:, 0, None, None], 0.0, gram)
            segment_ids = jnp.cumsum(resets, axis=1)
        number = None if parameter is None else parameter[0]
        out, final = read_gram(recurrence, inputs, x, number, gram, segment_ids, readout=readout, dtype=dtype)
        return out, (final, parameter)

    resets = None if segment_ids is None else resets_of(segment_ids)
    arguments = (inputs, x), resets, (state, None if parameter is None else parameter[None])
    block = jax.checkpoint(evaluate, prevent_cse=False)
    out, (final, _) = in_blocks(block, *pvary_together(arguments), chunk_size=_CHUNK_SIZE, chunks=_CHUNKS)
    return out, final

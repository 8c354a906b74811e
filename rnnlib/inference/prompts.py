"""Prompts of different lengths as one array, and what may be asked of them."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

# Prompts are padded on the left to a multiple of this, and room for new tokens is rounded up to one, so that all
# lengths share a few compiled functions.
PROMPT_BUCKET = 64


def pad_prompts(
    prompts: Int[Array | np.ndarray, "B T"] | Sequence[Sequence[int]], vocabulary_size: int, *, multiple: int = 1
) -> tuple[Int[Array, "B length"], Int[Array, "B length"]]:
    """Prompts as one array, padded on the left, with the padding a segment of its own.

    Args:
        prompts: token numbers, one row or sequence each.
        vocabulary_size: tokens are checked against it.
        multiple: the common length is rounded up to a multiple of this.

    Returns:
        Tokens `[B, length]` int32 and segment ids `[B, length]` int32: 0 for padding, 1 for the prompt.
    """
    rows = [np.asarray(row) for row in prompts]
    if not rows:
        raise ValueError("prompt_tokens is empty: expected at least one prompt")
    for index, row in enumerate(rows):
        if row.ndim != 1 or row.size == 0:
            raise ValueError(f"prompt_tokens[{index}] has shape {row.shape}: expected a row of at least one token")
        if not np.issubdtype(row.dtype, np.integer):
            raise TypeError(f"prompt_tokens[{index}] has dtype {row.dtype}: expected integers")
        if row.min() < 0 or row.max() >= vocabulary_size:
            raise ValueError(
                f"prompt_tokens[{index}] has tokens from {row.min()} to {row.max()}: "
                f"expected them in [0, {vocabulary_size})"
            )
    length = rounded_up(max(row.size for row in rows), multiple)
    tokens = np.zeros([len(rows), length], np.int32)
    segment_ids = np.zeros([len(rows), length], np.int32)
    for index, row in enumerate(rows):
        tokens[index, length - row.size :] = row
        segment_ids[index, length - row.size :] = 1
    return jnp.asarray(tokens), jnp.asarray(segment_ids)


def prompt_positions(segment_ids: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Positions of prompts padded on the left: they count from the first token, not from the padding before it."""
    return jnp.maximum(jnp.cumsum(segment_ids, axis=1, dtype=jnp.int32) - 1, 0)


def rounded_up(tokens: int, multiple: int) -> int:
    """The smallest multiple of a number that is at least `tokens`."""
    return -(-tokens // multiple) * multiple


def expect_no_tracing(prompt_tokens: Any, state: Any) -> None:
    """TypeError within a function that JAX traces."""
    # What is made here is traced under jit, but not under vmap, which shows in what is given.
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((jnp.zeros([]), prompt_tokens, state))):
        raise TypeError(
            "generate: called while jax traces a function, expected no jit or vmap around it: it compiles what it "
            "runs, for many prompts at once; jax.lax.scan over model.extend decodes inside of a function"
        )

"""Chunk forms block by block, in a loop, on a TPU: a few chunks of a few rows and heads at a time.

XLA for TPUs unrolls a batch of small matrix products: a product of two thousand 64 x 64 matrices takes seconds to
compile, and one of 32 two tenths of a second. In a loop over blocks, what lies between a block's products also stays on
the chip.
On other devices all chunks are computed at once.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.common.platform import platform
from rnnlib.ops.arguments import is_symbolic

_TOKENS = 2048
"""Tokens in a block over all its rows and heads, at most: more compile for longer, and run a little faster.

docs/tpu.md has a table. Blocks of 32 chunks of 64 tokens, or of 16 of 128.
"""

_MATRICES = 32
"""Chunks in a block at most."""


def in_blocks(
    evaluate: Callable[[Any, Array | None, Any], tuple[Any, Any]],
    inputs: Any,
    resets: Array | None,
    state: Any,
    *,
    chunk_size: int,
    chunks: int | None = None,
) -> tuple[Any, Any]:
    """`evaluate(inputs, resets, state)`, on a TPU in a loop over blocks that passes the state on.

    Args:
        evaluate: a rule that reads tokens in order and mixes neither rows nor heads. From the arguments below it
            computes arrays like `inputs`, and the final state.
        inputs: any tree of arrays by token, `[B, T, n * H, ...]`.
        resets: None or `[B, T]`, true where a document begins.
        state: any tree of arrays `[B, H, ...]`, the first of which is whole; others may have 1 in place of B and H.
        chunk_size: tokens of a chunk. A block has a multiple of them; padding is zero and comes last.
        chunks: in a block at most, over its rows and heads; None is as many as compile in reasonable time where each
            takes matrix products.
    """
    (batch, heads), length = jax.tree.leaves(state)[0].shape[:2], jax.tree.leaves(inputs)[0].shape[1]
    if platform() != "tpu" or is_symbolic(batch) or is_symbolic(length):
        return evaluate(inputs, resets, state)
    most = chunks or min(_MATRICES, max(1, _TOKENS // chunk_size))
    some_heads = _largest_divisor(heads, most)
    rows = _largest_divisor(batch, most // some_heads)
    tokens = chunk_size * min(max(1, most // (rows * some_heads)), -(-length // chunk_size))
    blocks = -(-length // tokens)
    parts = (batch // rows, heads // some_heads)

    def split(x: Array) -> Array:
        """`[B, T, n * H, ...]` to `[parts, blocks, rows, tokens, n * some_heads, ...]`."""
        x = jnp.pad(x, [(0, 0), (0, blocks * tokens - length)] + [(0, 0)] * (x.ndim - 2))
        x = x.reshape(parts[0], rows, blocks, tokens, parts[1], -1, *x.shape[3:])
        x = x.transpose(0, 4, 2, 1, 3, 5, *range(6, x.ndim))
        return x.reshape(math.prod(parts), *x.shape[2:])

    def join(x: Array) -> Array:
        """The inverse of `split`."""
        x = x.reshape(*parts, *x.shape[1:])
        x = x.transpose(0, 3, 2, 4, 1, 5, *range(6, x.ndim))
        return x.reshape(batch, blocks * tokens, -1, *x.shape[6:])[:, :length]

    def split_state(x: Array) -> Array:
        """`[B, H, ...]` to `[parts, rows, some_heads, ...]`."""
        x = jnp.broadcast_to(x, (batch, heads, *x.shape[2:]))
        x = x.reshape(parts[0], rows, parts[1], some_heads, *x.shape[2:]).swapaxes(1, 2)
        return x.reshape(math.prod(parts), *x.shape[2:])

    def join_state(x: Array) -> Array:
        """The inverse of `split_state`."""
        x = x.reshape(*parts, *x.shape[1:]).swapaxes(1, 2)
        return x.reshape(batch, heads, *x.shape[4:])

    def run(part: Any) -> tuple[Any, Any]:
        state, part = part
        return jax.lax.scan(step, state, part)

    def step(state: Any, block: Any) -> tuple[Any, Any]:
        inputs, resets = block
        out, state = evaluate(inputs, None if resets is None else resets[..., 0], state)
        return state, out

    if resets is not None:
        resets = jnp.broadcast_to(resets[:, :, None], (batch, length, heads))
    tokens_of_parts = jax.tree.map(split, (inputs, resets))
    final, out = jax.lax.map(run, (jax.tree.map(split_state, state), tokens_of_parts))
    return jax.tree.map(join, out), jax.tree.map(join_state, final)


def _largest_divisor(of: int, limit: int) -> int:
    """The largest divisor of a number that is at most `limit`."""
    return max(n for n in range(1, limit + 1) if of % n == 0)

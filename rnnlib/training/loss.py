"""The language-model loss and its units."""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.common.vma import pvary_together
from rnnlib.layers.tensor import TENSOR, first_of_shard, sum_over_shards
from rnnlib.ops.log_sum_exp import log_sum_exp

_GROUP_ROWS = 4
"""Tokens whose logits' gradient is multiplied at once, by the width. Each product reads and writes the head's float32
gradient. In bfloat16 what is held then takes as much memory as AdamW's two moments of the head."""


class LossSums(NamedTuple):
    """Sums over tokens, from which every mean follows; sums of parts add up to the sums of the whole.

    Attributes:
        nats: weighted sum of the cross entropy, natural log.
        tokens: sum of the loss weights.
        bytes: weighted sum of the bytes that the target tokens stand for.
    """

    nats: Float[Array, ""]
    tokens: Float[Array, ""]
    bytes: Float[Array, ""]


def loss_sums(
    logits: Float[Array, "B T vocabulary"],
    targets: Int[Array, "B T"],
    weights: Float[Array, "B T"],
    token_bytes: Int[Array | np.ndarray, " tokens"],
) -> LossSums:
    """Cross entropy of next-token predictions, in float32, over the tokens whose weight is not 0.

    Logits and targets at tokens of weight 0 have no influence, not even when they are not finite or out of range. A
    target outside of the vocabulary (such as -100) at a token that has a weight gives NaN.

    Args:
        logits: unnormalised log probabilities.
        targets: the tokens to predict.
        weights: loss weights, 0 for tokens that are not to be predicted.
        token_bytes: bytes that each token of the vocabulary stands for, such as a tokenizer's `token_bytes`.

    Returns:
        Float32 sums of nats, tokens and bytes.
    """
    counted = weights != 0
    targets = jnp.where(counted, targets, 0)
    logits = jnp.where(counted[..., None], logits.astype(jnp.float32), 0.0)
    nats = _cross_entropy(logits, targets)
    return _sums(jnp.sum(nats * weights), targets, weights, token_bytes)


def _cross_entropy(logits: Array, targets: Array) -> Array:
    """Nats `[...]` of logits `[..., vocabulary]`."""
    # The target's logit is picked by a comparison and not by its index: the gradient of indexing is a scatter, which on
    # a GPU is either not deterministic or not fast.
    is_target = jnp.arange(logits.shape[-1]) == targets[..., None]
    nats = log_sum_exp(logits) - jnp.sum(jnp.where(is_target, logits, 0.0), axis=-1)
    return _where_token(nats, targets, logits.shape[-1])


def _where_token(nats: Array, targets: Array, vocabulary_size: int) -> Array:
    # No target at all would pass for one of logit 0.
    return jnp.where((targets >= 0) & (targets < vocabulary_size), nats, jnp.nan)


def _sums(nats: Array, targets: Array, weights: Array, token_bytes: Array | np.ndarray) -> LossSums:
    return LossSums(
        nats=nats,
        tokens=jnp.sum(weights),
        bytes=jnp.sum(jnp.asarray(token_bytes)[targets].astype(jnp.float32) * weights),
    )


def head_loss_sums(
    hidden: Float[Array, "B T D"],
    head: Float[Array, "vocabulary D"],
    targets: Int[Array, "B T"],
    weights: Float[Array, "B T"],
    token_bytes: Int[Array | np.ndarray, " tokens"],
    *,
    block_logits: int = 1 << 27,
    tp_size: int = 1,
) -> LossSums:
    """`loss_sums` of the logits `hidden @ head.T`, computed for one block of tokens at a time.

    The logits of all tokens are never held at once. The forward pass computes the gradients of `hidden` and `head`, so
    that no logit is computed twice. The logits' gradient is held for about `4 D` tokens, or for a block if that is
    more. Operands of products, such as the logits' gradient, are in `hidden`'s dtype. Sums are in float32 at least, and
    so is the head's gradient.

    Args:
        hidden: what the head reads, in the dtype to compute in. Rows of weight 0 have no influence, even if not finite.
        head: the output embedding, in the dtype it is stored in.
        targets: the tokens to predict.
        weights: loss weights, 0 for tokens that are not to be predicted.
        token_bytes: bytes that each token of the vocabulary stands for, such as a tokenizer's `token_bytes`.
        block_logits: most logits of a block. The default takes half a gigabyte, and its products fill a GPU.
        tp_size: devices that the vocabulary is sharded over, within `shard_map`: `head` is this device's shard. They
            exchange the largest logit, the sum of exponentials and the target's logit of each token.

    Returns:
        Float32 sums of nats, tokens and bytes.
    """
    counted = weights != 0
    targets = jnp.where(counted, targets, 0)
    tokens = jnp.where(counted[..., None], hidden, 0).reshape(-1, hidden.shape[-1])
    block_size = max(1, block_logits // head.shape[0])
    arguments = pvary_together((tokens, head, targets.reshape(-1), weights.reshape(-1)))
    nats = _head_nats((block_size, tp_size), *arguments)
    return _sums(nats.astype(jnp.float32), targets, weights, token_bytes)


def _block_nats(hidden: Array, head: Array, targets: Array, weights: Array, tp_size: int) -> tuple[Array, Array]:
    """Nats of each token of a block `[N]` and their weighted gradient in its logits `[N, vocabulary]`."""
    wide = jnp.promote_types(hidden.dtype, jnp.float32)
    logits = jnp.einsum("nd,vd->nv", hidden, head, preferred_element_type=wide)
    size = head.shape[0]
    own = targets - first_of_shard(size, tp_size)
    normalizer = log_sum_exp(logits)
    if tp_size > 1:  # of this device's part until here
        highest = jax.lax.pmax(normalizer, TENSOR)
        normalizer = highest + jnp.log(sum_over_shards(jnp.exp(normalizer - highest), tp_size))
    d_logits = weights[:, None] * (jnp.exp(logits - normalizer[:, None]) - (jnp.arange(size) == own[:, None]))
    of_target = jnp.take_along_axis(logits, jnp.clip(own, 0, size - 1)[:, None], axis=1)[:, 0]
    nats = normalizer - sum_over_shards(jnp.where((own >= 0) & (own < size), of_target, 0.0), tp_size)
    return _where_token(nats, targets, size * tp_size), d_logits.astype(hidden.dtype)


def _in_blocks(block_size: int, group_size: int, *arrays: Array) -> list[Array]:
    """Rows `[N, ...]` as `[groups, blocks, rows of a block, ...]`, evenly, padded with zeros (of weight 0).

    A group has about `group_size` rows, and one block at least.
    """
    length = arrays[0].shape[0]
    needed = -(-length // block_size)
    groups = -(-needed // max(1, round(group_size / block_size)))
    blocks = -(-needed // groups)
    size = -(-length // (groups * blocks))
    padded = (jnp.pad(x, [(0, groups * blocks * size - length)] + [(0, 0)] * (x.ndim - 1)) for x in arrays)
    return [x.reshape(groups, blocks, size, *x.shape[1:]) for x in padded]


def _scan(step, carry, arrays: Sequence[Array]):
    """`jax.lax.scan`; a single turn is no loop."""
    if arrays[0].shape[0] > 1:
        return jax.lax.scan(step, carry, tuple(arrays))
    carry, results = step(carry, [x[0] for x in arrays])
    return carry, jax.tree.map(lambda x: x[None], results)


def _as_rows(x: Array, leading: int, length: int | None = None) -> Array:
    """Joins the leading axes; `length` of the rows."""
    return x.reshape(-1, *x.shape[leading:])[:length]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _head_nats(how: tuple[int, int], hidden: Array, head: Array, targets: Array, weights: Array) -> Array:
    """Weighted sum of the nats of `[N]` tokens; `how` is a block's size, and the devices of the head."""
    block_size, tp_size = how
    matrix = head.astype(hidden.dtype)

    def step(total, block):
        rows, ids, factors = block
        return total + jnp.sum(factors * _block_nats(rows, matrix, ids, factors, tp_size)[0]), None

    zero = jnp.zeros([], jnp.promote_types(hidden.dtype, jnp.float32))
    blocks = _in_blocks(block_size, block_size, hidden, targets, weights)
    return _scan(step, zero, [x[:, 0] for x in blocks])[0]


def _head_nats_forward(how: tuple[int, int], hidden: Array, head: Array, targets: Array, weights: Array):
    block_size, tp_size = how
    matrix = head.astype(hidden.dtype)
    wide = jnp.promote_types(hidden.dtype, jnp.float32)
    product = functools.partial(jnp.einsum, preferred_element_type=wide)

    def logits_of_block(carry, block):
        (total, d_logits), (number, rows, ids, factors) = carry, block
        nats, own = _block_nats(rows, matrix, ids, factors, tp_size)
        d_logits = jax.lax.dynamic_update_slice_in_dim(d_logits, own, number * len(rows), axis=0)
        return (total + jnp.sum(factors * nats), d_logits), nats

    def gradients_of_group(carry, group):
        total, d_head = carry
        rows = _as_rows(group[0], 2)
        # Not zeros: every row is written, and what a scan returns would be filled with zeros first.
        d_logits = jax.lax.empty((len(rows), len(matrix)), rows.dtype)
        (total, d_logits), nats = _scan(logits_of_block, (total, d_logits), [jnp.arange(len(group[0])), *group])
        d_rows = product("nv,vd->nd", d_logits, matrix).astype(rows.dtype)
        return (total, d_head + product("nv,nd->vd", d_logits, rows)), (d_rows, nats)

    length, width = hidden.shape
    carry = jnp.zeros([], wide), jnp.zeros(head.shape, wide)
    groups = _in_blocks(block_size, _GROUP_ROWS * width, hidden, targets, weights)
    (total, d_head), (d_hidden, nats) = _scan(gradients_of_group, carry, groups)
    nats = _as_rows(nats, 3, length).astype(weights.dtype)
    return total, (_as_rows(d_hidden, 2, length), d_head.astype(head.dtype), nats)


def _head_nats_backward(how: tuple[int, int], residuals, gradient: Array):
    d_hidden, d_head, nats = residuals
    own, gradient = gradient, sum_over_shards(gradient, how[1])  # this device's logits are in the loss of all
    no_gradient = np.zeros(nats.shape, jax.dtypes.float0)
    scaled = [(scale * x).astype(x.dtype) for scale, x in ((gradient, d_hidden), (gradient, d_head), (own, nats))]
    return scaled[0], scaled[1], no_gradient, scaled[2]


_head_nats.defvjp(_head_nats_forward, _head_nats_backward)


def bits_per_byte(nats: float | int, num_bytes: float | int) -> float:
    """Bits per byte of text, `nats / ln 2 / bytes`, comparable between tokenizers; NaN where there is no byte."""
    return nats / math.log(2) / num_bytes if num_bytes > 0 else math.nan

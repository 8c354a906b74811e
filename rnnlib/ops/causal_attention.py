"""Softmax attention, full or over a sliding window, of rows and of one token to a ring of those before it."""

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from pallas_kernels.common.platform import platform
from pallas_kernels.common.vma import pvary_together
from rnnlib.fields import PositiveInteger, check_value
from rnnlib.ops.arguments import (
    accumulation_dtype,
    check_rank,
    check_segment_ids,
    check_shape,
    floating_arrays,
    is_symbolic,
    segment_index,
)
from rnnlib.ops.context_parallel import current_axis, tokens_before
from rnnlib.ops.derivatives import with_derivatives_of
from rnnlib.ops.forgetting_attention import forgetting_attention
from rnnlib.ops.heads import rotate_pairs
from rnnlib.ops.kernels import attention_gradient_kernel, kernel_operators, unsupported_reason
from rnnlib.ops.sharding import is_split, split_over_mesh

_NAME = "causal_attention"

# Queries per block where rows are split over devices: each block is compared with a whole row.
_QUERIES = 1024


@split_over_mesh
def causal_attention(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T HK K"],
    v: Float[Array, "B T HK V"],
    *,
    log_decay: Float[Array, "B T H"] | None = None,
    window: int | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
) -> Float[Array, "B T H V"]:
    """Causal softmax attention, `softmax(q k^T / sqrt(K)) v` over the tokens that each token may see.

    With `log_decay`, weights decay as in the Forgetting Transformer (arXiv 2503.02130, equation 5): the score of query
    t and key s has the sum of the log decays over s < r <= t added to it. XLA then computes blocks of queries, in
    memory linear in T.

    Memory is linear in T for a sliding window. If cuDNN does not support the call without a mask, the row is split into
    blocks as long as the window, and each block attends to itself and to the previous block.

    In bfloat16, with heads of 64 channels and rows of a multiple of 128 tokens that are not packed, a Hopper GPU
    computes gradients in a kernel that adds up in a fixed order (`pallas_kernels.attention.mosaic_gpu.bwd`).

    Args:
        q: queries.
        k: keys. Query heads H are a multiple of key heads HK: query head `j` uses key head `j // (H // HK)`.
        v: values.
        log_decay: natural logarithm of each query head's decay, `<= 0`; less than -100 counts as -100. None is none.
        window: how many tokens each token sees, itself included; None is itself and all tokens before it.
        segment_ids: ids of documents packed into a row. A token sees no token before the last change of id.

    Returns:
        The output in `v`'s dtype. The softmax is in float32 or narrower, in float64 for float64 arguments; in float32
        or wider with a decay.

    Raises:
        ValueError: a shape or `window` is none of those above.
        TypeError: an array is not floating, or `segment_ids` is not of integers.
    """
    return _checked(q, k, v, log_decay, window, segment_ids, 0)


@split_over_mesh
def attention_of_layer(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T HK K"],
    v: Float[Array, "B T HK V"],
    *,
    number: int,
    log_decay: Float[Array, "B T H"] | None = None,
    window: int | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
) -> Float[Array, "B T H V"]:
    """`causal_attention` in a layer of a model: a call that differs from those of other layers, with the same result.

    It works around a fault of XLA (jax 0.11.2): a deterministic program on a GPU that contains two equal calls of
    cuDNN's attention fails with `IndexError: raw_hash_map<>::at`, because only the first of equal backward passes is
    marked as deterministic.

    Args:
        q: as for `causal_attention`, like `k`, `v`, and the options.
        k: keys.
        v: values.
        number: of the layer among those of a program, 0 or more. In bfloat16 the program differs by it.
        log_decay: natural logarithm of each query head's decay.
        window: how many tokens each token sees.
        segment_ids: ids of documents packed into a row.

    Returns:
        The output of `causal_attention`, which raises what this function does.
    """
    return _checked(q, k, v, log_decay, window, segment_ids, number)


def _checked(
    q: Array,
    k: Array,
    v: Array,
    log_decay: Array | None,
    window: int | None,
    segment_ids: Array | None,
    number: int,
) -> Array:
    """Attention of arguments that are checked here."""
    q, k, v, log_decay = floating_arrays(_NAME, q=q, k=k, v=v, log_decay=log_decay)
    check_rank(_NAME, "q", q, 4, axes="[B, T, H, K]")
    check_rank(_NAME, "k", k, 4, axes="[B, T, HK, K]")
    check_rank(_NAME, "v", v, 4, axes="[B, T, HK, V]")
    if k.shape[:2] != q.shape[:2] or k.shape[3] != q.shape[3] or q.shape[2] % k.shape[2] != 0:
        raise ValueError(
            f"{_NAME}: k has shape {k.shape}, expected [B, T, HK, K] where q is {q.shape} and HK divides H"
        )
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(f"{_NAME}: v has shape {v.shape}, expected [B, T, HK] = {k.shape[:3]} as in k")
    check_value(_NAME, "window", window, PositiveInteger | None)
    batch, length = q.shape[:2]
    check_segment_ids(_NAME, segment_ids, batch, length)
    axis = current_axis()
    if log_decay is not None:
        check_shape(_NAME, "log_decay", log_decay, q.shape[:3], axes="[B, T, H]")
        log_decay = log_decay.astype(accumulation_dtype(q, k, v, log_decay))
        return _with_decay(q, k, v, log_decay, window, segment_ids, axis)
    if axis is not None:
        return _over_devices(q, k, v, window, segment_ids, number, axis)
    if segment_ids is not None:
        segment_ids = segment_index(segment_ids)
    return _over_rows(q, k, v, window, segment_ids, number)


def _with_decay(
    q: Array, k: Array, v: Array, log_decay: Array, window: int | None, segment_ids: Array | None, axis: str | None
) -> Array:
    """Attention with a decay, of whole rows or of this device's shard of each."""
    first: Array | int = 0
    if axis is not None:
        first = lax.axis_index(axis) * q.shape[1]
        k, v, log_decay = lax.all_gather((k, v, log_decay), axis, axis=1, tiled=True)
        segment_ids = None if segment_ids is None else lax.all_gather(segment_ids, axis, axis=1, tiled=True)
    documents = None if segment_ids is None else segment_index(segment_ids)
    of_queries = documents if axis is None else None
    if documents is not None and axis is not None:
        of_queries = lax.dynamic_slice_in_dim(documents, first, q.shape[1], axis=1)
    options: dict[str, Any] = {"window": window, "query_documents": of_queries, "documents": documents}
    return forgetting_attention(q, k, v, log_decay, first=first, **options)


def _over_rows(q: Array, k: Array, v: Array, window: int | None, segment_ids: Array | None, number: int) -> Array:
    """Attention over whole rows; no two documents of a row have the same id."""
    length = q.shape[1]
    # cuDNN skips tokens outside of the window; with documents it would read a mask of T x T.
    widest = v if v.shape[3] > q.shape[3] else q
    is_direct = segment_ids is None and _backend(widest, _common_dtype(q, k, v)) is not None
    if window is None or is_symbolic(length) or 2 * window >= length or is_direct:
        mask = None if segment_ids is None else segment_ids[:, None, :, None] == segment_ids[:, None, None, :]
        local = None if window is None else (window - 1, 0)
        if window is not None and is_symbolic(length):  # for which jax.nn's attention has no window
            near = (jnp.arange(length)[:, None] - jnp.arange(length) < window)[None, None]
            mask, local = near if mask is None else mask & near, None
        return _attention(q, k, v, number, mask=mask, is_causal=True, local_window_size=local)
    return _blockwise_window_attention(q, k, v, window, segment_ids, number)


def _over_devices(
    q: Array, k: Array, v: Array, window: int | None, segment_ids: Array | None, number: int, axis: str
) -> Array:
    """Attention of this device's shard of each row.

    With a window, a device also needs the last `window - 1` tokens of the previous device. With a window longer than a
    shard, or with no window, each device gathers the keys and values of whole rows and processes its queries in
    blocks, since a mask for all queries at once would be quadratic in the row.
    """
    batch, length = q.shape[:2]
    if window is not None and window - 1 <= length:
        before = window - 1
        seen = tokens_before(_NAME, jnp.ones((batch, length), bool), before, None, segment_ids, axis)
        own = jnp.zeros((batch, length), jnp.int32) if segment_ids is None else segment_index(segment_ids)
        ids = jnp.concatenate([seen.astype(jnp.int32) - 1, own], axis=1)
        k, v = (jnp.concatenate([tokens_before(_NAME, x, before, None, None, axis), x], axis=1) for x in (k, v))
        q = jnp.pad(q, [(0, 0), (before, 0), (0, 0), (0, 0)])
        return _over_rows(q, k, v, window, ids, number)[:, before:]
    k, v = lax.all_gather((k, v), axis, axis=1, tiled=True)
    documents = None if segment_ids is None else segment_index(lax.all_gather(segment_ids, axis, axis=1, tiled=True))

    def attend(own: tuple[Array, Array]) -> Array:
        """Attention of a block of consecutive queries, given with the position of the first."""
        first, q = own
        distance = first + jnp.arange(q.shape[1])[:, None] - jnp.arange(k.shape[1])[None, :]
        mask = (distance >= 0 if window is None else (distance >= 0) & (distance < window))[None]
        if documents is not None:
            of_queries = lax.dynamic_slice_in_dim(documents, first, q.shape[1], axis=1)
            mask = mask & (of_queries[:, :, None] == documents[:, None, :])
        return _attention(q, k, v, number, mask=mask[:, None])

    first = lax.axis_index(axis) * length
    if length <= _QUERIES or length % _QUERIES:
        return attend((first, q))
    blocks = length // _QUERIES
    parts = jnp.moveaxis(q.reshape(batch, blocks, _QUERIES, *q.shape[2:]), 1, 0)
    out = lax.map(jax.checkpoint(attend), (first + _QUERIES * jnp.arange(blocks), parts))
    return jnp.moveaxis(out, 0, 1).reshape(batch, length, *out.shape[3:])


def masked_attention(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S HK K"],
    v: Float[Array, "B S HK K"],
    *,
    mask: Array,
    scale: float | None = None,
) -> Float[Array, "B T H K"]:
    """The attention of queries to keys that a mask lets them see, in `q`'s dtype.

    Args:
        q: queries. Head `j` uses key head `j // (H // HK)`.
        k: keys.
        v: values.
        mask: `[B, T, S]`, what each query sees.
        scale: factor on the scores; None is `K ** -0.5`.
    """
    return _dot_product_attention(q, k.astype(q.dtype), v.astype(q.dtype), mask=mask[:, None], scale=scale)


def _common_dtype(q: Array, k: Array, v: Array) -> jnp.dtype:
    return jnp.promote_types(jnp.promote_types(q.dtype, k.dtype), v.dtype)


def _dot_product_attention(
    q: Array, k: Array, v: Array, *, implementation: Literal["cudnn"] | None = None, **options: Any
) -> Array:
    """`jax.nn.dot_product_attention`, but in float64 for float64 arrays and in float32 for float16 on a CPU.

    That function has its softmax in float32 always. It multiplies in float16 and accumulates in float32, which XLA does
    not support on a CPU.
    """
    if q.dtype == jnp.float64:
        return _in_float64(q, k, v, **options)
    is_widened = q.dtype == jnp.float16 and platform() == "cpu"
    arrays = [x.astype(jnp.float32) if is_widened else x for x in (q, k, v)]
    return jax.nn.dot_product_attention(*arrays, implementation=implementation, **options).astype(q.dtype)


def _in_float64(
    q: Array,
    k: Array,
    v: Array,
    *,
    scale: float | None = None,
    mask: Array | None = None,
    is_causal: bool = False,
    local_window_size: tuple[int, int] | None = None,
) -> Array:
    """The formula; arguments as of `jax.nn.dot_product_attention`, `mask` without heads and no window ahead."""
    batch, length, heads, size = q.shape
    # [B, T, HK, G, K]
    groups = q.reshape(batch, length, k.shape[2], -1, size)
    # [B, HK, G, T, S]
    scores = jnp.einsum("bthgk,bshk->bhgts", groups, k) * (size**-0.5 if scale is None else scale)
    distance = jnp.arange(length)[:, None] - jnp.arange(k.shape[1])
    is_seen = jnp.ones_like(distance, bool)
    if is_causal:
        is_seen &= distance >= 0
    if local_window_size is not None:
        is_seen &= distance <= local_window_size[0]
    if mask is not None:
        is_seen = is_seen & mask[:, :, None]
    # A query that sees nothing, of padding, has the mean of all values and not NaN.
    weights = jax.nn.softmax(jnp.where(is_seen, scores, jnp.finfo(scores.dtype).min / 2), axis=-1)
    return jnp.einsum("bhgts,bshk->bthgk", weights, v).reshape(batch, length, heads, -1)


def _attention(q: Array, k: Array, v: Array, number: int, **options) -> Array:
    dtype = _common_dtype(q, k, v)  # dot_product_attention wants one dtype and one width throughout
    scale, size = q.shape[-1] ** -0.5, max(q.shape[-1], v.shape[-1])
    padded = [jnp.pad(x.astype(dtype), [(0, 0)] * 3 + [(0, size - x.shape[-1])]) for x in (q, k, v)]
    backend = _backend(padded[0], dtype)
    attend: Callable[..., Array] = functools.partial(_dot_product_attention, implementation=backend, **options)
    kernel = None
    if backend == "cudnn" and options.get("is_causal") and options.get("mask") is None:
        kernel = attention_gradient_kernel(*padded)
    if kernel is not None:
        window = options.get("local_window_size")
        gradients = functools.partial(kernel, scale=scale, window=None if window is None else window[0] + 1)
        out = _with_gradients(functools.partial(attend, scale=scale), gradients)(*pvary_together(padded))
    elif number and dtype == jnp.bfloat16:
        # A different factor makes the call different; factors that are powers of two change no digit of the result.
        power = 2.0 ** (number % 64)
        out = attend(padded[0] / power, *padded[1:], scale=power * scale)
    else:
        out = attend(*padded, scale=scale)
    return out[..., : v.shape[-1]].astype(v.dtype)


def _with_gradients(attend: Callable[..., Array], gradients: Callable[..., tuple[Array, ...]]) -> Callable[..., Array]:
    """`attend(q, k, v)` by cuDNN, with `gradients(q, k, v, out, log_sums, d_out)` for its backward pass.

    cuDNN's own backward pass adds up the queries' gradients in the order in which they come, or, in a deterministic
    program, computes every product twice.
    """
    run = jax.custom_vjp(attend)

    def forward(q: Array, k: Array, v: Array) -> tuple[Array, Any]:
        out, pull_back = jax.vjp(attend, q, k, v)
        # What cuDNN keeps for its backward pass. jax's `return_residual` gives the log sums rounded to bfloat16.
        batch, length, heads, _ = q.shape
        saved = [x for x in jax.tree.leaves(pull_back) if x.dtype == jnp.float32]
        log_sums = [x for x in saved if x.shape == (batch, heads, length)]
        return out, (None, (q, k, v, out, *log_sums)) if len(log_sums) == 1 else (pull_back, None)

    def backward(kept: Any, d_out: Array) -> tuple[Array, ...]:
        pull_back, arrays = kept
        return gradients(*arrays, d_out) if pull_back is None else pull_back(d_out)

    run.defvjp(forward, backward)
    return run


def _backend(q: Array, dtype: DTypeLike) -> Literal["cudnn"] | None:
    """`"cudnn"` (flash attention, memory linear in T) if it supports the case; None for XLA's own products."""
    half = dtype in (jnp.bfloat16, jnp.float16)
    fits = q.shape[1] % 64 == 0 and q.shape[3] % 8 == 0 and q.shape[3] <= 128
    return "cudnn" if half and fits and platform() == "gpu" else None


def _blockwise_window_attention(
    q: Array, k: Array, v: Array, window: int, segment_ids: Array | None, number: int
) -> Array:
    batch, length = q.shape[:2]
    blocks = -(-length // window)

    def with_previous(x: Array) -> Array:
        """`[B, T, ...]` to `[B * blocks, 2 * window, ...]`: the previous block, then the block itself."""
        x = jnp.pad(x, [(0, 0), (window, blocks * window - length)] + [(0, 0)] * (x.ndim - 2))
        x = x.reshape(batch, blocks + 1, window, *x.shape[2:])
        pairs = jnp.concatenate([x[:, :-1], x[:, 1:]], axis=2)
        return pairs.reshape(batch * blocks, 2 * window, *x.shape[3:])

    row = jnp.arange(window)[:, None] + window
    column = jnp.arange(2 * window)[None, :]
    in_window = (column <= row) & (column > row - window)
    # The first block of a row has no previous block, and padded tokens see only themselves.
    position = with_previous(jnp.broadcast_to(jnp.arange(1, length + 1), (batch, length)))
    mask = in_window[None] & (position[:, None, :] > 0) | (row == column)[None]
    if segment_ids is not None:
        ids = with_previous(segment_ids)
        mask = mask & (ids[:, window:, None] == ids[:, None, :])
    query = with_previous(q)[:, window:]
    out = _attention(query, with_previous(k), with_previous(v), number, mask=mask[:, None])
    return out.reshape(batch, blocks * window, *out.shape[2:])[:, :length]


class Ring(NamedTuple):
    """Keys and values of the tokens before: token `n` of a row is in slot `n % S`.

    Attributes:
        key: `[B, S, HK, K]`.
        value: `[B, S, HK, V]`.
        segment: `[B, S]` int32, of the token in each slot.
    """

    key: Array
    value: Array
    segment: Array


def token_attention_supports(q: Array, k: Array, v: Array, ring: Ring) -> bool:
    """Whether `token_attention` is faster than XLA's products: one token of bfloat16 on a GPU."""
    arrays = (q[:, 0], k[:, 0], v[:, 0], ring.key, ring.value) if q.shape[1] == 1 else None
    return (
        arrays is not None
        and platform() == "gpu"
        and q.dtype == jnp.bfloat16
        and current_axis() is None
        and not any(map(is_split, (q, k, v, *ring)))
        and unsupported_reason(lambda kernels: kernels.attention.unsupported_reason(*arrays)) is None
    )


def token_attention(
    q: Array,
    k: Array,
    v: Array,
    ring: Ring,
    length: Array,
    current: Array,
    *,
    angle: Array | None = None,
    scale: float | None = None,
) -> tuple[Array, Ring]:
    """The attention of a token to itself and to the tokens of its segment in a ring, by the kernel.

    The ring is overwritten if no other code holds it. Derivatives are XLA's.

    Args:
        q: queries `[B, 1, H, K]`. Head `j` uses key head `j // (H // HK)`.
        k: the token's keys `[B, 1, HK, K]`.
        v: its values `[B, 1, HK, V]`.
        ring: of the tokens before.
        length: `[B]` int32, tokens of each row before this one.
        current: `[B]` int32, the token's segment. Other tokens of the segment come right before it.
        angle: by which the channel pairs `(i, i + K/2)` of queries and keys turn first, `[B, 1, 1, K/2]`; None is none.
        scale: factor on the scores; None is `K ** -0.5`.

    Returns:
        The output `[B, 1, H, V]`, and the ring with the token in it.

    Raises:
        NotImplementedError: the kernel does not support the call.
    """

    def run(q: Array, k: Array, v: Array, ring: Ring) -> tuple[Array, Ring]:
        options: dict[str, Any] = {**ring._asdict(), "length": length, "current": current, "scale": scale}
        token = q[:, 0], k[:, 0], v[:, 0]
        attention = kernel_operators().attention
        if attention.unsupported_reason(*token, ring.key, ring.value, backend="mosaic") is None:
            options |= {"angle": None if angle is None else angle[:, 0, 0], "backend": "mosaic"}
        else:
            q, k = turned(q, k)
            token = q[:, 0], k[:, 0], v[:, 0]
        out, *updated = attention.token_attention(*token, **options)
        return out[:, None], Ring(*updated)

    def formula(q: Array, k: Array, v: Array, ring: Ring) -> tuple[Array, Ring]:
        return token_attention_formula(*turned(q, k), v, ring, length, current, scale=scale)

    def turned(q: Array, k: Array) -> tuple[Array, Array]:
        return (q, k) if angle is None else (rotate_pairs(q, angle), rotate_pairs(k, angle))

    return with_derivatives_of(formula, run)(q, k, v, ring)


def token_attention_formula(
    q: Array, k: Array, v: Array, ring: Ring, length: Array, current: Array, *, scale: float | None = None
) -> tuple[Array, Ring]:
    """`token_attention` by XLA's products, without turning; arguments and results as there."""
    rows, capacity = jnp.arange(len(length)), ring.key.shape[1]
    own = (k[:, 0], v[:, 0], current)
    ring = Ring(*(x.at[rows, length % capacity].set(y.astype(x.dtype)) for x, y in zip(ring, own)))
    is_seen = (jnp.arange(capacity) <= length[:, None]) & (ring.segment == current[:, None])
    if scale is not None:
        q = q * (scale * q.shape[3] ** 0.5)
    return _attention(q, ring.key, ring.value, 0, mask=is_seen[:, None, None]), ring

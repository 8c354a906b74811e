"""One token's softmax attention to a ring of keys and values, by a kernel on NVIDIA GPUs."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.platform import platform
from rnnlib.ops.kernels import triton_kernels, triton_unsupported
from rnnlib.ops.sequence import current_axis
from rnnlib.ops.sharding import is_split


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


def token_attention_serves(q: Array, k: Array, v: Array, ring: Ring) -> bool:
    """Whether `token_attention` is faster than XLA's products: one token of bfloat16 on a GPU."""
    arrays = (q[:, 0], k[:, 0], v[:, 0], ring.key, ring.value) if q.shape[1] == 1 else None
    return (
        arrays is not None
        and platform() == "gpu"
        and q.dtype == jnp.bfloat16
        and current_axis() is None
        and not any(map(is_split, (q, k, v, *ring)))
        and triton_unsupported("token_attention_unsupported", *arrays) is None
    )


def token_attention(
    q: Array, k: Array, v: Array, ring: Ring, length: Array, current: Array, *, scale: float | None = None
) -> tuple[Array, Ring]:
    """The attention of a token to itself and to the tokens of its segment in a ring, by the kernel.

    The ring is overwritten if no other code holds it. Derivatives are XLA's.

    Args:
        q: queries `[B, 1, H, K]`. Head `j` uses key head `j // (H // HK)`.
        k: the token's keys `[B, 1, HK, K]`.
        v: its values `[B, 1, HK, V]`.
        ring: of the tokens before.
        length: `[B]` int32, tokens of each row before this one.
        current: `[B]` int32, the token's segment.
        scale: factor on the scores; None is `K ** -0.5`.

    Returns:
        The output `[B, 1, H, V]`, and the ring with the token in it.

    Raises:
        NotImplementedError: the kernel does not support the call.
    """

    @jax.custom_jvp
    def run(q: Array, k: Array, v: Array, ring: Ring) -> tuple[Array, Ring]:
        out, *updated = triton_kernels().token_attention(
            q[:, 0], k[:, 0], v[:, 0], **ring._asdict(), length=length, current=current, scale=scale
        )
        return out[:, None], Ring(*updated)

    def formula(q: Array, k: Array, v: Array, ring: Ring) -> tuple[Array, Ring]:
        return token_attention_formula(q, k, v, ring, length, current, scale=scale)

    run.defjvp(lambda primals, tangents: (run(*primals), jax.jvp(formula, primals, tangents)[1]))
    return run(q, k, v, ring)


def token_attention_formula(
    q: Array, k: Array, v: Array, ring: Ring, length: Array, current: Array, *, scale: float | None = None
) -> tuple[Array, Ring]:
    """`token_attention` as it is defined, in float32 at least; arguments and results as there."""
    rows, capacity = jnp.arange(len(length)), ring.key.shape[1]
    own = (k[:, 0], v[:, 0], current)
    ring = Ring(*(x.at[rows, length % capacity].set(y.astype(x.dtype)) for x, y in zip(ring, own)))
    is_seen = (jnp.arange(capacity) <= length[:, None]) & (ring.segment == current[:, None])
    wide = jnp.promote_types(q.dtype, jnp.float32)
    groups = q[:, 0].reshape(len(q), ring.key.shape[2], -1, q.shape[3]).astype(wide)
    scores = jnp.einsum("bhgk,bshk->bhgs", groups, ring.key.astype(wide), precision="highest")
    scores = scores * (q.shape[3] ** -0.5 if scale is None else scale)
    weights = jax.nn.softmax(scores, where=is_seen[:, None, None], axis=-1)
    out = jnp.einsum("bhgs,bshv->bhgv", weights, ring.value.astype(wide), precision="highest")
    return out.reshape(len(q), 1, q.shape[2], -1).astype(q.dtype), ring

"""One token's attention to a ring of keys and values."""

from jax import Array
from jaxtyping import Float, Int

from pallas_kernels.attention.triton import decode as triton
from pallas_kernels.attention.triton.decode import TokenAttentionConfig
from pallas_kernels.common.refusal import expect_backend, refuse
from pallas_kernels.common.triton.backend import unsupported_arrays
from pallas_kernels.common.vma import pvary_together

_MOST_CHANNELS = 256
_MOST_QUERIES = 64  # query heads of a key head
_LEAST_ROWS = 96  # for which the backend `"mosaic"` is faster: a row is a program there


def unsupported_reason(
    q: Array, k: Array, v: Array, key: Array, value: Array, *, backend: str = "triton"
) -> str | None:
    """Why a backend can't serve `token_attention`, as a noun phrase, or None if it can; arguments as there."""
    if backend == "triton":
        if max(q.shape[-1], v.shape[-1]) > _MOST_CHANNELS:
            return f"key size {q.shape[-1]} with value size {v.shape[-1]} (at most {_MOST_CHANNELS})"
        if min(q.shape[-1], v.shape[-1]) < 16:
            return f"key size {q.shape[-1]} with value size {v.shape[-1]} (at least 16)"
        if q.shape[1] // k.shape[1] > _MOST_QUERIES:
            return f"{q.shape[1] // k.shape[1]} query heads of a key head (at most {_MOST_QUERIES})"
    if len({x.dtype for x in (q, k, v, key, value)}) > 1:
        return "a ring of another dtype than the token"
    if backend == "triton":
        return unsupported_arrays(q=q)
    if len(q) < _LEAST_ROWS:
        return f"{len(q)} rows (at least {_LEAST_ROWS})"
    try:
        from pallas_kernels.attention.mosaic_gpu import decode as mosaic_gpu
    except ImportError as error:
        return f"this installation: {error}"
    return mosaic_gpu.unsupported_reason(q, key, value)


def token_attention(
    q: Float[Array, "B H K"],
    k: Float[Array, "B HK K"],
    v: Float[Array, "B HK V"],
    *,
    key: Float[Array, "B S HK K"],
    value: Float[Array, "B S HK V"],
    segment: Int[Array, "B S"],
    length: Int[Array, " B"],
    current: Int[Array, " B"],
    angle: Float[Array, "B P"] | None = None,
    scale: float | None = None,
    config: TokenAttentionConfig | None = None,
    backend: str = "triton",
) -> tuple[Float[Array, "B H V"], Float[Array, "B S HK K"], Float[Array, "B S HK V"], Int[Array, "B S"]]:
    """The attention of a token to itself and to the tokens of its segment in a ring, which then has the token too.

    Token `n` of a row is in slot `n % S`; the new token is number `length`. The ring is overwritten if no other code
    holds it. No derivative is defined.

    Args:
        q: queries, bfloat16 or float32. Head `j` uses key head `j // (H // HK)`.
        k: the token's keys.
        v: its values.
        key: keys of the ring.
        value: values of the ring.
        segment: int32, of the token in each slot.
        length: int32, tokens of each row before this one.
        current: int32, the token's segment.
        angle: by which the channel pairs `(i, i + K/2)` of queries and keys turn first, in radians, float32; `P = K/2`.
            None turns none, and is all that the backend `"triton"` takes.
        scale: factor on the scores; None is `K ** -0.5`.
        config: how a call in Triton is cut into programs.
        backend: `"triton"` is one launch. `"mosaic"` is two, the first of which stores the token; the second reads the
            ring in Mosaic GPU, faster for many rows on a Hopper card, in bfloat16.

    Returns:
        The output in `q`'s dtype, and the ring's keys, values and segments.

    Raises:
        NotImplementedError: there is an `unsupported_reason`, but for the device and few rows.
        ValueError: `backend` is neither, or `angle` is given to Triton.
    """
    expect_backend("token_attention", backend, "triton", "mosaic")
    factor = q.shape[-1] ** -0.5 if scale is None else float(scale)
    q, k, v, ring, length, current, angle = pvary_together((q, k, v, (key, value, segment), length, current, angle))
    if backend == "mosaic":
        from pallas_kernels.attention.mosaic_gpu.decode import ring_attention

        turned, seen, ring = triton.store_token(q, k, v, ring, length, current, angle)
        return ring_attention(turned, key=ring[0], value=ring[1], last=length, seen=seen, scale=factor), *ring
    if angle is not None:
        raise ValueError("token_attention: angle is given, expected None with the backend 'triton'")
    refuse("token_attention", unsupported_reason(q, k, v, key, value))
    out, ring = triton.token_attention(q, k, v, ring, length, current, factor, config)
    return out, *ring

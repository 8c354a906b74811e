"""Linear attention: checks, choice of implementation, documentation."""

import functools
from collections.abc import Callable
from typing import Any

from jax import Array
from jaxtyping import Float, Int

from rnnlib.ops.arguments import check_rule, check_shape, choose_implementation, floating_arrays, scaled_queries
from rnnlib.ops.context_parallel import current_axis, decaying_rule_on_shard, evaluate_on_shards
from rnnlib.ops.kernels import kernel_operators, unsupported_reason
from rnnlib.ops.linear_attention.pallas import linear_attention_triton
from rnnlib.ops.linear_attention.reference import LinearAttentionInputs, linear_attention_scan
from rnnlib.ops.linear_attention.xla_chunked import linear_attention_chunked
from rnnlib.ops.sharding import split_over_mesh

_NAME = "linear_attention"


@split_over_mesh
def linear_attention(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T HV V"],
    *,
    log_decay: Float[Array, "B T HV"] | Float[Array, "B T HV K"] | None = None,
    write: Float[Array, "B T HV"] | Float[Array, "B T HV V"] | None = None,
    diagonal: Float[Array, "B T HV"] | None = None,
    diagonal_size: int = 1,
    initial_state: Float[Array, "B HV K V"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    scale: float | Float[Array, ""] | None = None,
    chunk_size: int = 64,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T HV V"], Float[Array, "B HV K V"]]:
    """Linear attention with decay: each token adds to the state, and nothing is erased.

    Per value head, with the state `S [K, V]` in float32:

        S_t = Diag(exp(log_decay_t)) S_{t-1} + k_t (w_t * v_t)^T        o_t = scale * S_t^T q_t

    With a `diagonal` z, what a token reads of its own write has a weight of its own, which the state does not see:

        o_t = scale * (S_t + k_t ((z_t - w_t) * v_t)^T)^T q_t

    That is not how it is computed: w_t has no part in o_t. So w_t may depend on the next token, as it does under the
    trapezoidal rule (Mamba-3), and o_t remains causal.

    Linear attention (Katharopoulos et al., 2020) has no decay; RetNet and Mamba-2 one per head; gated linear attention
    (arXiv 2312.06635) one per key channel.

    Args:
        q: queries.
        k: keys.
        v: values. Value heads HV are a multiple of key heads H: value head `j` uses key head `j // (HV // H)`.
        log_decay: natural logarithm of the decay, `<= 0` (-inf is a hard reset), one per head or per key channel; None
            is no decay.
        write: gate `w` on the value, one per head or per value channel; None is 1.
        diagonal: gate in place of `write` on what a token reads of its own write; None is `write`. With it, `write` is
            one number a head.
        diagonal_size: rows of q, k and v that make a token, a power of two of at most `chunk_size`; T is a multiple of
            it. Row r then reads what the rows of its token write, later ones too, by `diagonal_r` and with no decay
            between them; their documents must be one.
        initial_state: the state before the first token; None is zero.
        segment_ids: documents packed into a row: the state restarts where the id changes. The first token continues
            `initial_state`.
        scale: factor on the output; None is `K ** -0.5`. A traced one multiplies the queries, in their dtype.
        chunk_size: tokens in a chunk (16, 32, 64, 128 or 256) of all implementations but `"scan"`.
        implementation: `"scan"` (token by token: the reference, and the one that `jax.jvp` goes through), `"chunked"`
            (XLA, any device), `"triton"` (Pallas kernels on NVIDIA GPUs; on a CPU they are interpreted, which serves
            tests), `"mosaic"` (Pallas' Mosaic GPU kernels for Hopper cards), or None for the
            fastest that supports the case. Gradients can be differentiated again, forwards and backwards: those of
            kernels by way of `"chunked"`.

    Returns:
        The output in `v`'s dtype, and the final state (of the last segment) in float32, or float64 for float64 inputs.

    Raises:
        ValueError: a shape, `chunk_size` or `implementation` is none of those above.
        TypeError: an argument is no array or not floating, or `segment_ids` is not of integers.
        NotImplementedError: the implementation named does not support the case.
    """
    arrays = {"log_decay": log_decay, "write": write, "diagonal": diagonal, "initial_state": initial_state}
    q, k, v, log_decay, write, diagonal, initial_state = floating_arrays(_NAME, q=q, k=k, v=v, **arrays)
    gates = {"log_decay": log_decay, "write": write}
    check_rule(_NAME, q, k, v, gates, {}, initial_state, segment_ids, chunk_size)
    _check_diagonal(v, write, diagonal, diagonal_size, chunk_size)
    q, scale = scaled_queries(_NAME, q, scale)

    options: dict[str, Any] = {"scale": scale, "chunk_size": chunk_size, "diagonal_size": diagonal_size}
    implementations: dict[str, Callable[..., tuple[Array, Array]]] = {
        "scan": functools.partial(linear_attention_scan, scale=scale, diagonal_size=diagonal_size),
        "chunked": functools.partial(linear_attention_chunked, **options),
        "triton": functools.partial(linear_attention_triton, **options),
        "mosaic": functools.partial(linear_attention_triton, backend="mosaic", **options),
    }

    def reason(backend: str) -> str | None:
        arrays, given = (q, k, v, log_decay, diagonal), {"chunk_size": chunk_size, "backend": backend}
        return unsupported_reason(lambda kernels: kernels.linear_attention.unsupported_reason(*arrays, **given))

    run = choose_implementation(
        _NAME,
        implementation,
        implementations,
        q.shape[1],
        slower={"mosaic": lambda: not kernel_operators().linear_attention.is_mosaic_faster(v, log_decay)},
        triton=lambda: reason("triton"),
        mosaic=lambda: reason("mosaic"),
    )
    inputs = LinearAttentionInputs(q, k, v, write, log_decay, diagonal)
    axis = current_axis()
    if axis is None:
        return run(inputs, initial_state, segment_ids)
    is_kernel = any(run is implementations[name] for name in ("triton", "mosaic"))
    if is_kernel and kernel_operators().linear_attention.shard_reason(q, log_decay) is None:
        on_shard = functools.partial(run, context_axis=axis)
    else:
        on_shard = functools.partial(decaying_rule_on_shard, run, axis=axis)
    return evaluate_on_shards(on_shard, inputs, initial_state, segment_ids, axis)


def _check_diagonal(v: Array, write: Array | None, diagonal: Array | None, size: int, chunk_size: int) -> None:
    """Raises ValueError unless a diagonal and its size are those that `linear_attention` takes."""
    if diagonal is not None:
        check_shape(_NAME, "diagonal", diagonal, v.shape[:3], axes="[B, T, HV]")
        if write is not None and write.ndim == 4:
            raise ValueError(f"{_NAME}: write has shape {write.shape}, expected [B, T, HV] with a diagonal")
    elif size != 1:
        raise ValueError(f"{_NAME}: diagonal_size is {size}, expected 1 without a diagonal")
    if size not in (1, 2, 4, 8, 16, 32, 64, 128, 256) or size > chunk_size:
        raise ValueError(f"{_NAME}: diagonal_size is {size}, expected a power of two of at most {chunk_size}")
    if size > 1 and v.shape[1] % size:
        raise ValueError(f"{_NAME}: v has {v.shape[1]} rows, expected a multiple of diagonal_size={size}")

"""The gated delta rule: checks, choice of implementation, documentation."""

import functools
from collections.abc import Callable
from typing import Any

from jax import Array
from jaxtyping import Float, Int

from rnnlib.ops.arguments import check_rule, choose_implementation, floating_arrays, scaled_queries
from rnnlib.ops.context_parallel import choose_rule_on_shard, current_axis, evaluate_on_shards
from rnnlib.ops.gated_delta_rule.pallas import gated_delta_rule_triton
from rnnlib.ops.gated_delta_rule.reference import DeltaRuleInputs, gated_delta_rule_scan
from rnnlib.ops.gated_delta_rule.xla_chunked import gated_delta_rule_chunked
from rnnlib.ops.gates import resolve_gates
from rnnlib.ops.kernels import unsupported_reason
from rnnlib.ops.sharding import split_over_mesh

_NAME = "gated_delta_rule"


@split_over_mesh
def gated_delta_rule(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T HV V"],
    *,
    beta: Float[Array, "B T HV"] | None = None,
    erase: Float[Array, "B T HV"] | Float[Array, "B T HV K"] | None = None,
    write: Float[Array, "B T HV"] | Float[Array, "B T HV V"] | None = None,
    write_key: Float[Array, "B T H K"] | Float[Array, "B T HV K"] | None = None,
    log_decay: Float[Array, "B T HV"] | Float[Array, "B T HV K"] | None = None,
    initial_state: Float[Array, "B HV K V"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    scale: float | Float[Array, ""] | None = None,
    chunk_size: int = 64,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T HV V"], Float[Array, "B HV K V"]]:
    r"""The delta rule with decay, separate erase and write gates, and a write key of its own.

    Per value head, with the state `S [K, V]` in float32 and `D_t = Diag(exp(log_decay_t))`:

        S_t = D_t S_{t-1} + k~_t (w_t * v_t - (D_t S_{t-1})^T (b_t * k_t))^T        o_t = scale * S_t^T q_t

    where `b` is `erase`, `w` is `write` and `k~` is `write_key`. One recurrence serves many papers: DeltaNet (no decay,
    `beta`; arXiv 2406.06484), Gated DeltaNet (scalar decay; arXiv 2412.06464), Kimi Delta Attention
    (channel-wise decay), Gated DeltaNet-2 (channel-wise gates), Preconditioned DeltaNet (`write_key`), Kaczmarz Linear
    Attention, Longhorn and others (gains in `beta`).

    Inputs must be finite at every token, including padding and other documents (`log_decay` may be -inf). The fast
    implementations mask by multiplying with zero, so a NaN spreads over its whole row. The scan does not spread it.

    Args:
        q: queries.
        k: read keys. Transitions are stable for `0 <= erase * (k . write_key) <= 2`: normalise keys or scale gates.
        v: values. Value heads HV are a multiple of key heads H: value head `j` uses key head `j // (HV // H)`.
        beta: one gate that both erases and writes; kernels load it once and round its gradient once. Gates that
            happen to be equal, as in `erase=g, write=g`, are two.
        erase: gate on the read key, one per head or per key channel; None is 1.
        write: gate on the value, one per head or per value channel; None is 1.
        write_key: the key that is written; None is `k`. Its gradient has its dtype: a float32 write key beside bfloat16
            keys gets an unrounded gradient, although the kernels round the write key itself.
        log_decay: natural logarithm of the decay, `<= 0` (-inf is a hard reset), one per head or per key channel; None
            is no decay.
        initial_state: the state before the first token; None is zero.
        segment_ids: documents packed into a row: the state restarts where the id changes. The first token continues
            `initial_state`.
        scale: factor on the output; None is `K ** -0.5`. A traced one multiplies the queries, in their dtype.
        chunk_size: tokens in a chunk (16, 32, 64, 128 or 256) of the `"chunked"` and `"triton"` implementations.
        implementation: `"scan"` (token by token: the reference, and the one that `jax.jvp` goes through), `"chunked"`
            (XLA, any device), `"triton"` (Pallas kernels on NVIDIA GPUs; on a CPU they are interpreted, which serves
            tests), `"mosaic"` (the same with most stages in Pallas' Mosaic GPU, on Hopper GPUs, in bfloat16
            with 65 to 128 channels), or None for the fastest that supports the case. Gradients can be differentiated
            again, forwards and backwards: those of kernels by way of `"chunked"`.

    Returns:
        The output in `v`'s dtype, and the final state (of the last segment) in float32, or float64 for float64 inputs.

    Raises:
        ValueError: a shape, `chunk_size` or `implementation` is none of those above, or `beta` comes with `erase` or
            `write`.
        TypeError: an argument is no array or not floating, or `segment_ids` is not of integers.
        NotImplementedError: the implementation named does not support the case.
    """
    q, k, v, beta, erase, write, write_key, log_decay, initial_state = floating_arrays(
        _NAME,
        q=q,
        k=k,
        v=v,
        beta=beta,
        erase=erase,
        write=write,
        write_key=write_key,
        log_decay=log_decay,
        initial_state=initial_state,
    )
    gates = {"erase": erase, "write": write, "log_decay": log_decay}
    check_rule(_NAME, q, k, v, gates, {"write_key": write_key}, initial_state, segment_ids, chunk_size)
    resolved = resolve_gates(_NAME, beta, erase, write, v.shape[:3])
    q, scale = scaled_queries(_NAME, q, scale)

    def reason(backend: str) -> str | None:
        arrays = q, k, v, resolved.erase, log_decay
        return unsupported_reason(
            lambda kernels: kernels.delta_rule.unsupported_reason(*arrays, chunk_size=chunk_size, backend=backend)
        )

    options: dict[str, Any] = {"scale": scale, "chunk_size": chunk_size}
    implementations: dict[str, Callable[..., tuple[Array, Array]]] = {
        "scan": functools.partial(gated_delta_rule_scan, scale=scale),
        "chunked": functools.partial(gated_delta_rule_chunked, **options),
        "triton": functools.partial(gated_delta_rule_triton, **options),
        "mosaic": functools.partial(gated_delta_rule_triton, backend="mosaic", **options),
    }
    run = choose_implementation(
        _NAME,
        implementation,
        implementations,
        q.shape[1],
        triton=lambda: reason("triton"),
        mosaic=lambda: reason("mosaic"),
    )
    inputs = DeltaRuleInputs(q, k, v, resolved, write_key, log_decay)
    axis = current_axis()
    if axis is None:
        return run(inputs, initial_state, segment_ids)
    on_shard = choose_rule_on_shard(run, implementations, q, axis)
    return evaluate_on_shards(on_shard, inputs, initial_state, segment_ids, axis)

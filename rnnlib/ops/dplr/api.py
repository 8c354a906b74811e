"""The diagonal-plus-low-rank recurrence: checks, choice of implementation, documentation."""

import functools
from collections.abc import Callable
from typing import Any

from jax import Array
from jaxtyping import Float, Int

from rnnlib.ops.arguments import check_rule, choose_implementation, floating_arrays, scaled_queries
from rnnlib.ops.context_parallel import choose_rule_on_shard, current_axis, evaluate_on_shards
from rnnlib.ops.dplr.pallas import LEAST_LOG_DECAY, dplr_triton, dplr_two_steps, has_own_kernels
from rnnlib.ops.dplr.reference import DPLRInputs, dplr_scan
from rnnlib.ops.dplr.xla_chunked import dplr_chunked
from rnnlib.ops.kernels import unsupported_reason
from rnnlib.ops.sharding import split_over_mesh

_NAME = "dplr"


@split_over_mesh
def dplr(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"] | Float[Array, "B T HV K"],
    v: Float[Array, "B T HV V"],
    *,
    a: Float[Array, "B T H K"] | Float[Array, "B T HV K"],
    b: Float[Array, "B T H K"] | Float[Array, "B T HV K"],
    log_decay: Float[Array, "B T HV"] | Float[Array, "B T HV K"] | None = None,
    least_log_decay: float | None = None,
    initial_state: Float[Array, "B HV K V"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    scale: float | Float[Array, ""] | None = None,
    chunk_size: int = 64,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T HV V"], Float[Array, "B HV K V"]]:
    """The general recurrence with a diagonal-plus-low-rank transition whose vectors are independent arguments.

    Per value head, with the state `S [K, V]` in float32 and `D_t = Diag(exp(log_decay_t))`:

        S_t = (D_t - b_t a_t^T) S_{t-1} + k_t v_t^T        o_t = scale * S_t^T q_t

    In the papers' transposed notation this is `S_t = S_{t-1} (D_t - a_t b_t^T) + v_t k_t^T`
    (Preconditioned DeltaNet, arXiv 2604.21100, equation D.2.1). Note that `a` reads the state *before* it decays.
    Special cases (table 3): in DeltaNet, Gated DeltaNet, KDA and Comba, a, b and k are parallel to one key. In the
    preconditioned rules, b = k and a is independent. In RWKV-7, a and b are parallel to one key and k is independent.
    For all of them but RWKV-7, `rnnlib.ops.gated_delta_rule` takes half the work.

    Args:
        q: queries.
        k: keys that values are written along.
        v: values. Value heads HV are a multiple of key heads H: value head `j` uses key head `j // (HV // H)`.
        a: the vector that reads the previous state.
        b: the vector along which that reading is subtracted. Without decay, transitions are stable for
            `0 <= a . b <= 2`.
        log_decay: natural logarithm of the decay, `<= 0`, one per head or per key channel; None is no decay. With -inf
            the state is forgotten, but the reading by `a` of the previous state is still subtracted.
        least_log_decay: a lower bound that `log_decay` is known to have, such as RWKV-7's -0.61; None is none. Kernels
            need one of at least -5, the fast ones of at least -1.5625. It is not checked.
        initial_state: the state before the first token; None is zero.
        segment_ids: documents packed into a row: the state restarts where the id changes. The first token continues
            `initial_state`.
        scale: factor on the output; None is `K ** -0.5`. A traced one multiplies the queries, in their dtype.
        chunk_size: tokens in a chunk (16, 32, 64, 128 or 256) of the `"chunked"` implementation; kernels take 64.
        implementation: `"scan"` (token by token: the reference, and the one that `jax.jvp` goes through), `"chunked"`
            (XLA, any device), `"triton"` (kernels on NVIDIA GPUs: one pass where the decay's bound is at least -1.5625
            and heads have at most 128 channels, in float32 64; else `gated_delta_rule`'s over two steps a token),
            `"mosaic"` (`gated_delta_rule`'s over two steps a token), or None for the fastest that supports the case.
            Gradients can be differentiated again.

    Returns:
        The output in `v`'s dtype, and the final state (of the last segment) in float32, or float64 for float64 inputs.

    Raises:
        ValueError: a shape, `chunk_size` or `implementation` is none of those above.
        TypeError: an argument is no array or not floating, or `segment_ids` is not of integers.
        NotImplementedError: the implementation named does not support the case.
    """
    q, k, v, a, b, log_decay, initial_state = floating_arrays(
        _NAME, q=q, k=k, v=v, a=a, b=b, log_decay=log_decay, initial_state=initial_state
    )
    gates, keys = {"log_decay": log_decay}, {"k": k, "a": a, "b": b}
    check_rule(_NAME, q, None, v, gates, keys, initial_state, segment_ids, chunk_size)
    q, scale = scaled_queries(_NAME, q, scale)

    inputs = DPLRInputs(q, k, v, a, b, log_decay)

    def reason(backend: str) -> str | None:
        if log_decay is not None and (least_log_decay is None or least_log_decay < LEAST_LOG_DECAY):
            return f"a least_log_decay of {least_log_decay} (at least {LEAST_LOG_DECAY} is needed)"
        arrays = q, a, v, log_decay
        return unsupported_reason(
            lambda kernels: kernels.delta_rule.unsupported_reason(*arrays, chunk_size=chunk_size, backend=backend)
        )

    def run_triton(inputs: DPLRInputs, *arguments: Any, context_axis: str | None = None) -> tuple[Array, Array]:
        run = dplr_triton if has_own_kernels(inputs, least_log_decay) else dplr_two_steps
        return run(inputs, *arguments, context_axis=context_axis, **options)

    options: dict[str, Any] = {"scale": scale, "chunk_size": chunk_size}
    implementations: dict[str, Callable[..., tuple[Array, Array]]] = {
        "scan": functools.partial(dplr_scan, scale=scale),
        "chunked": functools.partial(dplr_chunked, **options),
        "triton": run_triton,
        "mosaic": functools.partial(dplr_two_steps, backend="mosaic", **options),
    }
    run = choose_implementation(
        _NAME,
        implementation,
        implementations,
        q.shape[1],
        kernel_for_one_token=False,
        slower={"mosaic": lambda: has_own_kernels(inputs, least_log_decay)},
        triton=lambda: reason("triton"),
        mosaic=lambda: reason("mosaic"),
    )
    axis = current_axis()
    if axis is None:
        return run(inputs, initial_state, segment_ids)
    on_shard = choose_rule_on_shard(run, implementations, q, axis)
    return evaluate_on_shards(on_shard, inputs, initial_state, segment_ids, axis)

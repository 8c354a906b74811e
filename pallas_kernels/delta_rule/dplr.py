r"""The diagonal-plus-low-rank recurrence by the delta rule's stages, in Triton kernels.

Its chunk form is the delta rule's with a second key. With the key `a` that reads, the key `b` along which that reading
is taken away, and the key `k` that values are written along,

    A = (I + tril(Abar Bbar^T, -1))^-1      L = tril(Abar Kbar^T, -1)      P_x = scale * tril(Q_G Xbar^T)
    R = A (-L V - Abar S_0)      O = scale * Q_G S_0 + P_b R + P_k V
    S_C = Diag(exp(G_C)) S_0 + B_tail^T R + K_tail^T V

where `Abar` has the decay before each token, and the rest is as in `pallas_kernels.delta_rule`: `-L V` is in the place
of the values there. Stages read `b` as the write key and `k` as `Inputs.value_key`.
"""

from jax import Array
from jaxtyping import Float, Int

from pallas_kernels.common.decay import MAX_EXPONENT
from pallas_kernels.common.kernel_shape import CHUNK
from pallas_kernels.common.refusal import refuse
from pallas_kernels.delta_rule.api import call_options, shard_reason, unsupported_reason
from pallas_kernels.delta_rule.config import DeltaRuleConfig
from pallas_kernels.delta_rule.inputs import crop_results, make_inputs, pad_inputs
from pallas_kernels.delta_rule.vjp import choose_pass

LEAST_LOG_DECAY = -MAX_EXPONENT / (CHUNK // 2)
"""Log decays have to be at least this, so that one product of pairs has the range of a chunk (`channel_decay`)."""

MAX_CHANNELS = {"bfloat16": 128, "float32": 64}
"""Key or value channels of a head by the matrices' dtype. With more, kernels spill tens of kilobytes a thread."""

__all__ = ["LEAST_LOG_DECAY", "MAX_CHANNELS", "dplr", "shard_reason", "unsupported_reason"]


def dplr(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"] | Float[Array, "B T HV K"],
    v: Float[Array, "B T HV V"],
    *,
    a: Float[Array, "B T H K"] | Float[Array, "B T HV K"],
    b: Float[Array, "B T H K"] | Float[Array, "B T HV K"],
    log_decay: Float[Array, "B T HV K"],
    initial_state: Float[Array, "B HV K V"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    scale: float | None = None,
    config: DeltaRuleConfig | None = None,
    context_axis: str | None = None,
) -> tuple[Float[Array, "B T HV V"], Float[Array, "B HV K V"]]:
    """`S_t = (D_t - b_t a_t^T) S_{t-1} + k_t v_t^T`, `o_t = scale * S_t^T q_t`; forward and backward, in chunks of 64.

    Args:
        q: queries, bfloat16 or float32.
        k: keys that values are written along.
        v: values; value head `j` uses key head `j // (HV // H)`.
        a: what reads the state before it decays.
        b: along which that reading is taken away.
        log_decay: natural logarithm of the decay, in `[LEAST_LOG_DECAY, 0]`, which is not checked.
        initial_state: the state before the first token; None is zero.
        segment_ids: the state restarts where the id changes; the first token continues `initial_state`.
        scale: factor on the output; None is `K ** -0.5`.
        config: how the call is cut into programs; None takes a default.
        context_axis: as of `pallas_kernels.delta_rule.gated_delta_rule`.

    Returns:
        The output in `v`'s dtype and the final state in float32, with a `context_axis` that after this device's tokens.

    Raises:
        NotImplementedError: there is an `unsupported_reason` or, with a `context_axis`, a `shard_reason`.
    """
    refuse("dplr", unsupported_reason(q, a, v, log_decay, chunk_size=CHUNK))
    if context_axis is not None:
        refuse("dplr", shard_reason(q, "triton"))
    gates = None, None, log_decay
    inputs = make_inputs(q, a, v, b, *gates, initial_state, segment_ids, context_axis=context_axis)
    dtype = inputs.q.dtype
    inputs = inputs._replace(value_key=k.astype(dtype), write_key=b.astype(dtype))
    options, inputs = call_options(inputs, scale=scale, config=config, context_axis=context_axis)
    out, state = crop_results(inputs, choose_pass()(options, pad_inputs(inputs)))
    return out.astype(v.dtype), state

"""The public function of linear attention."""

from jax import Array
from jaxtyping import Float, Int

from pallas_kernels.common.kernel_shape import CHUNK
from pallas_kernels.delta_rule.api import call_options, refuse_unsupported
from pallas_kernels.delta_rule.api import unsupported_reason as unsupported_reason
from pallas_kernels.delta_rule.config import DeltaRuleConfig
from pallas_kernels.delta_rule.inputs import crop_results, is_sum, make_inputs, pad_inputs
from pallas_kernels.delta_rule.vjp import chunked_pass, one_token
from pallas_kernels.linear_attention.vjp import sums_pass


def linear_attention(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T HV V"],
    *,
    log_decay: Float[Array, "B T HV"] | Float[Array, "B T HV K"] | None = None,
    write: Float[Array, "B T HV"] | Float[Array, "B T HV V"] | None = None,
    initial_state: Float[Array, "B HV K V"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    scale: float | None = None,
    chunk_size: int = CHUNK,
    config: DeltaRuleConfig | None = None,
) -> tuple[Float[Array, "B T HV V"], Float[Array, "B HV K V"]]:
    """Linear attention with decay: `S_t = D_t S_{t-1} + k_t (w_t * v_t)^T`, `o_t = scale * S_t^T q_t`.

    What a token writes does not depend on the state, so segments of the sequence only add up, and output and gradients
    are sums over pairs of tokens (see `sums`). A channel-wise decay takes the delta rule's kernels without the inverse.

    Args:
        q: queries, bfloat16 or float32.
        k: keys.
        v: values; value head `j` uses key head `j // (HV // H)`.
        log_decay: natural logarithm of the decay, `<= 0`, -inf included; None is no decay.
        write: gate on the value; None is 1.
        initial_state: the state before the first token; None is zero.
        segment_ids: the state restarts where the id changes; the first token continues `initial_state`.
        scale: factor on the output; None is `K ** -0.5`.
        chunk_size: only 64.
        config: how the call is cut into programs; None takes the device's tuned one.

    Returns:
        The output in `v`'s dtype and the final state in float32.

    Raises:
        NotImplementedError: there is an `unsupported_reason`.
    """
    refuse_unsupported("linear_attention", q, k, v, log_decay, chunk_size=chunk_size)
    inputs = make_inputs(q, k, v, None, None, write, log_decay, initial_state, segment_ids)
    options, inputs = call_options(inputs, scale=scale, config=config, online=False)
    run = sums_pass if is_sum(inputs, online=False) else chunked_pass
    if q.shape[1] == 1:
        out, state = one_token(run, options, inputs)
    else:
        out, state = crop_results(inputs, run(options, pad_inputs(inputs)))
    return out.astype(v.dtype), state

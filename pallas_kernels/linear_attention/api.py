"""The public function of linear attention, and which calls its kernels can serve."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from pallas_kernels.common.kernel_shape import CHUNK, is_channel_wise
from pallas_kernels.common.refusal import expect_backend, refuse
from pallas_kernels.delta_rule import api as delta_rule
from pallas_kernels.delta_rule.api import call_options
from pallas_kernels.delta_rule.config import DeltaRuleConfig
from pallas_kernels.delta_rule.inputs import crop_results, is_sum, make_inputs, pad_inputs
from pallas_kernels.delta_rule.vjp import Pass, choose_pass, one_token
from pallas_kernels.linear_attention.vjp import gated_values, linear_pass, with_gate_in_values

_MOSAIC_SIZES = (64, 128)
# Chunks of all heads from which the Mosaic GPU kernels are chosen: the fewest that were timed, on an H200, and ahead of
# Triton's by 1.12 times forward and 1.38 times with backward.
_FEWEST_CHUNKS = 256
# The same under a decay of one number a channel: the fewest that were timed, and ahead by 1.6 and 2.1 times.
_FEWEST_CHANNEL_CHUNKS = 1024


def unsupported_reason(
    q: Array,
    k: Array,
    v: Array,
    log_decay: Array | None,
    diagonal: Array | None = None,
    *,
    chunk_size: int = CHUNK,
    backend: str = "triton",
) -> str | None:
    """Why a backend can't serve a call, as a noun phrase, or None if it can.

    Args:
        q: queries `[B, T, H, K]`.
        k: keys `[B, T, H, K]`.
        v: values `[B, T, HV, V]`.
        log_decay: log decay, or None.
        diagonal: gate on what a token reads of its own write, or None.
        chunk_size: tokens in a chunk.
        backend: `"triton"` or `"mosaic"`.
    """
    reason = delta_rule.unsupported_reason(q, k, v, log_decay, chunk_size=chunk_size)
    if reason is None and diagonal is not None:
        if is_channel_wise(log_decay):
            return "a diagonal beside a decay of one number a channel"
        if v.shape[1] == 1:
            return "a diagonal for a single row"
    if reason is not None or backend == "triton":
        return reason
    # Under a decay of one number a channel the kernels are the delta rule's, which have heads of 128 channels.
    sizes = _MOSAIC_SIZES[-1:] if is_channel_wise(log_decay) else _MOSAIC_SIZES
    if v.shape[3] % _MOSAIC_SIZES[-1] == 0:
        narrow = jax.ShapeDtypeStruct((*v.shape[:3], _MOSAIC_SIZES[-1]), v.dtype)  # `_narrow_heads`
        return delta_rule.mosaic_unsupported_reason(q, k, narrow, sizes=sizes)
    return delta_rule.mosaic_unsupported_reason(q, k, v, sizes=sizes)


def shard_reason(q: Array, log_decay: Array | None) -> str | None:
    """Why a call can't be on shards of rows that devices share, as a noun phrase, or None if it can.

    Args:
        q: queries `[B, T, H, K]`, of a call that the backend serves where rows are whole.
        log_decay: log decay, or None.
    """
    if is_channel_wise(log_decay) or q.shape[1] == 1:
        return delta_rule.shard_reason(q, "triton")
    return None


def _narrow_heads(
    v: Array, log_decay: Array | None, gates: tuple[Array | None, ...], initial_state: Array | None
) -> tuple[Array, Array | None, tuple[Array | None, ...], Array | None]:
    """Values of heads of at most 128 channels, and a decay, gates on the values and states to match.

    What one value channel of a state becomes does not depend on the others: parts of a head are heads that share a key.
    """
    parts = max(1, v.shape[3] // _MOSAIC_SIZES[-1])
    if parts == 1:
        return v, log_decay, gates, initial_state

    def narrow(x):
        return jnp.repeat(x, parts, axis=2) if x.ndim == 3 else x.reshape(*v.shape[:2], -1, _MOSAIC_SIZES[-1])

    gates = tuple(None if x is None else narrow(x) for x in gates)
    log_decay = None if log_decay is None else jnp.repeat(log_decay, parts, axis=2)
    if initial_state is not None:
        batch, heads, keys, _ = initial_state.shape
        initial_state = jnp.swapaxes(initial_state.reshape(batch, heads, keys, parts, -1), 2, 3)
        initial_state = initial_state.reshape(batch, heads * parts, keys, -1)
    return v.reshape(*v.shape[:2], -1, _MOSAIC_SIZES[-1]), log_decay, gates, initial_state


def _wide_heads(out: Array, state: Array, like: Array) -> tuple[Array, Array]:
    """Outputs and states of `_narrow_heads` in the shapes of the values `like`."""
    batch, _, keys, size = state.shape
    state = jnp.swapaxes(state.reshape(batch, like.shape[2], -1, keys, size), 2, 3)
    return out.reshape(like.shape), state.reshape(batch, like.shape[2], keys, -1)


def is_mosaic_faster(v: Array, log_decay: Array | None = None) -> bool:
    """Whether the Mosaic GPU kernels are the faster ones for a call with these arrays that both backends serve."""
    batch, length, heads, size = v.shape
    heads *= max(1, size // _MOSAIC_SIZES[-1])  # `_narrow_heads`
    fewest = _FEWEST_CHANNEL_CHUNKS if is_channel_wise(log_decay) else _FEWEST_CHUNKS
    return batch * heads * (length // CHUNK) >= fewest


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
    scale: float | None = None,
    chunk_size: int = CHUNK,
    config: DeltaRuleConfig | None = None,
    backend: str = "triton",
    context_axis: str | None = None,
) -> tuple[Float[Array, "B T HV V"], Float[Array, "B HV K V"]]:
    """Linear attention with decay: `S_t = D_t S_{t-1} + k_t (w_t * v_t)^T`, `o_t = scale * S_t^T q_t`.

    What a token writes does not depend on the state, so splits of the sequence only add up, and output and gradients
    are sums over pairs of tokens (see `sums`). A channel-wise decay takes the delta rule's kernels without the inverse.

    Args:
        q: queries, bfloat16 or float32.
        k: keys.
        v: values; value head `j` uses key head `j // (HV // H)`.
        log_decay: natural logarithm of the decay, `<= 0`, -inf included; None is no decay.
        write: gate on the value; None is 1.
        diagonal: gate in place of `write`, one number a token too, on what a token reads of its own write; None is
            `write`. Write gates below 2^-32 then count as 2^-32.
        diagonal_size: rows of a token, a power of two of at most 64: a row reads what all of them write by its
            `diagonal`, with no decay between them.
        initial_state: the state before the first token; None is zero.
        segment_ids: the state restarts where the id changes; the first token continues `initial_state`.
        scale: factor on the output; None is `K ** -0.5`.
        chunk_size: only 64.
        config: how the call is cut into programs; None takes the device's tuned one.
        backend: `"mosaic"` runs all of it in Mosaic GPU, where it has no `unsupported_reason`, in less time. Pairs of
            tokens are then rounded once, as the inputs are. Under a channel-wise decay so are values times their gate,
            and the states that the backward reads; chunks with too strong a decay for one reference are Triton's.
        context_axis: as of `pallas_kernels.delta_rule.gated_delta_rule`.

    Returns:
        The output in `v`'s dtype and the final state in float32, with a `context_axis` that after this device's tokens.

    Raises:
        NotImplementedError: there is an `unsupported_reason` or, with a `context_axis`, a `shard_reason`.
        ValueError: `backend` is neither.
    """
    expect_backend("linear_attention", backend, "triton", "mosaic")
    reason = unsupported_reason(q, k, v, log_decay, diagonal, chunk_size=chunk_size, backend=backend)
    refuse("linear_attention", reason, backend)
    if context_axis is not None:
        refuse("linear_attention", shard_reason(q, log_decay), backend)
    values, in_mosaic, of_stages = v, backend == "mosaic", "triton"
    if in_mosaic:
        if is_channel_wise(log_decay):  # these kernels write the values as they are
            v, write, of_stages = gated_values(v, write), None, backend
        v, log_decay, (write, diagonal), initial_state = _narrow_heads(v, log_decay, (write, diagonal), initial_state)
    more = initial_state, segment_ids, diagonal, context_axis
    inputs = make_inputs(q, k, v, None, None, write, log_decay, *more)
    how: dict[str, Any] = {"online": False, "backend": of_stages, "context_axis": context_axis}
    options, inputs = call_options(inputs, scale=scale, config=config, **how)
    options = dataclasses.replace(options, diagonal_size=diagonal_size)
    run: Pass = choose_pass()
    if is_sum(inputs, online=False):
        inputs = with_gate_in_values(inputs)
        run = linear_pass
    if q.shape[1] == 1:
        out, state = one_token(run, options, inputs)
    elif in_mosaic and run is linear_pass:
        from pallas_kernels.linear_attention.mosaic_gpu import vjp

        padded = pad_inputs(inputs)
        mosaic_options = vjp.choose_options(padded, options.scale, diagonal_size, context_axis)
        out, state = crop_results(inputs, vjp.linear_pass(mosaic_options, padded))
    else:
        out, state = crop_results(inputs, run(options, pad_inputs(inputs)))
    if in_mosaic:
        out, state = _wide_heads(out, state, values)
    return out.astype(v.dtype), state

"""The public function of the gated delta rule, and which calls its kernels can serve."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from pallas_kernels.common.kernel_shape import CHUNK, next_power_of_two
from pallas_kernels.common.platform import is_hopper, platform
from pallas_kernels.common.refusal import expect_backend, refuse
from pallas_kernels.common.triton.backend import unsupported_arrays
from pallas_kernels.common.vma import pvary_together
from pallas_kernels.delta_rule.config import DeltaRuleConfig, splits
from pallas_kernels.delta_rule.inputs import Inputs, crop_results, make_inputs, pad_inputs
from pallas_kernels.delta_rule.tuned_configs import choose_config
from pallas_kernels.delta_rule.vjp import Options, choose_pass, one_token

MAX_CHANNELS = {"triton": 256, "mosaic": 128}
"""Key or value channels of a head that each backend takes at most."""


def unsupported_reason(
    q: Array, k: Array, v: Array, *gates: Array | None, chunk_size: int = CHUNK, backend: str = "triton"
) -> str | None:
    """Why a backend can't serve a call, as a noun phrase, or None if it can.

    Args:
        q: queries `[B, T, H, K]`.
        k: keys `[B, T, H, K]`.
        v: values `[B, T, HV, V]`.
        *gates: erase gate and log decay, or None.
        chunk_size: tokens in a chunk.
        backend: `"triton"` or `"mosaic"`.
    """
    reason = unsupported_arrays(q=q, k=k, v=v)
    if reason is not None:
        return reason
    if chunk_size != CHUNK:
        return f"chunk_size {chunk_size} (only {CHUNK})"
    most = MAX_CHANNELS["triton"]
    if q.shape[3] > most or v.shape[3] > most:
        return f"key size {q.shape[3]} with value size {v.shape[3]} (at most {most} each)"
    has_channel_gates = any(x is not None and x.ndim == 4 for x in gates)
    if platform() != "cpu" and has_channel_gates and q.shape[3] > 128 and jnp.result_type(q, k, v) == jnp.float32:
        return f"key size {q.shape[3]} in float32 with channel-wise gates (at most 128: shared memory is too small)"
    return mosaic_unsupported_reason(q, k, v, sizes=(MAX_CHANNELS["mosaic"],)) if backend == "mosaic" else None


def mosaic_unsupported_reason(
    q: Array, k: Array, v: Array | jax.ShapeDtypeStruct, *, sizes: tuple[int, ...]
) -> str | None:
    """Why a call that Triton serves can't be in Mosaic GPU, as far as its device and matrices go, or None if it can.

    Args:
        q: queries `[B, T, H, K]`.
        k: keys `[B, T, H, K]`.
        v: values `[B, T, HV, V]`.
        sizes: the key and value channels that a head is padded to, powers of two in order.
    """
    if not is_hopper():
        return "this device (it runs on Hopper cards)"
    try:
        import pallas_kernels.common.mosaic_gpu  # noqa: F401
    except ImportError as error:
        return f"this jax: {error}"
    if jnp.result_type(q, k, v) != jnp.bfloat16:
        return f"matrices of dtype {jnp.result_type(q, k, v)} (only bfloat16)"
    if q.shape[1] == 1:
        return "a single token (its kernel is Triton's)"
    if any(next_power_of_two(size) not in sizes for size in (q.shape[3], v.shape[3])):
        least = sizes[0] // 2 + 1
        return f"key size {q.shape[3]} with value size {v.shape[3]} ({least} to {sizes[-1]} each)"
    return None


def shard_reason(q: Array, backend: str) -> str | None:
    """Why a call can't be on shards of rows that devices share, as a noun phrase, or None if it can.

    Args:
        q: queries `[B, T, H, K]`, of a call that the backend serves where rows are whole.
        backend: as of `gated_delta_rule`.
    """
    if backend == "mosaic_mma":
        return "shards of rows"
    if q.shape[1] == 1:
        return "shards of rows of a single token"
    if not splits(next_power_of_two(q.shape[3])):
        return f"shards of rows with key size {q.shape[3]} (at most 128)"
    return None


def _mma_reason(inputs: Inputs) -> str | None:
    """Why a call that Triton serves can't have its forward by `mma.sync`."""
    try:
        from pallas_kernels.delta_rule.mosaic_mma.stages import unsupported_reason as reason
    except ImportError as error:
        return f"this jax: {error}"
    return reason(inputs)


def gated_delta_rule(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T HV V"],
    *,
    erase: Float[Array, "B T HV"] | Float[Array, "B T HV K"] | None = None,
    write: Float[Array, "B T HV"] | Float[Array, "B T HV V"] | None = None,
    write_key: Float[Array, "B T H K"] | Float[Array, "B T HV K"] | None = None,
    log_decay: Float[Array, "B T HV"] | Float[Array, "B T HV K"] | None = None,
    initial_state: Float[Array, "B HV K V"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    tied_gates: bool = False,
    scale: float | None = None,
    chunk_size: int = CHUNK,
    config: DeltaRuleConfig | None = None,
    backend: str = "triton",
    context_axis: str | None = None,
) -> tuple[Float[Array, "B T HV V"], Float[Array, "B HV K V"]]:
    r"""The delta rule with decay, erase and write gates and a write key, forward and backward in Triton kernels.

    Per value head, with the state `S [K, V]` in float32 and `D_t = Diag(exp(log_decay_t))`:

        S_t = D_t S_{t-1} + k~_t (w_t * v_t - (D_t S_{t-1})^T (b_t * k_t))^T        o_t = scale * S_t^T q_t

    evaluated in chunks of 64 tokens (equations 21 to 24 of Gated DeltaNet-2, arXiv 2605.22791, with `k~` and `k` told
    apart). The backward keeps the splits' starting states, two `[64, 64]` matrices a chunk and, where gates are one
    number a channel, the keys and queries as they scale them; it recomputes the rest. Runs are bit-identical. Few heads
    are spread over the card in splits of the sequence; there, what is left of a state counts as zero where it is less
    than 1e-15 of it. A single token takes a kernel of its own that moves the state once; a state that is donated is
    updated in place.

    Args:
        q: queries, bfloat16 or float32.
        k: read keys.
        v: values; value head `j` uses key head `j // (HV // H)`.
        erase: gate on the read key; None is 1.
        write: gate on the value; None is 1.
        write_key: the key that is written; None is `k`. Kernels round it to the other matrices' dtype; its gradient has
            the dtype that it is given in, so that one given in float32 gets one that nothing rounds.
        log_decay: natural logarithm of the decay, `<= 0`, -inf included; None is no decay.
        initial_state: the state before the first token; None is zero.
        segment_ids: the state restarts where the id changes; the first token continues `initial_state`.
        tied_gates: whether `erase`, one number a token, is the write gate too; `write` is then None. It is loaded once,
            and its gradient is one sum, rounded once.
        scale: factor on the output; None is `K ** -0.5`.
        chunk_size: only 64.
        config: how the call is cut into programs; None takes the device's tuned one.
        backend: `"mosaic"` runs most stages as Mosaic GPU kernels, where it has no `unsupported_reason`: nearly the
            same roundings in less time. Tied gates then count as 2^-32 where they are smaller, but for gradients that
            are exactly 0 where a gate is. Without a gradient one kernel may be the whole forward, whose log decay is
            added up in float32. `"mosaic_mma"` runs the forward by kernels that need no Triton and no wgmma
            (`pallas_kernels.delta_rule.mosaic_mma`), slower than Triton's on an H100. Read where `config` is None.
        context_axis: the mesh axis of an enclosing `jax.shard_map` over whose devices the tokens of each row are split,
            in the devices' order; None is whole rows. `initial_state` is then the state before the first device's
            tokens; its gradient is the first device's, and zero on the others.

    Returns:
        The output in `v`'s dtype and the final state in float32, with a `context_axis` that after this device's tokens.

    Raises:
        NotImplementedError: there is an `unsupported_reason` or, with a `context_axis`, a `shard_reason`.
        ValueError: `backend` is none of these, or `tied_gates` comes with `write` or without a gate of one number a
            token.
    """
    if tied_gates and (write is not None or erase is None or erase.ndim != 3):
        raise ValueError("gated_delta_rule: tied_gates is True, expected erase [B, T, HV] and no write")
    expect_backend("gated_delta_rule", backend, "triton", "mosaic", "mosaic_mma")
    needed = "mosaic" if config is None and backend == "mosaic" else "triton"
    reason = unsupported_reason(q, k, v, erase, log_decay, chunk_size=chunk_size, backend=needed)
    refuse("gated_delta_rule", reason, needed)
    if context_axis is not None:
        refuse("gated_delta_rule", shard_reason(q, backend), backend)
    gates = erase, write, log_decay
    inputs = make_inputs(q, k, v, write_key, *gates, initial_state, segment_ids, context_axis=context_axis)
    if backend == "mosaic_mma":
        refuse("gated_delta_rule", _mma_reason(inputs), backend)
    how: dict[str, Any] = {"tied_gates": tied_gates, "backend": backend, "context_axis": context_axis}
    options, inputs = call_options(inputs, scale=scale, config=config, **how)
    if q.shape[1] == 1:
        out, state = one_token(choose_pass(), options, inputs)
    else:
        out, state = crop_results(inputs, choose_pass()(options, pad_inputs(inputs)))
    return out.astype(v.dtype), state


def call_options(
    inputs: Inputs,
    *,
    scale: float | None,
    config: DeltaRuleConfig | None,
    tied_gates: bool = False,
    online: bool = True,
    backend: str = "triton",
    context_axis: str | None = None,
) -> tuple[Options, Inputs]:
    """The static options of a call, and its inputs as its passes take them (see `Options`)."""
    scale = inputs.q.shape[-1] ** -0.5 if scale is None else float(scale)
    config = config or choose_config(inputs, online, backend, is_shard=context_axis is not None)
    write_key_dtype = None if inputs.write_key is None else inputs.write_key.dtype
    more: dict[str, Any] = {"tokens": inputs.q.shape[1], "context_axis": context_axis}
    options = Options(online, scale, config, tied_gates, write_key_dtype, **more)
    return options, pvary_together(inputs)

"""One token of a loop that seldom stores the state: its update of rank one is delayed. See `delayed_state`."""

from jax import Array
from jaxtyping import Float

from pallas_kernels.common.config import KernelConfig
from pallas_kernels.common.kernel_shape import CHUNK, next_power_of_two
from pallas_kernels.common.platform import is_hopper
from pallas_kernels.common.refusal import expect_backend, refuse
from pallas_kernels.common.triton.kernel_shape import KernelShape
from pallas_kernels.common.vma import varying_axes
from pallas_kernels.delta_rule import api
from pallas_kernels.delta_rule.delayed_state import DelayedState
from pallas_kernels.delta_rule.inputs import kernel_shape_of, make_inputs
from pallas_kernels.delta_rule.triton import decode_delayed as triton
from pallas_kernels.delta_rule.tuned_configs import choose_config

_FLUSH = KernelConfig(num_warps=2, num_stages=1, block=32)


def unsupported_reason(
    q: Array,
    k: Array,
    v: Array,
    erase: Array | None = None,
    log_decay: Array | None = None,
    *,
    backend: str = "triton",
) -> str | None:
    """Why updates of such tokens can't be delayed by a backend, as a noun phrase, or None if they can.

    Args:
        q: queries `[B, 1, H, K]`.
        k: keys `[B, 1, H, K]`.
        v: values `[B, 1, HV, V]`.
        erase: erase gate, or None.
        log_decay: log decay, or None.
        backend: `"triton"` or `"mosaic"`.
    """
    if q.shape[1] != 1:
        return f"{q.shape[1]} tokens (a single one)"
    if any(next_power_of_two(size) != size for size in (q.shape[3], v.shape[3])):
        return f"key size {q.shape[3]} with value size {v.shape[3]} (powers of two, at least 16)"
    reason = api.unsupported_reason(q, k, v, erase, log_decay, chunk_size=CHUNK)
    if reason is not None or backend == "triton":
        return reason
    if not is_hopper():
        return "this device (it runs on Hopper cards)"
    if axes := varying_axes([x for x in (q, k, v, erase, log_decay) if x is not None]):
        return f"arrays that vary along {sorted(axes)} inside jax.shard_map"  # it updates arrays in place
    try:
        from pallas_kernels.delta_rule.mosaic_gpu.decode_delayed import unsupported_sizes
    except ImportError as error:
        return f"this jax: {error}"
    return unsupported_sizes(q.shape[3], v.shape[3])


def delayed_token(
    q: Float[Array, "B 1 H K"],
    k: Float[Array, "B 1 H K"],
    v: Float[Array, "B 1 HV V"],
    *,
    delayed: DelayedState,
    erase: Float[Array, "B 1 HV"] | Float[Array, "B 1 HV K"] | None = None,
    write: Float[Array, "B 1 HV"] | Float[Array, "B 1 HV V"] | None = None,
    write_key: Float[Array, "B 1 H K"] | Float[Array, "B 1 HV K"] | None = None,
    log_decay: Float[Array, "B 1 HV"] | Float[Array, "B 1 HV K"] | None = None,
    scale: float | None = None,
    online: bool = True,
    launch: KernelConfig | None = None,
    backend: str = "triton",
) -> tuple[Float[Array, "B 1 HV V"], DelayedState]:
    """`gated_delta_rule` or `linear_attention` of one token, whose update is kept beside the state.

    Args:
        q: queries, bfloat16 or float32; K and V are powers of two.
        k: read keys.
        v: values.
        delayed: the state, from `without_pending` or an earlier token.
        erase: as for `gated_delta_rule`.
        write: likewise.
        write_key: likewise.
        log_decay: likewise; None where `delayed` has none.
        scale: likewise.
        online: False for `linear_attention`, whose keys are `k`.
        launch: how the kernel is compiled; None takes that of the device's schedule.
        backend: `"triton"` has the bits of the step that stores each time; `"mosaic"` is faster where it has no
            `unsupported_reason`, and differs by float32 rounding.

    Returns:
        The output in `v`'s dtype, and the state after the token. No gradient is defined.

    Raises:
        NotImplementedError: there is an `unsupported_reason`, but for the device and `jax.shard_map`.
        ValueError: `backend` is neither.
    """
    expect_backend("delayed_token", backend, "triton", "mosaic")
    refuse("delayed_token", unsupported_reason(q, k, v, erase, log_decay))
    x = make_inputs(q, k, v, write_key, erase, write, log_decay, None, None)
    if x.write_key is not None:
        x = x._replace(write_key=x.write_key.astype(x.k.dtype))
    kernel_shape = kernel_shape_of(
        KernelShape, x, online=online, scale=q.shape[-1] ** -0.5 if scale is None else float(scale)
    )
    if backend == "mosaic":
        from pallas_kernels.delta_rule.mosaic_gpu import decode_delayed as mosaic

        refuse("delayed_token", mosaic.unsupported_sizes(q.shape[3], v.shape[3]), backend)
        return mosaic.delayed_token(x, delayed, scale=kernel_shape.scale, online=online)
    out, after = triton.delayed_token(kernel_shape, x, delayed, launch or choose_config(x, online).decode)
    return out.astype(v.dtype), after


def flush(delayed: DelayedState, launch: KernelConfig | None = None) -> Float[Array, "B HV K V"]:
    """The state with all pending updates, in place of the one that is given; float32."""
    return triton.flush(delayed, launch or _FLUSH)

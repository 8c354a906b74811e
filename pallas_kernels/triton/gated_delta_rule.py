"""The gated delta rule and linear attention through Triton kernels: public functions."""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from pallas_kernels.triton.family import Options, run
from pallas_kernels.triton.problem import Inputs
from pallas_kernels.triton.schedule import Schedule


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
    scale: float | None = None,
    schedule: Schedule | None = None,
) -> tuple[Float[Array, "B T HV V"], Float[Array, "B HV K V"]]:
    """Doc."""
    inputs = _inputs(q, k, v, write_key, erase, write, log_decay, initial_state, segment_ids)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return run(Options(True, scale, schedule or Schedule()), inputs)


def _inputs(q, k, v, write_key, erase, write, log_decay, initial_state, segment_ids) -> Inputs:
    dtype = v.dtype
    starts = None
    if segment_ids is not None:
        changes = segment_ids[:, 1:] != segment_ids[:, :-1]
        starts = jnp.pad(changes, ((0, 0), (1, 0))).astype(jnp.int32)
        if log_decay is None:
            log_decay = jnp.zeros(v.shape[:3], jnp.float32)
    write_key = None if write_key is None else write_key.astype(dtype)
    return Inputs(q.astype(dtype), k.astype(dtype), v, write_key, erase, write, log_decay, initial_state, starts)

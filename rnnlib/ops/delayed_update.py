"""Loops over single tokens that seldom store the state: `pallas_kernels.delta_rule.delayed_state` says how.

`delay_updates` before the loop, `delayed_token` for each token, `flush` after it.
"""

import jax.numpy as jnp
from jax import Array

from pallas_kernels.common.platform import platform
from pallas_kernels.delta_rule.delayed_state import PERIOD as PERIOD
from pallas_kernels.delta_rule.delayed_state import DelayedState as DelayedState
from pallas_kernels.delta_rule.delayed_state import without_pending as without_pending
from rnnlib.ops.context_parallel import current_axis
from rnnlib.ops.gated_delta_rule.reference import DeltaRuleInputs
from rnnlib.ops.kernels import kernel_operators, unsupported_reason
from rnnlib.ops.sharding import is_split

LEAST_BYTES = 8 * 2**20
"""Of a layer's states where writes wait. Below, on an H100, a step takes as long as its loads take to arrive."""


def delay_updates(state: Array, token: DeltaRuleInputs, *, implementation: str | None) -> Array | DelayedState:
    """The state as a loop carries it: one beside which writes wait, where a kernel serves and gains by that.

    Args:
        state: `[B, HV, K, V]`.
        token: any token of the loop, T = 1: shapes and dtypes count, not values. Linear attention's has no erase gate
            and no write key, and writes `k`.
        implementation: of the operator, as its argument.
    """
    x = token
    if implementation not in (None, "triton", "mosaic") or (implementation is None and platform() != "gpu"):
        return state
    is_large = state.size * state.dtype.itemsize >= LEAST_BYTES
    if state.dtype != jnp.float32 or not is_large or is_split(state) or current_axis() is not None:
        return state
    arrays = x.q, x.k, x.v, x.gates.erase, x.log_decay
    if unsupported_reason(lambda kernels: kernels.delayed_update.unsupported_reason(*arrays)) is not None:
        return state
    key = x.k if x.write_key is None else x.write_key
    return without_pending(state, key.astype(jnp.result_type(x.q, x.k, x.v)), x.log_decay)


def delayed_token(
    token: DeltaRuleInputs,
    state: DelayedState,
    *,
    scale: float | None,
    online: bool = True,
    implementation: str | None = None,
) -> tuple[Array, DelayedState]:
    """Output `[B, 1, HV, V]` and the state after one token.

    With `implementation="triton"` they have the bits of the operator's kernel for one token, which stores the state.
    Else a faster kernel in Mosaic GPU serves where it can, which differs by float32 rounding.

    Args:
        token: as for `delay_updates`.
        state: from `delay_updates` or an earlier token.
        scale: factor on the output; None is `K ** -0.5`.
        online: the delta rule; False is linear attention.
        implementation: of the operator, as its argument.

    Raises:
        NotImplementedError: there is more than one token.
    """
    gates = token.gates
    arrays = token.q, token.k, token.v, gates.erase, token.log_decay
    kernels = kernel_operators().delayed_update
    is_mosaic = implementation != "triton" and kernels.unsupported_reason(*arrays, backend="mosaic") is None
    backend = "mosaic" if is_mosaic else "triton"
    named = {name: x for name, x in token._asdict().items() if name != "gates"}
    return kernels.delayed_token(
        **named,
        erase=gates.erase,
        write=gates.write,
        delayed=state,
        scale=scale,
        online=online,
        backend=backend,
    )


def flush(state: DelayedState) -> Array:
    """The state `[B, HV, K, V]` with all pending writes."""
    return kernel_operators().delayed_update.flush(state)

"""The diagonal-plus-low-rank recurrence on NVIDIA GPUs.

`dplr_triton` runs kernels of its own, for decays as weak as RWKV-7's. For stronger ones, and for more channels,
`dplr_two_steps` runs the delta rule's kernels. The delta rule removes and adds along one key, this recurrence along
two. So a token is two of the delta rule's steps:

    S' = D S - b (S^T a)^T        decays; reads along `a`, writes nothing along `b`
    S'' = S' + k v^T              no decay; reads nothing, writes `v` along `k`; the query reads

The delta rule reads the state after it has decayed. The erase gate `1 / D` takes the decay out of that reading, so the
decay needs a lower bound.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from rnnlib.ops.arguments import accumulation_dtype
from rnnlib.ops.context_parallel import erasing_rule_on_shard
from rnnlib.ops.derivatives import with_further_derivatives
from rnnlib.ops.dplr.reference import DPLRInputs
from rnnlib.ops.dplr.xla_chunked import dplr_chunked
from rnnlib.ops.gated_delta_rule.pallas import gated_delta_rule_triton
from rnnlib.ops.gated_delta_rule.reference import DeltaRuleInputs
from rnnlib.ops.gates import ResolvedGates
from rnnlib.ops.kernels import kernel_operators

# The least log decay whose inverse is taken: the erase gate is at most e^5.
LEAST_LOG_DECAY = -5.0


def two_steps(inputs: DPLRInputs) -> DeltaRuleInputs:
    """The arguments of the delta rule over `2 T` steps."""
    q, k, v, a, b, log_decay = inputs
    batch, length, heads = v.shape[:3]
    wide = accumulation_dtype(*inputs)

    def repeated(x: Array) -> Array:
        """For each value head, where `a` is of value heads."""
        return x if x.shape[2] == a.shape[2] else jnp.repeat(x, a.shape[2] // x.shape[2], axis=2)

    if log_decay is None:
        erase = jnp.ones((batch, length, heads), wide)
    else:
        erase = jnp.exp(-log_decay.astype(wide))
        log_decay = _in_turn(log_decay, jnp.zeros_like(log_decay))
    write = jnp.zeros((batch, length, heads), wide)
    gates = ResolvedGates(_in_turn(erase, jnp.zeros_like(erase)), _in_turn(write, write + 1))
    if b.shape[2] != k.shape[2]:
        b, k = (jnp.repeat(x, heads // x.shape[2], axis=2) for x in (b, k))
    q = repeated(q)
    return DeltaRuleInputs(
        _in_turn(jnp.zeros_like(q), q),
        _in_turn(a, jnp.zeros_like(a)),
        _in_turn(jnp.zeros_like(v), v),
        gates,
        _in_turn(b, k),
        log_decay,
    )


def _in_turn(first: Array, second: Array) -> Array:
    """`[B, T, ...]` of each step as `[B, 2 T, ...]`."""
    return jnp.stack([first, second], axis=2).reshape(first.shape[0], -1, *first.shape[2:])


def channel_decay(log_decay: Array | None, key: Array, values: Array) -> Array:
    """A log decay for each key channel of each value head, from one that may be absent or a number a token."""
    shape = *values.shape[:3], key.shape[3]
    if log_decay is None:
        return jnp.zeros(shape, accumulation_dtype(key, values))
    return log_decay if log_decay.ndim == 4 else jnp.broadcast_to(log_decay[..., None], shape)


def has_own_kernels(inputs: DPLRInputs, least_log_decay: float | None) -> bool:
    """Whether `dplr_triton` takes a call that the delta rule's kernels do."""
    operators = kernel_operators()
    if inputs.log_decay is not None and (
        least_log_decay is None or least_log_decay < operators.diagonal_plus_low_rank.LEAST_LOG_DECAY
    ):
        return False
    most = operators.diagonal_plus_low_rank.MAX_CHANNELS[jnp.result_type(inputs.q, inputs.a, inputs.v).name]
    return max(inputs.q.shape[3], inputs.v.shape[3]) <= most


@functools.partial(jax.jit, static_argnames=("scale", "chunk_size", "context_axis"), inline=True)
def dplr_triton(
    inputs: DPLRInputs,
    initial_state: Array | None,
    segment_ids: Array | None,
    *,
    scale: float,
    chunk_size: int,
    context_axis: str | None = None,
) -> tuple[Array, Array]:
    """Evaluates the recurrence by kernels of its own; arguments and results as `dplr_two_steps`.

    `chunk_size` is tokens in a chunk.
    """

    def keywords(inputs: DPLRInputs, initial_state, segment_ids) -> dict[str, Any]:
        arrays = inputs._asdict() | {"log_decay": channel_decay(inputs.log_decay, inputs.q, inputs.v)}
        options = {"scale": scale, "context_axis": context_axis}
        return arrays | {"initial_state": initial_state, "segment_ids": segment_ids, **options}

    reference: Any = functools.partial(dplr_chunked, scale=scale, chunk_size=chunk_size)
    if context_axis is not None:
        reference = functools.partial(erasing_rule_on_shard, reference, axis=context_axis)
    run = with_further_derivatives(kernel_operators().diagonal_plus_low_rank.dplr, keywords, reference)
    return run(inputs, initial_state, segment_ids)


def dplr_two_steps(
    inputs: DPLRInputs,
    initial_state: Array | None,
    segment_ids: Array | None,
    *,
    scale: float,
    chunk_size: int,
    backend: str = "triton",
    context_axis: str | None = None,
) -> tuple[Array, Array]:
    """Evaluates the recurrence by the delta rule's kernels; results as `dplr_scan`.

    Args:
        inputs: token-wise arguments, with log decays of at least `LEAST_LOG_DECAY`.
        initial_state: None (zero) or `[B, HV, K, V]`.
        segment_ids: None or `[B, T]`.
        scale: factor on the output.
        chunk_size: steps in a chunk, two for each token.
        backend: as of the delta rule.
        context_axis: likewise.
    """
    documents = None if segment_ids is None else jnp.repeat(segment_ids, 2, axis=1)
    options: dict[str, Any] = {"scale": scale, "chunk_size": chunk_size, "backend": backend}
    given = two_steps(inputs), initial_state, documents
    out, state = gated_delta_rule_triton(*given, context_axis=context_axis, **options)
    return out[:, 1::2], state

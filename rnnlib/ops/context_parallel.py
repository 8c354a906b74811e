"""Rows whose tokens are split over devices: each device has one shard of every row, in the devices' order.

Over a shard of any length, a recurrence maps the entering state to `M state + N`. Each device computes M and N of its
own shard, the devices exchange all M and N, and each device composes the maps of the devices before it into the state
that enters its own shard. From there the operator runs as on one device. The size of M and N does not grow with the
row. Kernels that cut a sequence into parts have the parts' maps, and most find M and N from these
(`pallas_kernels.delta_rule.row_shards`); other implementations run once more for them. Attention has no such map:
devices exchange its keys and values.

Sources: the affine maps of linear recurrences are those of Blelloch's parallel scan (1990); LASP-2 (arXiv 2502.07563)
gathers the states of linear attention over devices.
"""

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.common.row_shards import continues, entering, from_before, matrix_product
from pallas_kernels.common.vma import pvary_together
from rnnlib.ops.arguments import accumulation_dtype, resets_of
from rnnlib.ops.kernels import kernel_operators

# A user context is part of the cache key of `jax.jit`.
_AXIS = jax.make_user_context(default_value=None)

Product = Callable[[Array, Array], Array]


def context_axis(name: str | None) -> AbstractContextManager[Any]:
    """Within this context, tokens given to operators and layers are one shard of each row.

    For use inside `jax.shard_map` over a mesh with that axis, which splits the tokens (and segment ids, positions and
    outputs) evenly: device i of the axis has the i-th shard. Outputs and gradients equal those of one device with
    whole rows. An initial state is the state before the row's first token, and must be the same on each device. A final
    state is the state after the row's last token, and is returned on each device.

        @jax.shard_map(mesh=mesh, in_specs=PartitionSpec(None, "context"), out_specs=PartitionSpec(None, "context"))
        def mix(q, k, v, beta):
            with rnnlib.ops.context_axis("context"):
                return rnnlib.ops.gated_delta_rule(q, k, v, beta=beta)[0]

    As in any `jax.shard_map` with `check_vma=False`, a gradient that is computed inside, with respect to a value that
    all devices have, is only this device's part: the whole gradient is the sum over devices.

    Args:
        name: the mesh axis; None is whole rows again.

    Raises:
        TypeError: `name` is no text.
    """
    if name is not None and not isinstance(name, str):
        raise TypeError(f"context_axis: name is {name!r}, expected a mesh axis's name or None")
    return _AXIS(name)


def current_axis() -> str | None:
    """The mesh axis over which tokens are split, or None where each device has whole rows.

    Raises:
        ValueError: no enclosing `jax.shard_map` has this axis.
    """
    name = _AXIS.value
    if name is None:
        return None
    try:
        size = lax.axis_size(name)
    except NameError:
        raise ValueError(
            f"context_axis({name!r}): there is no such axis here, expected to be inside jax.shard_map over a mesh "
            f"with an axis {name!r}"
        ) from None
    return name if size > 1 else None


def expect_whole_rows(what: str) -> None:
    """Raises NotImplementedError, with a message that begins with `what`, if tokens are split over devices."""
    axis = current_axis()
    if axis is not None:
        raise NotImplementedError(f"{what}: is not for tokens split over devices (context_axis({axis!r}))")


def of_first(x: Array, axis: str) -> Array:
    """The first device's `x`, on each device."""
    return _of_device(x, axis, 0)


def of_last(x: Array, axis: str) -> Array:
    """The last device's `x`, on each device."""
    return _of_device(x, axis, lax.axis_size(axis) - 1)


def _of_device(x: Array, axis: str, index: int) -> Array:
    return lax.psum(jnp.where(lax.axis_index(axis) == index, x, jnp.zeros_like(x)), axis)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def with_last_tokens(x: Array, count: int) -> tuple[Array, Array]:
    """`x` `[B, T, ...]`, and its last `count` tokens, for what reads both.

    The gradient of the last tokens is added where they are. As a slice's gradient it would be padded to the length of
    `x`, and the sum would read and write all of it. So it would if XLA fused the sum with its place, hence the barrier.
    There is no forward-mode derivative.
    """
    return x, x[:, x.shape[1] - count :]


def _with_last_tokens_forward(x: Array, count: int) -> tuple[tuple[Array, Array], None]:
    return with_last_tokens(x, count), None


def _with_last_tokens_backward(count: int, _: None, gradients: tuple[Array, Array]) -> tuple[Array]:
    d_x, d_last = gradients
    start = d_x.shape[1] - count
    total = lax.optimization_barrier(d_x[:, start:] + d_last)
    return (lax.dynamic_update_slice_in_dim(d_x, total, start, axis=1),)


with_last_tokens.defvjp(_with_last_tokens_forward, _with_last_tokens_backward)


def tokens_before(
    operator: str,
    x: Array,
    count: int,
    initial: Array | None,
    segment_ids: Array | None,
    axis: str,
    last: Array | None = None,
) -> Array:
    """The last `count` tokens before this device's shard, `[B, count, ...]`; zeros for tokens of other documents.

    Args:
        operator: the public function's name, which begins the message.
        x: `[B, T, ...]`.
        count: number of tokens.
        initial: the tokens before the first device's shard; None is zeros.
        segment_ids: None or `[B, T]`.
        axis: the mesh axis over which tokens are split.
        last: the last `count` tokens of `x`, from `with_last_tokens`; None is a slice of `x`.

    Raises:
        ValueError: a shard has fewer than `count` tokens.
    """
    length = x.shape[1]
    if length < count:
        raise ValueError(
            f"{operator}: each of the {lax.axis_size(axis)} devices of mesh axis {axis!r} has {length} tokens of a "
            f"row, expected at least {count}: those that the next device reads"
        )
    if count == 0:
        return x[:, :0]
    before = from_before(x[:, -count:] if last is None else last, axis)
    if segment_ids is not None:
        ids = from_before(segment_ids[:, -count:], axis)
        # True from the end of the previous shard backwards, up to the first change of id.
        same = jnp.flip(jnp.cumprod(jnp.flip(ids == segment_ids[:, :1], axis=1), axis=1), axis=1)
        before = jnp.where(same.reshape(*same.shape, *(1,) * (x.ndim - 2)), before, 0)
    first = jnp.zeros_like(before) if initial is None else initial.astype(x.dtype)
    return jnp.where(lax.axis_index(axis) == 0, first, before)


def token_after(x: Array, axis: str) -> Array:
    """The token after this device's shard, `[B, ...]` of `x` `[B, T, ...]`; zeros on the last device."""
    size = lax.axis_size(axis)
    return lax.ppermute(x[:, 0], axis, [(i + 1, i) for i in range(size - 1)])


def token_before(x: Array, axis: str) -> Array:
    """The token before this device's shard, of any document, `[B, ...]` of `x` `[B, T, ...]`; zeros on the first."""
    return from_before(x[:, -1], axis)


def document_starts(segment_ids: Array) -> Array:
    """Whether each token begins a new document of its row, `[B, T]` bool; tokens may be split over devices."""
    resets, axis = resets_of(segment_ids), current_axis()
    return resets if axis is None else resets.at[:, 0].set(~continues(segment_ids, axis))


def first_position(length: int) -> Array | int:
    """The position in its row of the first of `length` tokens: 0, or the start of this device's shard."""
    axis = current_axis()
    return 0 if axis is None else lax.axis_index(axis) * length


def entering_state(
    transition: Array, offset: Array, initial_state: Array, segment_ids: Array | None, product: Product, axis: str
) -> Array:
    """The state that enters this device's shard: zero where the shard begins a document.

    Args:
        transition: M of the shard, `[B, ...]`, zero where a document starts after its first token.
        offset: N of the shard, of the state's shape `[B, ...]`.
        initial_state: the state that enters the first device's shard.
        segment_ids: None or `[B, T]` of the shard.
        product: the product of a transition and a state.
        axis: the mesh axis over which tokens are split.
    """
    batch = offset.shape[0]
    goes_on = None if segment_ids is None else continues(segment_ids, axis)

    def kept(x: Array) -> Array:
        return x if goes_on is None else jnp.where(goes_on.reshape(batch, *(1,) * (x.ndim - 1)), x, 0)

    return kept(entering(kept(transition), offset, initial_state, product, axis))


def total_decay(log_decay: Array | None, segment_ids: Array | None, like: Array) -> Array:
    """The decay over a whole shard, for states that only decay, `[B, ...]`: zero where a document starts inside.

    Args:
        log_decay: `[B, T, ...]` or None, no decay.
        segment_ids: None or `[B, T]`.
        like: an array `[B, ...]` of the result's rank and dtype. Axes that a decay lacks are added last, of size 1.
    """
    batch = like.shape[0]
    if log_decay is None:
        decay = jnp.ones((batch, *(1,) * (like.ndim - 1)), like.dtype)
    else:
        decay = jnp.exp(jnp.sum(log_decay.astype(like.dtype), axis=1))
        decay = decay.reshape(*decay.shape, *(1,) * (like.ndim - decay.ndim))
    if segment_ids is None:
        return decay
    resets = jnp.any(resets_of(segment_ids), axis=1)
    return jnp.where(resets.reshape(batch, *(1,) * (like.ndim - 1)), 0, decay)


def enter_gram(
    offset: Array, log_decay: Array | None, initial_state: Array | None, segment_ids: Array | None, axis: str
) -> Array:
    """The decayed sum that enters this device's shard; arguments as `entering_state` and `total_decay` take them."""
    initial = jnp.zeros_like(offset) if initial_state is None else initial_state
    return entering_state(total_decay(log_decay, segment_ids, offset), offset, initial, segment_ids, jnp.multiply, axis)


Run = Callable[[Any, Array | None, Array | None], tuple[Array, Array]]


def evaluate_on_shards(
    run: Run, inputs: Any, initial_state: Array | None, segment_ids: Array | None, axis: str
) -> tuple[Array, Array]:
    """Runs a rule on split rows: the outputs of this device's tokens, and the state after the row's last token.

    Args:
        run: the rule on this device's shard, which returns the state after the shard: kernels with a `context_axis`,
            which find M and N on their way, or `erasing_rule_on_shard` or `decaying_rule_on_shard` of any others.
        inputs: the rule's token-wise arguments.
        initial_state: None (zero) or `[B, HV, K, V]`.
        segment_ids: None or `[B, T]`.
        axis: the mesh axis over which tokens are split.
    """
    inputs, initial_state = pvary_together((inputs, initial_state))
    out, final = run(inputs, initial_state, segment_ids)
    return out, of_last(final, axis)


def choose_rule_on_shard(
    run: Callable[..., tuple[Array, Array]], implementations: Mapping[str, Any], q: Array, axis: str
) -> Run:
    """How a rule whose transitions are matrices is evaluated on each device's shard.

    The delta rule's kernels find a shard's map on their way; other implementations are called for it.

    Args:
        run: the implementation that was chosen.
        implementations: all of the operator's, by name.
        q: queries `[B, T, H, K]` of a shard.
        axis: the mesh axis over which tokens are split.
    """
    backend = next((name for name in ("triton", "mosaic") if run is implementations[name]), None)
    kernels = None if backend is None else kernel_operators().delta_rule
    if kernels is not None and kernels.shard_reason(q, backend) is None:
        return functools.partial(run, context_axis=axis)
    widest = None if kernels is None else kernels.MAX_CHANNELS[backend]
    return functools.partial(erasing_rule_on_shard, run, axis=axis, widest=widest)


def erasing_rule_on_shard(
    run: Run,
    inputs: Any,
    initial_state: Array | None,
    segment_ids: Array | None,
    *,
    axis: str,
    widest: int | None = None,
) -> tuple[Array, Array]:
    """A rule whose transitions are matrices `[K, K]`, such as the delta rule's, on this device's shard of each row.

    The rule itself computes N and M: with K more value channels, all zero, and the initial state `[0 | I]`, its final
    state is `[N | M]`.

    Args:
        run: the operator's implementation.
        inputs: the rule's token-wise arguments, a named tuple with at least `q`, `v [B, T, HV, V]` and, if it has any,
            `gates`.
        initial_state: None (zero) or `[B, HV, K, V]`.
        segment_ids: None or `[B, T]`.
        axis: the mesh axis over which tokens are split.
        widest: value channels that `run` supports at most, None for any. Where N and M have more, each has a call of
            its own.

    Returns:
        The outputs of this device's tokens, and the state after them.
    """
    state = _state_like(inputs, initial_state)
    key_size, value_size = state.shape[2:]
    identity = jnp.broadcast_to(jnp.eye(key_size, dtype=state.dtype), (*state.shape[:3], key_size))
    zeros = jnp.zeros((*inputs.v.shape[:3], key_size), inputs.v.dtype)
    if widest is None or key_size + value_size <= widest:
        both = jnp.concatenate([jnp.zeros_like(state), identity], axis=-1)
        wide = _with_values(inputs, zeros, lambda given, x: jnp.concatenate([given, x], axis=-1))
        final = run(wide, both, segment_ids)[1]
        offset, transition = final[..., :value_size], final[..., value_size:]
    else:
        offset = run(inputs, None, segment_ids)[1]
        transition = run(_with_values(inputs, zeros, lambda given, x: x), identity, segment_ids)[1]
    before = entering_state(transition, offset, state, segment_ids, matrix_product, axis)
    return run(inputs, before, segment_ids)


def _with_values(inputs: Any, v: Array, joined: Callable[[Array, Array], Array]) -> Any:
    """The inputs with `joined(values, v)` for values; a write gate of one number a value channel is 1 for `v`."""
    changed: dict[str, Any] = {"v": joined(inputs.v, v)}
    gates = getattr(inputs, "gates", None)
    if gates is not None and gates.write is not None and gates.write.ndim == 4:
        changed["gates"] = gates.with_write(joined(gates.write, jnp.ones_like(v, dtype=gates.write.dtype)))
    return inputs._replace(**changed)


def decaying_rule_on_shard(
    run: Run, inputs: Any, initial_state: Array | None, segment_ids: Array | None, *, axis: str
) -> tuple[Array, Array]:
    """A rule whose transitions only decay the state, on this device's shard; see `erasing_rule_on_shard`."""
    state = _state_like(inputs, initial_state)
    before = enter_gram(run(inputs, None, segment_ids)[1], inputs.log_decay, state, segment_ids, axis)
    return run(inputs, before, segment_ids)


def _state_like(inputs: Any, initial_state: Array | None) -> Array:
    """The initial state, or zeros `[B, HV, K, V]`, in the dtype of states."""
    dtype = accumulation_dtype(*jax.tree.leaves(inputs), initial_state)
    if initial_state is not None:
        return initial_state.astype(dtype)
    batch, _, value_heads, value_size = inputs.v.shape
    return jnp.zeros((batch, value_heads, inputs.q.shape[3], value_size), dtype)

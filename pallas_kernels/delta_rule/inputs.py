"""Arrays of a call of the delta rule or of linear attention, for every backend: dtypes, padding, static facts."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from pallas_kernels.common.kernel_shape import CHUNK, KernelShape, is_channel_wise, next_power_of_two, resets_of
from pallas_kernels.common.row_shards import continues


class Inputs(NamedTuple):
    """Arguments of a call, lengths padded to whole chunks and channels to powers of two.

    Attributes:
        q: `[B, T, H, K]`.
        k: `[B, T, H, K]`.
        v: `[B, T, HV, V]`.
        write_key: None (`k`), `[B, T, H, K]` or `[B, T, HV, K]`.
        erase: None (1), `[B, T, HV]` or `[B, T, HV, K]`.
        write: None (1), `[B, T, HV]` or `[B, T, HV, V]`.
        log_decay: None, `[B, T, HV]` or `[B, T, HV, K]`.
        initial_state: None (zero) or `[B, HV, K, V]` float32.
        resets: None, or `[B, T]` int32, 1 at each token that starts a document.
        value_key: None, or `[B, T, H, K]` or `[B, T, HV, K]`, the key that values are written along where that is not
            the key that takes away what is erased (`dplr`).
        diagonal: None (`write`), or `[B, T, HV]`, in place of `write` on what a token of linear attention reads of its
            own write.
    """

    q: Array
    k: Array
    v: Array
    write_key: Array | None = None
    erase: Array | None = None
    write: Array | None = None
    log_decay: Array | None = None
    initial_state: Array | None = None
    resets: Array | None = None
    value_key: Array | None = None
    diagonal: Array | None = None


def make_inputs(
    q: Array,
    k: Array,
    v: Array,
    write_key: Array | None,
    erase: Array | None,
    write: Array | None,
    log_decay: Array | None,
    initial_state: Array | None,
    segment_ids: Array | None,
    diagonal: Array | None = None,
    context_axis: str | None = None,
) -> Inputs:
    """Brings the matrices to one dtype and the gates to one that kernels load, and marks documents' first tokens.

    Tokens may be split over devices along `context_axis`.
    """
    dtype = jnp.result_type(q, k, v)
    resets = resets_of(segment_ids)
    if context_axis is not None and resets is not None:
        is_first = jnp.logical_not(continues(segment_ids, context_axis))  # type: ignore[arg-type]
        resets = resets.at[:, 0].set(is_first.astype(resets.dtype))
    if resets is not None and log_decay is None:
        log_decay = jnp.zeros(v.shape[:3], jnp.float32)

    def widened(x):
        return x if x is None or x.dtype in (jnp.bfloat16, jnp.float32) else x.astype(jnp.float32)

    return Inputs(
        q=q.astype(dtype),
        k=k.astype(dtype),
        v=v.astype(dtype),
        write_key=widened(write_key),
        erase=widened(erase),
        write=widened(write),
        log_decay=widened(log_decay),
        initial_state=widened(initial_state),
        resets=resets,
        diagonal=widened(diagonal),
    )


def pad_inputs(inputs: Inputs, whole_chunks: bool = True) -> Inputs:
    """Pads channels to powers of two and, with `whole_chunks`, the length to whole chunks; the padding does nothing."""
    key_size, value_size = inputs.q.shape[3], inputs.v.shape[3]
    tokens = -inputs.q.shape[1] % CHUNK if whole_chunks else 0
    keys, values = next_power_of_two(key_size) - key_size, next_power_of_two(value_size) - value_size
    if not (tokens or keys or values):
        return inputs

    def pad(x, channels):
        return None if x is None else jnp.pad(x, [(0, 0), (0, tokens), (0, 0), (0, channels)][: x.ndim])

    state = inputs.initial_state
    return Inputs(
        q=pad(inputs.q, keys),
        k=pad(inputs.k, keys),
        v=pad(inputs.v, values),
        write_key=pad(inputs.write_key, keys),
        erase=pad(inputs.erase, keys),
        write=pad(inputs.write, values),
        log_decay=pad(inputs.log_decay, keys),
        initial_state=None if state is None else jnp.pad(state, [(0, 0), (0, 0), (0, keys), (0, values)]),
        resets=pad(inputs.resets, 0),
        value_key=pad(inputs.value_key, keys),
        diagonal=pad(inputs.diagonal, 0),
    )


def crop_results(inputs: Inputs, results: tuple[Array, Array]) -> tuple[Array, Array]:
    """Output and state without what `pad_inputs` added to `inputs`."""
    (out, state), key_size, value_size = results, inputs.q.shape[3], inputs.v.shape[3]
    return out[:, : inputs.q.shape[1], :, :value_size], state[:, :, :key_size, :value_size]


def is_sum(inputs: Inputs, online: bool) -> bool:
    """Whether a call is a sum over pairs of tokens with one weight each, which takes kernels of its own."""
    return not online and not is_channel_wise(inputs.log_decay)


def kernel_shape_of[Kind: KernelShape](
    kind: type[Kind], inputs: Inputs, *, online: bool, scale: float, num_splits: int = 1, tokens: int | None = None
) -> Kind:
    """The static facts of a call on `inputs`, as a backend's `kind` of problem."""
    batch, length, key_heads, key_size = inputs.q.shape
    value_heads, value_size = inputs.v.shape[2:]
    sizes = batch, length, key_heads, value_heads, key_size, value_size
    tokens = None if tokens == length else tokens
    return kind(*sizes, jnp.dtype(inputs.v.dtype), online, scale, num_splits, tokens)

"""Argument handling that all operators share: checks, dtypes, choice of implementation."""

import math
import reprlib
from collections.abc import Callable, Mapping
from numbers import Integral
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels.common.platform import platform

IMPLEMENTATIONS = ("scan", "chunked", "triton", "mosaic")

# Keeps a wrong argument short in an error message: `reprlib.repr` would print six nested lists, six levels deep.
_SHORT = reprlib.Repr(maxlevel=2, maxlist=2, maxtuple=2)

_FLOATING = "a floating dtype of at least 16 bits"


def check_shape(operator: str, name: str, array: Array, *allowed: tuple[int, ...], axes: str) -> None:
    """Raises unless `array` has one of the shapes `allowed`.

    Args:
        operator: the public function's name, which begins the message.
        name: the argument's name.
        array: the argument.
        *allowed: shapes that the argument may have.
        axes: the same shapes in words, such as `"[B, T, HV] or [B, T, HV, K]"`.

    Raises:
        ValueError: names the argument, its shape and what was expected.
    """
    if array.shape not in allowed:
        expected = " or ".join(str(shape) for shape in allowed)
        raise ValueError(f"{operator}: {name} has shape {array.shape}, expected {axes} = {expected}")


def check_rank(operator: str, name: str, array: Array, rank: int, *, axes: str) -> None:
    """Raises ValueError unless `array` has `rank` axes, none of them empty."""
    if array.ndim != rank:
        raise ValueError(f"{operator}: {name} has shape {array.shape}, expected {axes} ({rank} axes)")
    if 0 in array.shape:
        raise ValueError(f"{operator}: {name} has shape {array.shape}, expected {axes} with no empty axis")


def floating_arrays(operator: str, **arguments: Any) -> list[Any]:
    """The arguments as jax arrays, in their order; `None` stays None.

    Args:
        operator: the public function's name, which begins the message.
        **arguments: arrays of JAX or NumPy. NumPy's float64 becomes float32 unless 64-bit types are enabled.

    Raises:
        TypeError: an argument is no array, or its dtype is not floating or has fewer than 16 bits. The message names
            the argument.
    """
    arrays: list[Array | None] = []
    for name, argument in arguments.items():
        if argument is None:
            arrays.append(None)
            continue
        check_array(operator, name, argument)
        array = argument if isinstance(argument, Array) else jnp.asarray(argument)
        if not _is_floating(array.dtype):
            raise TypeError(f"{operator}: {name} has dtype {array.dtype}, expected {_FLOATING}")
        arrays.append(array)
    return arrays


def check_floating_dtype(operator: str, name: str, dtype: Any) -> None:
    """Raises TypeError unless an argument is a floating dtype of at least 16 bits, or the name of one."""
    try:
        is_floating = _is_floating(jnp.dtype(dtype))
    except TypeError:
        is_floating = False
    if not is_floating:
        raise TypeError(f"{operator}: {name} is {_SHORT.repr(dtype)}, expected {_FLOATING}")


def _is_floating(dtype: Any) -> bool:
    """Whether a dtype is one that operators compute with; jax promotes narrower ones to no other dtype."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits >= 16


def check_array(operator: str, name: str, argument: Any, *, expected: str = "an array") -> None:
    """Raises TypeError if the argument has no shape or dtype, such as a list or a number."""
    if not hasattr(argument, "shape") or not hasattr(argument, "dtype"):
        raise TypeError(f"{operator}: {name} is {_SHORT.repr(argument)}, expected {expected}")


def check_segment_ids(operator: str, segment_ids: Array | None, batch: int, length: int) -> None:
    """Raises unless `segment_ids` is None or an integer array `[B, T]` whose values fit jax's integer dtype."""
    if segment_ids is None:
        return
    check_array(operator, "segment_ids", segment_ids)
    check_shape(operator, "segment_ids", segment_ids, (batch, length), axes="[B, T]")
    if not jnp.issubdtype(segment_ids.dtype, jnp.integer):
        raise TypeError(f"{operator}: segment_ids has dtype {segment_ids.dtype}, expected an integer dtype")
    # jax truncates NumPy's 64-bit integers; two documents could then get the same id.
    kept = jax.dtypes.canonicalize_dtype(segment_ids.dtype)
    if isinstance(segment_ids, np.ndarray) and kept != segment_ids.dtype and segment_ids.size:
        low, high = segment_ids.min(), segment_ids.max()
        if low < jnp.iinfo(kept).min or high > jnp.iinfo(kept).max:
            raise ValueError(f"{operator}: segment_ids has numbers from {low} to {high}, expected those of {kept}")


def _check_key_value_heads(operator: str, q: Array, k: Array | None, v: Array) -> None:
    """Checks q, k `[B, T, H, K]` (unless None) and v `[B, T, HV, V]`, where HV is a multiple of H."""
    check_rank(operator, "q", q, 4, axes="[B, T, H, K]")
    check_rank(operator, "v", v, 4, axes="[B, T, HV, V]")
    if k is not None:
        check_shape(operator, "k", k, q.shape, axes="the shape of q, [B, T, H, K]")
    if v.shape[:2] != q.shape[:2]:
        raise ValueError(f"{operator}: v has shape {v.shape}, expected batch and length [B, T] = {q.shape[:2]} as in q")
    if v.shape[2] % q.shape[2] != 0:
        raise ValueError(
            f"{operator}: v has {v.shape[2]} heads (shape {v.shape}), expected a multiple of the {q.shape[2]} key heads"
        )


def check_rule(
    operator: str,
    q: Array,
    k: Array | None,
    v: Array,
    gates: Mapping[str, Array | None],
    keys: Mapping[str, Array | None],
    initial_state: Array | None,
    segment_ids: Array | None,
    chunk_size: int,
) -> None:
    """Checks the arguments of a rule with a state `[K, V]` for each value head.

    Args:
        operator: the public function's name.
        q: queries `[B, T, H, K]`.
        k: keys `[B, T, H, K]`; None if they are among `keys`.
        v: values `[B, T, HV, V]`, where HV is a multiple of H.
        gates: by name, None, `[B, T, HV]`, or one number a channel: `[B, T, HV, V]` for `write`, else `[B, T, HV, K]`.
        keys: by name, None, `[B, T, H, K]` or `[B, T, HV, K]`.
        initial_state: None or `[B, HV, K, V]`.
        segment_ids: None or `[B, T]`.
        chunk_size: tokens in a chunk.

    Raises:
        ValueError: names the argument, its shape and what was expected.
        TypeError: `segment_ids` is no array of integers.
    """
    _check_key_value_heads(operator, q, k, v)
    batch, length, _, key_size = q.shape
    per_head, value_size = v.shape[:3], v.shape[3]
    for name, gate in gates.items():
        if gate is not None:
            size, letter = (value_size, "V") if name == "write" else (key_size, "K")
            axes = f"[B, T, HV] or [B, T, HV, {letter}]"
            check_shape(operator, name, gate, per_head, (*per_head, size), axes=axes)
    for name, key in keys.items():
        if key is not None:
            check_shape(operator, name, key, q.shape, (*per_head, key_size), axes="[B, T, H, K] or [B, T, HV, K]")
    if initial_state is not None:
        state_shape = (batch, v.shape[2], key_size, value_size)
        check_shape(operator, "initial_state", initial_state, state_shape, axes="[B, HV, K, V]")
    check_segment_ids(operator, segment_ids, batch, length)
    check_chunk_size(operator, chunk_size)


def check_chunk_size(operator: str, chunk_size: int) -> None:
    """Raises ValueError unless the chunk size is a power of two from 16 to 256."""
    if not isinstance(chunk_size, Integral) or chunk_size not in (16, 32, 64, 128, 256):
        raise ValueError(f"{operator}: chunk_size is {chunk_size!r}, expected 16, 32, 64, 128 or 256")


def scaled_queries(operator: str, q: Array, scale: Any) -> tuple[Array, float]:
    """Queries, and the output's scale as a Python number, for which the implementations are compiled.

    Args:
        operator: the public function's name.
        q: queries `[..., K]`.
        scale: None (`K ** -0.5`), a number, or a traced number (learned, or an argument of `jax.jit`). A traced number
            multiplies the queries, and the returned scale is 1.

    Raises:
        TypeError: `scale` is no number.
        ValueError: `scale` is not finite.
    """
    if scale is None:
        return q, q.shape[-1] ** -0.5
    if isinstance(scale, jax.core.Tracer) and scale.shape == ():
        return (scale * q).astype(q.dtype), 1.0
    try:
        number = float(scale)
    except (TypeError, ValueError):
        raise TypeError(f"{operator}: scale is {_SHORT.repr(scale)}, expected a number") from None
    if not math.isfinite(number):
        raise ValueError(f"{operator}: scale is {number}, expected a finite number")
    return q, number


def check_positive(operator: str, name: str, number: float) -> None:
    """Raises unless `number` is finite and positive after rounding to float32."""
    smallest, largest = (float(x) for x in (jnp.finfo(jnp.float32).tiny, jnp.finfo(jnp.float32).max))
    try:
        is_positive = bool(smallest <= number <= largest)
    except TypeError:  # `number` is None, text or a traced value
        raise TypeError(f"{operator}: {name} is {_SHORT.repr(number)}, expected a positive number") from None
    if not is_positive:
        raise ValueError(
            f"{operator}: {name} is {number}, expected a positive number, of at least {smallest:.2g} and finite"
        )


def per_head(
    operator: str, name: str, number: Any, heads: int, dtype: jnp.dtype, *, is_positive: bool = False
) -> Array:
    """Converts a number, an array with one number, or an array with one number per head to an array `[H]`.

    Args:
        operator: the public function's name.
        name: the argument's name.
        number: the argument.
        heads: H.
        dtype: of the result.
        is_positive: whether a number must be above 0; the values of an array are not checked.

    Raises:
        ValueError: a number is not finite or not positive, or an array has another shape.
        TypeError: the argument is neither a number nor an array, or the array is not floating.
    """
    number = number.item() if isinstance(number, np.generic) else number
    if isinstance(number, (int, float)):
        if is_positive:
            check_positive(operator, name, number)
        elif not math.isfinite(number):
            raise ValueError(f"{operator}: {name} is {number}, expected a finite number")
        return jnp.full((heads,), number, dtype)
    check_array(operator, name, number, expected="a number or an array")
    (array,) = floating_arrays(operator, **{name: number})
    check_shape(operator, name, array, (), (heads,), axes="a number or [H]")
    return jnp.broadcast_to(array.astype(dtype), (heads,))


def is_symbolic(size: Any) -> bool:
    """Whether a size is a variable of `jax.export` and not a number."""
    return not isinstance(size, Integral)


def accumulation_dtype(*arrays: Array | None) -> jnp.dtype:
    """Float64 where any argument is float64, float32 otherwise: the dtype of states and of all accumulation."""
    # A Python number passed to `jax.jit` is traced as weakly typed float64. It must not promote the result.
    is_double = any(x is not None and x.dtype == jnp.float64 and not x.weak_type for x in arrays)
    return jnp.dtype(jnp.float64 if is_double else jnp.float32)


def matmul_precision(*arrays: Array | None) -> str:
    """The matmul precision for a computation on these arguments: tf32 suffices if any of them is bfloat16."""
    is_half = any(array is not None and array.dtype in (jnp.bfloat16, jnp.float16) for array in arrays)
    return "tensorfloat32" if is_half else "highest"


def resets_of(segment_ids: Array) -> Array:
    """Whether each token begins a new segment, `[B, T]` bool.

    The first token never does: it continues the segment of `initial_state`.
    """
    changes = segment_ids[:, 1:] != segment_ids[:, :-1]
    return jnp.pad(changes, ((0, 0), (1, 0)))


def segment_index(segment_ids: Array) -> Array:
    """The number of changes of id up to and at each token, `[B, T]`: distinct for documents that share an id."""
    return jnp.cumsum(resets_of(segment_ids), axis=1, dtype=jnp.int32)


def choose_implementation[Implementation](
    operator: str,
    implementation: str | None,
    implementations: Mapping[str, Implementation],
    length: int,
    *,
    kernel_for_one_token: bool = True,
    slower: Mapping[str, Callable[[], bool]] | None = None,
    **unsupported: Callable[[], str | None],
) -> Implementation:
    """The implementation to run.

    Args:
        operator: the public function's name.
        implementation: the name that the caller passed; None takes the first of `default_preference` that supports the
            case.
        implementations: the operator's implementations by name.
        length: tokens in a sequence, T.
        kernel_for_one_token: whether None may choose a kernel for a single token, where XLA produces one fused loop.
        slower: for an implementation that is not always faster than the next one, by its name, a function that returns
            whether it is slower for this case, which it supports; None then passes over it.
        **unsupported: for each implementation that supports only some cases, by its name, a function that returns the
            reason why the implementation does not support this case, or None if it does.

    Raises:
        ValueError: `implementation` is not the name of an implementation.
        NotImplementedError: the implementation named does not support the case. The message gives the reason.
    """

    def objection(name: str) -> str | None:
        return unsupported[name]() if name in unsupported else None

    def is_chosen(name: str) -> bool:
        is_slower = (slower or {}).get(name, lambda: False)
        return name in implementations and objection(name) is None and not is_slower()

    if implementation is None:
        preference = default_preference(length) if length != 1 or kernel_for_one_token else ("scan", "chunked")
        return implementations[next(filter(is_chosen, preference))]
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"{operator}: implementation is {implementation!r}, expected None or one of {IMPLEMENTATIONS}")
    if implementation not in implementations:
        raise NotImplementedError(f"{operator}: there is no {implementation!r} implementation of this operator")
    reason = objection(implementation)
    if reason is not None:
        raise NotImplementedError(f"{operator}: implementation {implementation!r} does not support {reason}")
    return implementations[implementation]


def default_preference(length: int) -> tuple[str, ...]:
    """Implementations, best first, for sequences of `length` tokens on the default device."""
    if platform() == "gpu":
        return ("triton", "scan", "chunked") if length == 1 else ("mosaic", "triton", "chunked", "scan")
    return ("scan", "chunked") if length == 1 else ("chunked", "scan")

"""The diagonal Gram and its readout: checks that all operators share, choice of implementation."""

import functools
from collections.abc import Callable
from typing import Any

from jax import Array

from pallas_kernels.common.platform import platform
from rnnlib.ops.arguments import check_segment_ids, check_shape, choose_implementation, floating_arrays, is_symbolic
from rnnlib.ops.context_parallel import context_axis, current_axis, enter_gram, of_last
from rnnlib.ops.diagonal_preconditioner.inputs import DiagonalGramInputs
from rnnlib.ops.diagonal_preconditioner.pallas import diagonal_gram_triton, gram_unsupported_reason
from rnnlib.ops.diagonal_preconditioner.read_gram import read_gram, read_gram_in_blocks
from rnnlib.ops.diagonal_preconditioner.readouts import Gram
from rnnlib.ops.diagonal_preconditioner.reference import diagonal_gram_scan
from rnnlib.ops.diagonal_preconditioner.xla_chunked import diagonal_gram_chunked
from rnnlib.ops.kernels import kernel_operators

_IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    "scan": diagonal_gram_scan,
    "chunked": diagonal_gram_chunked,
    "triton": diagonal_gram_triton,
    "mosaic": functools.partial(diagonal_gram_triton, backend="mosaic"),
}


def evaluate(
    operator: str,
    readout: Any,
    inputs: DiagonalGramInputs,
    *,
    x: Array | None = None,
    parameter: Array | None = None,
    like: Array | None = None,
    dtype: Any = None,
    with_key: bool = False,
    initial_state: Array | None,
    segment_ids: Array | None,
    implementation: str | None,
) -> tuple[Array, Array, Array]:
    """A readout of the diagonal Gram after each token.

    Args:
        operator: the public function's name, which error messages begin with.
        readout: of `rnnlib.ops.diagonal_preconditioner.readouts`.
        inputs: token-wise arguments of the recurrence, checked (`gram_inputs`).
        x: the readout's second argument, beside A, `[B, T, H, K]`; None is `inputs.k`.
        parameter: a number a head that the readout takes, `[H]`, or None.
        like: an array to whose dtype the readout may be rounded; None is the accumulation dtype.
        dtype: of the readout; None is what `like` gives.
        with_key: whether the caller uses the returned keys. The kernel then adds their gradient to that of `k`.
        initial_state: None (zero) or `[B, H, K]`.
        segment_ids: None or `[B, T]`.
        implementation: a name, or None for the best that supports the case.

    Returns:
        The readout `[B, T, H, K]`, A after the last token `[B, H, K]`, and `inputs.k`.
    """
    k, log_decay, _ = inputs
    (initial_state,) = floating_arrays(operator, initial_state=initial_state)
    batch, length, heads, channels = k.shape
    if initial_state is not None:
        check_shape(operator, "initial_state", initial_state, (batch, heads, channels), axes="[B, H, K]")
    check_segment_ids(operator, segment_ids, batch, length)
    axis = current_axis()
    if axis is not None:  # first a pass for A alone, to find the A that enters this device's shard
        rest: dict[str, Any] = {"segment_ids": segment_ids, "implementation": implementation}
        with context_axis(None):
            own = evaluate(operator, Gram(), inputs, initial_state=None, **rest)[1]
        initial_state = enter_gram(own, log_decay, initial_state, segment_ids, axis)
    options: dict[str, Any] = {"readout": readout, "like": like}

    def reason(backend: str) -> str | None:
        return gram_unsupported_reason(inputs, x, parameter, initial_state, **options, backend=backend)

    run = choose_implementation(
        operator,
        implementation,
        _IMPLEMENTATIONS,
        length,
        kernel_for_one_token=False,
        slower={"mosaic": lambda: not kernel_operators().preconditioner.is_mosaic_faster(k)},
        chunked=lambda: _chunked_unsupported(length, log_decay),
        triton=lambda: reason("triton"),
        mosaic=lambda: reason("mosaic"),
    )
    if run is _IMPLEMENTATIONS["triton"] or run is _IMPLEMENTATIONS["mosaic"]:
        options |= {"dtype": dtype, "with_key": with_key}
        out, final, key = run(inputs, x, parameter, initial_state, segment_ids, **options)
    else:
        dtype = like.dtype if dtype is None and like is not None else dtype
        read = read_gram_in_blocks if run is diagonal_gram_chunked and platform() == "tpu" else read_gram
        out, final = read(run, inputs, x, parameter, initial_state, segment_ids, readout=readout, dtype=dtype)
        key = k
    return out, (final if axis is None else of_last(final, axis)), key


def _chunked_unsupported(length: int, log_decay: Array | None) -> str | None:
    """Why a call can't have the chunked form, as a noun phrase, or None if it can."""
    if is_symbolic(length) and log_decay is not None and log_decay.ndim == 4:
        return "a decay of one number a channel over a symbolic length (its prefix scan has as many levels as log2 T)"
    return None

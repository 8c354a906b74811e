"""The diagonal preconditioner: documentation, and checks of its own."""

from typing import Any

from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from rnnlib.ops.arguments import check_floating_dtype, check_rank, check_shape, floating_arrays
from rnnlib.ops.diagonal_preconditioner.evaluate import evaluate
from rnnlib.ops.diagonal_preconditioner.inputs import gram_inputs
from rnnlib.ops.diagonal_preconditioner.readouts import Gram, Preconditioner
from rnnlib.ops.diagonal_preconditioner.squash import Interval, Squash, check_squash
from rnnlib.ops.sharding import split_over_mesh


@split_over_mesh
def diagonal_gram(
    k: Float[Array, "B T H K"],
    *,
    log_decay: Float[Array, "B T H"] | Float[Array, "B T H K"] | None = None,
    gain: Float[Array, "B T H"] | Float[Array, "B T H K"] | None = None,
    initial_state: Float[Array, "B H K"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T H K"], Float[Array, "B H K"]]:
    """The decayed diagonal of the keys' Gram matrix, after each token.

        A_t = exp(log_decay_t) A_{t-1} + gain_t k_t^2

    Preconditioned DeltaNet (arXiv 2604.21100), equations 7 and 9.

    Args:
        k: keys.
        log_decay: natural logarithm of the decay, `<= 0` (-inf is a hard reset), one per head or per channel; None is
            no decay.
        gain: weight of each token, `>= 0`, one per head or per channel; None is 1.
        initial_state: A before the first token, `>= 0`; None is zero.
        segment_ids: documents packed into a row: A restarts from zero where the id changes. The first token continues
            `initial_state`.
        implementation: `"scan"` (token by token: the reference), `"chunked"` (XLA, any device), `"triton"` (Pallas
            kernels on NVIDIA GPUs; on a CPU they are interpreted, which serves tests), or None for the fastest that
            supports the case.

    Returns:
        A after each token and after the last one (of the last segment), in float32, or float64 for float64 inputs.

    Raises:
        ValueError: a shape or `implementation` is none of those above.
        TypeError: an array is not floating, or `segment_ids` is not of integers.
        NotImplementedError: the implementation named does not support the case.
    """
    inputs = gram_inputs("diagonal_gram", k, log_decay, gain)
    options: dict[str, Any] = dict(initial_state=initial_state, segment_ids=segment_ids, implementation=implementation)
    return evaluate("diagonal_gram", Gram(), inputs, **options)[:2]


@split_over_mesh
def diagonal_preconditioner(
    k: Float[Array, "B T H K"],
    *,
    log_decay: Float[Array, "B T H"] | Float[Array, "B T H K"] | None = None,
    gain: Float[Array, "B T H"] | Float[Array, "B T H K"] | None = None,
    center: float | Float[Array, ""] | Float[Array, " H"] = 0.0,
    bound: float = 1.5,
    eps: float = 1e-6,
    initial_state: Float[Array, "B H K"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    implementation: str | None = None,
    interval: Interval = "symmetric",
    squash: Squash = "rational",
) -> tuple[Float[Array, "B T H K"], Float[Array, "B H K"]]:
    """The stable apply-to-key preconditioner: how much each channel of a key is amplified before it is written.

        A_t = exp(log_decay_t) A_{t-1} + gain_t k_t^2        B_t = exp(-log(bound) s(log(A_t + eps) - center))

    with `s(r) = r / (1 + |r|)`. The write key is `B_t * k_t`. Source: Preconditioned DeltaNet (arXiv 2604.21100),
    equation 9. Since B lies between `1 / bound` and `bound`, the delta rule's transition keeps its eigenvalues in the
    unit disk while `beta * |k|^2 * bound <= 2` (lemma E.2).

    Args:
        k: keys; the paper normalises them to unit length.
        log_decay: of the preconditioner's own recurrence, `<= 0` (-inf is a hard reset), one per head or per channel;
            None is no decay.
        gain: of the preconditioner's own recurrence, `>= 0`, one per head or per channel; None is 1.
        center: log A at which B is 1, one number or one a head.
        bound: x, from 1 (no preconditioning) to 2.
        eps: added to A under the logarithm.
        initial_state: A before the first token, `>= 0`; None is zero.
        segment_ids: documents packed into a row: A restarts where the id changes. The first token continues
            `initial_state`.
        implementation: `"scan"` (token by token: the reference), `"chunked"` (XLA, any device), `"triton"` (Pallas
            kernels on NVIDIA GPUs; on a CPU they are interpreted, which serves tests), or None for the fastest that
            supports the case.
        interval: `"symmetric"` is [1/x, x], `"amplify"` [1, x], `"dampen"` [1/x, 1] (appendix E.3).
        squash: `"rational"` as above, or `"tanh"` (figure 12).

    Returns:
        B for each token, and A after the last one (of the last segment), in float32, or float64 for float64 inputs.

    Raises:
        ValueError: a shape, `bound`, `eps`, `interval`, `squash` or `implementation` is none of those above.
        TypeError: an array is not floating, or `segment_ids` is not of integers.
        NotImplementedError: the implementation named does not support the case.
    """
    name = "diagonal_preconditioner"
    check_squash(name, bound, eps, interval, squash)
    inputs = gram_inputs(name, k, log_decay, gain)
    options: dict[str, Any] = dict(initial_state=initial_state, segment_ids=segment_ids, implementation=implementation)
    readout = Preconditioner(float(bound), float(eps), interval, squash, times_row=False)
    return evaluate(name, readout, inputs, parameter=inputs.per_head(name, "center", center), **options)[:2]


@split_over_mesh
def precondition_key(
    k: Float[Array, "B T H K"],
    *,
    gram_key: Float[Array, "B T H K"] | None = None,
    log_decay: Float[Array, "B T H"] | Float[Array, "B T H K"] | None = None,
    gain: Float[Array, "B T H"] | Float[Array, "B T H K"] | None = None,
    center: float | Float[Array, ""] | Float[Array, " H"] = 0.0,
    bound: float = 1.5,
    eps: float = 1e-6,
    initial_state: Float[Array, "B H K"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    implementation: str | None = None,
    interval: Interval = "symmetric",
    squash: Squash = "rational",
    write_key_dtype: DTypeLike | None = None,
) -> tuple[Float[Array, "B T H K"], Float[Array, "B T H K"], Float[Array, "B H K"]]:
    """The write key of the stable apply-to-key preconditioner: `B_t * k_t`, with B of `diagonal_preconditioner`.

    The same as multiplying by hand, except that B itself is never stored.

    Args:
        k: read keys.
        gram_key: the keys whose Gram A is; None is `k`.
        log_decay: as in `diagonal_preconditioner`.
        gain: likewise.
        center: likewise.
        bound: likewise.
        eps: likewise.
        initial_state: likewise.
        segment_ids: likewise.
        implementation: likewise, or `"mosaic"` (Pallas' Mosaic GPU on Hopper GPUs: bfloat16 keys of 128 channels, no
            `gram_key`, gates of one number a token).
        interval: likewise.
        squash: likewise.
        write_key_dtype: of the write key; None is k's. A gradient has the dtype of its array: with keys in bfloat16 and
            float32 here, the write key's gradient comes from `rnnlib.ops.gated_delta_rule` unrounded. The kernels
            still round the write key itself to k's dtype.

    Returns:
        The read key, which is `k`; the write key; and A after the last token, in float32, or float64 for float64
        inputs. Use the returned read key in place of `k`: the gradients of both keys are then added in one pass.

    Raises:
        ValueError: a shape, `bound`, `eps`, `interval`, `squash` or `implementation` is none of those above.
        TypeError: an array or `write_key_dtype` is not floating, or `segment_ids` is not of integers.
        NotImplementedError: the implementation named does not support the case.
    """
    name = "precondition_key"
    check_squash(name, bound, eps, interval, squash)
    k, gram_key = floating_arrays(name, k=k, gram_key=gram_key)
    check_rank(name, "k", k, 4, axes="[B, T, H, K]")
    if gram_key is not None:
        check_shape(name, "gram_key", gram_key, k.shape, axes="the shape of k, [B, T, H, K]")
    if write_key_dtype is not None:
        check_floating_dtype(name, "write_key_dtype", write_key_dtype)
    inputs = gram_inputs(name, k if gram_key is None else gram_key, log_decay, gain)
    options: dict[str, Any] = dict(initial_state=initial_state, segment_ids=segment_ids, implementation=implementation)
    write_key, final, key = evaluate(
        name,
        Preconditioner(float(bound), float(eps), interval, squash, times_row=True),
        inputs,
        x=None if gram_key is None else k,
        parameter=inputs.per_head(name, "center", center),
        like=k,
        dtype=write_key_dtype,
        with_key=gram_key is None,
        **options,
    )
    return (key if gram_key is None else k), write_key, final

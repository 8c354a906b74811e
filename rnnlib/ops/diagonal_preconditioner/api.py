"""The diagonal preconditioner: checks, choice of implementation, documentation."""

from jax import Array
from jaxtyping import Float, Int

from rnnlib.ops.arguments import (
    check_floating,
    check_rank,
    check_segment_ids,
    check_shape,
    choose_implementation,
    default_preference,
)
from rnnlib.ops.diagonal_preconditioner.chunked import diagonal_gram_chunked
from rnnlib.ops.diagonal_preconditioner.inputs import DiagonalGramInputs
from rnnlib.ops.diagonal_preconditioner.scan import diagonal_gram_scan
from rnnlib.ops.diagonal_preconditioner.squash import Interval, Squash, check_squash, squash_to_interval

_IMPLEMENTATIONS = {"scan": diagonal_gram_scan, "chunked": diagonal_gram_chunked}


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
        implementation: `"scan"` (token by token: the definition), `"chunked"` (XLA, any device), or None for the
            fastest that supports the case.

    Returns:
        A after each token and after the last one (of the last segment), in float32, or float64 for float64 inputs.

    Raises:
        ValueError: a shape or `implementation` is none of those above.
        TypeError: an array is not floating, or `segment_ids` is not of integers.
        NotImplementedError: the implementation named does not exist for this operator.
    """
    return evaluate_gram("diagonal_gram", k, log_decay, gain, initial_state, segment_ids, implementation)


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
        implementation: `"scan"` (token by token: the definition), `"chunked"` (XLA, any device), or None for the
            fastest that supports the case.
        interval: `"symmetric"` is [1/x, x], `"amplify"` [1, x], `"dampen"` [1/x, 1] (appendix E.3).
        squash: `"rational"` as above, or `"tanh"` (figure 12).

    Returns:
        B for each token, and A after the last one (of the last segment), in float32, or float64 for float64 inputs.

    Raises:
        ValueError: a shape, `bound`, `eps`, `interval`, `squash` or `implementation` is none of those above.
        TypeError: an array is not floating, or `segment_ids` is not of integers.
        NotImplementedError: the implementation named does not exist for this operator.
    """
    name = "diagonal_preconditioner"
    check_squash(name, bound, eps, interval, squash)
    gram, final = evaluate_gram(name, k, log_decay, gain, initial_state, segment_ids, implementation)
    if isinstance(center, Array):
        check_floating(name, center=center)
        check_shape(name, "center", center, (), (k.shape[2],), axes="a number or [H]")
    return squash_to_interval(gram, center=center, bound=bound, eps=eps, interval=interval, squash=squash), final


def evaluate_gram(
    operator: str,
    k: Array,
    log_decay: Array | None,
    gain: Array | None,
    initial_state: Array | None,
    segment_ids: Array | None,
    implementation: str | None,
) -> tuple[Array, Array]:
    """`diagonal_gram` under the name of the operator that it serves, which error messages begin with."""
    check_floating(operator, k=k, log_decay=log_decay, gain=gain, initial_state=initial_state)
    check_rank(operator, "k", k, 4, axes="[B, T, H, K]")
    batch, length, heads, channels = k.shape
    for name, gate in (("log_decay", log_decay), ("gain", gain)):
        if gate is not None:
            check_shape(operator, name, gate, k.shape[:3], k.shape, axes="[B, T, H] or [B, T, H, K]")
    if initial_state is not None:
        check_shape(operator, "initial_state", initial_state, (batch, heads, channels), axes="[B, H, K]")
    check_segment_ids(operator, segment_ids, batch, length)
    chosen = choose_implementation(
        operator, implementation, {name: lambda: None for name in _IMPLEMENTATIONS}, default_preference(length)
    )
    return _IMPLEMENTATIONS[chosen](DiagonalGramInputs(k, log_decay, gain), initial_state, segment_ids)

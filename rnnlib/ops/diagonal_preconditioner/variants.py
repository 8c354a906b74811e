"""Alternatives to the stable preconditioner: inverses of the diagonal Gram, and normalised write keys."""

from typing import Any, Literal, get_args

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from rnnlib.ops.arguments import accumulation_dtype, check_rank, check_shape, floating_arrays
from rnnlib.ops.diagonal_preconditioner.evaluate import evaluate
from rnnlib.ops.diagonal_preconditioner.inputs import gram_inputs
from rnnlib.ops.diagonal_preconditioner.readouts import PreconditionedQuery, ShermanMorrisonKey
from rnnlib.ops.sharding import split_over_mesh

Normalization = Literal["projection", "implicit", "decayed_implicit"]


@split_over_mesh
def precondition_query(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    *,
    ridge: float | Float[Array, ""] | Float[Array, " H"] = 1.0,
    log_decay: Float[Array, "B T H"] | Float[Array, "B T H K"] | None = None,
    gain: Float[Array, "B T H"] | Float[Array, "B T H K"] | None = None,
    initial_state: Float[Array, "B H K"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T H K"], Float[Array, "B H K"]]:
    """The apply-to-query preconditioner, `q~_t = q_t / (A_t + ridge)`, for linear attention and its decayed forms.

    Preconditioned DeltaNet (arXiv 2604.21100), equation 8 and appendix F.1.1; A is `rnnlib.ops.diagonal_gram`.

    Args:
        q: queries.
        k: keys.
        ridge: positive, one number or one a head.
        log_decay: as in `diagonal_gram`.
        gain: as in `diagonal_gram`.
        initial_state: A before the first token; None is zero.
        segment_ids: as in `diagonal_gram`.
        implementation: as in `diagonal_gram`.

    Returns:
        The preconditioned queries in q's dtype, and A after the last token, in float32, or float64 for float64 inputs.

    Raises:
        ValueError: a shape, `ridge` or `implementation` is none of those above.
        TypeError: an array is not floating, or `segment_ids` is not of integers.
    """
    name = "precondition_query"
    (q,) = floating_arrays(name, q=q)
    inputs = gram_inputs(name, k, log_decay, gain)
    check_shape(name, "q", q, inputs.k.shape, axes="the shape of k, [B, T, H, K]")
    options: dict[str, Any] = dict(initial_state=initial_state, segment_ids=segment_ids, implementation=implementation)
    ridges = inputs.per_head(name, "ridge", ridge, is_positive=True)
    return evaluate(name, PreconditionedQuery(), inputs, x=q, parameter=ridges, like=q, **options)[:2]


@split_over_mesh
def sherman_morrison_key(
    k: Float[Array, "B T H K"],
    *,
    ridge: float | Float[Array, ""] | Float[Array, " H"] = 1.0,
    log_decay: Float[Array, "B T H"] | Float[Array, "B T H K"] | None = None,
    gain: Float[Array, "B T H"] | Float[Array, "B T H K"] | None = None,
    initial_state: Float[Array, "B H K"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T H K"], Float[Array, "B H K"]]:
    """The "unstable" apply-to-key preconditioner: the write key of Sherman and Morrison with the previous Gram.

        k~_t = P k_t / (1 + k_t^T P k_t)        P = Diag(A_{t-1} + ridge)^-1

    `k_t . k~_t` lies in [0, 1) whatever A is (appendix C.3). "Unstable" refers to training, in the paper's experiments.
    Preconditioned DeltaNet (arXiv 2604.21100), equation 8 and appendix F.1.2.

    Args:
        k: keys.
        ridge: positive, one number or one a head.
        log_decay: as in `diagonal_gram`.
        gain: as in `diagonal_gram`.
        initial_state: A before the first token; None is zero.
        segment_ids: as in `diagonal_gram`.
        implementation: as in `diagonal_gram`.

    Returns:
        The write keys in k's dtype, and A after the last token, in float32, or float64 for float64 inputs.

    Raises:
        ValueError: a shape, `ridge` or `implementation` is none of those above.
        TypeError: an array is not floating, or `segment_ids` is not of integers.
    """
    name = "sherman_morrison_key"
    inputs = gram_inputs(name, k, log_decay, gain)
    options: dict[str, Any] = dict(initial_state=initial_state, segment_ids=segment_ids, implementation=implementation)
    ridges = inputs.per_head(name, "ridge", ridge, is_positive=True)
    return evaluate(name, ShermanMorrisonKey(), inputs, parameter=ridges, like=inputs.k, **options)[:2]


@split_over_mesh
def write_key_normalization(
    k: Float[Array, "B T H K"],
    write_key: Float[Array, "B T H K"],
    kind: Normalization,
    *,
    gain: Float[Array, "B T H"] | None = None,
    log_decay: Float[Array, "B T H"] | None = None,
    eps: float = 1e-6,
) -> Float[Array, "B T H"]:
    """The factors on a preconditioned write key that Preconditioned DeltaNet's table 7 compares.

    With `m = k . write_key` and the main recurrence's decay `alpha` and gain `beta`, the gain on the write is

    - `"projection"`: `beta / m`: a gain of 1 then writes the value exactly;
    - `"implicit"`: `beta / (1 + m)`;
    - `"decayed_implicit"`: `beta / (alpha + beta m)`.

    The paper found none of them to help (without: loss 2.511; these: 2.517, 2.521, 2.524).

    Args:
        k: read keys.
        write_key: preconditioned write keys.
        kind: which factor.
        gain: beta, for `"decayed_implicit"`; None is 1.
        log_decay: log alpha, for `"decayed_implicit"`; None is 0.
        eps: added to the denominator where it can be zero.

    Returns:
        The factor, without beta, in float32, or float64 for float64 inputs.

    Raises:
        ValueError: a shape or `kind` is none of those above.
        TypeError: an array is not floating.
    """
    name = "write_key_normalization"
    k, write_key, gain, log_decay = floating_arrays(name, k=k, write_key=write_key, gain=gain, log_decay=log_decay)
    check_rank(name, "k", k, 4, axes="[B, T, H, K]")
    check_shape(name, "write_key", write_key, k.shape, axes="the shape of k, [B, T, H, K]")
    for argument, gate in (("gain", gain), ("log_decay", log_decay)):
        if gate is not None:
            check_shape(name, argument, gate, k.shape[:3], axes="[B, T, H]")
    if kind not in get_args(Normalization):
        raise ValueError(f"{name}: kind is {kind!r}, expected one of {get_args(Normalization)}")
    dtype = accumulation_dtype(k, write_key, gain, log_decay)
    m = jnp.sum(k.astype(dtype) * write_key.astype(dtype), axis=-1)
    if kind == "projection":
        return 1 / (m + eps)
    if kind == "implicit":
        return 1 / (1 + m)
    alpha = jnp.ones_like(m) if log_decay is None else jnp.exp(log_decay.astype(dtype))
    return 1 / (alpha + (m if gain is None else gain.astype(dtype) * m) + eps)

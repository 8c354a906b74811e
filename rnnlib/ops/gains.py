"""Gains: how far one token moves the state, as a function of its key (the `gain` axis).

Each returns the `beta` of `rnnlib.ops.gated_delta_rule`, one number per token and head, in float32 (float64 for float64
keys), and is meant for keys that are *not* normalised. With `x = k . k`:

| gain | value | what it is |
|---|---|---|
| Kaczmarz | eta / (x + eps) | a relaxed projection onto the token's equation (Kaczmarz Linear Attention) |
| Longhorn | b / (1 + b x) | the implicit (proximal) step |
| NLMS | 1 / (x + eps) | normalised least mean squares |
| EFLA | (1 - exp(-b x)) / x | the exact solution of the continuous-time delta rule |
"""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from rnnlib.ops.arguments import accumulation_dtype, check_rank, check_shape, floating_arrays


def kaczmarz_gain(k: Float[Array, "B T H K"], eta: Float[Array, "B T H"], eps: float = 1e-6) -> Float[Array, "B T H"]:
    """`eta / (k . k + eps)`: the Kaczmarz step with relaxation `eta` in (0, 2) (Kaczmarz Linear Attention).

    Args:
        k: keys, not normalised.
        eta: relaxation.
        eps: keeps a zero key's gain finite.
    """
    square, eta = _square_norm("kaczmarz_gain", k, "eta", eta)
    return eta / (square + eps)


def longhorn_gain(k: Float[Array, "B T H K"], beta: Float[Array, "B T H"]) -> Float[Array, "B T H"]:
    """`beta / (1 + beta k . k)`: the implicit online-learning step of Longhorn (arXiv 2407.14207).

    Args:
        k: keys, not normalised.
        beta: weight of the token's loss, `>= 0`.
    """
    square, beta = _square_norm("longhorn_gain", k, "beta", beta)
    return beta / (1 + beta * square)


def nlms_gain(k: Float[Array, "B T H K"], eps: float = 1e-6) -> Float[Array, "B T H"]:
    """`1 / (k . k + eps)`: the normalised least-mean-squares step.

    Args:
        k: keys, not normalised.
        eps: keeps a zero key's gain finite.
    """
    square, _ = _square_norm("nlms_gain", k, "gate", None)
    return 1 / (square + eps)


def efla_gain(k: Float[Array, "B T H K"], beta: Float[Array, "B T H"]) -> Float[Array, "B T H"]:
    """`(1 - exp(-beta k . k)) / (k . k)`: the delta rule's differential equation solved exactly over a step of `beta`.

    A zero key gets the limit, `beta`, with a finite gradient.

    Args:
        k: keys, not normalised.
        beta: step length, `>= 0`.
    """
    square, beta = _square_norm("efla_gain", k, "beta", beta)
    exponent = beta * square
    # Near zero the quotient would be 0 / 0; its series is accurate there up to rounding.
    is_small = exponent < 1e-3
    quotient = -jnp.expm1(-exponent) / jnp.where(is_small, 1.0, square)
    series = beta * (1 - exponent / 2 * (1 - exponent / 3))
    return jnp.where(is_small, series, quotient)


def _square_norm(operator: str, k: Array, name: str, gate: Array | None) -> tuple[Array, Array]:
    k, gate = floating_arrays(operator, **{"k": k, name: gate})
    check_rank(operator, "k", k, 4, axes="[B, T, H, K]")
    dtype = accumulation_dtype(k, gate)
    if gate is None:
        gate = jnp.ones((), dtype)
    else:
        check_shape(operator, name, gate, k.shape[:3], axes="[B, T, H]")
    return jnp.sum(jnp.square(k.astype(dtype)), axis=-1), gate.astype(dtype)

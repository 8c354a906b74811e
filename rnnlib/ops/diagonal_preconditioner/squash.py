"""From a diagonal Gram to a bounded preconditioner."""

import math
from typing import Literal, get_args

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from rnnlib.ops.arguments import accumulation_dtype, check_positive, floating_arrays, per_head

Interval = Literal["symmetric", "amplify", "dampen"]
Squash = Literal["rational", "tanh"]


def check_squash(operator: str, bound: float, eps: float, interval: str, squash: str) -> None:
    """Raises ValueError for a bound outside [1, 2], an eps that is not positive in float32, or an unknown name."""
    try:
        is_bound = bool(1 <= bound <= 2)
    except TypeError:  # `bound` is None, text or a traced value
        raise TypeError(f"{operator}: bound is {bound!r}, expected a number from 1 to 2") from None
    if not is_bound:
        raise ValueError(f"{operator}: bound is {bound}, expected 1 <= bound <= 2 (1 is no preconditioning)")
    check_positive(operator, "eps", eps)
    if interval not in get_args(Interval):
        raise ValueError(f"{operator}: interval is {interval!r}, expected one of {get_args(Interval)}")
    if squash not in get_args(Squash):
        raise ValueError(f"{operator}: squash is {squash!r}, expected one of {get_args(Squash)}")


def squash_to_interval(
    gram: Float[Array, "*batch H K"],
    *,
    center: float | Float[Array, ""] | Float[Array, " H"] = 0.0,
    bound: float = 1.5,
    eps: float = 1e-6,
    interval: Interval = "symmetric",
    squash: Squash = "rational",
) -> Float[Array, "*batch H K"]:
    """A bounded, decreasing function of the diagonal Gram: a stand-in for its inverse that cannot blow up.

    Preconditioned DeltaNet, equation 9: `r = log(A + eps) - center`, `s = r / (1 + |r|)`, `B = exp(-log(bound) s)`.

    Args:
        gram: A, `>= 0`.
        center: where B is the middle of its interval, in units of log A; one number or one a head.
        bound: x, the end of the interval, from 1 to 2.
        eps: keeps the logarithm finite where A is 0.
        interval: `"symmetric"` is [1/x, x], `"amplify"` [1, x], `"dampen"` [1/x, 1] (appendix E.3).
        squash: `"rational"` is `r / (1 + |r|)`; `"tanh"` saturates sooner (figure 12).

    Returns:
        B, in A's dtype.

    Raises:
        ValueError: a shape, `bound`, `eps`, `interval` or `squash` is none of those above.
        TypeError: an array is not floating.
    """
    name = "squash_to_interval"
    check_squash(name, bound, eps, interval, squash)
    (gram,) = floating_arrays(name, gram=gram)
    if gram.ndim < 2:
        raise ValueError(f"{name}: gram has shape {gram.shape}, expected [..., H, K]")
    # In float16 a small eps rounds to 0, and log(0) is -inf.
    dtype = accumulation_dtype(gram)
    centers = per_head(name, "center", center, gram.shape[-2], dtype)
    out = preconditioner_of(gram.astype(dtype), centers[:, None], bound, eps, interval, squash)
    return out.astype(gram.dtype)


def preconditioner_of(gram: Array, center: Array, bound: float, eps: float, interval: str, squash: str) -> Array:
    """`squash_to_interval` for a center that broadcasts against `gram`."""
    r = jnp.log(gram + eps) - center
    s = jnp.tanh(r) if squash == "tanh" else r / (1 + jnp.abs(r))
    # The exponent of the bound runs over [-1, 1], [0, 1] or [-1, 0].
    exponent = {"symmetric": -s, "amplify": (1 - s) / 2, "dampen": -(1 + s) / 2}[interval]
    return jnp.exp(math.log(bound) * exponent)

"""The diagonal Gram before and after squashing (Preconditioned DeltaNet, figures 2, 12 and 13)."""

from typing import NamedTuple

import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Float


def log_gram(gram: ArrayLike, eps: float = 1e-6) -> np.ndarray:
    """`log(A + eps)`, float64: where A is log-normal, this is normal (figure 2)."""
    return np.log(np.asarray(gram, np.float64) + eps)


class Saturation(NamedTuple):
    """How far the squash functions are from their linear part, after each token.

    Attributes:
        rational: mean over channels of `|r| / (1 + |r|)`, `[B, T, H]`.
        tanh: mean over channels of `|tanh r|`, `[B, T, H]`.
    """

    rational: Float[np.ndarray, "B T H"]
    tanh: Float[np.ndarray, "B T H"]


def saturation(gram: ArrayLike, center: ArrayLike, eps: float = 1e-6) -> Saturation:
    """The saturation of both squash functions with `r = log(A + eps) - center` (figure 12); 1 is fully saturated.

    Args:
        gram: A `[B, T, H, K]`.
        center: `[H]`.
        eps: as in `rnnlib.ops.diagonal_preconditioner`.
    """
    r = np.abs(log_gram(gram, eps) - np.asarray(center, np.float64)[:, None])
    return Saturation(np.mean(r / (1 + r), axis=-1), np.mean(np.tanh(r), axis=-1))

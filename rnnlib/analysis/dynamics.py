"""How a recurrence's transition acts: write eigenvalues, decay and gain (Preconditioned DeltaNet, figures 7, 14-16)."""

import numpy as np
from jaxtyping import Float

from rnnlib.analysis.layers import LayerActivations


def key_products(activations: LayerActivations) -> Float[np.ndarray, "B T HX"]:
    """`k_t . k~_t` of read and write key, which is 1 for unit keys without a preconditioner (figures 7 and 15)."""
    key, write_key = _per_head(activations.key, activations.write_key)
    return np.sum(key * write_key, axis=-1)


def decays(activations: LayerActivations) -> np.ndarray:
    """`alpha_t`, `[B, T, HV]` or `[B, T, HV, K]`; ones where nothing decays."""
    if activations.log_decay is None:
        return np.ones(activations.erase.shape[:3])
    return np.exp(np.asarray(activations.log_decay, np.float64))


def write_eigenvalues(activations: LayerActivations, *, every: int = 1) -> Float[np.ndarray, "B N HX"]:
    """The eigenvalue of the transition `(I - k~ (b * k)^T) Diag(alpha)` that writing sets apart: its smallest.

    Under a decay per head it is `alpha_t (1 - sum_i b_i k_i k~_i)` (lemma E.1); the others are `alpha_t`. Under a decay
    per channel it is found numerically: since `b_i k_i k~_i >= 0`, the transition is similar to a symmetric matrix.

    Args:
        activations: of a layer.
        every: takes every n-th token, for layers with a decay per channel of which all would take long.

    Returns:
        For `N = ceil(T / every)` tokens of each value head, or of each of its keys where a token writes several.

    Raises:
        ValueError: a decay per channel meets a write key of another sign than its key: there is no such symmetric
            matrix, and eigenvalues may be complex.
    """
    tokens = slice(None, None, every)
    erase = np.asarray(activations.erase[:, tokens], np.float64)
    erase = erase if erase.ndim == 4 else erase[..., None]
    key, write_key, erase, alpha = _per_head(
        activations.key[:, tokens], activations.write_key[:, tokens], erase, decays(activations)[:, tokens]
    )
    parts = erase * key * write_key
    if alpha.ndim == 3:
        return alpha * (1 - np.sum(parts, axis=-1))
    if np.any(parts < 0):
        share = np.mean(parts < 0)
        raise ValueError(
            f"write_eigenvalues: layer {activations.layer}: erase * key * write_key is negative in {share:.0%} of the "
            "channels, expected write keys of their keys' signs under a decay per channel"
        )
    # D - (D k~) e^T is similar to D - s s^T with s_i^2 = d_i k~_i e_i.
    root = np.sqrt(alpha * parts)
    matrices = alpha[..., None] * np.eye(alpha.shape[-1]) - root[..., :, None] * root[..., None, :]
    return np.linalg.eigvalsh(matrices)[..., 0]


def _per_head(*arrays) -> list[np.ndarray]:
    """Arrays `[B, T, H or HV, ...]` in float64, key heads repeated for the value heads that share them.

    Likewise value heads, where they have several keys each.
    """
    wide = [np.asarray(x, np.float64) for x in arrays]
    heads = max(x.shape[2] for x in wide)
    return [np.repeat(x, heads // x.shape[2], axis=2) for x in wide]

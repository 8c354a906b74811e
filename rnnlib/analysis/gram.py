"""Spectra of key Gram matrices, and how far their diagonals tell them (Preconditioned DeltaNet, figure 1)."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Bool, Float, Int

from rnnlib.analysis.layers import LayerActivations


def key_gram(key: Float[Array, "B T H K"], valid: Bool[Array, "B T"] | None = None) -> Float[np.ndarray, "B H K K"]:
    """`sum_t k_t k_t^T` of each sequence and head, float64; of all documents of a packed row together.

    Args:
        key: keys.
        valid: tokens to sum over; None is all.
    """
    keys = np.swapaxes(np.asarray(key, np.float64), 1, 2)
    if valid is not None:
        keys = np.where(np.asarray(valid)[:, None, :, None], keys, 0.0)
    return np.swapaxes(keys, -1, -2) @ keys


class GramSpectrum(NamedTuple):
    """How a Gram matrix compares with its diagonal.

    Attributes:
        eigenvalues: `[..., K]`, largest first.
        diagonal: `[..., K]`, largest first.
        correlation: Pearson's, of the two `[...]`. Two sorted lists always correlate; see `diagonal_share`.
        alignment: the eigenvectors' largest absolute entries, averaged with the eigenvalues as weights `[...]`: 1 where
            they are axes, and at least `K**-0.5`.
        diagonal_share: the diagonal's part of the squared Frobenius norm `[...]`: 1 for a diagonal matrix, and for one
            of equal eigenvalues in any basis.
    """

    eigenvalues: np.ndarray
    diagonal: np.ndarray
    correlation: np.ndarray
    alignment: np.ndarray
    diagonal_share: np.ndarray


def gram_spectrum(gram: ArrayLike) -> GramSpectrum:
    """Eigenvalues, diagonal, and their correlation and alignment.

    Args:
        gram: symmetric positive semidefinite matrices `[..., K, K]`.
    """
    gram = np.asarray(gram, np.float64)
    eigenvalues, vectors = np.linalg.eigh(gram)
    eigenvalues = np.maximum(eigenvalues, 0.0)
    weights = eigenvalues / _positive(eigenvalues.sum(axis=-1, keepdims=True))
    alignment = np.sum(weights * np.abs(vectors).max(axis=-2), axis=-1)
    diagonal = np.diagonal(gram, axis1=-2, axis2=-1)
    share = np.sum(diagonal**2, axis=-1) / _positive(np.sum(gram**2, axis=(-2, -1)))
    eigenvalues, diagonal = eigenvalues[..., ::-1], np.sort(diagonal, axis=-1)[..., ::-1]
    return GramSpectrum(eigenvalues, diagonal, _correlation(eigenvalues, diagonal), alignment, share)


def _correlation(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    x, y = (_deviations(z) for z in (x, y))
    norm = np.sqrt(np.sum(x * x, axis=-1) * np.sum(y * y, axis=-1))
    return np.asarray(np.sum(x * y, axis=-1) / _positive(norm))


def _deviations(x: np.ndarray) -> np.ndarray:
    """From the mean; 0 where they are no more than rounding."""
    deviations = x - x.mean(axis=-1, keepdims=True)
    flat = np.abs(deviations).max(axis=-1, keepdims=True) <= 1e-12 * np.abs(x).max(axis=-1, keepdims=True)
    return np.where(flat, 0.0, deviations)


def _positive(x: ArrayLike) -> np.ndarray:
    x = np.asarray(x)
    return np.where(x > 0, x, 1.0)


def gram_over_time(
    key: Float[Array, "B T H K"],
    times: Sequence[int],
    *,
    log_decay: Float[Array, "B T H"] | Float[Array, "B T H K"] | None = None,
    gain: Float[Array, "B T H"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
) -> Float[np.ndarray, "N B H K K"]:
    """`G_t = alpha_t G_(t-1) + beta_t k_t k_t^T` after `t` tokens, for each `t` of `times`, float64.

    Args:
        key: keys.
        times: numbers of tokens, increasing, each from 1 to T.
        log_decay: log alpha; None is no decay. One per channel decays the matrix by the channels' geometric mean.
        gain: beta; None is 1.
        segment_ids: packed documents; G restarts where the id changes.

    Raises:
        ValueError: `times` are not increasing numbers from 1 to T.
    """
    times = list(times)
    if not times or times[0] < 1 or times[-1] > key.shape[1] or any(b <= a for a, b in itertools.pairwise(times)):
        raise ValueError(f"times is {times}, expected increasing numbers from 1 to {key.shape[1]}")
    # [B, H, T, K] and [B, H, T]
    keys = np.swapaxes(np.asarray(key, np.float64), 1, 2)
    weights = np.ones(keys.shape[:3]) if gain is None else np.swapaxes(np.asarray(gain, np.float64), 1, 2)
    logs = np.zeros(keys.shape[:3]) if log_decay is None else np.swapaxes(_per_head(log_decay), 1, 2)
    documents = np.zeros((keys.shape[0], 1, keys.shape[2])) if segment_ids is None else _documents(segment_ids)
    grams = []
    for time in times:
        # Sums over the tokens after each one, as sums: a log decay of -inf needs no exception.
        after = np.cumsum(logs[..., 1:time][..., ::-1], axis=-1)[..., ::-1]
        weight = weights[..., :time] * np.exp(np.pad(after, ((0, 0), (0, 0), (0, 1))))
        weight = weight * (documents[..., :time] == documents[..., time - 1 : time])
        grams.append(np.swapaxes(weight[..., None] * keys[..., :time, :], -1, -2) @ keys[..., :time, :])
    return np.stack(grams)


def _per_head(log_decay: ArrayLike) -> np.ndarray:
    log_decay = np.asarray(log_decay, np.float64)
    return log_decay.mean(axis=-1) if log_decay.ndim == 4 else log_decay


def _documents(segment_ids: ArrayLike) -> Int[np.ndarray, "B 1 T"]:
    """The number of each token's document in its row: ids may come back."""
    ids = np.asarray(segment_ids)
    return np.cumsum(np.diff(ids, axis=1, prepend=ids[:, :1]) != 0, axis=1)[:, None]


def condition_number(gram: ArrayLike, scale: ArrayLike | None = None, *, ridge: float = 1e-2) -> np.ndarray:
    """Effective condition number, `(largest eigenvalue + r) / (smallest + r)`, of `Diag(scale)^1/2 G Diag(scale)^1/2`.

    What governs how fast gradient steps with the preconditioner Diag(scale) solve the regression on the keys.

    Args:
        gram: `[..., K, K]`.
        scale: the preconditioner's diagonal `[..., K]`, `>= 0`; None is 1.
        ridge: r, in units of the mean eigenvalue, so that the number does not depend on the preconditioner's size.

    Returns:
        `[...]`, at least 1; at most `1 + K / ridge`.
    """
    gram = np.asarray(gram, np.float64)
    if scale is not None:
        root = np.sqrt(np.asarray(scale, np.float64))
        gram = root[..., :, None] * gram * root[..., None, :]
    eigenvalues = np.maximum(np.linalg.eigvalsh(gram), 0.0)
    r = ridge * _positive(eigenvalues.mean(axis=-1))
    return np.asarray((eigenvalues[..., -1] + r) / (eigenvalues[..., 0] + r))


class ConditionNumbers(NamedTuple):
    """Effective condition numbers of a layer's key Gram over time; NaN at tokens that are not valid.

    Attributes:
        times: numbers of tokens `[N]`.
        plain: of the Gram itself `[N, B, H]`.
        jacobi: scaled by its own diagonal's inverse `[N, B, H]`: what a diagonal preconditioner without bounds does.
        preconditioned: scaled by the layer's B `[N, B, H]`; None for layers without.
    """

    times: np.ndarray
    plain: np.ndarray
    jacobi: np.ndarray
    preconditioned: np.ndarray | None


def conditions_over_time(
    activations: LayerActivations, times: Sequence[int], *, ridge: float = 1e-2
) -> ConditionNumbers:
    """Effective condition numbers of a layer's key Gram, that of a packed row's present document.

    Where the layer has a preconditioner the Gram has that one's keys, decay and gain (if they are one a head), so that
    its diagonal is A.

    Args:
        activations: of the layer.
        times: numbers of tokens, increasing, each from 1 to T.
        ridge: as in `condition_number`.
    """
    preconditioner = activations.preconditioner
    if preconditioner is None:
        grams = gram_over_time(activations.key, times, segment_ids=activations.segment_ids)
    else:
        gain = preconditioner.gain
        grams = gram_over_time(
            preconditioner.key,
            times,
            log_decay=preconditioner.log_decay,
            gain=None if gain is None or gain.ndim == 4 else gain,
            segment_ids=activations.segment_ids,
        )
    diagonal = np.diagonal(grams, axis1=-2, axis2=-1)
    applied = None
    if preconditioner is not None and preconditioner.applied is not None:
        applied = np.moveaxis(np.asarray(preconditioner.applied)[:, np.asarray(times) - 1], 1, 0)

    def of_valid_tokens(scale: np.ndarray | None) -> np.ndarray:
        conditions = condition_number(grams, scale, ridge=ridge)
        if activations.valid is None:
            return conditions
        # [N, B, 1]
        valid = np.swapaxes(np.asarray(activations.valid)[:, np.asarray(times) - 1], 0, 1)[..., None]
        return np.where(valid, conditions, np.nan)

    return ConditionNumbers(
        times=np.asarray(times),
        plain=of_valid_tokens(None),
        jacobi=of_valid_tokens(1 / _positive(diagonal)),
        preconditioned=None if applied is None else of_valid_tokens(applied),
    )

"""Distributions of what differs from token to token, one a head, small enough to keep for every layer."""

from typing import NamedTuple

import numpy as np
from jax.typing import ArrayLike


class Distribution(NamedTuple):
    """A histogram per head, and moments of the values themselves.

    Attributes:
        edges: of the bins `[N + 1]`, shared by the heads.
        counts: `[H, N]`; values beyond the edges are in the outer bins.
        mean: `[H]`.
        deviation: standard deviation `[H]`.
        skewness: third standardised moment `[H]`: 0 for a normal distribution, positive with a heavy right tail.
        minimum: `[H]`.
        maximum: `[H]`.
    """

    edges: np.ndarray
    counts: np.ndarray
    mean: np.ndarray
    deviation: np.ndarray
    skewness: np.ndarray
    minimum: np.ndarray
    maximum: np.ndarray


def distribution(
    values: ArrayLike, *, head_axis: int, bounds: tuple[float, float] | None = None, bins: int = 60
) -> Distribution:
    """The distribution of finite values, one a head.

    Args:
        values: any array with a head axis.
        head_axis: which axis that is.
        bounds: ends of the histogram; None takes the smallest and largest value.
        bins: number of bins N.
    """
    array = np.moveaxis(np.asarray(values, np.float64), head_axis, 0)
    heads = [row[np.isfinite(row)] for row in array.reshape(array.shape[0], -1)]
    if bounds is None:
        bounds = (
            min((row.min() for row in heads if row.size), default=0.0),
            max((row.max() for row in heads if row.size), default=1.0),
        )
    low, high = bounds
    edges = np.linspace(low, high if high > low else low + 1.0, bins + 1)
    counts = np.stack([np.histogram(np.clip(row, edges[0], edges[-1]), edges)[0] for row in heads])
    return Distribution(edges, counts, *(np.array([moment(row) for row in heads]) for moment in _MOMENTS))


def _skewness(x: np.ndarray) -> float:
    deviation = x.std() if x.size else 0.0
    # Equal values deviate by the rounding of their mean, which is no distribution to speak of.
    return float(np.mean(((x - x.mean()) / deviation) ** 3)) if deviation > 1e-12 * np.abs(x).max(initial=0) else 0.0


def _or_nan(moment):
    return lambda x: float(moment(x)) if x.size else np.nan


_MOMENTS = tuple(_or_nan(moment) for moment in (np.mean, np.std, _skewness, np.min, np.max))

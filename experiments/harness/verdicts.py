"""Verdicts on claims, by one rule: where the interval of a difference lies, beside a margin that counts as equal.

A claim says that a difference is below, within or above a margin. It agrees if the whole 95 % interval lies there,
disagrees if none of it does, and is undecided otherwise. A claim of several parts is partly right if one part agrees
and another does not.
"""

import dataclasses
import enum
import math
import statistics
import warnings
from collections.abc import Callable, Sequence

import numpy as np
import scipy.stats


class Verdict(enum.Enum):
    """What our results say of a claim; the value is shown."""

    AGREES = "✓ agrees"
    PARTLY = "◐ partly"
    DISAGREES = "✗ disagrees"
    UNDECIDED = "? undecided"
    NEW = "★ new"


@dataclasses.dataclass(frozen=True)
class Interval:
    """A difference and its 95 % interval.

    Attributes:
        estimate: the difference.
        low: lower end.
        high: upper end.
    """

    estimate: float
    low: float
    high: float

    def __str__(self) -> str:
        ends = (round(100 * value, 1) for value in (self.estimate, self.low, self.high))
        estimate, low, high = (f"{end:+.1f}" if end else "0.0" for end in ends)  # of -0.04 too: no "-0.0"
        return f"{estimate} % ({low} to {high})"


@dataclasses.dataclass(frozen=True)
class Region:
    """Where a claim says that a difference lies.

    Attributes:
        low: lower end; -inf is no end.
        high: upper end.
    """

    low: float
    high: float

    def judge(self, interval: Interval) -> Verdict:
        """Whether an interval lies here, elsewhere, or in both."""
        if self.low <= interval.low and interval.high <= self.high:
            return Verdict.AGREES
        if interval.high < self.low or interval.low > self.high:
            return Verdict.DISAGREES
        return Verdict.UNDECIDED


def below(margin: float) -> Region:
    """Less than zero by more than the margin."""
    return Region(-math.inf, -margin)


def equal(margin: float) -> Region:
    """Zero, up to the margin."""
    return Region(-margin, margin)


def above(margin: float) -> Region:
    """More than zero by more than the margin."""
    return Region(margin, math.inf)


def combined(parts: Sequence[Verdict]) -> Verdict:
    """The verdict on a claim from those on its parts: partly where one agrees and another does not."""
    kinds = set(parts)
    if len(kinds) == 1:
        return kinds.pop()
    if kinds & {Verdict.AGREES, Verdict.PARTLY}:
        return Verdict.PARTLY
    return Verdict.DISAGREES if Verdict.DISAGREES in kinds else Verdict.UNDECIDED


def between_seeds(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    """Difference of means of seeds, in parts of the second mean, with Welch's interval; two seeds or more each."""
    scale = statistics.fmean(theirs)
    difference = (statistics.fmean(ours) - scale) / scale
    if max(map(np.ptp, (ours, theirs))) < 1e-6 * abs(scale):
        return Interval(difference, difference, difference)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # where all seeds of one of the two are at 100 %
        ends = scipy.stats.ttest_ind(ours, theirs, equal_var=False).confidence_interval()
    return Interval(difference, float(ends.low) / scale, float(ends.high) / scale)


def between_readings(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    """Difference of two medians, in parts of the second, from quantiles of readings.

    Args:
        ours: the 5, 50 and 95 % quantiles.
        theirs: likewise.
    """
    ends = (ours[0] / theirs[2] - 1, ours[2] / theirs[0] - 1)
    return Interval(float(ours[1] / theirs[1] - 1), *map(float, ends))


def of_one_run(ours: float, theirs: float, allowance: float) -> Interval:
    """Difference of two single runs, in parts of the second, with an allowance for seeds that nobody measured there."""
    difference = ours / theirs - 1
    return Interval(difference, difference - allowance, difference + allowance)


def between_counts(ours: tuple[int, int], theirs: tuple[int, int]) -> Interval:
    """Difference of two shares, each `(right, all)`, with Newcombe's interval of Wilson scores."""
    shares = [right / count for right, count in (ours, theirs)]
    ends = [scipy.stats.binomtest(*counts).proportion_ci(method="wilson") for counts in (ours, theirs)]
    difference = shares[0] - shares[1]
    low = difference - math.hypot(shares[0] - ends[0].low, ends[1].high - shares[1])
    high = difference + math.hypot(ends[0].high - shares[0], shares[1] - ends[1].low)
    return Interval(difference, low, high)


def bootstrap(measure: Callable[[np.ndarray], float], groups: Sequence[int], draws: int = 2000) -> Interval:
    """Percentile interval of a measure, by drawing whole groups (documents, say) again.

    Args:
        measure: of the weight of each group: how often it was drawn.
        groups: names of the groups that there are.
        draws: how many.
    """
    count = len(groups)
    weights = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), draws)
    low, high = np.percentile([measure(drawn) for drawn in weights], [2.5, 97.5])
    return Interval(measure(np.ones(count, int)), float(low), float(high))

"""Time of calls by the clock, whatever makes them. Imports no framework."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from experiments.harness.records import Record


def wall_record(
    call: Callable[[], Any], wait: Callable[[Any], Any], repeats: int, *, seconds: float | None = None
) -> Record:
    """Time of a call among calls that follow one another, as the steps of a training loop do: median and quantiles.

    Args:
        call: begins work on the device.
        wait: waits for what a call returned.
        repeats: how often so many calls in a row are timed.
        seconds: for which to time about, where that is less; None does all repeats.

    Returns:
        `wall_ms`, and `wall_ms_quantiles`: the 5 and 95 % quantiles of the repeats.
    """
    for _ in range(3):
        start = time.perf_counter()
        wait(call())
        once = time.perf_counter() - start
    calls = max(1, min(20, int(0.05 / once)))  # before the device is waited for
    if seconds is not None:
        repeats = max(2, min(repeats, int(seconds / (once * calls))))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(calls):
            results = call()
        wait(results)
        times.append((time.perf_counter() - start) / calls)
    low, median, high = (round(1e3 * float(t), 4) for t in np.quantile(times, (0.05, 0.5, 0.95)))
    return {"wall_ms": median, "wall_ms_quantiles": [low, high]}

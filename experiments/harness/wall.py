"""Time of calls by the clock, whatever makes them. Imports no framework."""

import statistics
import time
from collections.abc import Callable
from typing import Any


def wall_milliseconds(
    call: Callable[[], Any], wait: Callable[[Any], Any], repeats: int, *, seconds: float | None = None
) -> float:
    """Median time of a call among calls that follow one another, as the steps of a training loop do.

    Args:
        call: begins work on the device.
        wait: waits for what a call returned.
        repeats: how often so many calls in a row are timed.
        seconds: for which to time about, where that is less; None does all repeats.
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
    return statistics.median(times) * 1e3

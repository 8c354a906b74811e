"""Times of PyTorch's calls on a GPU, and what keeps Triton's search for kernels short. Imports torch, and no JAX."""

import concurrent.futures
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from experiments.harness.records import Record, by_short_name
from experiments.harness.wall import wall_record


def kernel_milliseconds(call: Callable[[], Any], calls: int = 5) -> dict[str, float]:
    """Mean device time a call of each GPU kernel, by name."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
    kernels: dict[str, float] = {}
    for event in trace.key_averages():
        if event.device_time_total > 0:
            kernels[event.key] = kernels.get(event.key, 0.0) + event.device_time_total / calls / 1e3
    return kernels


def timed_record(call: Callable[[], Any], repeats: int, left_out: tuple[str, ...] = ()) -> Record:
    """Wall time, device time and the kernels' shares of it, without kernels with `left_out` in their names."""
    wall = wall_record(call, lambda _: torch.cuda.synchronize(), repeats)
    kernels = kernel_milliseconds(call)
    counted = [ms for name, ms in kernels.items() if not any(part in name for part in left_out)]
    return {
        **({"wall_ms": None} if left_out else wall),
        "device_ms": round(sum(counted), 4),
        "kernels": by_short_name(kernels),
    }


def short_trials(*, once: bool) -> None:
    """Makes Triton's search spend 25 ms a candidate, or (`once`) just compile each candidate and keep no choice."""
    import triton.testing

    search = triton.testing.do_bench

    def do_bench(call: Callable[[], Any], warmup: int = 0, rep: int = 0, quantiles: Any = None, **others: Any) -> Any:
        if once:
            call()
            return [0.0] * len(quantiles) if quantiles else 0.0
        return search(call, warmup=5, rep=20, quantiles=quantiles, **others)

    triton.testing.do_bench = do_bench
    if once:
        _keep_no_choice()


def _keep_no_choice() -> None:
    """Keeps Triton's search from writing what it chose, which the processes that time would take over."""
    import triton.runtime.cache

    cache = triton.runtime.cache.FileCacheManager
    put = cache.put

    def put_code(self: Any, data: Any, filename: str, binary: bool = True) -> str:
        return "" if filename.endswith(".autotune.json") else put(self, data, filename, binary)

    cache.put = put_code


@contextlib.contextmanager
def compile_only(threads: int) -> Iterator[None]:
    """Makes Triton compile what is called, side by side, and launch none of it: the GPU is left to what is timed."""
    from triton.runtime._async_compile import AsyncCompileMode
    from triton.runtime.jit import JITFunction

    run = JITFunction.run

    def only_compile(self: Any, *arguments: Any, warmup: bool = False, **named: Any) -> Any:
        return run(self, *arguments, warmup=True, **named)

    with concurrent.futures.ThreadPoolExecutor(threads) as pool, AsyncCompileMode(pool, ignore_errors=True):
        JITFunction.run = only_compile
        try:
            yield
        finally:
            JITFunction.run = run


def compile_share(share: int, shares: int) -> None:
    """Makes Triton's search compile every `shares`-th candidate of each kernel, from number `share`; it chooses none.

    Kernels are cached on disk by Triton, so that several such processes save the one that searches its compilation.
    """
    from triton.runtime.autotuner import Autotuner

    bench = Autotuner._bench

    def compile_own_share(self: Any, *arguments: Any, config: Any, **meta: Any) -> list[float]:
        number = next(i for i, mine in enumerate(self.configs) if str(mine) == str(config))
        if number % shares != share:
            return [float("inf")] * 3
        self.__dict__["do_bench"] = once
        return bench(self, *arguments, config=config, **meta)

    def once(call: Callable[[], Any], **_: Any) -> list[float]:
        call()
        return [1.0] * 3

    Autotuner._bench = compile_own_share
    _keep_no_choice()


def take_first() -> None:
    """Makes Triton's search take the first candidate that runs, and compile no others."""
    from triton.runtime.autotuner import Autotuner

    prune, bench = Autotuner.prune_configs, Autotuner._bench

    def prune_configs(self: Any, *arguments: Any, **named: Any) -> Any:
        self.has_candidate = False
        return prune(self, *arguments, **named)

    def _bench(self: Any, *arguments: Any, **named: Any) -> Any:
        if self.has_candidate:
            return [float("inf")] * 3
        found = bench(self, *arguments, **named)
        self.has_candidate = np.isfinite(np.max(found))
        return found

    Autotuner.prune_configs, Autotuner._bench = prune_configs, _bench

"""Times of JAX's calls: of calls in a row by the clock, and of their GPU kernels from a trace."""

import glob
import tempfile
from collections.abc import Callable
from typing import Any

import jax

from experiments.harness.records import Record
from experiments.harness.wall import wall_record


def kernel_milliseconds(call: Callable[[], Any], calls: int = 5) -> dict[str, float] | None:
    """Mean device time a call of each GPU kernel, by name, from a trace; None where no GPU was seen."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    options.host_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            for _ in range(calls):
                results = call()
            jax.block_until_ready(results)
        kernels: dict[str, float] = {}
        for path in glob.glob(f"{folder}/**/*.xplane.pb", recursive=True):
            for plane in jax.profiler.ProfileData.from_file(path).planes:
                if "GPU" not in plane.name:
                    continue
                for line in plane.lines:
                    if line.name.startswith("Stream"):
                        for event in line.events:
                            kernels[event.name] = kernels.get(event.name, 0.0) + event.duration_ns / 1e6 / calls
    return kernels or None


def peak_mib(compiled: Any) -> float:
    """Memory of a compiled call beside its arguments, by the compiler's plan."""
    memory = compiled.memory_analysis()
    return round((memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes) / 2**20, 1)


def timed_record(call: Callable[[], Any], repeats: int, *, with_kernels: bool) -> Record:
    """Wall time, device time and the kernels' shares of it."""
    wall = wall_record(call, jax.block_until_ready, repeats, seconds=1.0)
    kernels = kernel_milliseconds(call) if with_kernels else None
    ordered = dict(sorted((kernels or {}).items(), key=lambda item: -item[1]))
    return {
        **wall,
        "device_ms": round(sum(kernels.values()), 4) if kernels else None,
        "kernels": {name: round(ms, 4) for name, ms in ordered.items()},
    }

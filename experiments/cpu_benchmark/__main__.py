"""Times the scan and the chunk form of the gated delta rule on this machine's CPU, forward + backward.

`uv run python -m experiments.cpu_benchmark` prints a table and writes `results.json` beside this file.
"""

import datetime
import json
import os
import pathlib
import platform
import statistics
import time
from dataclasses import asdict, dataclass

import jax
import jax.numpy as jnp
import tyro
from rich.console import Console
from rich.table import Table

from rnnlib import ops


@dataclass(frozen=True)
class BenchmarkConfig:
    """What is timed."""

    batch: int = 1
    length: int = 2048
    heads: int = 4
    key_size: int = 64
    value_size: int = 64
    repeats: int = 20
    """Timed calls of each; the median is reported."""
    output: pathlib.Path = pathlib.Path(__file__).parent / "results.json"


def inputs(config: BenchmarkConfig, decay: str) -> dict[str, jax.Array]:
    """Random arguments; `decay` is none, head or channel."""
    keys = jax.random.split(jax.random.key(0), 5)
    shape = (config.batch, config.length, config.heads)

    def unit(key: jax.Array) -> jax.Array:
        x = jax.random.normal(key, (*shape, config.key_size))
        return x / jnp.linalg.norm(x, axis=-1, keepdims=True)

    arguments = {
        "q": unit(keys[0]),
        "k": unit(keys[1]),
        "v": jax.random.normal(keys[2], (*shape, config.value_size)),
        "beta": jax.nn.sigmoid(jax.random.normal(keys[3], shape)),
    }
    if decay != "none":
        decay_shape = shape if decay == "head" else (*shape, config.key_size)
        arguments["log_decay"] = jax.nn.log_sigmoid(jax.random.normal(keys[4], decay_shape) + 3)
    return arguments


def median_milliseconds(implementation: str, arguments: dict[str, jax.Array], repeats: int) -> float:
    """Median wall time of the loss's value and gradients in all arguments."""

    @jax.jit
    def value_and_gradients(arguments):
        return jax.value_and_grad(
            lambda a: jnp.sum(jnp.square(ops.gated_delta_rule(**a, implementation=implementation)[0]))
        )(arguments)

    jax.block_until_ready(value_and_gradients(arguments))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(value_and_gradients(arguments))
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def main(config: BenchmarkConfig) -> None:
    """Times every decay, prints the table and writes the results."""
    table = Table(title=f"gated delta rule, forward + backward, T = {config.length}, H = {config.heads}, float32")
    for column in ("decay", "scan, ms", "chunked, ms", "ratio"):
        table.add_column(column, justify="right")
    rows = []
    for decay in ("none", "head", "channel"):
        arguments = inputs(config, decay)
        scan = median_milliseconds("scan", arguments, config.repeats)
        chunked = median_milliseconds("chunked", arguments, config.repeats)
        rows.append({"decay": decay, "scan_ms": scan, "chunked_ms": chunked, "ratio": scan / chunked})
        table.add_row(decay, f"{scan:.1f}", f"{chunked:.1f}", f"{scan / chunked:.1f}")
    Console().print(table)
    record = {
        "config": {name: value for name, value in asdict(config).items() if name != "output"},
        "cores": os.cpu_count(),
        "processor": platform.processor() or platform.machine(),
        "jax": jax.__version__,
        "date": datetime.date.today().isoformat(),
        "command": "uv run python -m experiments.cpu_benchmark",
        "rows": rows,
    }
    config.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main(tyro.cli(BenchmarkConfig))

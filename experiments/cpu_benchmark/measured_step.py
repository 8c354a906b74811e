"""Times and traces the training step of the README's model; `parts` runs this file with the code of any version.

`python measured_step.py FOLDER` writes into FOLDER the compiled step's text, a trace of some steps, and `times.json`.
"""

import json
import pathlib
import statistics
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp

import rnnlib.training
from rnnlib.data import load_tokenizer, make_dataset
from rnnlib.training import TrainConfig
from rnnlib.training.batches import put_batch
from rnnlib.training.compiled_steps import CompiledSteps

TRACED = 8


def median_seconds(call: Any, count: int) -> float:
    """Median wall time of a call, until its result is there."""
    times = []
    for _ in range(count):
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main(folder: pathlib.Path) -> None:
    """Measures."""
    # The version before it had none.
    getattr(rnnlib.training, "keep_freed_memory", lambda: None)()
    config, tokenizer = TrainConfig(), load_tokenizer("byte")
    batches = iter(make_dataset(config.data, split="train", tokenizer=tokenizer))
    program = CompiledSteps(config, tokenizer.token_bytes, None)
    state, batch = program.first_state(), put_batch(next(batches), None)
    step = program.train_step.lower(state, batch).compile()
    (folder / "step.txt").write_text(step.as_text())

    def one() -> Any:
        nonlocal state
        state, metrics = step(state, batch)
        return metrics

    for _ in range(10):
        jax.block_until_ready(one())
    seconds = median_seconds(one, 60)
    with jax.profiler.trace(str(folder / "trace")):
        for _ in range(TRACED):
            jax.block_until_ready(one())
    # What two cores do at most: a product of the model's size, and sums over more than the caches hold.
    rows, kernel = jnp.ones((1024, 512)), jnp.ones((512, 512))
    product = jax.jit(jnp.matmul)
    large = jnp.ones(1 << 25)
    add = jax.jit(lambda x: x + 1)
    jax.block_until_ready((product(rows, kernel), add(large)))
    analysis = step.cost_analysis()
    found = {
        "milliseconds": 1e3 * seconds,
        "traced_steps": TRACED,
        "operations": analysis["flops"],
        "bytes": analysis["bytes accessed"],
        "product_gigaflops": 2e-9 * rows.size * 512 / median_seconds(lambda: product(rows, kernel), 60),
        "memory_gigabytes_per_second": 2e-9 * large.nbytes / median_seconds(lambda: add(large), 10),
        "host": host_milliseconds(batches),
    }
    (folder / "times.json").write_text(json.dumps(found))


def host_milliseconds(batches: Any) -> dict[str, float]:
    """What the host does between steps: milliseconds of reading a batch and putting it on the device."""
    count = 100
    start = time.perf_counter()
    read = [next(batches) for _ in range(count)]
    middle = time.perf_counter()
    for batch in read:
        jax.block_until_ready(put_batch(batch, None))
    end = time.perf_counter()
    return {"read a batch": 1e3 * (middle - start) / count, "put it": 1e3 * (end - middle) / count}


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))

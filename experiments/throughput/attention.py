"""`python -m experiments.throughput.attention`: causal attention's gradients by cuDNN and by this repository's kernel.

By turns in one process. cuDNN's gradients are timed as programs get them that need not be deterministic, and as
deterministic ones do; the kernel's are the same in both.
"""

import dataclasses
import functools
import json
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax import Array

from experiments.harness.command import errors_as_lines
from experiments.harness.environment import command_line, environment
from experiments.harness.pictures import pyplot, save
from experiments.harness.tables import write_text
from rnnlib.ops import causal_attention

Arrays = tuple[Array, ...]

KINDS = {
    "kernel": ("this repository's kernel, the same bits always", "tab:blue"),
    "cudnn": ("cuDNN", "tab:gray"),
    "cudnn_deterministic": ("cuDNN, deterministic", "tab:orange"),
}
"""Gradients that are timed: label and colour."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """Attention that is timed; heads of 64 channels, in bfloat16."""

    batch: int
    length: int
    heads: int
    key_heads: int
    window: int | None = None

    @property
    def product_flops(self) -> float:
        """Floating-point operations of one product over the pairs that are seen; forward takes two, backward five."""
        window = min(self.window or self.length, self.length)
        seen = window * self.length - window * (window - 1) / 2
        return 2 * self.batch * self.heads * 64 * seen


PROBLEMS = (
    Problem(8, 4096, 16, 16),
    Problem(32, 1024, 16, 16),
    Problem(2, 16384, 16, 16),
    Problem(1, 32768, 8, 8),
    Problem(8, 4096, 16, 4),
    Problem(8, 4096, 16, 16, 512),
    Problem(8, 4096, 16, 16, 2048),
)


@dataclasses.dataclass(frozen=True)
class Options:
    """Times attention's gradients on one Hopper card."""

    output: pathlib.Path
    """JSON file of the numbers; a picture of them gets its name, in `figures` beside its folder."""
    turns: int = 5
    calls: int = 10
    """Of a turn, one asked for after the other."""
    lengths: tuple[int, ...] = ()
    """Only problems of these tokens a row."""
    report_only: bool = False
    """Time nothing: draw the numbers that `output` has."""
    commit: str | None = None
    """Commit to record where there is no git repository."""


def draw(problem: Problem) -> Arrays:
    """Queries, keys, values and the gradient of the output."""
    keys = jax.random.split(jax.random.key(0), 4)
    heads = (problem.heads, problem.key_heads, problem.key_heads, problem.heads)
    shapes = [(problem.batch, problem.length, count, 64) for count in heads]
    return tuple(jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes))


def programs(problem: Problem) -> dict[str, Callable[..., Any]]:
    """What is timed: the forward pass alone, and with each kind of gradients."""

    def cudnn(q: Array, k: Array, v: Array) -> Array:
        local = None if problem.window is None else (problem.window - 1, 0)
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=local, implementation="cudnn")

    def with_gradients(attend: Callable[..., Array], *arrays: Array) -> Arrays:
        out, pull_back = jax.vjp(attend, *arrays[:3])
        return (out, *pull_back(arrays[3]))

    # A function of its own for each: jax would give a second program of one the first one's options.
    deterministic = jax.jit(
        lambda *arrays: with_gradients(cudnn, *arrays), compiler_options={"xla_gpu_deterministic_ops": True}
    )
    return {
        "forward": jax.jit(lambda *arrays: cudnn(*arrays[:3])),
        "cudnn": jax.jit(functools.partial(with_gradients, cudnn)),
        "cudnn_deterministic": deterministic,
        "kernel": jax.jit(
            functools.partial(with_gradients, functools.partial(causal_attention, window=problem.window))
        ),
    }


def time_problem(problem: Problem, turns: int, calls: int) -> dict[str, Any]:
    """Milliseconds of each program, the median of the turns, and what follows from them."""
    arrays = draw(problem)
    runs = programs(problem)
    results = {name: jax.block_until_ready(run(*arrays)) for name, run in runs.items()}
    milliseconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(turns):
        for name, run in runs.items():
            start = time.perf_counter()
            jax.block_until_ready([run(*arrays) for _ in range(calls)])
            milliseconds[name].append((time.perf_counter() - start) / calls * 1e3)
    medians = {name: float(np.median(times)) for name, times in milliseconds.items()}
    again = runs["kernel"](*arrays)
    record: dict[str, Any] = dataclasses.asdict(problem)
    for name in KINDS:
        backward = medians[name] - medians["forward"]
        record[f"{name}_backward_ms"] = round(backward, 3)
        record[f"{name}_backward_tflops"] = round(5 * problem.product_flops / backward * 1e-9, 1)
    record["forward_ms"] = round(medians["forward"], 3)
    record["milliseconds"] = {name: [round(x, 3) for x in times] for name, times in milliseconds.items()}
    record["kernel_gives_the_same_bits"] = all(bool((x == y).all()) for x, y in zip(results["kernel"], again))
    record["relative_differences_from_cudnn"] = [
        float(jnp.linalg.norm((x - y).astype(jnp.float32)) / jnp.linalg.norm(y.astype(jnp.float32)))
        for x, y in zip(results["kernel"], results["cudnn"])
    ]
    return record


def picture(content: dict[str, Any], output: pathlib.Path) -> None:
    """Draws the pace of gradients, problem by problem."""
    records = content["problems"]
    drawing, axes = pyplot().subplots(figsize=(9, 1.4 + 0.55 * len(records)), layout="constrained")
    for i, record in enumerate(records):
        for offset, (name, (label, color)) in zip((-0.27, 0, 0.27), KINDS.items()):
            pace = record[f"{name}_backward_tflops"]
            axes.barh(i + offset, pace, height=0.25, color=color, alpha=0.8, label=None if i else label)
            axes.text(pace, i + offset, f" {record[f'{name}_backward_ms']:.2f} ms", va="center", fontsize=7)
    names = [
        f"{r['batch']} x {r['length']}, {r['heads']} heads"
        + (f" of {r['key_heads']} keys" if r["key_heads"] < r["heads"] else "")
        + (f", window {r['window']}" if r["window"] else "")
        for r in records
    ]
    axes.set_yticks(range(len(records)), names, fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.set_xlabel("TFLOP/s: five products over the pairs that are seen", fontsize=8)
    axes.set_title(
        f"Gradients of causal attention, 64 channels, bfloat16, {content['environment']['device']}", fontsize=10
    )
    drawing.legend(fontsize=8, frameon=False, loc="outside lower center", ncols=3)
    save(drawing, output.parent.parent / "figures" / f"{output.stem}.png")


def main(argv: Sequence[str] | None = None) -> None:
    """Times what the options say and writes it."""
    options = tyro.cli(Options, args=argv, prog="python -m experiments.throughput.attention")
    if options.report_only:
        picture(json.loads(options.output.read_text()), options.output)
        return
    where = environment(command_line("experiments.throughput.attention"), options.commit)
    with errors_as_lines():
        problems = [x for x in PROBLEMS if not options.lengths or x.length in options.lengths]
        if not problems:
            known = sorted({x.length for x in PROBLEMS})
            raise ValueError(f"lengths: no problem has {list(options.lengths)} tokens a row, expected some of {known}")
        records = []
        for problem in problems:
            records.append(time_problem(problem, options.turns, options.calls))
            print(json.dumps(records[-1]), flush=True)
        content = {"problems": records, "environment": where}
        write_text(options.output, json.dumps(content, indent=1) + "\n")
        picture(content, options.output)


if __name__ == "__main__":
    main()

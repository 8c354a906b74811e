"""How fast `rnnlib.models.stream` writes: time of a new token by rows, beside what reading weights and states takes.

`python -m experiments.throughput.decoding`: see README.md.
"""

import concurrent.futures
import dataclasses
import json
import pathlib
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
import tyro
from flax import nnx

from experiments.sweep.command import errors_as_lines
from experiments.sweep.device import turn
from experiments.sweep.report import write_between_marks
from experiments.sweep.results import command_line, environment, write_text
from experiments.sweep.study import pick_named, slug
from experiments.throughput.flops import BANDWIDTH
from experiments.throughput.study import MIXERS, Case, Scale, model_config, study
from rnnlib.models import DecoderLM, ModelConfig, stream

FOLDER = pathlib.Path(__file__).parent


@dataclasses.dataclass(frozen=True)
class Options:
    """Times decoding with random bfloat16 weights, then writes the table."""

    setting: Scale = "small"
    """The model's size, as of the training steps."""
    mixers: tuple[str, ...] = ("Gated DeltaNet",)
    """Labels of mixers."""
    rows: tuple[int, ...] = (1, 16, 256)
    """Texts that are continued together."""
    prompt: int = 128
    """Tokens of each prompt."""
    new: int = 128
    """Tokens of a block, whose time is taken."""
    blocks: int = 4
    """Blocks, the first of which compiles and is not timed."""
    report_only: bool = False
    """Time nothing."""
    output: pathlib.Path = FOLDER
    """Folder for results."""
    exclusive: pathlib.Path | None = None
    """Lock file, for several commands on one device: nothing else is timed meanwhile."""
    commit: str | None = None
    """Commit to record where there is no git repository."""


def random_model(config: ModelConfig) -> DecoderLM:
    """A model whose weights are normal numbers: what is in them costs no time, and initialising takes long."""
    graph, state = nnx.split(nnx.eval_shape(lambda: DecoderLM(config, rngs=nnx.Rngs(0))))
    rng = np.random.default_rng(0)
    return nnx.merge(graph, jax.tree.map(lambda p: jax.device_put(_normal(rng, p)), state))


def _normal(rng: np.random.Generator, like: Any) -> np.ndarray:
    return (0.02 * rng.standard_normal(like.shape, np.float32)).astype(like.dtype)


def bytes_of_a_token(model: DecoderLM, rows: int, length: int) -> dict[str, int]:
    """Bytes that a new token of all rows must read and write.

    All weights once (the embedding only where it is the head too), and the caches, read and written.

    Args:
        model: the model.
        rows: texts together.
        length: of each, for attention's cache.
    """
    weights = sum(p.nbytes for p in jax.tree.leaves(nnx.state(model, nnx.Param)))
    if model.head is not None:
        weights -= model.embedding[...].nbytes
    caches = jax.tree.leaves(jax.eval_shape(lambda: model.init_cache(rows, length)))
    return {"weights": weights, "caches": 2 * sum(x.size * x.dtype.itemsize for x in caches)}


def _blocks(model: DecoderLM, rows: int, options: Options) -> Iterator[jax.Array]:
    prompts = np.random.default_rng(1).integers(model.config.vocabulary_size, size=(rows, options.prompt))
    return stream(
        model,
        prompts.astype(np.int32),
        max_new_tokens=options.new * options.blocks,
        block_size=options.new,
        temperature=0,
    )


def time_decoding(model: DecoderLM, rows: int, options: Options) -> dict[str, Any]:
    """Seconds of each block after the first, and what they come to."""
    blocks = _blocks(model, rows, options)
    np.asarray(next(blocks))
    seconds, start = [], time.perf_counter()
    for block in blocks:
        np.asarray(block)
        end = time.perf_counter()
        seconds.append((end - start) / options.new)
        start = end
    median = float(np.median(seconds))
    moved = bytes_of_a_token(model, rows, options.prompt + options.new * options.blocks)
    bandwidth = BANDWIDTH.get(jax.devices()[0].device_kind)
    limit = None if bandwidth is None else sum(moved.values()) / bandwidth
    return {
        "rows": rows,
        "prompt": options.prompt,
        "token_seconds": [round(s, 8) for s in seconds],
        "tokens_per_second": round(rows / median, 1),
        "bytes": moved,
        "limit_seconds": limit,
        "of_limit": None if limit is None else round(limit / median, 4),
    }


def table(records: Sequence[dict[str, Any]]) -> str:
    """Markdown: a line for each mixer and number of rows."""
    if not records:
        return "No results yet.\n"
    lines = [
        "| mixer | rows | ms a token | tokens/s | weights + caches, GB a token | of the bandwidth |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for r in sorted(records, key=lambda r: (r["mixer"], r["rows"])):
        share = "" if r["of_limit"] is None else f"{r['of_limit']:.0%}"
        moved = f"{r['bytes']['weights'] / 1e9:.2f} + {r['bytes']['caches'] / 1e9:.2f}"
        milliseconds = 1000 * float(np.median(r["token_seconds"]))
        cells = [r["mixer"], f"{r['rows']}", f"{milliseconds:.2f}", f"{r['tokens_per_second']:,.0f}", moved, share]
        lines.append(f"| {' | '.join(cells)} |")
    where = records[0]["environment"]
    commits = ", ".join(sorted({r["environment"]["commit"][:7] for r in records}))
    lines += ["", f"{where['device']}, jax {where['packages']['jax']}; commit {commits}; {where['date'][:10]}."]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    options = tyro.cli(Options, args=argv, prog="python -m experiments.throughput.decoding")
    plan = study(options.setting)
    folder = options.output / "results" / f"{options.setting}_decoding"
    with errors_as_lines():
        mixers = pick_named(MIXERS, options.mixers)
    for mixer in () if options.report_only else mixers:
        config = model_config(plan, Case(mixer, plan.main_length, keeps="everything", unrolled=True))
        model = random_model(config.replace(param_dtype=config.dtype))
        with concurrent.futures.ThreadPoolExecutor(len(options.rows)) as pool:  # compiles
            for blocks in pool.map(lambda rows, model=model: next(_blocks(model, rows, options)), options.rows):
                np.asarray(blocks)
        with turn(options.exclusive):
            for rows in options.rows:
                record = {"mixer": mixer.label} | time_decoding(model, rows, options)
                record["environment"] = environment(command_line("experiments.throughput.decoding"), options.commit)
                write_text(folder / f"{slug(mixer.label)}--{rows}.json", json.dumps(record, indent=1) + "\n")
                print(f"{mixer.label}, {rows} rows: {record['tokens_per_second']} tokens/s", flush=True)
    records = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    text = table(records)
    write_between_marks(options.output / "README.md", f"{options.setting} decoding", text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""`python -m experiments.decoding.kernels`: where a token's time goes, kernel by kernel, from a profile."""

import dataclasses
import json
import pathlib
import re
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from experiments.decoding.measure import token_blocks
from experiments.decoding.study import DecodingSetting, DecodingStudy, configurations, study
from experiments.harness.command import errors_as_lines
from experiments.harness.environment import command_line, environment
from experiments.harness.tables import write_text
from experiments.throughput.profiling import profile
from rnnlib.models import ModelConfig

# Operations of a CPU's program that run others, which are there too.
_ENCLOSING = re.compile(r"(while|conditional|call)\b")


@dataclasses.dataclass(frozen=True)
class Options:
    """Profiles tokens of the study's models."""

    output: pathlib.Path
    """JSON file of the numbers."""
    setting: DecodingSetting = "real"
    """Models of the study at this setting."""
    models: tuple[str, ...] = ("KDA 340M",)
    """Labels of models."""
    texts: tuple[int, ...] = (256,)
    """Continued together."""
    shown: int = 16
    """Kernels of a table, those that take longest; the file has all."""
    commit: str | None = None
    """Commit to record where there is no git repository."""


def profile_model(config: ModelConfig, texts: int, plan: DecodingStudy) -> dict[str, Any]:
    """Profiles the tokens of one block.

    Returns:
        Of each kernel (on a CPU each operation) launches of a token, microseconds of a launch and of a token, the
        longest first; the sum of these, and microseconds of a token of the block before, which nothing profiles.
    """
    _, blocks = token_blocks(config, texts, dataclasses.replace(plan, blocks=3))
    np.asarray(next(blocks))  # compiles
    start = time.perf_counter()
    np.asarray(next(blocks))
    seconds = time.perf_counter() - start
    kernels: list[dict[str, Any]] = [
        {
            "kernel": operation.kernel,
            "launches": round(operation.calls / plan.block, 3),
            "launch_us": round(operation.milliseconds / operation.calls * 1e3, 3),
            "token_us": round(operation.milliseconds / plan.block * 1e3, 3),
        }
        for operation in profile(lambda: np.asarray(next(blocks)), "")
        if not _ENCLOSING.match(operation.kernel)
    ]
    return {
        "texts": texts,
        "token_us": round(seconds / plan.block * 1e6, 2),
        "kernels_us": round(sum(kernel["token_us"] for kernel in kernels), 2),
        "kernels": kernels,
    }


def table(label: str, record: dict[str, Any], shown: int) -> Table:
    """The kernels that take longest, and what the others take together."""
    title = f"{label}, {record['texts']} texts: {record['token_us']:,} us a token, kernels {record['kernels_us']:,}"
    found = Table("kernel", "launches a token", "us a launch", "us a token", "of all", title=title)
    first, others = record["kernels"][:shown], record["kernels"][shown:]
    rows = [(k["kernel"], k["launches"], f"{k['launch_us']:.2f}", k["token_us"]) for k in first]
    if others:
        launches, microseconds = (sum(k[name] for k in others) for name in ("launches", "token_us"))
        rows.append((f"{len(others)} others", launches, "", microseconds))
    for name, launches, launch, microseconds in rows:
        share = microseconds / max(record["kernels_us"], 1e-9)
        found.add_row(name, f"{launches:g}", launch, f"{microseconds:.1f}", f"{share:.1%}")
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Profiles what the options say and writes it."""
    options = tyro.cli(Options, args=argv, prog="python -m experiments.decoding.kernels")
    where = environment(command_line("experiments.decoding.kernels"), options.commit)
    with errors_as_lines():
        plan = study(options.setting)
        records = []
        for label, config in configurations(plan, options.models).items():
            for texts in options.texts:
                record = profile_model(config, texts, plan)
                Console().print(table(label, record, options.shown))
                records.append({"model": label, **record})
                write_text(options.output, json.dumps({"tokens": records, "environment": where}, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""`python -m experiments.scale_prediction`: writes the tables of this folder's page.

Bytes are those of `rnnlib.training.plan_step`, which tests hold to compiled steps. Times are bytes over the links'
rates, and operations over a rate that was measured on one card: a prediction. No GPU is needed, and none was used.
"""

import dataclasses
import json
import pathlib
import sys
from typing import Any

import tyro

from experiments.sweep.results import command_line, environment, write_text
from experiments.throughput.flops import PEAK, step_flops
from rnnlib.data import DataConfig
from rnnlib.models import ModelConfig, model_preset
from rnnlib.training import Exchange, MeshConfig, TrainConfig, plan_step

FOLDER = pathlib.Path(__file__).parent
CARD = "NVIDIA H200"
# Bytes a second that one card sends: by NVLink in its host, by its own InfiniBand adapter (400 Gbit/s) out of it.
NVLINK, INFINIBAND, IN_A_HOST = 450e9, 50e9, 8
# What a collective takes for each device of a ring beside its bytes, seconds. An assumption.
HOP = 3e-6
# experiments/throughput: Gated DeltaNet of 1.3B, one after another, nothing recomputed. Blocks that are recomputed do a
# third more for the same model operations.
UTILISATION = 0.521 * 3 / 4
BEGIN, END = "<!-- tables: written by the command, do not edit -->", "<!-- end of the tables -->"


@dataclasses.dataclass(frozen=True)
class Options:
    """Predicts and writes the page."""

    rows: int = 4
    """Rows of a batch on each device."""
    length: int = 4096
    """Tokens a row."""
    output: pathlib.Path = FOLDER
    """Folder of README.md and results.json."""
    commit: str | None = None
    """Commit to record where there is no git repository."""

    def __post_init__(self) -> None:
        for name in ("rows", "length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


def models() -> dict[str, ModelConfig]:
    """Both models: Gated DeltaNet without the output gate, bfloat16, blocks recomputed."""
    small = model_preset("1.3b")
    return {"1.3B": small, "7B": small.replace(width=4096, num_layers=32, num_heads=32)}


def in_one_host(exchange: Exchange, fsdp: int) -> int:
    """How many devices of a group are in one host: devices of one `fsdp` group are next to each other."""
    if exchange.over == ("data",):
        return min(exchange.devices, max(1, IN_A_HOST // fsdp))
    return min(exchange.devices, IN_A_HOST)


def sent_by_link(exchange: Exchange, fsdp: int) -> tuple[float, float]:
    """Bytes that a device sends by NVLink and by InfiniBand.

    A group of k devices in each of several hosts sends what leaves the host by the k adapters together, each a part of
    it: rings that leave the host at different cards.
    """
    together = in_one_host(exchange, fsdp)
    within = exchange.sent if together > 1 else 0.0
    return within, exchange.sent / together if exchange.devices > together else 0.0


def waiting(exchange: Exchange) -> float:
    """Seconds beside the bytes, if each array is a collective of its own and goes round one ring."""
    rounds = 2 if exchange.kind == "all-reduce" else 1
    return exchange.count * rounds * (exchange.devices - 1) * HOP


def prediction(name: str, model: ModelConfig, devices: int, fsdp: int, options: Options) -> dict[str, Any]:
    """One row of a table."""
    data = DataConfig(sequence_length=options.length, batch_size=devices * options.rows)
    config = TrainConfig(model=model, data=data, mesh=MeshConfig(data=devices // fsdp, fsdp=fsdp))
    plan = plan_step(config, devices, card=CARD)
    tokens = options.rows * options.length
    compute = tokens * step_flops(model, options.length).total / (PEAK[CARD] * UTILISATION)
    links = [sent_by_link(exchange, fsdp) for exchange in plan.exchanges]
    # The slower link of each collective decides.
    moving = sum(max(within / NVLINK, between / INFINIBAND) for within, between in links)
    return {
        "model": name,
        "parameters": plan.num_parameters,
        "devices": devices,
        "data": devices // fsdp,
        "fsdp": fsdp,
        "state_gb": (plan.parameters + plan.gradients + plan.optimizer) / 1e9,
        "memory_gb": plan.total / 1e9,
        "nvlink_gb": sum(within for within, _ in links) / 1e9,
        "infiniband_gb": sum(between for _, between in links) / 1e9,
        "compute_ms": 1e3 * compute,
        "moving_ms": 1e3 * moving,
        "latency_ms": 1e3 * sum(waiting(exchange) for exchange in plan.exchanges),
        "efficiency_none_hidden": compute / (compute + moving),
        "efficiency_all_hidden": compute / max(compute, moving),
        "thousand_tokens_per_second": [devices * tokens / 1e3 / s for s in (compute + moving, max(compute, moving))],
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Predictions as Markdown."""
    lines = [
        "| model | GPUs | data x fsdp | state, GB a GPU | all, at most | sent by NVLink, GB | by InfiniBand, GB | "
        "compute, ms | communication, ms | efficiency: none hidden | all hidden | latency, ms, at most |",
        "|" + " --- |" * 12,
    ]
    for row in rows:
        cells = [
            row["model"],
            row["devices"],
            f"{row['data']} x {row['fsdp']}",
            *(f"{row[key]:.1f}" for key in ("state_gb", "memory_gb", "nvlink_gb", "infiniband_gb")),
            *(f"{row[key]:.0f}" for key in ("compute_ms", "moving_ms")),
            *(f"{row[key]:.0%}" for key in ("efficiency_none_hidden", "efficiency_all_hidden")),
            f"{row['latency_ms']:.0f}",
        ]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main() -> int:
    """Runs the command; returns the exit code."""
    options = tyro.cli(Options, prog="python -m experiments.scale_prediction")
    rows = [
        prediction(name, model, devices, fsdp, options)
        for name, model in models().items()
        for devices in (64, 1024)
        for fsdp in (1, 8, 64, *([1024] if devices == 1024 else []))
    ]
    result = {
        "rows_a_device": options.rows,
        "length": options.length,
        "nvlink": NVLINK,
        "infiniband": INFINIBAND,
        "utilisation": UTILISATION,
        "peak": PEAK[CARD],
        "predictions": rows,
        "environment": environment(command_line("experiments.scale_prediction"), options.commit),
    }
    write_text(options.output / "results.json", json.dumps(result, indent=1) + "\n")
    page = options.output / "README.md"
    before, _, rest = page.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    write_text(page, f"{before}{BEGIN}\n{table(rows)}\n{END}{after}")
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())

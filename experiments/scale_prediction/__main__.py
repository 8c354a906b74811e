"""`python -m experiments.scale_prediction`: writes the tables of this folder's page.

Bytes are those of `rnnlib.training.plan_step`, which tests hold to compiled steps. Times are bytes over the links'
rates, and operations over a rate that was measured on one card: a prediction. No GPU is needed, and none was used.
"""

import dataclasses
import json
import math
import pathlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import tyro
from rich.progress import track

from experiments.harness.environment import command_line, environment
from experiments.harness.page import markdown_table
from experiments.harness.tables import write_text
from rnnlib.data import DataConfig
from rnnlib.models import ModelConfig, model_preset
from rnnlib.training import Exchange, MeshConfig, TrainConfig, plan_step
from rnnlib.training.flops import PEAK, step_flops

FOLDER = pathlib.Path(__file__).parent
CARD = "NVIDIA H200"
# Bytes a second that one card sends: by NVLink in its host, by its own InfiniBand adapter (400 Gbit/s) out of it.
NVLINK, INFINIBAND, IN_A_HOST = 450e9, 50e9, 8
# What a collective takes for each device of a ring beside its bytes, seconds. An assumption.
HOP = 3e-6
# experiments/throughput: Gated DeltaNet of 1.3B, one after another, nothing recomputed. Blocks that are recomputed do a
# third more for the same model operations.
UTILISATION = 0.521 * 3 / 4
LONG = 1 << 20
BEGIN, END = "<!-- tables: written by the command, do not edit -->", "<!-- end of the tables -->"


@dataclasses.dataclass(frozen=True)
class Options:
    """Predicts and writes the page."""

    rows: int = 4
    """Rows of a batch on each device."""
    length: int = 4096
    """Tokens a row, but of the rows of 2**20 tokens."""
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


def in_one_host(over: tuple[str, ...], mesh: Mapping[str, int]) -> int:
    """How many devices of a group are in one host, where neighbours along the last axes are.

    Args:
        over: Axes of the group.
        mesh: Sizes of all axes, in their order.
    """
    places, step = [0], 1
    for axis, size in reversed(list(mesh.items())):
        if axis in over:
            places = [place + i * step for i in range(size) for place in places]
        step *= size
    return sum(place < IN_A_HOST for place in places)


def sent_by_link(exchange: Exchange, mesh: Mapping[str, int]) -> tuple[float, float]:
    """Bytes that a device sends by NVLink and by InfiniBand.

    A group of k devices in each of several hosts sends what leaves the host by the k adapters together, each a part of
    it: rings that leave the host at different cards.
    """
    together = in_one_host(exchange.over, mesh)
    within = exchange.sent if together > 1 else 0.0
    return within, exchange.sent / together if exchange.devices > together else 0.0


def waiting(exchange: Exchange) -> float:
    """Seconds beside the bytes, if each array is a collective of its own and goes round one ring."""
    rounds = {"all-reduce": 2 * (exchange.devices - 1), "collective-permute": 1}
    return exchange.count * rounds.get(exchange.kind, exchange.devices - 1) * HOP


def prediction(name: str, model: ModelConfig, mesh: MeshConfig, rows: int, length: int) -> dict[str, Any]:
    """One row of the table.

    Args:
        name: Of the model.
        model: What is trained.
        mesh: All sizes.
        rows: Of the whole batch.
        length: Tokens a row.
    """
    sizes = {axis: getattr(mesh, axis) for axis in ("data", "fsdp", "context", "tensor")}
    devices = math.prod(sizes.values())
    data = DataConfig(sequence_length=length, batch_size=rows)
    plan = plan_step(TrainConfig(model=model, data=data, mesh=mesh), devices)
    tokens = rows * length / devices
    compute = tokens * step_flops(model, length).total / (PEAK[CARD] * UTILISATION)
    links = [sent_by_link(exchange, sizes) for exchange in plan.exchanges]
    # The slower link of each collective decides.
    moving = sum(max(within / NVLINK, between / INFINIBAND) for within, between in links)
    return {
        "model": name,
        "parameters": plan.num_parameters,
        "devices": devices,
        **sizes,
        "rows": rows,
        "length": length,
        "state_gb": (plan.parameters + plan.gradients + plan.optimizer) / 1e9,
        "nvlink_gb": sum(within for within, _ in links) / 1e9,
        "infiniband_gb": sum(between for _, between in links) / 1e9,
        "compute_ms": 1e3 * compute,
        "moving_ms": 1e3 * moving,
        "latency_ms": 1e3 * sum(waiting(exchange) for exchange in plan.exchanges),
        "efficiency_none_hidden": compute / (compute + moving),
        "efficiency_all_hidden": compute / max(compute, moving),
        "thousand_tokens_per_second": [devices * tokens / 1e3 / s for s in (compute + moving, max(compute, moving))],
    }


def predictions(options: Options) -> Iterator[dict[str, Any]]:
    """All rows: copies, FSDP and shared layers with the same batch; then rows of 2**20 tokens over eight devices."""
    for name, model in models().items():
        for devices in (64, 1024):
            meshes = [MeshConfig(devices // fsdp, fsdp) for fsdp in (1, 8, 64, 1024) if fsdp <= devices]
            meshes += [MeshConfig(devices // 8 // fsdp, fsdp, tensor=8) for fsdp in (1, 8)]
            for mesh in meshes:
                yield prediction(name, model, mesh, devices * options.rows, options.length)
    small, large = models().items()
    for (name, model), mesh in (
        (small, MeshConfig(1, 1, context=8)),
        (large, MeshConfig(1, 1, context=8, tensor=8)),
        (large, MeshConfig(1, 8, context=8)),
    ):
        yield prediction(name, model, mesh, mesh.data * (mesh.fsdp or 1), LONG)


def table(rows: list[dict[str, Any]]) -> str:
    """Predictions as Markdown."""
    header = ["model", "GPUs", "mesh", "rows x tokens", "state, GB a GPU", "sent by NVLink, GB", "by InfiniBand, GB"]
    header += ["compute, ms", "communication, ms", "efficiency: none hidden", "all hidden", "latency, ms, at most"]
    lines = []
    for row in rows:
        cells = [
            row["model"],
            row["devices"],
            " x ".join(f"{axis} {row[axis]}" for axis in ("data", "fsdp", "context", "tensor") if row[axis] > 1),
            f"{row['rows']:,} x {row['length']:,}",
            *(f"{row[key]:.1f}" for key in ("state_gb", "nvlink_gb", "infiniband_gb")),
            *(f"{row[key]:.0f}" for key in ("compute_ms", "moving_ms")),
            *(f"{row[key]:.0%}" for key in ("efficiency_none_hidden", "efficiency_all_hidden")),
            f"{row['latency_ms']:.0f}",
        ]
        lines.append([str(cell) for cell in cells])
    return "\n".join(markdown_table(header, lines))


def main() -> int:
    """Runs the command; returns the exit code."""
    options = tyro.cli(Options, prog="python -m experiments.scale_prediction")
    rows = list(track(predictions(options), total=23, description="planning"))
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

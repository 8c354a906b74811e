"""`python -m experiments.several_gpus.offline`: memory of training steps on meshes of H100s, compiled without one.

XLA's CUDA plugin compiles for described cards (`experiments.kernel_benchmarks.offline`), and its plan of the step says
what each device needs. Needs the dependency group `offline`.
"""

import dataclasses
import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import tyro
from rich.progress import track

from experiments.harness.child import Child, answer
from experiments.harness.command import errors_as_lines
from experiments.harness.environment import command_line, environment
from experiments.harness.page import markdown_table, write_between_marks
from experiments.harness.tables import write_text
from experiments.kernel_benchmarks.offline.compiling import environment as offline_environment
from experiments.kernel_benchmarks.offline.compiling import missing_packages

FOLDER = pathlib.Path(__file__).parent
MEMORY = 80_000_000_000
SHAPE = (8, 4096)
"""Rows of each device, and their tokens."""
_AXES = ("data", "fsdp", "context", "tensor")
MESHES = ((2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 2, 1), (1, 1, 1, 2), (2, 2, 1, 1), (2, 1, 2, 1), (2, 1, 1, 2))


@dataclasses.dataclass(frozen=True)
class Options:
    """Compiles the step of a model of the 1.3B model's width, blocks recomputed, on each mesh."""

    layers: tuple[int, ...] = (3, 6)
    """Numbers of blocks: what one more block takes tells whether its activations are kept."""
    output: pathlib.Path = FOLDER
    """Folder of offline.json and of the page."""
    commit: str | None = None
    """Commit to record where there is no git repository."""

    def __post_init__(self) -> None:
        if not self.layers or min(self.layers) < 1:
            raise ValueError(f"layers must be at least 1, got {self.layers}")


def step_memory(mesh: Sequence[int] | None, layers: int, *, latency_hiding: bool, preset: str = "1.3b") -> int:
    """Bytes of temporary memory of a step, compiled in a process of its own.

    Args:
        mesh: sizes of "data", "fsdp", "context" and "tensor"; None for one device.
        layers: blocks of the model.
        latency_hiding: whether XLA's latency-hiding scheduler is on.
        preset: model whose other sizes it has.

    Raises:
        RuntimeError: the process failed.
    """
    asked = {"mesh": mesh, "layers": layers, "latency_hiding": latency_hiding, "preset": preset}
    child = Child("experiments.several_gpus.offline", "compile", variables=offline_environment())
    return answer(child, asked, seconds=3600)


def _compile(asked: dict[str, Any]) -> int:
    """Temporary memory of one step."""
    import math

    import numpy as np
    from jax.sharding import AxisType, Mesh

    from experiments.kernel_benchmarks.offline.cards import CARDS
    from rnnlib.models import model_preset
    from rnnlib.training import (
        MeshConfig,
        OptimizerConfig,
        abstract_train_state,
        learning_rate_schedule,
        make_optimizer,
        make_train_step,
    )
    from rnnlib.training.batches import abstract_batch
    from rnnlib.training.mesh import abstract_mesh
    from rnnlib.training.step import abstract_state

    # One device is a mesh of one: inside it kernels are traced for its card.
    sizes = abstract_mesh(MeshConfig(*(asked["mesh"] or (1, 1, 1, 1)))).shape
    count = math.prod(sizes.values())
    devices = np.array(CARDS["sm_90"].devices(count, memory=MEMORY)).reshape(tuple(sizes.values()))
    mesh = Mesh(devices, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
    model = model_preset(asked["preset"]).replace(num_layers=asked["layers"], scan_layers=False)
    optimizer, schedule = make_optimizer(OptimizerConfig(), 1000), learning_rate_schedule(OptimizerConfig(), 1000)
    graph, state = abstract_train_state(model, optimizer, mesh)
    token_bytes = np.ones(model.vocabulary_size, np.int32)
    step: Any = make_train_step(graph, optimizer, schedule, token_bytes, mesh, deterministic=False)
    batch = abstract_batch(SHAPE[0] * count, SHAPE[1], mesh)
    lowered = step.trace(abstract_state(state, mesh), batch).lower(lowering_platforms=("cuda",))
    if "xla.gpu.triton" not in lowered.as_text():
        raise AssertionError("the step was not traced for a GPU: it has no kernels")
    compiled = lowered.compile({"xla_gpu_enable_latency_hiding_scheduler": asked["latency_hiding"]})
    return int(compiled.memory_analysis().temp_size_in_bytes)


def named(mesh: Sequence[int] | None) -> str:
    """A mesh as tables name it."""
    if mesh is None:
        return "one GPU"
    return " x ".join(f"{axis} {size}" for axis, size in zip(_AXES, mesh) if size > 1)


def table(result: dict[str, Any]) -> str:
    """Markdown of all steps."""
    layers = result["layers"]
    header = ["mesh", *(f"{n} blocks{kind}, GB" for n in layers for kind in ("", ", latency hiding"))]
    rows = []
    for mesh in dict.fromkeys(record["mesh"] for record in result["records"]):
        found = {(r["layers"], r["latency_hiding"]): r["bytes"] for r in result["records"] if r["mesh"] == mesh}
        cells = [found.get((n, hidden)) for n in layers for hidden in (False, True)]
        rows.append([mesh, *("" if cell is None else f"{cell / 1e9:.1f}" for cell in cells)])
    where = result["environment"]
    lines = "\n".join(markdown_table(header, rows))
    return (
        f"{lines}\n\nTemporary memory of each device by XLA's plan, compiled for H100s of 80 GB without a card; "
        f"jax {where['packages']['jax']}, commit {where['commit'][:7]}, {where['date'][:10]}.\n"
    )


def main() -> int:
    """Runs the command; returns the exit code."""
    options = tyro.cli(Options, prog="python -m experiments.several_gpus.offline")
    with errors_as_lines():
        if reason := missing_packages():
            raise ValueError(reason)
    cases = [(mesh, n, hidden) for mesh in (None, *MESHES) for n in options.layers for hidden in (False, True)]
    cases = [case for case in cases if case[0] is not None or not case[2]]
    records = [
        {
            "mesh": named(mesh),
            "layers": n,
            "latency_hiding": hidden,
            "bytes": step_memory(mesh, n, latency_hiding=hidden),
        }
        for mesh, n, hidden in track(cases, description="compiling")
    ]
    where = environment(command_line("experiments.several_gpus.offline"), options.commit)
    result = {"layers": list(options.layers), "shape": SHAPE, "environment": where, "records": records}
    write_text(options.output / "offline.json", json.dumps(result, indent=1) + "\n")
    write_between_marks(options.output / "README.md", "offline", table(result))
    print(table(result))
    return 0


if __name__ == "__main__":
    if sys.argv[1:] == ["compile"]:
        print(_compile(json.load(sys.stdin)))
    else:
        sys.exit(main())

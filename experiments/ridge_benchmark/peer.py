"""The process that times flash-linear-attention's MesaNet: `python -m experiments.ridge_benchmark.peer FOLDER`.

It compiles and lets the library choose its kernels, then waits for a line on its standard input and times.
"""

import importlib.metadata
import json
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as functional
from fla.ops.mesa_net import chunk_mesa_net

from experiments.kernel_benchmarks.records import RecordWriter, describe
from experiments.kernel_benchmarks.torch_worker import short_trials, timed_record


def passes(shape: tuple[int, ...], iterations: int) -> dict[str, Callable[[], Any]]:
    """Forward, and forward + backward."""
    torch.manual_seed(0)

    def normal(*sizes: int) -> Any:
        return torch.randn(sizes, device="cuda")

    x = {
        "q": functional.normalize(normal(*shape), dim=-1).bfloat16(),
        "k": functional.normalize(normal(*shape), dim=-1).bfloat16(),
        "v": normal(*shape).bfloat16(),
        "g": functional.logsigmoid(normal(*shape[:3]) + 3.0),
        "beta": torch.sigmoid(normal(*shape[:3])).bfloat16(),
        "lamb": torch.ones(shape[2], shape[3], device="cuda"),
    }
    inputs = [array.requires_grad_() for array in x.values()]
    d_out = normal(*shape).bfloat16()

    def forward() -> Any:
        with torch.no_grad():
            return chunk_mesa_net(**x, max_CG_iteration=iterations)[0]

    def forward_backward() -> Any:
        out = chunk_mesa_net(**x, max_CG_iteration=iterations)[0]
        return torch.autograd.grad(out, inputs, d_out)

    return {"forward": forward, "forward_backward": forward_backward}


def main(folder: pathlib.Path) -> None:
    """Prepares, waits, times."""
    config = json.loads((folder / "peer.json").read_text())
    write = RecordWriter(folder / "peer.jsonl")
    versions = {name: importlib.metadata.version(name) for name in ("torch", "triton", "fla-core")}
    write({"kind": "worker", "worker": "fla", **versions, "device": torch.cuda.get_device_name()})
    short_trials(once=False)
    shapes = [(*sizes, config["head_size"]) for sizes in config["shapes"]]
    failed: dict[Any, str] = {}
    calls: dict[Any, Callable[[], Any]] = {}
    for shape in shapes:
        for name, call in passes(shape, config["iterations"]).items():
            calls[shape, name] = call
            try:
                call()
            except Exception as error:
                failed[shape, name] = describe(error)
            torch.cuda.synchronize()
    (folder / "prepared").touch()
    sys.stdin.readline()
    for (shape, name), call in calls.items():
        what = {"operator": "mesanet", "precision": "bfloat16", "shape": shape, "pass": name, "implementation": "fla"}
        if (shape, name) in failed:
            write({**what, "kind": "failure", "of": "time", "reason": failed[shape, name]})
        else:
            write({**what, "kind": "time", **timed_record(call, config["repeats"])})


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))

"""A process that measures flash-linear-attention's MesaNet, in one of two ways.

`FOLDER compile N OF` compiles every OF-th of each kernel's candidates, from the N-th; several run side by side.
`FOLDER time` lets the library choose, then waits for a line on its standard input and times.
"""

import json
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as functional
from fla.ops.mesa_net import chunk_mesa_net

from experiments.harness.records import RecordWriter, describe, installed_versions
from experiments.harness.torch_timing import short_trials, timed_record


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


def compile_share(config: dict[str, Any], share: int, shares: int) -> None:
    """Compiles some of the candidates by running each once; the choice among them is left to the timing process."""
    short_trials(once=True)
    for name, module in list(sys.modules.items()):
        if not name.startswith("fla.ops"):
            continue
        for kernel in list(vars(module).values()):
            while kernel is not None and not isinstance(getattr(kernel, "configs", None), list):
                kernel = getattr(kernel, "fn", None)
            if kernel is not None and len(kernel.configs) > 1 and not hasattr(kernel, "shared_out"):
                kernel.configs = kernel.configs[share::shares] or kernel.configs[:1]
                kernel.shared_out = True
    for call in passes((*config["shapes"][0], config["head_size"]), config["iterations"]).values():
        call()
    torch.cuda.synchronize()


def main(folder: pathlib.Path, mode: str, *arguments: str) -> None:
    """Does a process's part."""
    config = json.loads((folder / "peer.json").read_text())
    if mode == "compile":
        compile_share(config, *map(int, arguments))
        return
    write = RecordWriter(folder / "peer.jsonl")
    versions = installed_versions(("torch", "triton", "fla-core"))
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
    main(pathlib.Path(sys.argv[1]), *sys.argv[2:])

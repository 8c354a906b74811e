"""A process that measures flash-linear-attention's MesaNet and its Gated DeltaNet layer, in one of two ways.

`FOLDER compile N OF` compiles every OF-th of each kernel's candidates, from the N-th; several run side by side.
`FOLDER time` lets the library choose, then waits for a line on its standard input and times.
"""

import contextlib
import functools
import json
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional

from experiments.harness.records import RecordWriter, describe, installed_versions
from experiments.harness.torch_timing import compile_share, short_trials, timed_record
from experiments.ridge_benchmark.config import PEER_LAYER

Passes = dict[str, Callable[[], Any]]


def passes(shape: tuple[int, ...], iterations: int) -> Passes:
    """Forward, and forward + backward, of MesaNet's operator."""
    from fla.ops.mesa_net import chunk_mesa_net

    torch.manual_seed(0)

    def normal(*sizes: int) -> Any:
        return torch.randn(sizes, device="cuda")

    x = {
        "q": torch.nn.functional.normalize(normal(*shape), dim=-1).bfloat16(),
        "k": torch.nn.functional.normalize(normal(*shape), dim=-1).bfloat16(),
        "v": normal(*shape).bfloat16(),
        "g": torch.nn.functional.logsigmoid(normal(*shape[:3]) + 3.0),
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


def layer_passes(layer: Any, x: Any) -> Passes:
    """Forward, and forward + backward with respect to the parameters and the input, in bfloat16 as ours.

    Args:
        layer: gives its output first; its parameters are in float32.
        x: its input, `[B, T, D]`.
    """
    inputs = [x.requires_grad_(), *layer.parameters()]
    d_out = torch.randn_like(x)

    def run() -> Any:
        with torch.autocast(x.device.type, torch.bfloat16):
            return layer(x)[0]

    def forward() -> Any:
        with torch.no_grad():
            return run()

    def forward_backward() -> Any:
        out = run()
        return torch.autograd.grad(out, inputs, d_out.to(out.dtype))

    return {"forward": forward, "forward_backward": forward_backward}


def gated_deltanet(config: dict[str, Any]) -> Passes:
    """Of flash-linear-attention's layer, with the sizes and the output gate of our preset."""
    from fla.layers import GatedDeltaNet

    torch.manual_seed(0)
    width, heads = config["width"], config["layer_heads"]
    layer = GatedDeltaNet(hidden_size=width, expand_v=1.0, head_dim=width // heads, num_heads=heads, use_gate=True)
    x = torch.randn(*config["layer_shape"], width, device="cuda", dtype=torch.bfloat16)
    return layer_passes(layer.cuda(), x)


def planned(config: dict[str, Any]) -> list[tuple[dict[str, Any], Callable[[], Passes]]]:
    """What is measured: a record's beginning, and what makes its passes."""
    found: list[tuple[dict[str, Any], Callable[[], Passes]]] = []
    for sizes in config["shapes"] if "solves" in config["only"] else ():
        shape = (*sizes, config["head_size"])
        what = {"kind": "time", "operator": "mesanet", "precision": "bfloat16", "shape": shape}
        found.append((what, functools.partial(passes, shape, config["iterations"])))
    if "layers" in config["only"]:
        what = {"kind": "layer", "layer": PEER_LAYER, "shape": (*config["layer_shape"], config["width"])}
        found.append((what, functools.partial(gated_deltanet, config)))
    return found


def compile_kernels(config: dict[str, Any], share: int, shares: int) -> None:
    """Compiles a share of every kernel's candidates; the choice among them is left to the timing process."""
    compile_share(share, shares)
    chosen = {what["kind"]: make for what, make in reversed(planned(config))}  # of MesaNet the first shape
    for make in chosen.values():
        with contextlib.suppress(ImportError):  # fla-core alone has no layers, which the timing process tells
            for call in make().values():
                call()
    torch.cuda.synchronize()


def main(folder: pathlib.Path, mode: str, *arguments: str) -> None:
    """Does a process's part."""
    config = json.loads((folder / "peer.json").read_text())
    if mode == "compile":
        compile_kernels(config, *map(int, arguments))
        return
    write = RecordWriter(folder / "peer.jsonl")
    versions = installed_versions(("torch", "triton", "fla-core"))
    write({"kind": "worker", "worker": "fla", **versions, "device": torch.cuda.get_device_name()})
    short_trials(once=False)
    calls: list[tuple[dict[str, Any], Callable[[], Any] | str]] = []
    for what, make in planned(config):
        try:
            made = make()
        except Exception as error:
            calls.append((what, describe(error)))
            continue
        for name, call in made.items():
            try:
                call()
                calls.append(({**what, "pass": name}, call))
            except Exception as error:
                calls.append(({**what, "pass": name}, describe(error)))
            torch.cuda.synchronize()
    (folder / "prepared").touch()
    sys.stdin.readline()
    for what, measured in calls:
        record = {**what, "implementation": "fla"}
        if isinstance(measured, str):
            write({**record, "kind": "failure", "of": what["kind"], "reason": measured})
        else:
            write({**record, **timed_record(measured, config["repeats"])})


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), *sys.argv[2:])

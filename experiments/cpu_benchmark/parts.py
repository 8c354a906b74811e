"""`python -m experiments.cpu_benchmark.parts`: adds where the time of a training step goes, by part, to `parts.json`.

An operation of the compiled step belongs to the part of the model whose source lines it was traced from. A moment at
which several operations run is shared between them equally, so that the parts sum to the traced steps' time.
"""

import collections
import dataclasses
import glob
import gzip
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from typing import Any

import tyro

from experiments.cpu_benchmark.machine import add_run, machine, revision

FOLDER = pathlib.Path(__file__).parent
IDLE, UNNAMED = "between operations", "copies and zeros without a source line"
# The first whose file or function is in an operation's stack.
PARTS = {
    "delta rule": ("ops/gated_delta_rule/", "ops/chunk.py", "ops/triangular.py"),
    "short convolutions": ("ops/short_convolution/",),
    "SwiGLU": ("layers/feed_forward.py",),
    "output norm and gate": ("layers/output_projection.py",),
    "projections of the mixer, decay, gain": ("layers/mixer.py",),
    "head and loss": ("training/loss.py",),
    "embedding": ("models/embedding.py",),
    "norms and residual sums": ("nn/normalization.py", "layers/normalization.py", "models/decoder.py"),
    "AdamW, clipping, whether all is finite": ("optax/", "training/optimizer.py", "training/step.py"),
}


@dataclasses.dataclass(frozen=True)
class Options:
    """Measures one version's step once."""

    name: str = "this"
    """What the results call this version."""
    tree: pathlib.Path = pathlib.Path(".")
    """Folder of the code, a git work tree."""
    output: pathlib.Path = FOLDER / "parts.json"
    """Where the measurement is added."""


def part_of(files: Iterable[str]) -> str:
    """The part that an operation belongs to, by the files of its stack."""
    files = list(files)
    for part, names in PARTS.items():
        if any(name in file for file in files for name in names):
            return part
    return UNNAMED


def _table(text: str, name: str) -> dict[int, str]:
    """Numbered lines of a table at the beginning of a compiled program's text."""
    lines = text.split(f"\n{name}\n", 1)[1].split("\n\n", 1)[0].splitlines()
    return {int(number): rest for number, _, rest in (line.partition(" ") for line in lines)}


def _number(field: str, line: str) -> int:
    found = re.search(rf"\b{field}=(\d+)", line)
    return int(found[1]) if found else 0


def operations(text: str) -> dict[str, tuple[str, str]]:
    """Part and direction ("forward" or "backward") of each operation in a compiled program's text."""
    files = {number: name.strip('"') for number, name in _table(text, "FileNames").items()}
    places = {n: files[_number("file_name_id", line)] for n, line in _table(text, "FileLocations").items()}
    frames = {
        n: (places[_number("file_location_id", line)], _number("parent_frame_id", line) - 1)
        for n, line in _table(text, "StackFrames").items()
    }

    def stack(frame: int) -> Iterable[str]:
        seen: set[int] = set()
        while frame in frames and frame not in seen:
            seen.add(frame)
            file, frame = frames[frame]
            yield file

    found = {}
    for line in text.splitlines():
        match = re.match(r"\s+(?:ROOT )?%([\w.\-]+) = ", line)
        if match:
            direction = "backward" if re.search(r'op_name="[^"]*transpose\(', line) else "forward"
            found[match[1]] = part_of(stack(_number("stack_frame_id", line))), direction
    return found


def shares(events: list[dict[str, Any]]) -> dict[str, float]:
    """Microseconds of each operation and `IDLE`; a moment is shared equally by the operations that run in it.

    Args:
        events: name, start "ts" and duration "dur" in microseconds. A loop's own event counts only while no operation
            of another name runs, since those within it have theirs.
    """
    points = sorted((e["ts"] + end * e["dur"], 1 - end, i) for i, e in enumerate(events) for end in (0, 1))
    found: dict[str, float] = collections.defaultdict(float)
    running: set[int] = set()
    last = points[0][0]
    for when, begins, number in points:
        names = [events[i]["name"] for i in running]
        names = [name for name in names if not name.startswith("while")] or names or [IDLE]
        for name in names:
            found[name] += (when - last) / len(names)
        last = when
        (running.add if begins else running.discard)(number)
    return dict(found)


def step_parts(text: str, trace: dict[str, Any], steps: int) -> dict[str, dict[str, float]]:
    """Milliseconds of a traced step, by part and direction."""
    events = [e for e in trace["traceEvents"] if e.get("ph") == "X" and "hlo_op" in e.get("args", {})]
    known = operations(text)
    events = [e for e in events if e["args"]["hlo_op"] in known]
    found: dict[str, dict[str, float]] = {}
    for name, microseconds in shares(events).items():
        part, direction = (IDLE, "forward") if name == IDLE else known[name]
        if part.startswith("AdamW") or part in (IDLE, UNNAMED):
            direction = "both"
        directions = found.setdefault(part, collections.defaultdict(float))
        directions[direction] += microseconds / 1e3 / steps
    return found


def main(options: Options) -> None:
    """Adds one measurement to the results."""
    environment = os.environ | {"PYTHONPATH": str(options.tree.resolve()), "JAX_PLATFORMS": "cpu"}
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, FOLDER / "measured_step.py", folder], env=environment, check=True)
        text = (pathlib.Path(folder) / "step.txt").read_text()
        times = json.loads((pathlib.Path(folder) / "times.json").read_text())
        (path,) = glob.glob(f"{folder}/trace/plugins/profile/*/*.trace.json.gz")
        with gzip.open(path) as file:
            trace = json.load(file)
    command = f"python -m experiments.cpu_benchmark.parts --name {options.name} --tree FOLDER"
    record = {"name": options.name, **revision(options.tree), **machine(), "command": command}
    record |= times | {"parts": step_parts(text, trace, times["traced_steps"])}
    add_run(options.output, record)
    total = sum(sum(part.values()) for part in record["parts"].values())
    print(f"{options.name}: {times['milliseconds']:.1f} ms a step, {total:.1f} ms traced")


if __name__ == "__main__":
    main(tyro.cli(Options))

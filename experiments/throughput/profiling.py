"""Where a step's time goes: device time by operation, from a profile of JAX."""

import dataclasses
import gzip
import pathlib
import re
import tempfile
from collections.abc import Callable
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class Operation:
    """One operation of a compiled program and the time that it took.

    Attributes:
        name: in the program's text.
        kernel: first kernel that ran for it; the operation's name on a CPU.
        source: the JAX operation that it comes from, by XLA's metadata; of a fusion that of its root.
        shape: of its result.
        calls: kernels that ran for it, in all steps.
        milliseconds: in all steps.
    """

    name: str
    kernel: str
    source: str
    shape: str
    calls: int
    milliseconds: float


def profile(step: Callable[[], Any], text: str) -> list[Operation]:
    """Device time of one step by operation, the longest first.

    Args:
        step: takes a step and waits for it.
        text: the compiled program.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            step()
        (file,) = pathlib.Path(folder).rglob("*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(file))
        planes = list(data.planes)
        devices = [plane for plane in planes if plane.name.startswith("/device:GPU")] or planes
        described = _described(text)
        by_kernel = {name.replace(".", "_").replace("-", "_"): name for name in described}
        found: dict[str, list[Any]] = {}
        for plane in devices:
            for line in plane.lines:
                for event in line.events:
                    operation = next((value for key, value in event.stats if key == "hlo_op"), None)
                    on_device = plane.name.startswith("/device:GPU")
                    # XLA's own lines show the same time again.
                    if not line.name.startswith("Stream") if on_device else operation is None:
                        continue
                    # In a command buffer all kernels have its name in place of their operation's. XLA's own kernels
                    # are named as their operation then, with underscores.
                    if on_device and operation not in described:
                        operation = by_kernel.get(event.name, event.name)
                    entry = found.setdefault(str(operation), [event.name, 0, 0.0])
                    entry[1] += 1
                    entry[2] += event.duration_ns / 1e6
    operations = [
        Operation(name, kernel, *described.get(name, ("", "")), calls, round(time, 5))
        for name, (kernel, calls, time) in found.items()
    ]
    return sorted(operations, key=lambda operation: -operation.milliseconds)


_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (\([^=]*?\)|\S+) \S", re.M)
_COMMENT = re.compile(r"/\*.*?\*/")  # numbers of a long tuple's elements
_OP_NAME = re.compile(r'op_name="([^"]*)"')


def _described(text: str) -> dict[str, tuple[str, str]]:
    """Source and result shape of every instruction of a program's text."""
    described = {}
    for line in text.splitlines():
        if match := _INSTRUCTION.match(_COMMENT.sub("", line)):
            source = _OP_NAME.search(line)
            described[match[1]] = (source[1] if source else "", match[2])
    return described


def write_program(text: str, path: pathlib.Path) -> None:
    """Writes a compiled program's text, compressed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text.encode()))

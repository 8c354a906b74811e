"""The collectives of a compiled program, read from its text: what each moves, and how often it runs."""

import math
import re
from typing import NamedTuple

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")
_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8}
_COMPUTATION = re.compile(r"^(ENTRY )?%([\w.\-]+) \(.*\{$")
_CALLED = re.compile(
    r"(?:to_apply|calls|body|condition|branch_computations|called_computations)=\{?((?:%[\w.\-]+(?:, )?)+)"
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_COLLECTIVE = re.compile(rf" = (.*) ({'|'.join(KINDS)})(?:-start)?\(")


class Collective(NamedTuple):
    """One collective operation of a program.

    Attributes:
        kind: One of `KINDS`.
        shapes: Of its results on a device, axes of length 1 left out.
        bytes: Of these.
        times: How often the program runs it.
        devices: How many have part in it together; of one, it does nothing.
    """

    kind: str
    shapes: tuple[tuple[int, ...], ...]
    bytes: int
    times: int
    devices: int


def _group_size(line: str) -> int:
    """Devices of a group, of `replica_groups=mesh['data'=2,'fsdp'=4] {'fsdp'}`, `[2,4]<=[8]` or `{{0,1},{2,3}}`."""
    if found := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", line):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", found[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", found[2]))
    if found := re.search(r"replica_groups=\[\d+,(\d+)\]", line):
        return int(found[1])
    if found := re.search(r"replica_groups=\{\{([\d,]*)\}", line):
        return len(found[1].split(","))
    if found := re.search(r"source_target_pairs=\{\{(.*?)\}\}", line):  # chains of devices, all equally long
        pairs = [pair.split(",") for pair in found[1].split("},{")]
        firsts = {source for source, _ in pairs} - {target for _, target in pairs}
        return len({device for pair in pairs for device in pair}) // len(firsts)
    raise ValueError(f"no groups of devices: {line}")


def collectives(text: str) -> list[Collective]:
    """All of them, of a program's text after XLA's passes (`compiled.as_text()`).

    Raises:
        ValueError: One stands in a loop whose number of rounds the compiler does not know.
    """
    lines: dict[str, list[str]] = {}
    entry = name = ""
    for line in text.splitlines():
        if found := _COMPUTATION.match(line):
            name = found[2]
            lines[name] = []
            entry = name if found[1] else entry
        elif name:
            lines[name].append(line)

    found_ones: list[Collective] = []

    def walk(computation: str, times: int | None) -> None:
        for line in lines[computation]:
            if found := _COLLECTIVE.search(line):
                if times is None:
                    raise ValueError(f"in a loop of unknown length: {line}")
                arrays = re.findall(r"(\w+)\[([\d,]*)\]", found[1])
                shapes = [tuple(int(n) for n in sizes.split(",") if n) for _, sizes in arrays]
                size = sum(_BYTES[dtype] * math.prod(shape) for (dtype, _), shape in zip(arrays, shapes))
                kept = tuple(tuple(n for n in shape if n > 1) for shape in shapes)
                found_ones.append(Collective(found[2], kept, size, times, _group_size(line)))
            rounds: int | None = 1
            if " while(" in line:
                trips = _TRIPS.search(line)
                rounds = int(trips[1]) if trips else None
            for called in _CALLED.findall(line):
                for other in re.findall(r"%([\w.\-]+)", called):
                    walk(other, None if times is None or rounds is None else times * rounds)

    walk(entry, 1)
    return found_ones

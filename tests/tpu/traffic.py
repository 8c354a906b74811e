"""Bytes that a compiled TPU program moves to and from its main memory, each loop's body as often as it runs.

XLA's own count takes a loop's body once. It also counts what stays in the chip's vector memory.
"""

import dataclasses
import math
import re

_WIDTHS = {"pred": 1, "bf16": 2, "c64": 8, "c128": 16, "token": 0, "opaque": 0}
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\](?:\{([^}]*)\})?")
_COMPUTATION = re.compile(r"^(ENTRY )?%([\w.\-]+) .*\{$")
_OPERATION = re.compile(r"(?<=[\s)}])([a-z][\w\-]*)\(")
_NO_BYTES = {
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "after-all",
    "partition-id",
    "replica-id",
}


@dataclasses.dataclass(frozen=True)
class Array:
    """An array of a program: its bytes, and whether they are in main memory."""

    bytes: int
    is_in_main_memory: bool


@dataclasses.dataclass(frozen=True)
class Instruction:
    """An instruction of a computation."""

    name: str
    operation: str
    arrays: tuple[Array, ...]
    operands: tuple[str, ...]
    line: str

    def attribute(self, name: str) -> str | None:
        """A computation, or a number, that the instruction names."""
        found = re.search(rf"\b{name}=%?([\w.\-]+)", self.line)
        return found[1] if found else None

    @property
    def cycles(self) -> int:
        """What the compiler estimates."""
        found = re.search(r'"estimated_cycles":"(\d+)"', self.line)
        return int(found[1]) if found else 0


@dataclasses.dataclass(frozen=True)
class Traffic:
    """What a program moves.

    Attributes:
        main: bytes read from and written to main memory.
        all: the same with arrays in vector memory.
        cycles: that the compiler estimates for the instructions it has an estimate of.
    """

    main: int = 0
    all: int = 0
    cycles: int = 0

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.main + other.main, self.all + other.all, self.cycles + other.cycles)

    def __mul__(self, times: int) -> "Traffic":
        return Traffic(self.main * times, self.all * times, self.cycles * times)


def _arrays(text: str) -> tuple[Array, ...]:
    """The arrays of a type, without their padding."""
    found = []
    for dtype, sizes, layout in _ARRAY.findall(text):
        bits = re.search(r"\d+", dtype)
        width = _WIDTHS[dtype] if dtype in _WIDTHS else int(bits[0]) / 8 if bits else 0
        count = math.prod(int(size) for size in sizes.split(",") if size)
        found.append(Array(math.ceil(count * width), re.search(r"S\([1-9]\d*\)", layout) is None))
    return tuple(found)


class Program:
    """The text of a compiled program (`compiled.as_text()`)."""

    def __init__(self, text: str):
        self._computations: dict[str, dict[str, Instruction]] = {}
        current: dict[str, Instruction] = {}
        self._entry = ""
        for line in text.splitlines():
            if start := _COMPUTATION.match(line):
                current = self._computations.setdefault(start[2], {})
                self._entry = start[2] if start[1] else self._entry
            elif (named := re.match(r"\s+(?:ROOT )?%([\w.\-]+) = (.*)", line)) and (
                operation := _OPERATION.search(f" {named[2]}")
            ):
                kind, rest = named[2][: operation.start() - 1], named[2][operation.end() - 1 :]
                operands = tuple(re.findall(r"%([\w.\-]+)", rest[: rest.find(")")]))
                current[named[1]] = Instruction(named[1], operation[1], _arrays(kind), operands, line)

    def traffic(self, *, loops: bool = True) -> Traffic:
        """Of the whole program; without `loops` a loop's body counts once, as XLA counts it."""
        return self._traffic(self._entry, loops)

    def _traffic(self, name: str, loops: bool) -> Traffic:
        return sum(
            (self._of(one, self._computations[name], loops) for one in self._computations[name].values()), Traffic()
        )

    def _of(self, one: Instruction, near: dict[str, Instruction], loops: bool) -> Traffic:
        if one.operation in _NO_BYTES or one.operation.endswith(("-done", "-update")):
            return Traffic()
        if one.operation == "while":
            return self._traffic(one.attribute("body") or "", loops) * (self._trips(one) if loops else 1)
        if one.operation == "call":
            return self._traffic(one.attribute("to_apply") or "", loops)
        inputs = [near[operand].arrays[0] for operand in one.operands if operand in near and near[operand].arrays]
        outputs = list(one.arrays)
        if one.operation == "fusion":
            inputs, outputs = self._fused(one, inputs)
        elif one.operation in ("dynamic-slice", "slice", "gather"):
            inputs = [dataclasses.replace(inputs[0], bytes=sum(x.bytes for x in outputs))]
        elif one.operation == "dynamic-update-slice":
            inputs, outputs = [inputs[1]], [dataclasses.replace(outputs[0], bytes=inputs[1].bytes)]
        elif one.operation in ("copy-start", "slice-start", "dynamic-slice-start"):  # (destination, source, ...)
            outputs = outputs[:1] if one.operation == "copy-start" else outputs[1:2]
            inputs = [dataclasses.replace(inputs[0], bytes=outputs[0].bytes)]
        moved = [*inputs, *outputs]
        main = sum(x.bytes for x in moved if x.is_in_main_memory)
        return Traffic(main, sum(x.bytes for x in moved), one.cycles)

    def _trips(self, one: Instruction) -> int:
        """How often a loop's body runs: JAX's loops count from 0 to a constant."""
        *_, test = self._computations[one.attribute("condition") or ""].values()
        limits = [x for x in self._computations[one.attribute("condition") or ""].values() if x.name in test.operands]
        numbers = [found[1] for x in limits if (found := re.search(r" constant\((\d+)\)", x.line))]
        if test.operation != "compare" or "direction=LT" not in test.line or len(numbers) != 1:
            raise ValueError(f"{one.name}: how often does this loop run? {test.line.strip()[:200]}")
        return int(numbers[0])

    def _fused(self, one: Instruction, inputs: list[Array]) -> tuple[list[Array], list[Array]]:
        """Inputs with the bytes of them that a fusion reads, and outputs with the bytes that it writes."""
        inside = self._computations[one.attribute("calls") or ""]
        read = [dataclasses.replace(x, bytes=self._read(one, i, x.bytes)) for i, x in enumerate(inputs)]
        root = next(reversed(inside.values()))
        parts = [inside[name] for name in root.operands] if root.operation == "tuple" else [root]
        written = []
        for array, part in zip(one.arrays, parts, strict=True):
            while part.operation == "bitcast":
                part = inside[part.operands[0]]
            in_place = part.operation == "dynamic-update-slice"
            size = inside[part.operands[1]].arrays[0].bytes if in_place else array.bytes
            written.append(dataclasses.replace(array, bytes=size))
        return read, written

    def _read(self, one: Instruction, number: int, whole: int) -> int:
        """Bytes that a fusion reads of an input: only slices of it, none where a slice is written into it, or all."""
        inside = self._computations[one.attribute("calls") or ""]
        parameter = next(x for x in inside.values() if x.operation == "parameter" and f"parameter({number})" in x.line)
        size, names = 0, [parameter.name]
        while names:
            name = names.pop()
            for user in (x for x in inside.values() if name in x.operands):
                if user.operation == "bitcast":
                    names.append(user.name)
                elif user.operation in ("dynamic-slice", "slice") and user.operands[0] == name:
                    size += user.arrays[0].bytes
                elif user.operation == "fusion":
                    size += self._read(user, user.operands.index(name), whole)
                elif user.operation != "dynamic-update-slice" or user.operands[0] != name:
                    size += whole
        return min(size, whole)

"""Look-ups in a run's records."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from experiments.harness.records import Record
from experiments.kernel_benchmarks.inputs import Shape

PASSES = {"forward": "forward", "forward_backward": "forward + backward"}

PAPER_SPEEDUPS = {
    (2048, 64): 5.5,
    (4096, 64): 7.6,
    (8192, 64): 11.5,
    (2048, 128): 8.9,
    (4096, 128): 13.2,
    (2048, 256): 13.7,
}
"""Chunk form over recurrence by (L, head size): table 1 of arXiv 2406.06484, on an H100."""


def sizes_text(shape: Any) -> str:
    """B, T and H as tables show them."""
    return ",".join(str(size) for size in shape[:3])


def head_sizes_text(sizes: tuple[int, int]) -> str:
    """K and V as tables and titles show them."""
    key_size, value_size = sizes
    return f"K = V = {key_size}" if key_size == value_size else f"K = {key_size}, V = {value_size}"


@dataclass(frozen=True)
class Errors:
    """An implementation's errors at one operator, shape and case.

    Attributes:
        by_result: by the result's name, and by the seed of its inputs; infinite where the result is not finite.
        identical: whether all reruns were bit-identical.
    """

    by_result: dict[str, dict[int, float]]
    identical: bool

    def median(self, result: str) -> float | None:
        """Over the seeds; None for a result that is not there."""
        return float(np.median(list(self.by_result[result].values()))) if result in self.by_result else None


@dataclass(frozen=True)
class Comparison:
    """Errors of one result beside a peer's.

    Attributes:
        operator: key of `OPERATORS`.
        shape: (B, T, H, K, V).
        case: of the inputs.
        result: its name.
        ours: median over the seeds that both have.
        theirs: likewise.
        low: the ratio of medians, 5th percentile of draws of as many seeds with replacement.
        high: likewise, 95th.
        seeds: how many.
    """

    operator: str
    shape: Shape
    case: str
    result: str
    ours: float
    theirs: float
    low: float
    high: float
    seeds: int

    @property
    def ratio(self) -> float:
        """Of the medians."""
        return self.ours / self.theirs


class View:
    """A run's results by what they measure.

    Attributes:
        config: the run's configuration.
        records: all records.
        commit: of what is timed, or several.
        ours: the implementation that stands for us: what a call takes by itself or, in older results, Triton's kernels.
        ceilings: copy bandwidth in GB/s and bfloat16 products in TFLOP/s, both 0 where they were not measured.
    """

    def __init__(self, results: dict[str, Any]) -> None:
        self.config = results["config"]
        self.records: list[Record] = results["records"]
        names = {r.get("implementation") for r in self.records}
        self.ours = "ours" if "ours" in names else "triton"
        # Where a run has what a call takes by itself, Triton's kernels are that where it has not.
        self._apart = {
            (r["operator"], tuple(r["shape"]))
            for r in self.records
            if r.get("implementation") == "ours" and r.get("of", r["kind"]) == "time"
        }
        first = results.get("commit", "").partition(", ")[0]  # records that were added later have their own
        self.commit = ", ".join(dict.fromkeys(r.get("commit", first) for r in self.records if r["kind"] == "time"))
        ceiling = next((r for r in self.records if r["kind"] == "ceiling"), None)
        self.ceilings = (ceiling["copy_gb_s"], ceiling["matmul_tflops"]) if ceiling else (0.0, 0.0)
        self._times = {
            (r["implementation"], r["operator"], tuple(r["shape"]), r["pass"]): r
            for r in self.records
            if r["kind"] == "time" and "beside" not in r
        }
        self._beside = {
            (r["beside"], tuple(r["shape"]), r["pass"]): r
            for r in self.records
            if r["kind"] == "time" and "beside" in r and r["implementation"] == self.ours
        }

    def has(self, implementation: str) -> bool:
        """Whether any time of an implementation was measured."""
        return any(key[0] == implementation for key in self._times)

    def record(self, implementation: str, operator: str, shape: Shape, run: str) -> Record | None:
        """The record of a time."""
        if implementation == "ours" and (operator, shape) not in self._apart:
            implementation = "triton"
        return self._times.get((implementation, operator, shape, run))

    def time(
        self, implementation: str, operator: str, shape: Shape, run: str, field: str = "device_ms"
    ) -> float | None:
        """A field of the record of a time; None where it was not measured."""
        record = self.record(implementation, operator, shape, run)
        return record[field] if record else None

    def baseline(self, operator: str, baseline: str, shape: Shape, run: str) -> float | None:
        """Our device time of an operator's baseline, on the same GPU as the operator's; None of another commit's."""
        ours = self.record(self.ours, operator, shape, run)
        for its in (self._beside.get((operator, shape, run)), self.record(self.ours, baseline, shape, run)):
            if its is not None and (ours is None or ours.get("commit") == its.get("commit")):
                return its["device_ms"]
        return None

    @property
    def head_sizes(self) -> tuple[int, int]:
        """K and V; older results have only one number for both."""
        key_size = self.config["head_size"]
        return key_size, self.config.get("value_size") or key_size

    def _shape(self, sizes: Any) -> Shape:
        return (*sizes, *self.head_sizes)

    def shape_text(self, shape: Shape) -> str:
        """B, T and H, and K and V where they are not this run's."""
        text, sizes = sizes_text(shape), shape[3:]
        return text if sizes == self.head_sizes else f"{text}; {head_sizes_text(sizes)}"

    def table_points(self) -> list[tuple[str, Shape]]:
        """(operator, shape) of the table."""
        return [(op, self._shape(sizes)) for op in self.config["operators"] for sizes in self.config["shapes"]]

    def sweep_shapes(self, *, filled: bool | None = None) -> list[Shape]:
        """Shapes of the sweep over T: at one row (`filled` False), at a fixed number of tokens (True), or both."""
        heads, tokens = self.config["sweep_heads"], self.config["sweep_tokens"]
        single = [self._shape((1, length, heads)) for length in self.config["sweep_lengths"]]
        full = [self._shape((max(1, tokens // length), length, heads)) for length in self.config["sweep_lengths"]]
        return {False: single, True: full, None: list(dict.fromkeys([*full, *single]))}[filled]

    def errors(self) -> dict[tuple[str, Shape, str], dict[str, Errors]]:
        """Errors by (operator, shape, case) and implementation."""
        found: dict[tuple[str, Shape, str], dict[str, Errors]] = {}
        for r in self.records:
            if r["kind"] == "error":
                by_name = found.setdefault((r["operator"], tuple(r["shape"]), r["case"]), {})
                before = by_name.get(r["implementation"], Errors({}, True))
                for result, error in r["errors"].items():
                    seeds = before.by_result.setdefault(result, {})
                    seeds[r.get("seed", 0)] = math.inf if error is None else error
                by_name[r["implementation"]] = Errors(before.by_result, before.identical and r["identical"])
        return found

    def error_comparisons(self, peer: str = "fla") -> list[Comparison]:
        """Our errors beside a peer's, but for those where both are above 1: there the gradient itself is rounding."""
        found = []
        for (operator, shape, case), by_name in self.errors().items():
            if self.ours not in by_name or peer not in by_name:
                continue
            theirs = by_name[peer].by_result
            for result, ours in by_name[self.ours].by_result.items():
                seeds = sorted(ours.keys() & theirs.get(result, {}).keys())
                pairs = np.array([(ours[seed], theirs[result][seed]) for seed in seeds])
                if not seeds or not np.all(pairs[:, 1] > 0):
                    continue
                mine, other = np.median(pairs, axis=0)
                if min(mine, other) < 1:
                    draws = np.random.default_rng(0).integers(0, len(seeds), (2000, len(seeds)))
                    medians = np.median(pairs[draws], axis=1)
                    low, high = np.quantile(medians[:, 0] / medians[:, 1], (0.05, 0.95), method="nearest")
                    where = (operator, shape, case, result)
                    found.append(Comparison(*where, float(mine), float(other), float(low), float(high), len(seeds)))
        return found

    def scan_speedups(self) -> Iterator[tuple[Shape, float | None, list[float | None]]]:
        """(shape, the paper's speed-up, ours of forward and of forward + backward), by wall time."""
        for batch, length, heads, size in self.config["scan_shapes"]:
            shape = (batch, length, heads, size, size)
            ratios: list[float | None] = []
            for run in PASSES:
                ours = self.time(self.ours, "deltanet", shape, run, "wall_ms")
                scan = self.time("scan", "deltanet", shape, run, "wall_ms")
                ratios.append(scan / ours if ours and scan else None)
            if any(ratios):
                yield shape, PAPER_SPEEDUPS.get((length, size)), ratios

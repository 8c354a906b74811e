"""What is measured: the command's configuration, and the list of measurements that follows from it."""

import dataclasses
import itertools
import pathlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from experiments.kernel_benchmarks.inputs import CASES, Shape
from experiments.kernel_benchmarks.operators import OPERATORS
from experiments.kernel_benchmarks.peers import supports

Sizes = tuple[int, int, int]

TABLE_SHAPES = ((1, 2048, 8), (1, 8192, 8), (1, 32768, 8), (4, 4096, 8), (8, 4096, 16), (2, 16384, 16))
Kind = Literal["time", "decode", "error"]
Implementation = Literal[
    "ours", "triton", "chunked", "scan", "fla", "fla_safe_gate", "flash_qla", "cudnn", "flashinfer", "jla"
]
OURS: tuple[Implementation, ...] = ("ours", "triton", "chunked", "scan")
KERNELS: tuple[Implementation, ...] = ("ours", "triton")  # what a call takes by itself, and Triton's kernels alone
PEERS: tuple[Implementation, ...] = ("fla", "fla_safe_gate", "flash_qla", "cudnn", "flashinfer", "jla")


@dataclass(frozen=True)
class BenchmarkConfig:
    """Times our implementations and, where they are installed, the peers; writes JSON, tables and pictures."""

    name: str = "h200"
    """Results go to NAME.json, NAME.md and NAME_*.png."""
    output: pathlib.Path = pathlib.Path(__file__).parent / "results"
    """Folder of the results."""
    from_json: bool = False
    """Measure nothing: make tables and pictures again from NAME.json."""
    add: bool = False
    """Keep what NAME.json has of measurements that are not made again now, such as other draws of the inputs."""
    join: tuple[str, ...] = ()
    """Measure nothing: NAME.json has the times of the first run's table, each from the last of these runs with it."""
    commit: str | None = None
    """The source's commit, where the folder it runs from is no checkout."""
    keep: pathlib.Path | None = None
    """New or empty folder for the worker processes' own files and logs, kept; left out, they are removed."""

    operators: tuple[str, ...] = tuple(OPERATORS)
    """Operators to measure."""
    implementations: tuple[Implementation, ...] = (*OURS, *PEERS)
    """Ours and the peers; peers that are not installed are passed over."""
    only: tuple[Kind, ...] = ("time", "decode", "error")
    """Kinds of measurements. Errors by themselves don't need the GPU for themselves: all their workers run at once."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Of q, k, v and the gates; decays are always float32."""
    head_size: int = 128
    """K, and V where `value_size` is left out."""
    value_size: int | None = None
    """V."""

    shapes: tuple[Sizes, ...] = TABLE_SHAPES
    """(B, T, H) of the table."""
    chunked_shapes: tuple[Sizes, ...] = ((1, 8192, 8),)
    """Those of them at which "chunked" is timed."""
    sweep_operators: tuple[str, ...] = ("gated_deltanet", "kda")
    """Operators timed against T."""
    sweep_lengths: tuple[int, ...] = (2048, 4096, 8192, 16384, 32768, 65536, 131072)
    """T, at one row and at rows that fill `sweep_tokens`."""
    sweep_tokens: int = 131072
    """B * T of the sweep."""
    sweep_heads: int = 8
    """H of the sweep."""
    error_shapes: tuple[Sizes, ...] = TABLE_SHAPES
    """(B, T, H) at which errors against the float64 scan are measured."""
    case_shape: Sizes = (1, 2048, 8)
    """(B, T, H) at which errors on special inputs are measured."""
    cases: tuple[str, ...] = CASES[1:]
    """Special inputs."""
    seeds: int = 5
    """Draws of the inputs of each error measurement; what is compared are medians."""
    scan_shapes: tuple[tuple[int, int, int, int], ...] = (
        (1, 2048, 32, 64),
        (1, 4096, 32, 64),
        (1, 8192, 32, 64),
        (1, 2048, 16, 128),
        (1, 4096, 16, 128),
        (1, 2048, 8, 256),
    )
    """(B, T, H, K) at which DeltaNet's kernels and "scan" are compared, as in table 1 of arXiv 2406.06484."""
    decode_batch: int = 64
    """Sequences decoded at once; 0 leaves decoding out."""
    decode_heads: int = 32
    """Heads while decoding."""

    repeats: int = 15
    """Timed calls of each; medians are reported."""
    time_limit: float = 1800.0
    """Seconds after which no further measurement starts; those left out are listed in the results."""
    exclusive: tuple[pathlib.Path, ...] = ()
    """Lock files, for several commands on one GPU: all compile side by side and measure one after another."""
    jax_processes: int = 1
    """Processes of each GPU that compile our kernels and those of peers in JAX side by side; each then measures what it
    compiled, one after another. Lowering holds one core of a process."""
    gpus: tuple[str, ...] = ()
    """GPUs to share the operators out to, as CUDA_VISIBLE_DEVICES names them; left out, all that there are."""

    def __post_init__(self) -> None:
        """Checks names."""
        for field, known in (("operators", OPERATORS), ("sweep_operators", OPERATORS), ("cases", CASES)):
            unknown = set(getattr(self, field)) - set(known)
            if unknown:
                raise ValueError(f"{field} has {sorted(unknown)}, expected some of {', '.join(known)}")
        if self.jax_processes < 1:
            raise ValueError(f"jax_processes is {self.jax_processes}, expected 1 or more")

    def shape(self, sizes: Sizes) -> Shape:
        """(B, T, H, K, V) from (B, T, H)."""
        return (*sizes, self.head_size, self.value_size or self.head_size)


@dataclass(frozen=True)
class Measurement:
    """One measurement.

    Attributes:
        kind: what is measured.
        operator: key of `OPERATORS`.
        implementation: of `OURS` or `PEERS`.
        shape: (B, T, H, K, V).
        case: inputs of an error measurement.
        seed: of these inputs.
        beside: the operator for whose sake this one is timed once more on another GPU, as what it is compared with.
    """

    kind: Kind
    operator: str
    implementation: str
    shape: Shape
    case: str = "random"
    seed: int = 0
    beside: str = ""


def share_out(measurements: Sequence[Measurement], shares: int) -> list[tuple[Measurement, ...]]:
    """Splits measurements by operator: each operator's, ours and the peers', stay together.

    The heaviest go first, to the share with the least so far. A share that has not an operator's baseline times ours
    once more, so that what is compared within a few percent comes from one GPU.

    Args:
        measurements: of all operators.
        shares: at most so many parts.
    """
    # About how many seconds: ours come compiled from a table; a peer's kernels are compiled and searched by operator.
    searched = {(m.operator, m.implementation) for m in measurements if m.implementation not in OURS}
    weights: dict[str, float] = {m.operator: 0.0 for m in measurements}
    for m in measurements:
        weights[m.operator] += (0.5 if m.implementation in OURS else 1.5) / (5 if m.kind == "error" and m.seed else 1)
    for operator, _ in searched:
        weights[operator] += 10.0
    parts: list[list[str]] = [[] for _ in range(min(shares, len(weights)))]
    for operator in sorted(weights, key=lambda name: -weights[name]):
        min(parts, key=lambda part: sum(weights[name] for name in part)).append(operator)
    found = []
    for part in parts:
        mine = [m for m in measurements if m.operator in part]
        for m in list(mine):
            baseline = OPERATORS[m.operator].baseline
            if m.kind == "time" and m.implementation in KERNELS and baseline and baseline not in part:
                mine.append(dataclasses.replace(m, operator=baseline, beside=m.operator))
        order = {"time": 0, "decode": 1, "error": 2}
        found.append(tuple(sorted(mine, key=lambda m: order[m.kind])))
    return found


def part_of(measurements: Sequence[Measurement], part: int, parts: int) -> list[Measurement]:
    """Every `parts`-th operator and shape with all its measurements, from number `part`: they share what is compiled.

    What is compared, ours and the peers' of an operator at a shape, stays together.
    """
    points = list(dict.fromkeys((m.operator, m.shape) for m in measurements))
    mine = set(points[part::parts])
    return [m for m in measurements if (m.operator, m.shape) in mine]


def timed_points(config: BenchmarkConfig) -> list[tuple[str, Shape, bool]]:
    """(operator, shape, whether in the table) of all timed points without the scan's, each once, the table first."""
    points: dict[tuple[str, Shape], bool] = {}
    for sizes in config.shapes:
        for operator in config.operators:
            points[operator, config.shape(sizes)] = True
    for length in config.sweep_lengths:
        for batch in (1, max(1, config.sweep_tokens // length)):
            for operator in config.sweep_operators:
                points.setdefault((operator, config.shape((batch, length, config.sweep_heads))), False)
    return [(operator, shape, in_table) for (operator, shape), in_table in points.items()]


def plan(config: BenchmarkConfig) -> list[Measurement]:
    """All measurements, the most wanted first."""
    chosen = config.implementations
    peers = [name for name in PEERS if name in chosen]
    ours = [name for name in KERNELS if name in chosen][:1]
    timed: list[Measurement] = []
    for operator, shape, in_table in timed_points(config):
        wanted = [*KERNELS, *peers] if in_table or operator == "gated_deltanet" else [*KERNELS]
        if in_table and shape[:3] in config.chunked_shapes:
            wanted.append("chunked")
        timed += [Measurement("time", operator, name, shape) for name in wanted if name in chosen]
    errors: list[Measurement] = []
    cases = [(sizes, "random") for sizes in config.error_shapes] + [(config.case_shape, case) for case in config.cases]
    # All cases with one seed before the next: what a time limit cuts is seeds.
    for seed, (sizes, case) in itertools.product(range(config.seeds), cases):
        for operator in config.operators:
            for name in (*KERNELS, *peers):
                if name in chosen and not (case == "packed" and sizes[0] > 1 and name in peers):
                    errors.append(Measurement("error", operator, name, config.shape(sizes), case, seed))
    decoded: list[Measurement] = []
    if config.decode_batch:
        shape = config.shape((config.decode_batch, 1, config.decode_heads))
        for operator in config.operators:
            decoded += [
                Measurement("decode", operator, name, shape) for name in (*ours, "scan", "fla") if name in chosen
            ]
    scanned: list[Measurement] = []
    if "deltanet" in config.operators:
        for batch, length, heads, key_size in config.scan_shapes:
            shape = (batch, length, heads, key_size, key_size)
            names = [name for name in (*ours, "scan") if name in chosen]
            scanned += [Measurement("time", "deltanet", name, shape) for name in names]
    wanted_once = [m for m in dict.fromkeys([*timed, *decoded, *errors, *scanned]) if m.kind in config.only]
    return [m for m in wanted_once if m.implementation in OURS or supports(m.implementation, m.operator, m.kind)]

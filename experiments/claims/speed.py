"""Claims on time and on solvers."""

from collections.abc import Callable
from typing import Any

import numpy as np

from experiments.claims.claim import Claim, Part
from experiments.claims.evidence import TIME, Measure, layer_beside_peer, number, steps
from experiments.harness.verdicts import Region, above, equal

RIDGE = "ridge_benchmark/results/h200.json"
SOLVERS = "solver_convergence/results/results.json"
KERNELS = "kernel_benchmarks/results/h200.json"
SPREAD = 0.05
"""Of a ratio of two medians of 15 calls."""


def _times(content: Any, field: str, *names: str, **wanted: str) -> dict[tuple[str, ...], float]:
    """A field of the records of forward and backward that are as wanted, by other fields of theirs."""
    found = {}
    for record in content["records"]:
        if all(record.get(name) == value for name, value in {"pass": "forward_backward", **wanted}.items()):
            found[tuple(str(record[name]) for name in names)] = record[field]
    return found


def _layers(ours: str, theirs: str) -> Callable[[Any], float]:
    def read(content: Any) -> float:
        times = _times(content, "device_ms", "layer", kind="layer")
        return times[(ours,)] / times[(theirs,)] - 1

    return read


def _kernels(ours: str, theirs: str) -> Callable[[Any], float]:
    """Mean over the shapes that both were timed at, forward and backward."""

    def read(content: Any) -> float:
        times = _times(content, "device_ms", "operator", "shape", kind="time", implementation="triton")
        shapes = [shape for operator, shape in times if operator == ours and (theirs, shape) in times]
        return float(np.mean([times[ours, shape] / times[theirs, shape] for shape in shapes])) - 1

    return read


def _chunk_form(content: Any) -> float:
    """How much faster, at the shape where it gains least, forward and backward."""
    times = _times(content, "wall_ms", "implementation", "shape", kind="time", operator="deltanet")
    shapes = [shape for name, shape in times if name == "scan"]
    return min(times["scan", shape] / times["triton", shape] for shape in shapes) - 1


def _at_4096(ours: str, theirs: str) -> Measure:
    """Of training steps of 4096 tokens a row."""
    return steps("real_4096", (ours, 4096), (theirs, 4096))


def _residual(precision: str) -> Callable[[Any], float]:
    def read(content: Any) -> float:
        found = content["residuals"][precision]
        return found["Chebyshev"]["largest"][-1] / found["conjugate gradients"]["largest"][-1] - 1

    return read


CLAIMS = (
    Claim(
        "Cost of preconditioning in training",
        "throughput",
        "Preconditioned DeltaNet, figure 3",
        "about 10 %",
        "PGDN 5.0 to 8.0 %, PKDA 4.2 %",
        (
            Part(
                "PGDN trains 5 to 15 % slower than Gated DeltaNet",
                _at_4096("PGDN", "Gated DeltaNet"),
                Region(-0.15, -0.05),
            ),
            Part("PKDA trains 5 to 15 % slower than KDA", _at_4096("PKDA", "KDA"), Region(-0.15, -0.05)),
        ),
    ),
    Claim(
        "PGDN against MesaNet",
        "throughput",
        "Preconditioned DeltaNet, 4.1",
        "more than 20 % faster",
        "2.5 times as fast; 55 % with MesaNet's products in bfloat16",
        (Part("PGDN trains more than 20 % faster", _at_4096("PGDN", "MesaNet"), above(0.2)),),
    ),
    Claim(
        "Throughput over lengths",
        "throughput",
        "Gated DeltaNet-2, figure 2",
        "hybrid 2K to 16K: -5 %, the Transformer falls sharply",
        "hybrid -11 and -9 %, six recurrences -5 to -8 %, Transformer++ -52 %",
        (
            Part(
                "the hybrid loses 5 % from 2K to 16K",
                steps(
                    "real", ("Gated DeltaNet-2 + sliding window", 16_384), ("Gated DeltaNet-2 + sliding window", 2048)
                ),
                Region(-0.05 - TIME, 0.0),
            ),
            Part(
                "Transformer++ loses more than a third",
                steps("real", ("Transformer++", 16_384), ("Transformer++", 2048)),
                Region(-1.0, -1 / 3),
            ),
            Part(
                "KDA is a little faster than Gated DeltaNet-2",
                steps("real", ("KDA", 4096), ("Gated DeltaNet-2", 4096)),
                above(0.0),
            ),
        ),
    ),
    Claim(
        "Gated KalmaNet's layer against Gated DeltaNet's",
        "ridge_benchmark",
        "Gated KalmaNet, figure 3b",
        "about as fast",
        "1.62 times as long",
        (
            Part(
                "it takes as long, within 10 %",
                number(RIDGE, _layers("Gated KalmaNet", "Gated DeltaNet"), SPREAD),
                equal(0.1),
            ),
            Part(
                "it takes no longer than Gated DeltaNet's layer of flash-linear-attention, the paper's baseline",
                layer_beside_peer("forward_backward"),
                Region(-1.0, 0.1),
            ),
        ),
        "flash-linear-attention's Gated DeltaNet, which the paper compares with",
    ),
    Claim(
        "Sketching to 32 channels",
        "ridge_benchmark",
        "Gated KalmaNet, table 8",
        "up to 10 % faster",
        "one layer 34 % faster; accuracy not measured",
        (
            Part(
                "the layer is faster",
                number(RIDGE, _layers("Gated KalmaNet, sketched", "Gated KalmaNet"), SPREAD),
                Region(-1.0, -TIME),
            ),
        ),
        "a whole model's training, and its accuracy",
    ),
    Claim(
        "Cost of a write key of its own",
        "kernel_benchmarks",
        "Preconditioned DeltaNet, figure 4",
        "effectively nothing",
        "10 to 21 % of the kernels, 3.0 to 3.5 % of a training step",
        (
            Part("kernels take as long", number(KERNELS, _kernels("write_key", "gated_deltanet"), 0.02), equal(TIME)),
            Part("a training step takes as long", _at_4096("PGDN, fixed B", "Gated DeltaNet"), equal(TIME)),
        ),
    ),
    Claim(
        "Chunk form against the recurrence",
        "kernel_benchmarks",
        "DeltaNet, table 1",
        "5.5 to 13.7 times as fast",
        "137 to 433 times, against XLA's scan",
        (Part("the chunk form is at least 5.5 times as fast", number(KERNELS, _chunk_form, SPREAD), above(4.5)),),
        "a recurrence that is a kernel",
    ),
    Claim(
        "Chebyshev is more accurate than conjugate gradients",
        "solver_convergence",
        "Gated KalmaNet, figure 1",
        "Chebyshev ahead",
        "bfloat16: 1.3e-2 against 1.8e-2, for our incremental form; float32: CG ahead",
        (
            Part("with products in bfloat16", number(SOLVERS, _residual("bfloat16 products")), Region(-1.0, 0.0)),
            Part("in float32", number(SOLVERS, _residual("float32")), Region(-1.0, 0.0)),
        ),
    ),
    Claim(
        "Undoing iterations, and convergence by the ridge",
        "solver_convergence",
        "Gated KalmaNet, figures 5 and 8",
        "Chebyshev bounded, CG not",
        "divisors 0.57 to 0.86, CG down to 4e-15",
        (
            Part(
                "Chebyshev's smallest divisor is above 0.01 for condition numbers up to 51",
                number(
                    SOLVERS,
                    lambda content: min(
                        bound
                        for bound, condition in zip(
                            content["backwards"]["chebyshev_lower_bound"], content["backwards"]["condition_number"]
                        )
                        if condition <= 51
                    ),
                ),
                above(0.01),
            ),
        ),
    ),
)

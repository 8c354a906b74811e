"""What a worker process is given: measurements and settings, in a folder that all of a run's processes share."""

import dataclasses
import json
import pathlib
import time
import zlib
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from experiments.harness.records import Record, RecordWriter, describe
from experiments.kernel_benchmarks.config import Measurement
from experiments.kernel_benchmarks.inputs import relative_errors


@dataclasses.dataclass(frozen=True)
class Work:
    """A run's work.

    Attributes:
        measurements: all of the run's; a worker does those of its implementations, in this order.
        in_jax: implementations that the JAX worker measures: ours and the peers in JAX.
        dtype: of q, k, v and the gates.
        repeats: timed calls of each.
        deadline: time (as `time.time()`) after which no measurement starts.
        folder: where records and references go.
    """

    measurements: tuple[Measurement, ...]
    in_jax: tuple[str, ...]
    dtype: str
    repeats: int
    deadline: float
    folder: pathlib.Path


def write_work(work: Work) -> None:
    """Writes `work.json` into the run's folder."""
    content = dataclasses.asdict(work)
    del content["folder"]
    (work.folder / "work.json").write_text(json.dumps(content))


def read_work(folder: pathlib.Path) -> Work:
    """Reads what `write_work` wrote."""
    content = json.loads((folder / "work.json").read_text())
    content["measurements"] = tuple(
        Measurement(**{**fields, "shape": tuple(fields["shape"])}) for fields in content["measurements"]
    )
    return Work(**content, folder=folder)


def reference_path(work: Work, measurement: Measurement) -> pathlib.Path:
    """Where the float64 reference of an error measurement is kept."""
    key = f"{measurement.operator} {measurement.shape} {measurement.case}"
    return work.folder / f"reference_{zlib.crc32(key.encode()):08x}_{measurement.seed}.npz"


def measure_all(
    measurements: Iterable[Measurement],
    deadline: float,
    measure: Callable[[Measurement], list[Record]],
    write: RecordWriter,
) -> None:
    """Measures in order, and records what fails and what would begin after the deadline."""
    for m in measurements:
        what: Record = {"operator": m.operator, "implementation": m.implementation, "shape": m.shape}
        if m.beside:
            what["beside"] = m.beside
        failure = {**what, "kind": "failure", "of": m.kind, "case": m.case}
        if time.time() > deadline:
            write({**failure, "reason": "time limit"})
            continue
        try:
            for record in measure(m):
                write({**what, **record})
        except Exception as error:
            write({**failure, "reason": describe(error)})


def error_record(work: Work, m: Measurement, rows: Mapping[str, np.ndarray], *, identical: bool) -> Record:
    """The record of an error measurement.

    Args:
        work: has the references.
        m: what was measured.
        rows: the compared rows of each result.
        identical: whether a second call gave the same bits.
    """
    with np.load(reference_path(work, m)) as expected:
        errors = relative_errors((name, x, expected[name]) for name, x in rows.items())
    return {"kind": "error", "case": m.case, "seed": m.seed, "errors": errors, "identical": identical}

"""What a worker process is given: measurements and settings, in a folder that all of a run's processes share."""

import dataclasses
import json
import pathlib
import zlib

from experiments.kernel_benchmarks.config import Measurement


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

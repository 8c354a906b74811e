"""A batch on the devices: the rows and tokens that each has."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from rnnlib.training.mesh import batch_spec, cp_size, row_shards, tp_size

Batch = Mapping[str, Any]
BATCH_FIELDS = ("inputs", "targets", "segment_ids", "positions", "loss_weights")


def put_batch(
    batch: Batch, mesh: Mesh | None, accumulation_steps: int = 1, *, stop: int | None = None
) -> dict[str, jax.Array]:
    """Puts a batch of NumPy arrays on the device(s), as `accumulation_steps` parts `[A, B / A, T]`.

    Rows are dealt to the parts in order; with a mesh each part's rows are split over its devices. In several processes
    each puts the rows that it has read (`process_rows`).

    Args:
        batch: `BATCH_FIELDS`, `[B, T]`.
        mesh: from `make_mesh`.
        accumulation_steps: A.
        stop: the signal by which this process was asked to stop, 0 for none; the step's metrics tell it to all.

    Raises:
        ValueError: if one of `BATCH_FIELDS` is missing, or the rows do not split evenly.
    """
    missing = [name for name in BATCH_FIELDS if name not in batch]
    if missing:
        raise ValueError(f"put_batch: batch has no {', '.join(missing)}, expected all of {', '.join(BATCH_FIELDS)}")
    shards, total = row_shards(mesh)
    check_batch_size(len(batch["inputs"]) * total // len(shards), accumulation_steps, mesh)
    parts = {}
    for name in BATCH_FIELDS:
        array = np.asarray(batch[name])
        parts[name] = array.reshape(accumulation_steps, array.shape[0] // accumulation_steps, *array.shape[1:])
    if stop is not None:
        parts["stop"] = np.full(parts["inputs"].shape[:2], stop, np.int32)
    if mesh is None:
        return jax.device_put(parts, jax.local_devices()[0])
    check_length(parts["inputs"].shape[2], mesh)
    shardings = {name: NamedSharding(mesh, batch_spec(mesh, array.ndim)) for name, array in parts.items()}
    if len(shards) == total:
        return jax.device_put(parts, shardings)

    def put(array: np.ndarray) -> jax.Array:
        share, sharding = array.shape[1] // len(shards), NamedSharding(mesh, batch_spec(mesh, array.ndim))

        def own(index: Any) -> np.ndarray:
            first = shards.index(index[1].start // share) * share
            return array[(slice(None), slice(first, first + share), *index[2:])]

        return jax.make_array_from_callback((array.shape[0], share * total, *array.shape[2:]), sharding, own)

    return {name: put(array) for name, array in parts.items()}


def abstract_batch(
    batch_size: int, length: int, mesh: Mesh | AbstractMesh | None, accumulation_steps: int = 1
) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and dtypes of what `put_batch` gives, and where it lies on a mesh."""
    shape = (accumulation_steps, batch_size // accumulation_steps, length)

    def field(dtype: Any, shape: tuple[int, ...] = shape) -> jax.ShapeDtypeStruct:
        sharding = None if mesh is None else NamedSharding(mesh, batch_spec(mesh, len(shape)))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    fields = {name: field(np.float32 if name == "loss_weights" else np.int32) for name in BATCH_FIELDS}
    if jax.process_count() > 1:  # whether one of several processes was asked to stop
        fields["stop"] = field(np.int32, shape[:2])
    return fields


def check_batch_size(batch_size: int, accumulation_steps: int, mesh: Mesh | AbstractMesh | None) -> None:
    """Raises ValueError unless the batch splits evenly over parts and devices."""
    devices = 1 if mesh is None else mesh.size
    if batch_size % (accumulation_steps * devices // (cp_size(mesh) * tp_size(mesh))):
        sizes = "" if mesh is None else f" ({', '.join(f'mesh.{axis}={size}' for axis, size in mesh.shape.items())})"
        raise ValueError(
            f"data.batch_size={batch_size} does not split evenly into accumulation_steps={accumulation_steps} parts "
            f"on devices={devices}{sizes}"
        )


def check_length(length: int, mesh: Mesh | AbstractMesh | None) -> None:
    """Raises ValueError unless a row's tokens split evenly over the devices that they are sharded over."""
    if length % cp_size(mesh):
        raise ValueError(
            f"data.sequence_length={length} does not split evenly over the devices of mesh.context={cp_size(mesh)}"
        )

"""Meshes of devices: rows of a batch over them, tokens of a row if asked, parameters replicated or sharded (FSDP).

The devices may belong to several processes. Each then reads the rows that its own devices compute.
"""

import dataclasses
import math
from typing import Annotated, Any

import jax
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from rnnlib.fields import PositiveInteger, Range, check_fields
from rnnlib.layers.tensor import TENSOR, sharded_axis

# Axes over which a batch's rows are sharded. Only some meshes have the next, over which a row's tokens are sharded, and
# `TENSOR`, over which layers are.
AXES = ("data", "fsdp")
CONTEXT = "context"
# Of a parameter's variable, the axis that is sharded over "tensor".
SHARDED_AXIS = "tensor_axis"

# Of a device's memory, what parameters, gradients and optimizer state may take before they are sharded: activations and
# the compiler's buffers need the rest.
_FOR_STATE = 0.75


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """How the work is sharded: `data x fsdp` groups of `context x tensor` devices.

    Each group has its own rows of every batch.

    With `fsdp` above 1, that many devices hold one copy of parameters and optimizer state between them. A matrix is
    gathered where a layer reads it, and its gradient is summed and dealt out again.
    With `context` above 1, the devices of a group have the same rows, and each computes one shard of every row
    (`rnnlib.ops.context_axis`); each holds what one device with whole rows would.
    With `tensor` above 1, each layer of a `DecoderLM` is sharded over that many devices: its heads, the width of its
    feed-forward and the vocabulary, with their parameters, gradients and optimizer state (`rnnlib.layers.tensor`).
    They have the same tokens.
    """

    data: Annotated[int, Range(at_least=-1)] = -1
    """Data parallel: copies of parameters and optimizer state; -1: as many as there are devices for."""
    fsdp: PositiveInteger | None = None
    """Fully sharded: devices that hold one copy; left out, 1, or as many as it takes if one does not fit into a GPU."""
    context: PositiveInteger = 1
    """Context parallel: devices that split the tokens of each sequence, for sequences too long for one."""
    tensor: PositiveInteger = 1
    """Tensor parallel: devices that split each layer (heads, feed-forward, vocabulary); it must divide these."""

    def __post_init__(self):
        """Checks every value."""
        check_fields(self)
        if self.data == 0:
            raise ValueError("MeshConfig: data is 0, expected -1 (what is left) or at least 1")

    def __str__(self) -> str:
        """The sizes that were chosen, as flags name them."""
        chosen = {"mesh.data": None if self.data == -1 else self.data, "mesh.fsdp": self.fsdp}
        chosen |= {"mesh.context": self.context} if self.context > 1 else {}
        chosen |= {"mesh.tensor": self.tensor} if self.tensor > 1 else {}
        return " x ".join(f"{name}={size}" for name, size in chosen.items() if size is not None)


def mesh_sizes(
    config: MeshConfig,
    available: int,
    *,
    devices: int | None = None,
    rows: int | None = None,
    state_bytes: int = 0,
    device_bytes: int | None = None,
) -> MeshConfig:
    """The sizes of a mesh, with what a config leaves open decided.

    The mesh has as many devices as the rows divide evenly over. Of these meshes it is the one with the smallest `fsdp`
    for which a device's shard of the training state fits into the device.

    Args:
        config: sizes, or some of them.
        available: devices that there are.
        devices: how many of them to use; None for as many as is good.
        rows: rows of a batch that are computed at a time; None for any number.
        state_bytes: what parameters, gradients and optimizer state take.
        device_bytes: A device's memory; None where it is not known.

    Raises:
        ValueError: if there are fewer devices than asked for, or the sizes do not come out even.
    """
    fixed = (1 if config.data == -1 else config.data) * (config.fsdp or 1) * config.context * config.tensor
    for number, asked in ((devices, f"devices={devices}"), (fixed, str(config))):
        if number is not None and number > available:
            count = jax.process_count()
            who = "this machine has" if count == 1 else f"these {count} processes have"
            raise ValueError(f"{asked}: {who} {available} {jax.default_backend()} device(s)")
    open_ = config.data == -1 or config.fsdp is None
    if devices is not None and (devices % fixed or (not open_ and devices != fixed)):
        raise ValueError(f"{config}: does not fit devices={devices}")

    def candidates(rows: int) -> list[MeshConfig]:
        together = config.context * config.tensor
        groups = available // together
        return [
            MeshConfig(data, fsdp, config.context, config.tensor)
            for data in (range(1, groups + 1) if config.data == -1 else [config.data])
            for fsdp in (range(1, groups // data + 1) if config.fsdp is None else [config.fsdp])
            if data * fsdp <= groups and devices in (None, data * fsdp * together) and rows % (data * fsdp) == 0
        ]

    def goodness(sizes: MeshConfig) -> tuple[bool, int, int]:
        fsdp = sizes.fsdp or 1
        fits = device_bytes is None or state_bytes / (fsdp * config.tensor) <= _FOR_STATE * device_bytes
        return fits, sizes.data * fsdp if devices is None else 0, -fsdp

    # Where rows split over none of them, the error is about the batch: its caller knows what it is made of.
    return max(candidates(rows or 0) or candidates(0), key=goodness)


def _axes(sizes: MeshConfig) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Sizes and names of the axes of a mesh."""
    shape: tuple[int, ...] = (sizes.data, sizes.fsdp or 1)
    axes: tuple[str, ...] = AXES
    if sizes.context > 1:  # innermost: these devices exchange most often
        shape, axes = (*shape, sizes.context), (*axes, CONTEXT)
    if sizes.tensor > 1:
        shape, axes = (*shape, sizes.tensor), (*axes, TENSOR)
    return shape, axes


def abstract_mesh(sizes: MeshConfig) -> AbstractMesh:
    """The mesh of sizes that `mesh_sizes` gave, without devices."""
    shape, axes = _axes(sizes)
    return AbstractMesh(shape, axes, axis_types=(AxisType.Auto,) * len(axes))


def make_mesh(devices: int | None = None, config: MeshConfig | None = None) -> Mesh | None:
    """A mesh with the axes "data", "fsdp" and, above size 1, "context" and "tensor" over the devices of all processes.

    None for a single device.

    Args:
        devices: how many of `jax.devices()` to use; None for as many as the config names, or all.
        config: sizes of the axes; by default all devices are "data".

    Raises:
        ValueError: if there are fewer devices than asked for, they do not come out even, or devices of one of several
            processes would be left out.
    """
    available = jax.devices()
    sizes = mesh_sizes(MeshConfig() if config is None else config, len(available), devices=devices)
    shape, axes = _axes(sizes)
    if jax.process_count() > 1 and math.prod(shape) != len(available):
        raise ValueError(
            f"{dataclasses.replace(sizes, fsdp=sizes.fsdp or 1)}: {jax.process_count()} processes have "
            f"{len(available)} devices, expected a mesh of all of them"
        )
    if math.prod(shape) == 1:
        return None
    return jax.make_mesh(shape, axes, axis_types=(AxisType.Auto,) * len(axes), devices=available[: math.prod(shape)])


def batch_spec(mesh: Mesh | AbstractMesh, rank: int = 3) -> PartitionSpec:
    """Where an array of a batch in parts lies, `[A, B / A, T]`: rows over their axes, tokens over theirs."""
    return PartitionSpec(None, AXES, *([CONTEXT] if CONTEXT in mesh.shape and rank > 2 else []))


def cp_size(mesh: Mesh | AbstractMesh | None) -> int:
    """The number of devices that a row's tokens are sharded over."""
    return 1 if mesh is None else mesh.shape.get(CONTEXT, 1)


def tp_size(mesh: Mesh | AbstractMesh | None) -> int:
    """The number of devices that each layer is sharded over."""
    return 1 if mesh is None else mesh.shape.get(TENSOR, 1)


def row_shards(mesh: Mesh | None) -> tuple[tuple[int, ...], int]:
    """A batch's rows lie in equal shards: the numbers of those on this process's devices, and how many there are."""
    if mesh is None:
        return (0,), 1
    total = math.prod(mesh.shape[axis] for axis in AXES)
    held = NamedSharding(mesh, PartitionSpec(AXES)).addressable_devices_indices_map((total,)).values()
    return tuple(sorted({(index or (slice(None),))[0].start or 0 for index in held})), total


def process_rows(mesh: Mesh | None, rows: int, parts: int = 1) -> tuple[int, ...]:
    """The rows of a batch that this process reads: those that its devices compute, in the batch's order.

    Args:
        mesh: from `make_mesh`.
        rows: rows of the whole batch.
        parts: parts of equal size that are computed in turn.
    """
    shards, total = row_shards(mesh)
    part, share = rows // parts, rows // parts // total
    return tuple(p * part + s * share + i for p in range(parts) for s in shards for i in range(share))


def parameter_spec(shape: tuple[int, ...], mesh: Mesh | AbstractMesh, tensor_axis: int | None = None) -> PartitionSpec:
    """Where a parameter lies, and so do the optimizer's arrays for it.

    `tensor_axis` lies over "tensor". Of the other axes, the first that the size of "fsdp" divides lies over "fsdp".

    Vectors and scalars are whole on every device: they are small, and each would be a collective of its own.
    """
    size, over = mesh.shape["fsdp"], {} if tensor_axis is None else {tensor_axis: TENSOR}
    if size > 1 and len(shape) > 1:
        for axis, length in enumerate(shape):
            if axis != tensor_axis and length and length % size == 0:
                over[axis] = "fsdp"
                break
    return PartitionSpec(*(over.get(axis) for axis in range(max(over, default=-1) + 1)))


def with_tp_axes(parameters: Any, own: Any, mesh: Mesh | AbstractMesh) -> Any:
    """Parameters that say along which axis they are sharded over "tensor".

    Args:
        parameters: of the whole model, as `nnx.split(model, nnx.Param, ...)` has them.
        own: likewise those of a device's shard.
        mesh: has the axis "tensor".

    Raises:
        ValueError: the shard is of another model.
    """
    shards, found = dict(nnx.to_flat_state(own)), []
    for path, variable in nnx.to_flat_state(parameters):
        name = ".".join(map(str, path))
        if path not in shards:
            raise ValueError(f"mesh.tensor={tp_size(mesh)}: {name} is not in the model that its config gives")
        axis = sharded_axis(variable.shape, shards[path].shape, tp_size(mesh))
        variable = variable.copy()
        variable.set_metadata(**{SHARDED_AXIS: axis})
        found.append((path, variable))
    return nnx.from_flat_state(found)


def parameter_specs(tree: Any, mesh: Mesh | AbstractMesh) -> Any:
    """`parameter_spec` of each parameter in a pytree of them, or of each array that an optimizer keeps for one.

    Raises:
        ValueError: layers are sharded, and the parameters were not made for that.
    """

    def spec(x: Any) -> Any:
        if isinstance(x, nnx.Variable):
            metadata = x.get_metadata()
            if tp_size(mesh) > 1 and SHARDED_AXIS not in metadata:
                raise ValueError(
                    f"mesh.tensor={tp_size(mesh)}: parameters do not say how they are sharded, expected those "
                    "of init_train_state(model, optimizer, mesh)"
                )
            axis = metadata.get(SHARDED_AXIS)
            return jax.tree.map(lambda value: parameter_spec(value.shape, mesh, axis), x)
        return parameter_spec(x.shape, mesh)

    return jax.tree.map(spec, tree, is_leaf=lambda x: isinstance(x, nnx.Variable))


def replicated(mesh: Mesh | AbstractMesh | None) -> Sharding:
    """The sharding of an array that is whole on the one device, or on each device of the mesh."""
    return SingleDeviceSharding(jax.local_devices()[0]) if mesh is None else NamedSharding(mesh, PartitionSpec())


def param_shardings(tree: Any, mesh: Mesh | AbstractMesh | None) -> Any:
    """The sharding of each parameter, or of each array of an optimizer's state, in a pytree of them."""
    if mesh is None:
        return jax.tree.map(lambda _: replicated(None), tree)
    specs = parameter_specs(tree, mesh)
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda x: isinstance(x, PartitionSpec))


@dataclasses.dataclass(frozen=True)
class _Gather:
    """What a sharded variable is read through: its whole value, gathered along an axis."""

    axis: int

    def __call__(self, variable: nnx.Variable, value: Any) -> Any:
        return jax.lax.all_gather(value, "fsdp", axis=self.axis, tiled=True)


def gather_where_read(model: nnx.Module, specs: Any) -> None:
    """Makes each sharded parameter of a model whole where a layer reads it, inside `shard_map`.

    So the gather stands in the layer, and within its recomputation where there is one. Its gradient is summed over the
    devices and scattered.

    Args:
        model: the model with this device's shards in its parameters.
        specs: `parameter_spec` of each, as `nnx.split(model, nnx.Param, ...)` has the parameters.
    """
    by_path = dict(nnx.to_flat_state(specs))
    for path, _ in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        spec = by_path[path]
        spec = tuple(spec.get_raw_value() if isinstance(spec, nnx.Variable) else spec)
        if "fsdp" in spec:
            node: Any = model
            for name in path:
                node = node[name] if isinstance(name, int) else getattr(node, str(name))
            node.set_metadata(on_get_value=(_Gather(spec.index("fsdp")),))

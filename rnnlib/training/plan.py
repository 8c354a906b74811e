"""What a training step takes and sends on a mesh of devices, from shapes alone: none of the devices is needed."""

import collections
import dataclasses
import math
import re
import warnings
from collections.abc import Sequence
from typing import Any, Literal

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from rnnlib.layers.tensor import TENSOR
from rnnlib.models import DecoderLM, ModelConfig, abstract_model
from rnnlib.models.variables import count_values
from rnnlib.training.adaptation import Adaptation, Lora, make_adaptation
from rnnlib.training.batches import abstract_batch, check_batch_size, check_length
from rnnlib.training.config import TrainConfig
from rnnlib.training.memory import planned_bytes
from rnnlib.training.mesh import (
    CONTEXT,
    MeshConfig,
    abstract_mesh,
    mesh_sizes,
    parameter_specs,
)
from rnnlib.training.optimizer import alike, learning_rate_schedule, make_optimizer
from rnnlib.training.step import TrainState, abstract_state, init_train_state, make_train_step, split_for_mesh

# Collectives by the names of JAX's primitives.
_KINDS = {
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "psum": "all-reduce",
    "pmax": "all-reduce",
    "ppermute": "collective-permute",
}


@dataclasses.dataclass(frozen=True)
class Exchange:
    """Collectives of one kind in a step.

    Attributes:
        kind: what they do.
        what: which arrays they are of.
        over: axes of the mesh whose devices have part in one together.
        devices: how many these are.
        count: arrays that a device has part in; XLA may join several in one operation.
        bytes: of these arrays, whole: what is gathered, scattered, summed or passed on.
    """

    kind: Literal["all-gather", "reduce-scatter", "all-reduce", "collective-permute"]
    what: str
    over: tuple[str, ...]
    devices: int
    count: int
    bytes: int

    @property
    def sent(self) -> float:
        """Bytes that each device sends, and receives, where arrays go round a ring of the devices."""
        if self.kind == "collective-permute":  # to the next device alone
            return float(self.bytes)
        rounds = 2 if self.kind == "all-reduce" else 1
        return rounds * self.bytes * (self.devices - 1) / self.devices


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """A training step on a mesh: bytes on each device, and what it sends.

    Attributes:
        mesh: sizes of the axes.
        model: the model, with the recomputation that was planned.
        rows: rows of a batch on each device, all parts together.
        length: tokens a row.
        parts: parts that the rows are computed in, in turn.
        num_parameters: trained numbers of the model.
        num_frozen: numbers that stay.
        parameters: bytes of a device's shard of the parameters, those that stay too, as they are stored.
        merged: bytes of its shard of the matrices with their adapters, which a step makes; 0 without adapters.
        gradients: bytes of its shard of the gradients, with several parts of the sum and of one part; with adapters,
            those of the matrices too.
        optimizer: bytes of its shard of the optimizer's state.
        compiled: bytes that a device needs while the step runs, by XLA's plan of the compiled step: state, batch,
            activations, gathered matrices and all else. None where it was not compiled.
        exchanges: all collectives of a step, but those that put adapters and matrices together: of the factors.
    """

    mesh: MeshConfig
    model: ModelConfig
    rows: int
    length: int
    parts: int
    num_parameters: int
    num_frozen: int
    parameters: int
    merged: int
    gradients: int
    optimizer: int
    compiled: int | None
    exchanges: tuple[Exchange, ...]

    @property
    def sent(self) -> float:
        """Bytes that each device sends in a step."""
        return sum(exchange.sent for exchange in self.exchanges)


def plan_step(
    config: TrainConfig,
    devices: int,
    *,
    device_bytes: int | None = None,
    compile_for: Sequence[jax.Device] | None = None,
) -> StepPlan:
    """Plans the training step of a config; nothing is allocated, and no data is read.

    With `remat="auto"` blocks are taken as recomputed whole, which needs the least memory.

    Args:
        config: what to train. The model's vocabulary counts as it is, whatever the tokenizer has.
        devices: how many there are.
        device_bytes: memory of each; where it is known, a `fsdp` that is left out is as large as it takes.
        compile_for: so many devices, for which the step is compiled: real ones, or described ones
            (`jax.experimental.topologies`). None compiles nothing, and takes seconds.

    Raises:
        ValueError: the mesh does not fit the devices, batch, rows or layers do not split over it, or a step that is
            compiled for TPUs does not fit into their memory.
    """
    fixed = [getattr(config.mesh, entry.name) or 1 for entry in dataclasses.fields(config.mesh)]
    if devices % math.prod(size for size in fixed if size != -1):
        raise ValueError(f"{config.mesh}: does not fit devices={devices}")
    if compile_for is not None and len(compile_for) != devices:
        raise ValueError(f"plan_step: compile_for has {len(compile_for)} devices, expected devices={devices}")
    model = config.model.replace(remat=True) if config.model.remat == "auto" else config.model
    optimizer = make_optimizer(config.optimizer, config.steps)
    adaptation = _adaptation(config, model, None)
    state = abstract_train_state(model, optimizer, None, adaptation)[1]
    kept: list[Any] = [state.parameters, state.optimizer, state.parameters]
    if adaptation is not None:  # what the model computes with, and its gradients
        changed = jax.eval_shape(adaptation.changed_variables, state.parameters, state.frozen)
        kept += [state.frozen, changed, changed]
    batch_size, parts = config.data.batch_size, config.accumulation_steps
    sizes = mesh_sizes(
        config.mesh,
        devices,
        devices=devices,
        rows=batch_size // parts,
        state_bytes=_bytes(kept),
        device_bytes=device_bytes,
    )
    mesh = abstract_mesh(sizes)
    check_batch_size(batch_size, parts, mesh)
    check_length(config.data.sequence_length, mesh)

    def step_on(mesh: Mesh | AbstractMesh) -> tuple[Any, TrainState, Any]:
        adaptation = _adaptation(config, model, mesh)
        graph, state = abstract_train_state(model, optimizer, mesh, adaptation)
        schedule = learning_rate_schedule(config.optimizer, config.steps)
        token_bytes = np.ones(model.vocabulary_size, np.int32)
        options: dict[str, Any] = {"deterministic": config.deterministic, "adaptation": adaptation}
        step = make_train_step(graph, optimizer, schedule, token_bytes, mesh, **options)
        return step, state, abstract_batch(batch_size, config.data.sequence_length, mesh, parts)

    step, state, batch = step_on(mesh)
    compiled = None
    if compile_for is not None:
        shape = tuple(mesh.shape.values())
        real = Mesh(np.array(compile_for).reshape(shape), tuple(mesh.shape), axis_types=(AxisType.Auto,) * len(shape))
        real_step, real_state, real_batch = step_on(real)
        platform = {"gpu": "cuda"}.get(compile_for[0].platform, compile_for[0].platform)
        with jax.sharding.use_abstract_mesh(real.abstract_mesh):  # the devices that the step is traced for
            traced = real_step.trace(abstract_state(real_state, real), real_batch)
        try:
            with warnings.catch_warnings():  # what was compiled for described devices cannot be read back without them
                warnings.filterwarnings("ignore", "Error reading persistent compilation cache entry")
                compiled = planned_bytes(traced.lower(lowering_platforms=(platform,)).compile())
        except jax.errors.JaxRuntimeError as error:  # XLA for TPUs plans no step that does not fit
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise ValueError(_does_not_fit(devices, compile_for[0].device_kind, str(error))) from error
    trained = _shard_bytes(state.parameters, mesh)
    adaptation, differentiated, merged = _adaptation(config, model, mesh), trained, 0
    if adaptation is not None:
        changed = jax.eval_shape(adaptation.changed_variables, state.parameters, state.frozen)
        differentiated = _shard_bytes(changed, mesh)
        merged = differentiated if isinstance(adaptation, Lora) else 0
    # The reported norm of the gradient, and the clipped one.
    norms = 1 if config.optimizer.clip_norm is None else 2
    return StepPlan(
        mesh=sizes,
        model=model,
        rows=batch_size // (mesh.shape["data"] * mesh.shape["fsdp"]),
        length=config.data.sequence_length,
        parts=parts,
        num_parameters=count_values(state.parameters),
        num_frozen=0 if state.frozen is None else count_values(state.frozen),
        parameters=trained + (0 if state.frozen is None else _shard_bytes(state.frozen, mesh)),
        merged=merged,
        gradients=differentiated * (2 if parts > 1 else 1) + (trained if merged else 0),
        optimizer=_shard_bytes(state.optimizer, mesh),
        compiled=compiled,
        exchanges=_exchanges(jax.make_jaxpr(step)(state, batch), state.parameters, mesh, norms),
    )


def abstract_train_state(
    model: ModelConfig,
    optimizer: optax.GradientTransformation,
    mesh: Mesh | AbstractMesh | None = None,
    adaptation: Adaptation | None = None,
) -> tuple[nnx.GraphDef, TrainState]:
    """`init_train_state` of a model that is not made: shapes and dtypes in place of arrays.

    Args:
        model: the model's configuration.
        optimizer: the optax transformation.
        mesh: from `make_mesh`, or one without devices.
        adaptation: what of the model is trained; None for all of it.
    """
    graphs: list[nnx.GraphDef] = []

    def new() -> Any:
        graph, state = init_train_state(DecoderLM(model, rngs=nnx.Rngs(0)), optimizer, mesh, adaptation)
        graphs.append(graph)
        return state

    state = jax.eval_shape(new)
    return graphs[0], state


def _adaptation(config: TrainConfig, model: ModelConfig, mesh: Mesh | AbstractMesh | None) -> Adaptation | None:
    """What of a config's model is trained, on a mesh; None for all of it."""
    whole = abstract_model(model)
    parameters = split_for_mesh(whole, mesh)[1]
    return make_adaptation(config.freeze, config.lora, parameters, seed=config.seed, model=whole)


def _does_not_fit(devices: int, kind: str, message: str) -> str:
    used = re.search(r"Used ([\d.]+\w) of ([\d.]+\w) hbm|\(([\d.]+\w)\) exceeds available HBM \(([\d.]+\w)\)", message)
    sizes = [size for size in used.groups() if size] if used else []
    needs = "it takes {} of {} of memory".format(*sizes) if sizes else message.splitlines()[0]
    return f"the step does not fit on {devices} x {kind}: {needs}; recompute more, or raise parts or mesh.fsdp"


def _bytes(tree: Any) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _with_axes(tree: Any, mesh: AbstractMesh) -> list[tuple[Any, tuple[str, ...]]]:
    """Arrays of parameters, or of what the optimizer keeps for them, with the axes that each is sharded over."""
    specs = jax.tree.leaves(parameter_specs(tree, mesh), is_leaf=lambda x: isinstance(x, PartitionSpec))
    axes = [tuple(axis for axis in spec if axis is not None) for spec in specs]
    return list(zip(jax.tree.leaves(tree), axes, strict=True))


def _shard_bytes(tree: Any, mesh: AbstractMesh) -> int:
    return sum(_bytes(x) // math.prod(mesh.shape[axis] for axis in axes) for x, axes in _with_axes(tree, mesh))


def _exchanges(program: Any, parameters: Any, mesh: AbstractMesh, norms: int) -> tuple[Exchange, ...]:
    """The collectives of a step; tests hold them to compiled ones.

    They are read from the traced step, with three differences. XLA's partitioner adds the sums of the gradient's norm,
    of which there are `norms`. An array that is read twice in one place, such as an embedding that is the head too, is
    gathered once. Equal segment ids for several readers are passed on once, so that the compiled step has a few
    collective-permutes less than are counted here.
    """
    counts: dict[tuple[Any, tuple[str, ...]], list[int]] = {}

    def add(kind: Any, axes: tuple[str, ...], size: int, times: int) -> None:
        over = tuple(axis for axis in mesh.axis_names if axis in axes and mesh.shape[axis] > 1)
        if over and times:
            found = counts.setdefault((kind, over), [0, 0])
            found[0] += times
            found[1] += times * size * (math.prod(mesh.shape[axis] for axis in over) if kind == "all-gather" else 1)

    def walk(jaxpr: Any, times: int) -> None:
        gathered = set()
        for equation in jaxpr.eqns:
            if (kind := _KINDS.get(equation.primitive.name)) is not None:
                named = equation.params["axes" if "axes" in equation.params else "axis_name"]
                for x in equation.invars:
                    if kind == "all-gather":
                        same = (id(x), str(equation.params))
                        if same in gathered:
                            continue
                        gathered.add(same)
                    add(kind, named if isinstance(named, tuple) else (named,), _bytes(x.aval), times)
            rounds = equation.params["length"] if equation.primitive.name == "scan" else 1
            for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
                if hasattr(inner, "eqns"):
                    walk(inner, times * rounds)

    walk(program.jaxpr, 1)
    found = [
        Exchange(kind, _what(kind, over, mesh), over, math.prod(mesh.shape[axis] for axis in over), count, size)
        for (kind, over), (count, size) in counts.items()
    ]
    pairs = _with_axes(parameters, mesh)
    shared = collections.Counter(axis for numbers in alike(parameters) for axis in pairs[numbers[0]][1])
    for axis, count in shared.items():
        if (devices := mesh.shape[axis]) > 1:
            count *= norms
            found.append(Exchange("all-reduce", "norm of the gradient", (axis,), devices, count, 4 * count))
    return tuple(found)


def _what(kind: str, over: tuple[str, ...], mesh: AbstractMesh) -> str:
    """What is exchanged, for people."""
    if over == ("fsdp",) and kind != "all-reduce":
        return "matrices" if kind == "all-gather" else "gradients of matrices"
    if over == (TENSOR,):
        return "activations, loss"
    if over == (CONTEXT,) and kind != "all-reduce":
        return "states, tokens, keys"
    return "gradients, loss" if math.prod(mesh.shape[axis] for axis in over) == mesh.size else "gradients of shards"

"""What a training step takes and sends on a mesh of devices, from shapes alone: none of the devices is needed."""

import collections
import contextlib
import dataclasses
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, PartitionSpec

from rnnlib.layers.tensor import TENSOR
from rnnlib.models import DecoderLM, ModelConfig, abstract_model
from rnnlib.ops import context_axis
from rnnlib.training.config import TrainConfig
from rnnlib.training.loss import head_loss_sums
from rnnlib.training.mesh import (
    CONTEXT,
    MeshConfig,
    abstract_mesh,
    cp_size,
    mesh_sizes,
    parameter_specs,
    tp_size,
)
from rnnlib.training.optimizer import alike, learning_rate_schedule, make_optimizer
from rnnlib.training.step import (
    TrainState,
    abstract_batch,
    check_batch_size,
    check_length,
    init_train_state,
    make_train_step,
    split_model,
    tp_shard,
)

# `head_loss_sums` has the logits of so many at a time, in float32, and their gradient.
_LOGITS_AT_A_TIME = 1 << 27
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
        kind: What they do.
        what: Which arrays they are of.
        over: Axes of the mesh whose devices have part in one together.
        devices: How many these are.
        count: Arrays that a device has part in; XLA may join several in one operation.
        bytes: Of these arrays, whole: what is gathered, scattered, summed or passed on.
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
        mesh: Sizes of the axes.
        model: The model, with the recomputation that was counted.
        rows: Rows of a batch on each device, all parts together.
        length: Tokens a row.
        parts: Parts that the rows are computed in, in turn.
        num_parameters: Trained numbers of the model.
        parameters: Bytes of a device's share of the parameters, as they are stored.
        gradients: Bytes of its share of their gradients, with several parts of the sum and of one part.
        optimizer: Bytes of its share of the optimizer's state.
        gathered: Bytes of matrices that are gathered whole. With recomputation these are the matrices of two blocks at
            a time, else of all blocks; with `scan_layers` those of one round, and a stacked copy of the shares.
        stored: Bytes that the forward pass leaves for the backward pass. An estimate, on the high side: the arrays
            that JAX's own differentiation stores, some of which XLA computes again from others.
        working: Bytes of what one block stores while it is computed again, or of the logits, whichever is more; an
            estimate in the same way.
        card: What activations are counted for; None for this machine.
        exchanges: All collectives of a step.
    """

    mesh: MeshConfig
    model: ModelConfig
    rows: int
    length: int
    parts: int
    num_parameters: int
    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    stored: int
    working: int
    card: str | None
    exchanges: tuple[Exchange, ...]

    @property
    def total(self) -> int:
        """Bytes of a device, all together. What the optimizer's update holds beside its results is not counted."""
        kept = self.parameters + self.gradients + self.optimizer
        return kept + self.gathered + self.stored + self.working

    @property
    def sent(self) -> float:
        """Bytes that each device sends in a step."""
        return sum(exchange.sent for exchange in self.exchanges)


def plan_step(
    config: TrainConfig, devices: int, *, device_bytes: int | None = None, card: str | None = None
) -> StepPlan:
    """Plans the training step of a config; nothing is allocated or compiled, and no data is read.

    With `remat="auto"` blocks are counted as recomputed whole, which takes the least memory.

    Args:
        config: What to train. The model's vocabulary counts as it is, whatever the tokenizer has.
        devices: How many there are.
        device_bytes: Memory of each; where it is known, a `fsdp` that is left out is as large as it takes.
        card: The GPU whose kernels activations are counted for, by JAX's name for it, such as "NVIDIA H200". None is
            this process's device; on a CPU recurrences and attention store several times as much. A model with
            attention is counted as for None where cuDNN is not installed here.

    Raises:
        ValueError: The mesh does not fit the devices, or batch, rows or layers do not split over it.
    """
    fixed = [getattr(config.mesh, entry.name) or 1 for entry in dataclasses.fields(config.mesh)]
    if devices % math.prod(size for size in fixed if size != -1):
        raise ValueError(f"{config.mesh}: does not fit devices={devices}")
    model = config.model.replace(remat=True) if config.model.remat == "auto" else config.model
    optimizer = make_optimizer(config.optimizer, config.steps)
    state = abstract_train_state(model, optimizer, None)[1]
    batch_size, parts = config.data.batch_size, config.accumulation_steps
    sizes = mesh_sizes(
        config.mesh,
        devices,
        devices=devices,
        rows=batch_size // parts,
        state_bytes=_bytes((state.parameters, state.optimizer, state.parameters)),
        device_bytes=device_bytes,
    )
    mesh = abstract_mesh(sizes)
    check_batch_size(batch_size, parts, mesh)
    check_length(config.data.sequence_length, mesh)
    graph, state = abstract_train_state(model, optimizer, mesh)
    shares = _share_bytes(state.parameters, mesh)
    rows = batch_size // (mesh.shape["data"] * mesh.shape["fsdp"])
    shard = config.data.sequence_length // cp_size(mesh)
    try:
        with _described(card):
            stored, working = _activation_bytes(model, rows // parts, shard, mesh)
    except RuntimeError as error:
        if card is None or "cuDNN" not in str(error):
            raise
        card = None  # attention is traced for a GPU only where cuDNN is installed
        stored, working = _activation_bytes(model, rows // parts, shard, mesh)
    schedule = learning_rate_schedule(config.optimizer, config.steps)
    step = make_train_step(graph, optimizer, schedule, np.ones(model.vocabulary_size, np.int32), mesh)
    program = jax.make_jaxpr(step)(state, abstract_batch(batch_size, config.data.sequence_length, mesh, parts))
    # The reported norm of the gradient, and the clipped one.
    norms = 1 if config.optimizer.clip_norm is None else 2
    return StepPlan(
        mesh=sizes,
        model=model,
        rows=rows,
        length=config.data.sequence_length,
        parts=parts,
        num_parameters=sum(math.prod(x.shape) for x in jax.tree.leaves(state.parameters)),
        parameters=shares,
        gradients=shares * (2 if parts > 1 else 1),
        optimizer=_share_bytes(state.optimizer, mesh),
        gathered=_gathered_bytes(model, state.parameters, mesh),
        stored=stored,
        working=working,
        card=card,
        exchanges=_exchanges(program, state.parameters, mesh, norms),
    )


def abstract_train_state(
    model: ModelConfig, optimizer: optax.GradientTransformation, mesh: Mesh | AbstractMesh | None = None
) -> tuple[nnx.GraphDef, TrainState]:
    """`init_train_state` of a model that is not made: shapes and dtypes in place of arrays.

    Args:
        model: The model's configuration.
        optimizer: The optax transformation.
        mesh: From `make_mesh`, or one without devices.
    """
    graphs: list[nnx.GraphDef] = []

    def new() -> Any:
        graph, state = init_train_state(DecoderLM(model, rngs=nnx.Rngs(0)), optimizer, mesh)
        graphs.append(graph)
        return state

    state = jax.eval_shape(new)
    return graphs[0], state


def _described(card: str | None) -> contextlib.AbstractContextManager[Any]:
    """Within it, functions are traced for a GPU that is not there."""
    if card is None:
        return contextlib.nullcontext()
    device = AbstractDevice(device_kind=card, num_cores=None, platform="gpu")
    mesh = AbstractMesh((1,), ("card",), axis_types=(AxisType.Auto,), abstract_device=device)
    return jax.sharding.use_abstract_mesh(mesh)


def _bytes(tree: Any) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _with_axes(tree: Any, mesh: AbstractMesh) -> list[tuple[Any, tuple[str, ...]]]:
    """Arrays of parameters, or of what the optimizer keeps for them, with the axes that each is shared out over."""
    specs = jax.tree.leaves(parameter_specs(tree, mesh), is_leaf=lambda x: isinstance(x, PartitionSpec))
    axes = [tuple(axis for axis in spec if axis is not None) for spec in specs]
    return list(zip(jax.tree.leaves(tree), axes, strict=True))


def _share_bytes(tree: Any, mesh: AbstractMesh) -> int:
    return sum(_bytes(x) // math.prod(mesh.shape[axis] for axis in axes) for x, axes in _with_axes(tree, mesh))


def _gathered_bytes(model: ModelConfig, parameters: Any, mesh: AbstractMesh) -> int:
    paths = [path for path, _ in nnx.to_flat_state(parameters)]
    shared = [
        (path, _bytes(x) // (mesh.shape[TENSOR] if TENSOR in axes else 1))
        for path, (x, axes) in zip(paths, _with_axes(parameters, mesh), strict=True)
        if "fsdp" in axes
    ]
    if not model.remat:
        return sum(size for _, size in shared)
    blocks = [0] * model.num_layers
    outside = [0]
    for path, size in shared:
        if "blocks" in path:
            blocks[int(str(path[path.index("blocks") + 1]))] += size
        else:
            outside.append(size)
    if model.scan_layers:
        period = len(model.mixers)
        return sum(blocks[:period]) + sum(blocks) // mesh.shape["fsdp"] + max(outside)
    return max(map(sum, zip(blocks, [*blocks[1:], 0]))) + max(outside)


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
    return "gradients, loss" if math.prod(mesh.shape[axis] for axis in over) == mesh.size else "gradients of shares"


def _activation_bytes(model: ModelConfig, rows: int, length: int, mesh: AbstractMesh) -> tuple[int, int]:
    """What one part of a device's rows leaves for the backward pass, and the most that is held beside it.

    Args:
        model: The whole model.
        rows: Of a part, on a device.
        length: Tokens of a row on a device.
        mesh: Layers and rows may be shared out over it.
    """
    shards = tp_size(mesh)
    own: Any = abstract_model(model) if shards == 1 else tp_shard(abstract_model(model), shards)
    graphdef, parameters, other = split_model(own)
    batch = {name: jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for name, x in abstract_batch(rows, length, None).items()}
    counts = jax.ShapeDtypeStruct((model.vocabulary_size,), jnp.int32)

    def nats(parameters: Any, other: Any, batch: Any, counts: Any) -> Any:
        model = nnx.merge(graphdef, parameters, other, copy=True)
        hidden = model.hidden(batch["inputs"], segment_ids=batch["segment_ids"], positions=batch["positions"])
        asked = (batch["targets"], batch["loss_weights"], counts)
        return head_loss_sums(hidden, model.output_embedding, *asked, tp_size=shards).nats

    stored = _residual_bytes(mesh, nats, parameters, other, batch, counts)
    tokens, vocabulary = rows * length, model.vocabulary_size // shards
    logits = 2 * 4 * vocabulary * min(tokens, max(1, _LOGITS_AT_A_TIME // vocabulary))
    return stored, max(logits, _block_bytes(model, own.blocks, rows, length, mesh) if model.remat else 0)


def _block_bytes(model: ModelConfig, blocks: Any, rows: int, length: int, mesh: AbstractMesh) -> int:
    """Bytes that the block which stores most stores for the backward pass, if it is not recomputed."""
    x = jax.ShapeDtypeStruct((rows, length, model.width), model.compute_dtype)
    ids = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    kinds = dict(zip(zip(model.layer_mixers, model.layer_feed_forwards), blocks))

    def of(block: Any) -> int:
        graphdef, parameters, other = split_model(block)

        def run(parameters: Any, x: Any, other: Any, ids: Any, positions: Any) -> Any:
            return nnx.merge(graphdef, parameters, other, copy=True)(x, segment_ids=ids, positions=positions)[0]

        return _residual_bytes(mesh, run, (parameters, x), other, ids, ids)

    return max(map(of, kinds.values()))


def _residual_bytes(mesh: AbstractMesh, function: Any, differentiated: Any, *rest: Any) -> int:
    """Bytes of the arrays that `jax.vjp` stores, but those that are arguments."""

    def pullback(differentiated: Any, *rest: Any) -> Any:
        if isinstance(differentiated, tuple):
            return jax.vjp(lambda *args: function(*args, *rest), *differentiated)[1]
        return jax.vjp(lambda x: function(x, *rest), differentiated)[1]

    axes = [(axis, size) for axis, size in mesh.shape.items() if axis in (CONTEXT, TENSOR)]
    with context_axis(CONTEXT if cp_size(mesh) > 1 else None):
        jaxpr = jax.make_jaxpr(pullback, axis_env=axes)(differentiated, *rest).jaxpr
    arguments = set(map(id, jaxpr.invars))
    stored: dict[int, Any] = {id(x): x.aval for x in jaxpr.outvars if not hasattr(x, "val") and id(x) not in arguments}
    return sum(_bytes(aval) for aval in stored.values() if aval.dtype != jax.dtypes.float0)

"""What a training step takes and sends on a mesh of devices, from shapes alone: none of the devices is needed."""

import contextlib
import dataclasses
import math
from collections.abc import Iterable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from rnnlib.models import DecoderLM, ModelConfig, abstract_model
from rnnlib.training.config import TrainConfig
from rnnlib.training.loss import head_loss_sums
from rnnlib.training.mesh import AXES, MeshConfig, mesh_sizes, parameter_spec
from rnnlib.training.optimizer import make_optimizer
from rnnlib.training.step import abstract_batch, check_batch_size, init_train_state, split_model

# `head_loss_sums` has the logits of so many at a time, in float32, and their gradient.
_LOGITS_AT_A_TIME = 1 << 27


@dataclasses.dataclass(frozen=True)
class Exchange:
    """Collectives of one kind in a step.

    Attributes:
        kind: What they do.
        what: Which arrays they are of.
        over: Axes of the mesh whose devices have part in one together.
        devices: How many these are.
        count: Arrays that a device has part in; XLA may join several in one operation.
        bytes: Of these arrays, whole: what is gathered, scattered or summed.
    """

    kind: Literal["all-gather", "reduce-scatter", "all-reduce"]
    what: str
    over: tuple[str, ...]
    devices: int
    count: int
    bytes: int

    @property
    def sent(self) -> float:
        """Bytes that each device sends, and receives, where arrays go round a ring of the devices."""
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
        gathered: Bytes of matrices that are whole for a while: of two blocks at a time, or of all of them where blocks
            are not recomputed; with `scan_layers` of one round, and a stacked copy of the shares.
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
        card: What JAX calls the GPU that activations are counted for, such as "NVIDIA H200": with its kernels. None
            for the device that this process has: on a CPU recurrences and attention store several times as much.
            It is None also where the model has attention and cuDNN is not installed here.

    Raises:
        ValueError: The mesh does not fit the devices, or the batch does not split over it.
        NotImplementedError: The mesh has another axis than these.
    """
    axes = {entry.name: getattr(config.mesh, entry.name) or 1 for entry in dataclasses.fields(config.mesh)}
    others = [f"mesh.{name}={size}" for name, size in axes.items() if name not in AXES and size > 1]
    if others:
        raise NotImplementedError(
            f"{', '.join(others)}: expected mesh.data and mesh.fsdp alone, which plans are made for"
        )
    if devices % math.prod(size for size in axes.values() if size != -1):
        raise ValueError(f"{config.mesh}: does not fit devices={devices}")
    model = config.model.replace(remat=True) if config.model.remat == "auto" else config.model
    optimizer = make_optimizer(config.optimizer, config.steps)
    state = jax.eval_shape(lambda: init_train_state(DecoderLM(model, rngs=nnx.Rngs(0)), optimizer)[1])
    batch_size, parts = config.data.batch_size, config.accumulation_steps
    sizes = mesh_sizes(
        config.mesh,
        devices,
        devices=devices,
        rows=batch_size // parts,
        state_bytes=_bytes((state.parameters, state.optimizer, state.parameters)),
        device_bytes=device_bytes,
    )
    fsdp = sizes.fsdp or 1
    mesh = AbstractMesh((sizes.data, fsdp), AXES)
    check_batch_size(batch_size, parts, mesh)
    parameters = [(path, leaf.get_raw_value()) for path, leaf in nnx.to_flat_state(state.parameters)]
    shares = _share_bytes((x for _, x in parameters), mesh)
    rows = batch_size // devices // parts
    try:
        with _described(card):
            stored, working = _activation_bytes(model, rows, config.data.sequence_length)
    except RuntimeError as error:
        if card is None or "cuDNN" not in str(error):
            raise
        card = None  # attention is traced for a GPU only where cuDNN is installed
        stored, working = _activation_bytes(model, rows, config.data.sequence_length)
    return StepPlan(
        mesh=sizes,
        model=model,
        rows=batch_size // devices,
        length=config.data.sequence_length,
        parts=parts,
        num_parameters=sum(math.prod(x.shape) for _, x in parameters),
        parameters=shares,
        gradients=shares * (2 if parts > 1 else 1),
        optimizer=_share_bytes(jax.tree.leaves(state.optimizer), mesh),
        gathered=_gathered_bytes(model, parameters, mesh),
        stored=stored,
        working=working,
        card=card,
        exchanges=_exchanges(config, model, parameters, mesh),
    )


def _described(card: str | None) -> contextlib.AbstractContextManager[Any]:
    """Within it, functions are traced for a GPU that is not there."""
    if card is None:
        return contextlib.nullcontext()
    device = AbstractDevice(device_kind=card, num_cores=None, platform="gpu")
    mesh = AbstractMesh((1,), ("card",), axis_types=(AxisType.Auto,), abstract_device=device)
    return jax.sharding.use_abstract_mesh(mesh)


def _bytes(tree: Any) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _is_shared(array: Any, mesh: AbstractMesh) -> bool:
    return "fsdp" in tuple(parameter_spec(array.shape, mesh))


def _share_bytes(arrays: Iterable[Any], mesh: AbstractMesh) -> int:
    return sum(_bytes(x) // (mesh.shape["fsdp"] if _is_shared(x, mesh) else 1) for x in arrays)


def _gathered_bytes(model: ModelConfig, parameters: list[tuple[Any, Any]], mesh: AbstractMesh) -> int:
    shared = [(path, _bytes(x)) for path, x in parameters if _is_shared(x, mesh)]
    if not model.remat:
        return sum(size for _, size in shared)
    blocks = [0] * model.num_layers
    outside = [0]
    for path, size in shared:
        if "blocks" in path:
            blocks[path[path.index("blocks") + 1]] += size
        else:
            outside.append(size)
    if model.scan_layers:
        period = len(model.mixers)
        return sum(blocks[:period]) + sum(blocks) // mesh.shape["fsdp"] + max(outside)
    return max(map(sum, zip(blocks, [*blocks[1:], 0]))) + max(outside)


def _exchanges(
    config: TrainConfig, model: ModelConfig, parameters: list[tuple[Any, Any]], mesh: AbstractMesh
) -> tuple[Exchange, ...]:
    """The collectives of `make_train_step`'s program; tests hold them to the compiled one."""
    data, fsdp = mesh.shape["data"], mesh.shape["fsdp"]
    shared = [(path, x) for path, x in parameters if _is_shared(x, mesh)]
    whole = [x for _, x in parameters if not _is_shared(x, mesh)]
    parts = config.accumulation_steps

    def of(kind: Any, what: str, over: tuple[str, ...], devices: int, sizes: list[int], times: int = 1) -> Exchange:
        return Exchange(kind, what, over, devices, len(sizes) * times, sum(sizes) * times)

    blocks = [_bytes(x) for path, x in shared if "blocks" in path]
    others = [_bytes(x) for path, x in shared if "blocks" not in path]
    # The reported norm of the gradient, and the clipped one.
    norms = 1 if config.optimizer.clip_norm is None else 2
    found = [
        of("all-gather", "matrices, forward", ("fsdp",), fsdp, blocks + others, parts),
        of("all-gather", "matrices, recomputed", ("fsdp",), fsdp, blocks if model.remat else [], parts),
        of("reduce-scatter", "gradients of matrices", ("fsdp",), fsdp, blocks + others, parts),
        of("all-reduce", "gradients of shares", ("data",), data, [size // fsdp for size in blocks + others]),
        of("all-reduce", "gradients, loss", AXES, data * fsdp, [_bytes(x) for x in whole] + [4] * 3),
        of("all-reduce", "norm of the gradient", ("fsdp",), fsdp, [4] * (norms * len(shared))),
    ]
    return tuple(exchange for exchange in found if exchange.devices > 1 and exchange.count)


def _activation_bytes(model: ModelConfig, rows: int, length: int) -> tuple[int, int]:
    """What one part of a device's rows leaves for the backward pass, and the most that is held beside it."""
    graphdef, parameters, other = split_model(abstract_model(model))
    batch = {name: jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for name, x in abstract_batch(rows, length, None).items()}
    counts = jax.ShapeDtypeStruct((model.vocabulary_size,), jnp.int32)

    def nats(parameters: Any, other: Any, batch: Any, counts: Any) -> Any:
        model = nnx.merge(graphdef, parameters, other, copy=True)
        hidden = model.hidden(batch["inputs"], segment_ids=batch["segment_ids"], positions=batch["positions"])
        asked = (batch["targets"], batch["loss_weights"], counts)
        return head_loss_sums(hidden, model.output_embedding, *asked).nats

    stored = _residual_bytes(nats, parameters, other, batch, counts)
    tokens = rows * length
    logits = 2 * 4 * model.vocabulary_size * min(tokens, max(1, _LOGITS_AT_A_TIME // model.vocabulary_size))
    return stored, max(logits, _block_bytes(model, rows, length) if model.remat else 0)


def _block_bytes(model: ModelConfig, rows: int, length: int) -> int:
    """What the block that stores most does, if it is not recomputed."""
    blocks = abstract_model(model).blocks
    x = jax.ShapeDtypeStruct((rows, length, model.width), model.compute_dtype)
    ids = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    kinds = dict(zip(zip(model.layer_mixers, model.layer_feed_forwards), blocks))

    def of(block: Any) -> int:
        graphdef, parameters, other = split_model(block)

        def run(parameters: Any, x: Any, other: Any, ids: Any, positions: Any) -> Any:
            return nnx.merge(graphdef, parameters, other, copy=True)(x, segment_ids=ids, positions=positions)[0]

        return _residual_bytes(run, (parameters, x), other, ids, ids)

    return max(map(of, kinds.values()))


def _residual_bytes(function: Any, differentiated: Any, *rest: Any) -> int:
    """Bytes of the arrays that `jax.vjp` stores, but those that are arguments."""

    def pullback(differentiated: Any, *rest: Any) -> Any:
        if isinstance(differentiated, tuple):
            return jax.vjp(lambda *args: function(*args, *rest), *differentiated)[1]
        return jax.vjp(lambda x: function(x, *rest), differentiated)[1]

    jaxpr = jax.make_jaxpr(pullback)(differentiated, *rest).jaxpr
    arguments = set(map(id, jaxpr.invars))
    stored: dict[int, Any] = {id(x): x.aval for x in jaxpr.outvars if not hasattr(x, "val") and id(x) not in arguments}
    return sum(_bytes(aval) for aval in stored.values() if aval.dtype != jax.dtypes.float0)

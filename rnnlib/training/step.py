"""The compiled training and evaluation steps, on one device or with the batch split over several."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from rnnlib.layers import RouterLoss, with_router_losses
from rnnlib.layers.input_projection import with_separate_columns
from rnnlib.layers.tensor import TENSOR
from rnnlib.models import DecoderLM
from rnnlib.ops import context_axis
from rnnlib.training.adaptation import Adaptation, join, pick
from rnnlib.training.batches import Batch
from rnnlib.training.loop_invariants import hoist
from rnnlib.training.loss import LossSums, head_loss_sums, loss_sums
from rnnlib.training.mesh import (
    CONTEXT,
    batch_spec,
    cp_size,
    gather_where_read,
    param_shardings,
    parameter_specs,
    replicated,
    tp_size,
    with_tp_axes,
)
from rnnlib.training.optimizer import Schedule, gradient_norm, where_finite
from rnnlib.training.packed import Packed, packed, unpacked
from rnnlib.training.separate_step import SeparateStep, before_conversion, without_optimizer


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """All that the training step reads and writes; donated to it.

    Attributes:
        parameters: the model's `nnx.Param` variables.
        other: its other variables (random streams, statistics).
        optimizer: the optimizer's state.
        updates: int32 scalar, updates applied.
        skipped: int32 scalar, updates left out because loss or gradient was not finite.
        frozen: what an `Adaptation` leaves as it is, where there is one; `parameters` is then what is trained.
    """

    parameters: Any
    other: Any
    optimizer: Any
    updates: Any
    skipped: Any
    frozen: Any = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepMetrics:
    """What one training step reports: float32 scalars, `skipped` int32 and `finite` bool.

    Attributes:
        nats: sum of the loss over the batch's tokens.
        tokens: sum of the loss weights.
        bytes: bytes that the predicted tokens stand for.
        gradient_norm: global norm of the gradient of the mean loss, before clipping.
        learning_rate: rate of this update.
        finite: whether loss and gradient were finite, that is, the update was applied.
        skipped: updates left out so far, this one included.
        stop: int32 scalar, the highest number of a signal by which one of several processes was asked to stop, 0
            where none was; None in one process.
    """

    nats: Any
    tokens: Any
    bytes: Any
    gradient_norm: Any
    learning_rate: Any
    finite: Any
    skipped: Any
    stop: Any = None


@runtime_checkable
class HasOutputEmbedding(Protocol):
    """A model whose logits are `hidden(tokens) @ output_embedding.T`, as `DecoderLM`'s are.

    Its loss is taken in blocks of tokens (`head_loss_sums`). Any other model is called for its logits.
    """

    output_embedding: Any

    def hidden(self, tokens: Any, *, segment_ids: Any = None, positions: Any = None) -> Any:
        """What the output embedding reads, `[B, T, D]`."""


TrainStep = Callable[[TrainState, Batch], tuple[TrainState, StepMetrics]]


def _compiler_options(deterministic: bool, mesh: Mesh | AbstractMesh | None) -> dict[str, Any] | None:
    """Options of XLA's GPU programs; elsewhere there are none.

    With `xla_gpu_deterministic_ops` they give the same bits every time, as other programs do anyway. Without it,
    scatter-adds (the embedding's gradient) sum in the order of arrival, and the choice among algorithms of a matrix
    product is timed anew in every process.

    For several GPUs XLA has a scheduler that begins collectives early and waits for them late. Where devices have whole
    copies of the model, hardly more than sums at the end of the step are left, also if they share rows: what shards of
    a row exchange is small, and needed at once. The scheduler then puts off the products of weights' gradients until
    then, and all activations that recomputation had saved are there at once (`experiments/several_gpus`).

    A mesh without devices is for tracing: a step that is traced inside another function has no options of its own. A
    mesh may be of TPUs that are described on a machine with GPUs (`plan_step`).
    """
    if jax.default_backend() != "gpu" or isinstance(mesh, AbstractMesh):
        return None
    if mesh is not None and mesh.devices.flat[0].platform == "tpu":
        return None
    options = {"xla_gpu_deterministic_ops": True} if deterministic else {}
    only_copies = mesh is not None and mesh.shape["data"] * cp_size(mesh) == math.prod(mesh.shape.values())
    return options | ({"xla_gpu_enable_latency_hiding_scheduler": False} if only_copies else {})


def state_shardings(state: TrainState, mesh: Mesh | AbstractMesh | None) -> TrainState:
    """Where each array of a training state lies, as a `TrainState` of shardings."""
    rest = jax.tree.map(lambda _: replicated(mesh), state)
    parameters, optimizer, frozen = param_shardings((state.parameters, state.optimizer, state.frozen), mesh)
    return dataclasses.replace(rest, parameters=parameters, optimizer=optimizer, frozen=frozen)


def put_state(state: Any, mesh: Mesh | None) -> Any:
    """Puts a pytree of arrays on the device, or on those of the mesh.

    Each device gets a copy, but of a `TrainState` with a mesh axis "fsdp" its shard of parameters and optimizer state.
    """
    return jax.device_put(state, state_shardings(state, mesh) if isinstance(state, TrainState) else replicated(mesh))


def abstract_state(state: TrainState, mesh: Mesh | None) -> TrainState:
    """Shapes and dtypes of a training state, and where it lies on a mesh."""
    if mesh is None:
        return jax.eval_shape(lambda x: x, state)
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding, weak_type=x.weak_type),
        state,
        state_shardings(state, mesh),
    )


def split_model(model: nnx.Module) -> tuple[Any, Any, Any]:
    """The model's static graph, its parameters and its other variables; `nnx.merge` puts them together again."""
    parts: Any = nnx.split(model, nnx.Param, ...)
    return parts


def tp_shard(model: nnx.Module, count: int) -> nnx.Module:
    """What each of `count` devices has of a model, with shapes in place of arrays.

    Raises:
        ValueError: the model cannot be sharded, or does not come out even.
    """
    if type(model) is not DecoderLM:
        raise ValueError(
            f"mesh.tensor={count}: the model is {type(model).__name__}, expected a DecoderLM, which can be sharded"
        )
    return model.tp_shard(count)


def split_for_mesh(model: nnx.Module, mesh: Mesh | AbstractMesh | None) -> tuple[Any, Any, Any]:
    """`split_model`; on a mesh that shards layers, parameters say along which axis."""
    if mesh is None or tp_size(mesh) == 1:
        return split_model(model)
    model = with_separate_columns(model)
    graphdef, parameters, other = split_model(model)
    shard = tp_shard(model, tp_size(mesh))
    for (path, whole_part), (own_path, part) in itertools.zip_longest(
        nnx.iter_modules(model), nnx.iter_modules(shard), fillvalue=((), None)
    ):
        if path != own_path or not isinstance(part, type(whole_part)):
            raise ValueError(
                f"mesh.tensor={tp_size(mesh)}: the model's {'.'.join(map(str, path or own_path))} is "
                f"{_full_name(whole_part)}, expected {_full_name(part)} as its config gives"
            )
    _, own, own_other = split_model(shard)
    for (path, x), (_, y) in zip(nnx.to_flat_state(other), nnx.to_flat_state(own_other), strict=True):
        if jax.tree.map(jnp.shape, x.get_raw_value()) != jax.tree.map(jnp.shape, y.get_raw_value()):
            name = ".".join(map(str, path))
            raise ValueError(f"mesh.tensor={tp_size(mesh)}: {name} is not trained, and only parameters are sharded")
    return graphdef, with_tp_axes(parameters, own, mesh), other


def _full_name(part: Any) -> str:
    return f"{type(part).__module__}.{type(part).__name__}"


def init_train_state(
    model: nnx.Module,
    optimizer: optax.GradientTransformation,
    mesh: Mesh | AbstractMesh | None = None,
    adaptation: Adaptation | None = None,
) -> tuple[nnx.GraphDef, TrainState]:
    """Splits a model into its static graph and the state of its training.

    Args:
        model: the module to train.
        optimizer: the optax transformation.
        mesh: from `make_mesh`, if it is to be trained on one that shards layers ("tensor").
        adaptation: what of the model is trained; None for all of it.

    Returns:
        The graph definition, and a state that shares the model's arrays (which the first training step donates).
    """
    graphdef, parameters, other = split_for_mesh(model, mesh)
    frozen = None
    if adaptation is not None:
        parameters, frozen = adaptation.split(parameters)
    zero = jnp.zeros([], jnp.int32)
    return graphdef, TrainState(parameters, other, optimizer.init(parameters), zero, jnp.zeros([], jnp.int32), frozen)


def _forward(
    graphdef, parameters, other, token_bytes, batch: Batch, specs: Any = None, shards: int = 1, evaluating: bool = False
) -> tuple[LossSums, jax.Array, Any]:
    """The language-model loss, what routers of experts add to the mean loss of a token, and the new `other`."""
    model = nnx.merge(graphdef, parameters, other, copy=True)
    if shards > 1:
        own: Any = tp_shard(model, shards)
        if evaluating:
            own.eval()
        model = nnx.merge(split_model(own)[0], parameters, other, copy=True)
    if specs is not None:
        gather_where_read(model, specs)
    # Without segment ids every row is one document (batches of the data pipelines always have them).
    tokens = {"segment_ids": batch.get("segment_ids"), "positions": batch["positions"]}
    asked = (batch["targets"], batch["loss_weights"], token_bytes)

    def sums_of(model: Any) -> LossSums:
        if isinstance(model, HasOutputEmbedding):
            hidden = model.hidden(batch["inputs"], **tokens)
            return head_loss_sums(hidden, model.output_embedding, *asked, tp_size=shards)
        return loss_sums(model(batch["inputs"], **tokens), *asked)

    sums, router_loss = with_router_losses(sums_of, model)
    return sums, router_loss, nnx.state(model, nnx.Not(nnx.Any(nnx.Param, RouterLoss)))


def _over_devices(
    function: Callable[..., Any],
    mesh: Mesh | AbstractMesh | None,
    *,
    gradients: bool,
    of: Callable[[Any], Any] = lambda parameters: parameters,
) -> Callable[..., Any]:
    """Runs `function(parameters, other, batch, specs)` on each device's rows or shard of them; sums over devices.

    Summed are the gradients (with `gradients`, the first output) and the loss. `specs` says how parameters are sharded,
    and `of` picks those of which there are gradients.
    shard_map and not the automatic partitioner: each device runs the single-device program, custom kernels included.
    """
    if mesh is None:
        return functools.partial(function, specs=None)

    split, every = (CONTEXT if cp_size(mesh) > 1 else None), mesh.axis_names
    apart = tuple(axis for axis in every if axis != TENSOR)  # devices that hold shards of one layer have the same sums

    def call(parameters, other, batch):
        specs = parameter_specs(parameters, mesh)

        def local(parameters, other, batch):
            with context_axis(split):
                outputs = function(parameters, other, batch, specs)
            if not gradients:
                return jax.lax.psum(outputs, apart)

            def summed(gradient, spec):
                # The gradient of what was gathered over "fsdp" is summed over it already.
                return jax.lax.psum(gradient, tuple(axis for axis in every if axis not in tuple(spec)))

            own, sums, other = outputs
            return jax.tree.map(summed, own, of(specs)), jax.lax.psum(sums, apart), other

        whole, rows = PartitionSpec(), {name: batch_spec(mesh, x.ndim) for name, x in batch.items()}
        mapped = jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(specs, whole, rows),
            out_specs=(of(specs), whole, whole) if gradients else whole,
            check_vma=False,
        )
        return mapped(parameters, other, batch)

    return call


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepGradients:
    """What a training step's forward and backward pass give to its update.

    Attributes:
        gradients: of the sum of the loss over all tokens, of what is trained.
        sums: `LossSums`, float32.
        other: the model's new variables that are no parameters.
        stop: as in `StepMetrics`.
    """

    gradients: Any
    sums: Any
    other: Any
    stop: Any


def _packing(state: TrainState) -> Callable[[Any], Any]:
    """What gives results the form of a state that may be packed."""
    return packed if isinstance(state.parameters, Packed) else lambda x: x


def make_train_step(
    graphdef: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    schedule: Schedule,
    token_bytes: np.ndarray,
    mesh: Mesh | AbstractMesh | None = None,
    *,
    deterministic: bool = True,
    adaptation: Adaptation | None = None,
    separate_update: bool = False,
) -> TrainStep:
    """Compiles the training step.

    The gradient is that of the mean loss over all tokens of the batch, however the batch is split into accumulation
    steps and devices: gradients of sums are added up and divided once by the number of tokens. Where loss or gradient
    is not finite, parameters and optimizer stay as they were, and `skipped` counts it.

    Args:
        graphdef: the model's static part, from `init_train_state`.
        optimizer: the optax transformation.
        schedule: learning rate by number of updates, for the report.
        token_bytes: int32, bytes that each token stands for.
        mesh: from `make_mesh`; the state is then one that `put_state` put on it. One without devices is for tracing.
        deterministic: on a GPU, the same state and batch give the same bits in every process.
        adaptation: what of the model is trained, as in `init_train_state`.
        separate_update: make two programs of it, the gradients' and the optimizer's, which compile side by side. All
            gradients are in memory between them, where one program has them take what activations have left.

    Returns:
        A jitted function of a state (donated) and a batch from `put_batch`, giving the new state and the metrics; or a
        `SeparateStep` of two. Of a `packed` state it gives a packed one, which takes less of the host's time.
    """
    byte_counts, shards = jnp.asarray(token_bytes, jnp.int32), tp_size(mesh)

    def differentiated(parameters):
        return parameters if adaptation is None else pick(parameters, lambda path: path in adaptation.changed)

    def sums_and_own_gradients(parameters, other, batch, specs):
        rest = None if adaptation is None else pick(parameters, lambda path: path not in adaptation.changed)
        parameters = differentiated(parameters)

        def loss(parameters, other, part):
            parameters = parameters if rest is None else join(parameters, rest)
            sums, router_loss, other = _forward(graphdef, parameters, other, byte_counts, part, specs, shards)
            # Of devices that hold shards of one layer each takes a part of the loss: see `rnnlib.layers.tensor`.
            return (sums.nats + router_loss * sums.tokens) / shards, (sums, other)

        gradient = jax.grad(loss, has_aux=True)
        if next(iter(batch.values())).shape[0] == 1:
            gradients, (sums, other) = gradient(parameters, other, {k: v[0] for k, v in batch.items()})
            return gradients, sums, other
        if mesh is not None and mesh.shape["fsdp"] > 1:

            def gradient_of_part(other, part):
                # Together with the part: XLA would gather once, before the loop, what does not depend on it, and a
                # device would hold all parameters whole.
                own, part = jax.lax.optimization_barrier((parameters, part))
                return gradient(own, other, part)
        else:
            # Weights are rounded to the dtype of matmuls once, not in each part.
            part = {name: jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for name, x in batch.items()}
            before, turn = hoist(gradient, parameters, other, part)
            gradient_of_part = functools.partial(turn, before(parameters), parameters)

        def add_part(carry, part):
            gradients, sums, other = carry
            part_gradients, (part_sums, other) = gradient_of_part(other, part)
            return (
                jax.tree.map(jnp.add, gradients, part_gradients),
                jax.tree.map(jnp.add, sums, part_sums),
                other,
            ), None

        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), parameters)
        carry = (zeros, LossSums(*(jnp.zeros([], jnp.float32) for _ in LossSums._fields)), other)
        (gradients, sums, other), _ = jax.lax.scan(add_part, carry, batch)
        return gradients, sums, other

    sums_and_gradients = _over_devices(sums_and_own_gradients, mesh, gradients=True, of=differentiated)

    def gradients_of(state: TrainState, batch: Batch) -> StepGradients:
        pack, state = _packing(state), unpacked(state)
        stop = jnp.max(batch["stop"]) if "stop" in batch else None
        batch = {name: x for name, x in batch.items() if name != "stop"}
        computed_with, to_trained = state.parameters, None
        if adaptation is not None:
            computed_with, to_trained = jax.vjp(
                lambda trained: adaptation.changed_variables(trained, state.frozen, state.updates + state.skipped),
                state.parameters,
            )
            unchanged = adaptation.unchanged_variables(state.frozen)
        parameters = computed_with if adaptation is None else join(computed_with, unchanged)
        gradients, sums, other = sums_and_gradients(parameters, state.other, batch)
        if to_trained is not None:
            (gradients,) = to_trained(jax.tree.map(lambda g, p: g.astype(p.dtype), gradients, computed_with))
        return pack(StepGradients(gradients, LossSums(*sums), other, stop))

    def update(state: TrainState, found: StepGradients) -> tuple[TrainState, StepMetrics]:
        pack, state, found = _packing(state), unpacked(state), unpacked(found)
        sums = found.sums
        scale = 1 / jnp.where(sums.tokens > 0, sums.tokens, 1)
        gradients = jax.tree.map(lambda g, p: (g * scale).astype(p.dtype), found.gradients, state.parameters)
        norm = gradient_norm(gradients)
        finite = jnp.isfinite(sums.nats) & jnp.isfinite(norm)
        changes, optimizer_state = optimizer.update(gradients, state.optimizer, state.parameters)
        parameters = optax.apply_updates(state.parameters, changes)
        parameters, optimizer_state = where_finite(
            finite, (parameters, optimizer_state), (state.parameters, state.optimizer), state.parameters
        )

        def statistics_if_finite(new, old):
            # Random streams advance in any case: their counters are integers.
            keep = not jnp.issubdtype(old.dtype, jnp.inexact)
            return new if keep else jnp.where(finite, new, old)

        skipped = state.skipped + jnp.where(finite, 0, 1)
        metrics = StepMetrics(
            nats=sums.nats,
            tokens=sums.tokens,
            bytes=sums.bytes,
            gradient_norm=norm,
            learning_rate=schedule(state.updates),
            finite=finite,
            skipped=skipped,
            stop=found.stop,
        )
        state = TrainState(
            parameters=parameters,
            other=jax.tree.map(statistics_if_finite, found.other, state.other),
            optimizer=optimizer_state,
            updates=state.updates + jnp.where(finite, 1, 0),
            skipped=skipped,
            frozen=state.frozen,
        )
        if mesh is not None:  # lying as it came: the next step takes it without compiling
            state = jax.lax.with_sharding_constraint(state, state_shardings(state, mesh))
        return pack(state), metrics

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
        return update(state, gradients_of(without_optimizer(state), batch))

    options = _compiler_options(deterministic, mesh)
    if separate_update:
        found = jax.jit(before_conversion(gradients_of))  # without options, being traced inside another

        def gradients_in_place(state: TrainState, batch: Batch, last: Any) -> StepGradients:
            return found(state, batch)

        gradients = jax.jit(gradients_in_place, donate_argnums=2, keep_unused=True, compiler_options=options)
        return SeparateStep(gradients, jax.jit(update, donate_argnums=0, compiler_options=options), found)
    return jax.jit(step, donate_argnums=0, compiler_options=options)


def make_evaluation_step(
    graphdef: nnx.GraphDef, token_bytes: np.ndarray, mesh: Mesh | None = None, *, deterministic: bool = True
) -> Callable[[Any, Any, Batch], LossSums]:
    """Compiles the evaluation step: `(parameters, other, batch) -> LossSums` of one batch from `put_batch`."""
    byte_counts = jnp.asarray(token_bytes, jnp.int32)

    def sums(parameters, other, batch, specs):
        part = {name: x[0] for name, x in batch.items()}
        return _forward(graphdef, parameters, other, byte_counts, part, specs, tp_size(mesh), evaluating=True)[0]

    over_devices = _over_devices(sums, mesh, gradients=False)

    def step(parameters, other, batch) -> LossSums:
        return LossSums(*over_devices(parameters, other, batch))

    return jax.jit(step, compiler_options=_compiler_options(deterministic, mesh))

"""Training many runs of one model side by side: a vmap over runs inside a scan over steps, compiled ahead."""

import concurrent.futures
import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from experiments.sweep.autoencoder import AutoEncoder
from experiments.sweep.data import Arrays, CellData, epoch_orders
from experiments.sweep.saved import Saved
from experiments.sweep.study import Cell, Group
from rnnlib.data.tasks import Compression
from rnnlib.models import DecoderLM
from rnnlib.models.variables import count_values
from rnnlib.training import loss_sums, make_optimizer
from rnnlib.training.accuracy import AccuracySums, accuracy_sums


@dataclasses.dataclass(frozen=True)
class CompiledGroup:
    """A group's compiled functions.

    Attributes:
        group: whose they are.
        num_parameters: of one model.
        init: `seeds -> state`.
        train: `(state, data, orders, which seed, learning rates) -> state, losses [steps, lanes]`.
        evaluate: `(sums so far, state, batch) -> sums`, by the shapes of the batch.
        seconds: that compiling took.
    """

    group: Group
    num_parameters: int
    init: Callable[..., Any]
    train: Callable[..., Any]
    evaluate: dict[Any, Callable[..., Any]]
    seconds: float


def _shapes(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def _signature(batch: Any) -> tuple[Any, ...]:
    return tuple(sorted((name, values.shape) for name, values in batch.items()))


def _batches(arrays: Arrays) -> list[Arrays]:
    """`[batches, B, ...]` one by one: sets of the same batches share a compiled program, however many they have."""
    return [{name: values[i] for name, values in arrays.items()} for i in range(len(arrays["inputs"]))]


def compile_group(group: Group, data: CellData) -> CompiledGroup:
    """Compiles everything that a group needs, without running anything.

    The learning rate is an array: the optimizer has a peak rate of 1 and a run's updates are multiplied by its rate,
    which for AdamW with decoupled decay is the same thing.
    """
    start = time.monotonic()
    cell, lanes = group.cell, group.lanes
    build = _builder(group)
    optimizer = make_optimizer(cell.optimizer_config(), cell.steps)
    # The model's static part, without any weights.
    graphdef = nnx.split(nnx.eval_shape(lambda: build(nnx.Rngs(0))), nnx.Param, ...)[0]

    def init_lane(seed: jax.Array) -> tuple[Any, Any, Any]:
        parts: Any = nnx.split(build(nnx.Rngs(jax.random.key(seed))), nnx.Param, ...)
        _, parameters, other = parts
        return parameters, other, optimizer.init(parameters)

    def answers(parameters: Any, other: Any, batch: dict[str, jax.Array]) -> jax.Array:
        model: Any = nnx.merge(graphdef, parameters, other)
        hidden = model.hidden(batch["inputs"])
        if batch["where"].shape[1] < hidden.shape[1]:
            hidden = jnp.take_along_axis(hidden, batch["where"][..., None], axis=1)
        return model.logits(hidden)

    def nats(parameters: Any, other: Any, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        logits = answers(parameters, other, batch)
        no_bytes = jnp.zeros(logits.shape[-1], jnp.int32)
        sums = loss_sums(logits, batch["targets"], batch["weights"], no_bytes)
        return sums.nats / jnp.maximum(sums.tokens, 1), logits

    def train_lane(state: Any, order: jax.Array, rate: jax.Array, train: dict[str, jax.Array]) -> tuple[Any, jax.Array]:
        parameters, other, moments = state
        batch = {name: values[order] for name, values in train.items()}
        (loss, _), gradients = jax.value_and_grad(nats, has_aux=True)(parameters, other, batch)
        changes, moments = optimizer.update(gradients, moments, parameters)
        parameters = optax.apply_updates(parameters, jax.tree.map(lambda change: change * rate, changes))
        return (parameters, other, moments), loss

    def train(state: Any, train: Any, orders: jax.Array, columns: jax.Array, rates: jax.Array) -> Any:
        def step(state: Any, order: jax.Array) -> tuple[Any, jax.Array]:
            return jax.vmap(train_lane, in_axes=(0, 0, 0, None))(state, order[columns], rates, train)

        return jax.lax.scan(step, state, orders)

    def evaluate(totals: Any, state: Any, batch: dict[str, jax.Array]) -> Any:
        def lane(parameters: Any, other: Any, batch: dict[str, jax.Array]) -> tuple[jax.Array, AccuracySums]:
            loss, logits = nats(parameters, other, batch)
            sums = accuracy_sums(logits, batch["targets"], batch["query_ids"], batch.get("allowed_targets"))
            return loss * sums.tokens, sums

        return jax.tree.map(jnp.add, totals, jax.vmap(lane, in_axes=(0, 0, None))(state[0], state[1], batch))

    seeds = jax.ShapeDtypeStruct((len(lanes),), jnp.uint32)
    init_all = jax.jit(jax.vmap(init_lane))
    state = jax.eval_shape(init_all, seeds)
    orders = jax.ShapeDtypeStruct((cell.steps // cell.chunks, len({s for _, s in lanes}), cell.batch_size), jnp.int32)
    columns = jax.ShapeDtypeStruct((len(lanes),), jnp.int32)
    rates = jax.ShapeDtypeStruct((len(lanes),), jnp.float32)
    batches = [batch for arrays in (data.validation, *data.test.values()) for batch in _batches(arrays)]
    shapes = {_signature(batch): _shapes(batch) for batch in batches}
    lowered = [
        init_all.lower(seeds),
        jax.jit(train, donate_argnums=0).lower(state, _shapes(_trained(data.train)), orders, columns, rates),
        *(jax.jit(evaluate).lower(_shapes(_no_sums(group)), state, batch) for batch in shapes.values()),
    ]
    # XLA compiles without Python's lock: the parts side by side take as long as the training step.
    with concurrent.futures.ThreadPoolExecutor(len(lowered)) as threads:
        compiled_init, compiled_train, *evaluations = threads.map(lambda part: part.compile(), lowered)
    return CompiledGroup(
        group=group,
        num_parameters=count_values(state[0]) // len(lanes),
        init=compiled_init,
        train=compiled_train,
        evaluate=dict(zip(shapes, evaluations)),
        seconds=time.monotonic() - start,
    )


def _no_sums(group: Group) -> Any:
    """Nats and counts of each lane before the first batch."""
    zero: Any = np.zeros(len(group.lanes), np.float32)
    return zero, AccuracySums(zero, zero, zero, zero)


def _builder(group: Group) -> Callable[[nnx.Rngs], Any]:
    """Builds a group's model: a language model, but for MAD's compression its auto-encoder."""
    config = group.cell.model_config(group.mixer)
    model = AutoEncoder if isinstance(group.cell.task, Compression) else DecoderLM
    return lambda rngs: model(config, rngs=rngs)


def _trained(train: Arrays) -> Arrays:
    """What the loss reads of the training set."""
    return {name: train[name] for name in ("inputs", "where", "targets", "weights")}


class DeviceData:
    """A cell's data on the device; only the last cell's stays there."""

    def __init__(self) -> None:
        self._cell: Cell | None = None
        self._data: CellData | None = None

    def put(self, cell: Cell, data: CellData) -> CellData:
        """The data with the training set as device arrays; each batch of the others goes there when it is tested."""
        if self._cell != cell:
            self._data = None
            self._data = dataclasses.replace(data, train=jax.device_put(_trained(data.train)))
            self._cell = cell
        assert self._data is not None
        return self._data


def train_group(
    compiled: CompiledGroup, data: CellData, advance: Callable[[int], None], saved: Saved | None = None
) -> list[dict[str, Any]]:
    """Trains and evaluates a group, or goes on with one that was stopped.

    Args:
        compiled: from `compile_group`.
        data: the cell's, on the device.
        advance: called with the number of steps done since its last call.
        saved: where its state is kept meanwhile; None keeps none.

    Returns:
        One record a run: learning rate, seed, loss curve, validation and test results.
    """
    cell, lanes = compiled.group.cell, compiled.group.lanes
    seeds = sorted({lane.seed for lane in lanes})
    orders = epoch_orders(cell.train_examples, cell.steps, cell.batch_size, seeds)
    columns = jnp.array([seeds.index(lane.seed) for lane in lanes], jnp.int32)
    rates = jnp.array([lane.learning_rate for lane in lanes], jnp.float32)
    state = compiled.init(jnp.array([lane.seed for lane in lanes], jnp.uint32))
    start = time.monotonic()
    per_chunk = cell.steps // cell.chunks
    curve: list[np.ndarray] = []
    if saved is not None and (found := saved.read(state)) is not None:
        state, curve = found
        advance(per_chunk * len(curve))
    for chunk in range(len(curve), cell.chunks):
        piece = orders[chunk * per_chunk : (chunk + 1) * per_chunk]
        state, losses = compiled.train(state, data.train, piece, columns, rates)
        curve.append(np.asarray(losses).mean(0))  # waits for the chunk
        advance(per_chunk)
        if saved is not None:
            saved.write_if_due(state, curve)
    seconds = time.monotonic() - start

    def results(arrays: Arrays) -> list[dict[str, float | None]]:
        totals = _no_sums(compiled.group)
        for batch in _batches(arrays):
            totals = compiled.evaluate[_signature(batch)](totals, state, batch)
        nats, sums = jax.device_get(totals)
        return [
            {
                "loss": _finite(nats[i] / sums.tokens[i]),
                "token_accuracy": float(sums.correct_tokens[i] / sums.tokens[i]),
                "query_accuracy": float(sums.correct_queries[i] / sums.queries[i]),
            }
            for i in range(len(lanes))
        ]

    validation = results(data.validation)
    test = {name: results(arrays) for name, arrays in data.test.items()}
    if saved is not None:
        saved.remove()
    return [
        {
            "learning_rate": lane.learning_rate,
            "seed": lane.seed,
            "train_loss": [_finite(losses[i]) for losses in curve],
            "validation": validation[i],
            "test": {name: entries[i] for name, entries in test.items()},
            "train_seconds_of_all_lanes": round(seconds, 3),
            "lanes": len(lanes),
        }
        for i, lane in enumerate(lanes)
    ]


def _finite(value: Any) -> float | None:
    value = float(value)
    return round(value, 6) if math.isfinite(value) else None

"""Compiling and timing one training step."""

import dataclasses
import functools
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from experiments.throughput.profiling import Operation, profile
from experiments.throughput.study import Case, ThroughputStudy, model_config
from rnnlib.models import DecoderLM, ModelConfig
from rnnlib.models.variables import count_values
from rnnlib.training import (
    OptimizerConfig,
    TrainState,
    abstract_train_state,
    learning_rate_schedule,
    make_optimizer,
    make_train_step,
    planned_bytes,
    put_batch,
    put_state,
)
from rnnlib.training.flops import PEAK, step_flops
from rnnlib.training.step import abstract_state, split_for_mesh

_SCHEDULE_STEPS = 1000


@dataclasses.dataclass(frozen=True)
class CompiledCase:
    """A case, ready to run.

    Attributes:
        case: what it is.
        step: compiled `(state, batch) -> state, metrics`.
        new_state: gives a state to begin with.
        mesh: of the devices that share the step; None for one device.
        num_parameters: of the model.
        seconds: that compiling took.
    """

    case: Case
    step: Any
    new_state: Callable[[], TrainState]
    mesh: Mesh | None
    num_parameters: int
    seconds: float


def _tokens(plan: ThroughputStudy, mesh: Mesh | None) -> int:
    """Tokens of a step: the study's for each device."""
    return plan.tokens * (1 if mesh is None else mesh.size)


def _batch(plan: ThroughputStudy, case: Case, mesh: Mesh | None) -> dict[str, jax.Array]:
    """Random tokens: speed does not depend on what they are."""
    shape = (_tokens(plan, mesh) // case.length, case.length)
    rng = np.random.default_rng(0)
    tokens = rng.integers(plan.model.vocabulary_size, size=(shape[0], shape[1] + 1))
    documents = 4 if case.packed else 1
    within = np.arange(case.length) % (case.length // documents)
    batch = put_batch(
        {
            "inputs": tokens[:, :-1].astype(np.int32),
            "targets": tokens[:, 1:].astype(np.int32),
            "segment_ids": np.broadcast_to(1 + np.arange(case.length) // (case.length // documents), shape).astype(
                "i4"
            ),
            "positions": np.broadcast_to(within, shape).astype(np.int32),
            "loss_weights": np.ones(shape, np.float32),
        },
        mesh,
        plan.accumulation,
    )
    if not case.packed:
        del batch["segment_ids"]  # rows of one document: nothing to tell apart
    return batch


def _initial_parameters(config: ModelConfig, full: Any, mesh: Mesh | None) -> Any:
    """Initial weights in the host's memory: those of one period of layers for all, since speed is all that is asked.

    (Compiling the initialisation of 24 layers takes minutes, and running it uncompiled takes longer than timing.)
    """
    period = len(config.mixers)
    model = DecoderLM(config.replace(num_layers=period), rngs=nnx.Rngs(0))
    leaves = jax.tree_util.tree_leaves_with_path(split_for_mesh(model, mesh)[1])
    by_name = {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}

    def value(path: Any, leaf: Any) -> np.ndarray:
        name = re.sub(r"(blocks'?\]\[)(\d+)", lambda m: f"{m[1]}{int(m[2]) % period}", jax.tree_util.keystr(path))
        if by_name[name].shape != leaf.shape:
            raise AssertionError(f"{name}: {by_name[name].shape} in place of {leaf.shape}")
        return by_name[name]

    return jax.tree_util.tree_map_with_path(value, full)


def compile_case(
    plan: ThroughputStudy, case: Case, mesh: Mesh | None = None, options: dict[str, Any] | None = None
) -> CompiledCase:
    """Compiles the training step of `rnnlib.training`; XLA tries out kernels on the device meanwhile.

    Args:
        plan: the study; each device has its number of tokens.
        case: what is timed.
        mesh: devices that share the step; None for one device.
        options: of XLA's compiler, beside those of `rnnlib.training`.
    """
    start = time.monotonic()
    config = model_config(plan, case)
    optimizer_config = OptimizerConfig()
    optimizer = make_optimizer(optimizer_config, _SCHEDULE_STEPS)
    schedule = learning_rate_schedule(optimizer_config, _SCHEDULE_STEPS)
    graphdef, state = abstract_train_state(config, optimizer, mesh)
    if jax.tree.leaves(state.other):
        raise TypeError(f"{case.mixer.label}: expected a model of parameters alone")
    # Made when the case is timed: until then the device's memory is a peer's.
    parameters = functools.cache(lambda: _initial_parameters(config, state.parameters, mesh))

    def new_state() -> TrainState:
        zero = np.zeros([], np.int32)
        on_device = put_state(parameters(), None)
        new = TrainState(on_device, state.other, optimizer.init(on_device), *put_state((zero, zero.copy()), None))
        return new if mesh is None else put_state(new, mesh)

    token_bytes = np.ones(config.vocabulary_size, np.int32)
    step: Any = make_train_step(graphdef, optimizer, schedule, token_bytes, mesh, deterministic=case.deterministic)
    batch = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=None if mesh is None else x.sharding),
        _batch(plan, case, mesh),
    )
    compiled = step.lower(abstract_state(state, mesh), batch).compile(options)
    num_parameters = count_values(state.parameters)
    return CompiledCase(case, compiled, new_state, mesh, num_parameters, time.monotonic() - start)


def in_groups(bytes_of: Mapping[Case, tuple[int, int]], limit: int | None) -> list[list[Case]]:
    """The cases, in their order, in groups that a device can hold at once.

    Args:
        bytes_of: of each case, what its state takes and what a step takes in all.
        limit: memory of the device; None where it is not known, which makes one group.
    """
    groups: list[list[Case]] = []
    held = most = 0
    for case, (state, step) in bytes_of.items():
        held, most = held + state, max(most, step - state)
        if not groups or (limit is not None and held + most > limit):
            groups.append([])
            held, most = state, step - state
        groups[-1].append(case)
    return groups


def claim_memory() -> None:
    """Has JAX take a device's memory in one piece, as it does at its start where that need not be left to a peer.

    What it takes bit by bit it keeps in pieces, and none of them may be large enough for the next case.
    """
    stats = jax.local_devices()[0].memory_stats() or {}
    free = stats.get("bytes_limit", 0) - stats.get("pool_bytes", stats.get("bytes_in_use", 0))
    for part in (0.97, 0.93, 0.88, 0.8):  # what else has a little of the card is not known
        try:
            jax.block_until_ready(jnp.zeros((int(part * free) // 2**30, 2**28), jnp.float32)).delete()
            return
        except jax.errors.JaxRuntimeError:
            continue


def bytes_of_case(compiled: CompiledCase) -> tuple[int, int]:
    """What a case's state and its batch take on the device, and what a step takes in all; 0 where it is not known."""
    memory = _memory(compiled.step)
    return (0, 0) if memory is None else (memory["argument_size_in_bytes"], memory["peak_bytes"])


class Measurement:
    """A case whose steps are being timed; its state stays on the device until `finish`.

    Steps are timed in two ways: each waited for before the next is asked for, and as `Trainer` takes them, one ahead of
    the one that is waited for, so that what the host does between steps costs no time.
    """

    def __init__(self, plan: ThroughputStudy, compiled: CompiledCase):
        """Takes the steps before timing."""
        self.plan = plan
        self.compiled = compiled
        self.batch = _batch(plan, compiled.case, compiled.mesh)
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.seconds_ahead: list[float] = []
        self.state: Any = compiled.new_state()
        self._run(plan.warmup)

    def _run(self, steps: int) -> list[float]:
        seconds = []
        for _ in range(steps):
            start = time.perf_counter()
            self.state, metrics = self.compiled.step(self.state, self.batch)
            self.losses.append(float(metrics.nats) / float(metrics.tokens))
            seconds.append(time.perf_counter() - start)
        return seconds

    def time(self, steps: int) -> None:
        """Times so many steps more, each waited for."""
        self.seconds += self._run(steps)

    def time_ahead(self, steps: int) -> None:
        """Times so many steps more, from one's end to the next one's, with the next always asked for.

        A step of thousands of kernels is asked for until the one before it has nearly ended, so an end is seen late.
        That of the last step is not, and the time before it is left out.
        """
        ends: list[float] = []
        pending: Any = None
        for number in range(steps + 3):
            metrics = None
            if number <= steps + 1:
                self.state, metrics = self.compiled.step(self.state, self.batch)
            if pending is not None:
                self.losses.append(float(pending.nats) / float(pending.tokens))
                ends.append(time.perf_counter())
            pending = metrics
        self.seconds_ahead += np.diff(ends)[:-1].tolist()

    def profile(self) -> tuple[list[Operation], str]:
        """Device time of one more step by operation, and the compiled program's text."""
        text = self.compiled.step.as_text()
        return profile(lambda: self._run(1), text), text

    def finish(self) -> dict[str, Any]:
        """Gives the state back.

        Returns:
            The record: tokens per second (from the median step), utilisation, memory, losses.
        """
        plan, compiled, case = self.plan, self.compiled, self.compiled.case
        losses, self.state = self.losses, None
        record: dict[str, Any] = {}
        if case.deterministic:
            self.losses, self.state = [], compiled.new_state()
            self._run(len(losses))
            record["same_bits_twice"], self.state = self.losses == losses, None
        flops = step_flops(model_config(plan, case), case.length)
        median = float(np.median(self.seconds))
        tokens = _tokens(plan, compiled.mesh)
        peak = PEAK.get(jax.devices()[0].device_kind)
        peak = None if peak is None else peak * tokens / plan.tokens  # of all devices together
        achieved = flops.total * tokens / median
        if self.seconds_ahead:
            ahead = float(np.median(self.seconds_ahead))
            record |= {
                "step_seconds_ahead": [round(s, 6) for s in self.seconds_ahead],
                "tokens_per_second_ahead": round(tokens / ahead, 1),
                "utilization_ahead": None if peak is None else round(flops.total * tokens / ahead / peak, 5),
            }
        return record | {
            **case.fields(),
            "preset": list(case.mixer.preset),
            "rows": tokens // case.length,
            "accumulation": plan.accumulation,
            "num_parameters": compiled.num_parameters,
            "step_seconds": [round(s, 6) for s in self.seconds],
            "tokens_per_second": round(tokens / median, 1),
            "flops_per_token": {"weights": flops.weights, "mixing": flops.mixing},
            "model_flops_per_second": achieved,
            "utilization": None if peak is None else round(achieved / peak, 5),
            "memory": _memory(compiled.step),
            "losses": [loss if np.isfinite(loss) else None for loss in losses],
            "compile_seconds": round(compiled.seconds, 2),
        }


def _memory(step: Any) -> dict[str, int] | None:
    """What XLA's plan of the step takes on the device, bytes: arguments (the state is donated) and intermediates."""
    analysis = step.memory_analysis()
    if analysis is None:
        return None
    names = ("argument_size_in_bytes", "output_size_in_bytes", "temp_size_in_bytes", "alias_size_in_bytes")
    return {name: int(getattr(analysis, name)) for name in names} | {"peak_bytes": int(planned_bytes(step) or 0)}

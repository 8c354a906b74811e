"""Compiles operators, layers, decoding and training steps for TPUs that are described, on a machine without one.

Needs libtpu: `uv run --group tpu`. XLA's TPU compiler says what a program takes of memory. Nothing here runs.
"""

import dataclasses
import functools
import json
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding

from rnnlib import ops
from rnnlib.layers.presets import mixer_names
from rnnlib.models import DecoderLM
from rnnlib.training import MeshConfig, TrainConfig
from rnnlib.training.plan import plan_step
from rnnlib.training.tpu import TPUS, described_tpus
from tests.tiny_models import tiny_config
from tests.tpu.traffic import Program

CHIPS = ("v5e", "v6e", "tpu7x")
"""Of each, a host of four chips is described."""

_B, _T, _H, _K = 1, 256, 2, 64
_TOKEN = ((_B, _T, _H, _K), jnp.bfloat16)
_HEAD = ((_B, _T, _H), jnp.float32)
_CHANNEL = ((_B, _T, _H, _K), jnp.float32)
_ROWS = ((_B, _T, _H * _K), jnp.bfloat16)


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What the compiler says of a program.

    Attributes:
        case: its name.
        chip: one of `CHIPS`.
        seconds: that compiling took, of processors' time.
        temporary: bytes of memory beside arguments and results, on a chip.
        moved: bytes that it reads from and writes to main memory (`tests.tpu.traffic`); 0 for a training step.
        cycles: that the compiler estimates; 0 for a training step.
    """

    case: str
    chip: str
    seconds: float
    temporary: int
    moved: int
    cycles: int


def _delta(q, k, v, decay, beta):
    return ops.gated_delta_rule(q, k, v, beta=beta, log_decay=decay)[0]


OPERATORS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "gated delta rule": (_delta, (_TOKEN, _TOKEN, _TOKEN, _HEAD, _HEAD)),
    "gated delta rule, decay by channel": (_delta, (_TOKEN, _TOKEN, _TOKEN, _CHANNEL, _HEAD)),
    "linear attention": (
        lambda q, k, v, decay: ops.linear_attention(q, k, v, log_decay=decay)[0],
        (_TOKEN, _TOKEN, _TOKEN, _HEAD),
    ),
    "dplr": (
        lambda q, k, v, a, b, decay: ops.dplr(q, k, v, a=a, b=b, log_decay=decay)[0],
        (*[_TOKEN] * 5, _CHANNEL),
    ),
    "ridge solve": (
        lambda q, k, decay: ops.ridge_solve(q, k, log_decay=decay)[0],
        (_TOKEN, _TOKEN, _HEAD),
    ),
    "ridge solve, conjugate gradients": (
        lambda q, k: ops.ridge_solve(q, k, adaptive=False, ridge=1.0, solver="conjugate_gradient")[0],
        (_TOKEN, _TOKEN),
    ),
    "diagonal preconditioner": (
        lambda k, decay, gain: ops.precondition_key(k, log_decay=decay, gain=gain),
        (_TOKEN, _HEAD, _HEAD),
    ),
    "diagonal preconditioner, decay by channel": (
        lambda k, decay, gain: ops.precondition_key(k, log_decay=decay, gain=gain),
        (_TOKEN, _CHANNEL, _CHANNEL),
    ),
    "exact preconditioner": (lambda q, k: ops.exact_preconditioner(q, k)[:2], (_TOKEN, _TOKEN)),
    "causal attention": (ops.causal_attention, (_TOKEN, _TOKEN, _TOKEN)),
    "sliding window": (functools.partial(ops.causal_attention, window=64), (_TOKEN, _TOKEN, _TOKEN)),
    "short convolution": (
        lambda x, kernel: ops.short_convolution(x, kernel, activation="silu")[0],
        (_ROWS, ((4, _H * _K), jnp.bfloat16)),
    ),
}
"""An operator's outputs as a function of the arrays that it is differentiated by."""

PRESETS = mixer_names()
"""A model of one layer of each is compiled with its gradient, and extends its cache by a token."""

MESHES = {
    "data": MeshConfig(data=4),
    "fsdp": MeshConfig(data=2, fsdp=2),
    "tensor": MeshConfig(data=2, tensor=2),
    "context": MeshConfig(data=2, context=2),
}
"""Meshes of four chips, on which a training step of a small Gated DeltaNet is compiled."""


def names() -> list[str]:
    """All cases."""
    return [
        *(f"operator: {name}" for name in OPERATORS),
        *(f"layer: {name}" for name in PRESETS),
        *(f"decoding: {name}" for name in PRESETS),
        *(f"training step: {name}" for name in MESHES),
    ]


def devices(chip: str) -> list[Any]:
    """Four described devices; a tpu7x chip has two."""
    return described_tpus(chip, 4 * TPUS[chip].cores)[:4]


def compile_case(case: str, chip: str) -> Compiled:
    """Compiles a case of `names` for a chip."""
    kind, name = case.split(": ")
    started = time.process_time()
    if kind == "training step":
        model = tiny_config("gated_deltanet", "gated_deltanet", vocabulary_size=64)
        config = TrainConfig(model=model, mesh=MESHES[name])
        data = dataclasses.replace(config.data, sequence_length=128, batch_size=4)
        plan = plan_step(dataclasses.replace(config, data=data), 4, compile_for=devices(chip))
        assert plan.compiled is not None
        return Compiled(case, chip, round(time.process_time() - started, 1), plan.compiled, 0, 0)
    if kind == "operator":
        function, kinds = OPERATORS[name]
        compiled = _compile(_with_gradient(function), [jax.ShapeDtypeStruct(*of) for of in kinds], chip)
    else:
        model = nnx.eval_shape(lambda: DecoderLM(tiny_config(name), rngs=nnx.Rngs(0)))
        graph, parameters = nnx.split(model)
        if kind == "layer":
            tokens = jax.ShapeDtypeStruct((2, 128), jnp.int32)

            def loss(parameters, tokens):
                return jnp.sum(nnx.merge(graph, parameters)(tokens).astype(jnp.float32))

            compiled = _compile(jax.grad(loss), [parameters, tokens], chip)
        else:
            cache = jax.eval_shape(lambda: nnx.merge(graph, _zeros(parameters)).init_cache(2, 64))
            token = jax.ShapeDtypeStruct((2, 1), jnp.int32)

            def extend(parameters, token, cache):
                return nnx.merge(graph, parameters).extend(token, cache)

            compiled = _compile(extend, [parameters, token, cache], chip)
    seconds = round(time.process_time() - started, 1)
    traffic = Program(compiled.as_text()).traffic()
    return Compiled(case, chip, seconds, compiled.memory_analysis().temp_size_in_bytes, traffic.main, traffic.cycles)


def _zeros(tree: Any) -> Any:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tree)


def _with_gradient(function: Callable[..., Any]) -> Callable[..., Any]:
    def both(*arguments):
        out, pull_back = jax.vjp(function, *arguments)
        return out, pull_back(jax.tree.map(jnp.ones_like, out))

    return both


def _compile(function: Callable[..., Any], arguments: list[Any], chip: str) -> Any:
    device = devices(chip)[0]
    alone = SingleDeviceSharding(device)
    arguments = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=alone), arguments)
    described = AbstractDevice(device_kind=device.device_kind, num_cores=None, platform="tpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("_",), abstract_device=described)):
        lowered = jax.jit(function).trace(*arguments).lower(lowering_platforms=("tpu",))
    return lowered.compile()


def line(compiled: Compiled) -> str:
    """A line of the file of results."""
    return json.dumps(dataclasses.asdict(compiled))

"""`python -m experiments.several_gpus.explicit_axes`: a training step on a mesh of Explicit axes, compiled beside ours.

The prototype has no `shard_map` but in operators. Parameters have a sharding each, by a table of names, and are read
through `jax.sharding.reshard`, which gathers what "fsdp" shares out. The step is one `jax.jit`. With `reduced`,
matrices are read with a type that says that their gradients are sums over devices, which are then scattered and not
copied.

Each step is compiled for four described H100s, or with `--cpus` for four virtual CPUs; its collectives are counted.
Needs the dependency group `offline`.
"""

import collections
import dataclasses
import json
import math
import os
import sys
from typing import Any, Literal

import tyro

from experiments.harness.child import Child
from experiments.harness.command import errors_as_lines
from experiments.kernel_benchmarks.offline.compiling import environment as offline_environment
from experiments.kernel_benchmarks.offline.compiling import missing_packages

Form = Literal["ours", "explicit", "explicit, reduced"]
FORMS: tuple[Form, ...] = ("ours", "explicit", "explicit, reduced")
_AXES = ("data", "fsdp", "tensor")


@dataclasses.dataclass(frozen=True)
class Options:
    """Compiles both forms of the step of a small model, blocks recomputed, and prints their collectives."""

    meshes: tuple[str, ...] = ("4,1,1", "1,4,1", "1,1,4")
    """Sizes of data, fsdp and tensor, with commas between them."""
    layers: int = 2
    """Blocks of the model."""
    width: int = 512
    """Its width."""
    rows: int = 8
    """Rows of the whole batch."""
    length: int = 1024
    """Tokens a row."""
    mixer: str = "gated_deltanet"
    """Its mixer."""
    cpus: bool = False
    """Compile for virtual CPUs."""


def spec_of(path: tuple[Any, ...], shape: tuple[int, ...], sizes: dict[str, int]) -> tuple[str | None, ...]:
    """Over which mesh axis each axis of a parameter lies."""
    names = [str(name) for name in path]
    entries: list[str | None] = [None] * len(shape)
    in_layer = {"mixer", "feed_forward"} & set(names) and not any("norm" in name for name in names)
    if sizes["tensor"] > 1 and in_layer:
        is_last = "output" in names or {"feed_forward", "down"} <= set(names)
        # The narrow half of a low rank is whole.
        axis = -2 if is_last else None if "down" in names else -1
        if axis is not None and len(shape) + axis >= 0 and shape[axis] % sizes["tensor"] == 0:
            entries[axis] = "tensor"
    if sizes["fsdp"] > 1 and len(shape) > 1:
        free = (i for i, size in enumerate(shape) if entries[i] is None and size % sizes["fsdp"] == 0)
        if (first := next(free, None)) is not None:
            entries[first] = "fsdp"
    return tuple(entries)


def _compiled(asked: dict[str, Any]) -> Any:
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from flax import nnx
    from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

    from experiments.kernel_benchmarks.offline.cards import CARDS
    from rnnlib.models import DecoderLM, ModelConfig
    from rnnlib.training import (
        OptimizerConfig,
        abstract_train_state,
        head_loss_sums,
        learning_rate_schedule,
        make_optimizer,
        make_train_step,
    )
    from rnnlib.training.batches import BATCH_FIELDS, abstract_batch
    from rnnlib.training.optimizer import gradient_norm
    from rnnlib.training.step import abstract_state, split_model

    shape, rows, length = tuple(asked["mesh"]), asked["rows"], asked["length"]
    sizes, count = dict(zip(_AXES, shape, strict=True)), math.prod(shape)
    devices = jax.devices()[:count] if asked["cpus"] else CARDS["sm_90"].devices(count, memory=80_000_000_000)
    platforms = None if asked["cpus"] else ("cuda",)
    model = ModelConfig(
        vocabulary_size=4096,
        width=asked["width"],
        num_layers=asked["layers"],
        num_heads=max(4, asked["width"] // 128),
        mixers=(asked["mixer"],),
        mlp_width=2 * asked["width"],
        dtype="float32" if asked["cpus"] else "bfloat16",
        remat=True,
    )
    optimizer, schedule = make_optimizer(OptimizerConfig(), 100), learning_rate_schedule(OptimizerConfig(), 100)
    counts = np.ones(model.vocabulary_size, np.int32)
    if asked["form"] == "ours":
        names = _AXES if sizes["tensor"] > 1 else _AXES[:2]
        mesh = Mesh(np.array(devices).reshape(shape[: len(names)]), names, axis_types=(AxisType.Auto,) * len(names))
        graph, state = abstract_train_state(model, optimizer, mesh)
        step: Any = make_train_step(graph, optimizer, schedule, counts, mesh, deterministic=False)
        traced = step.trace(abstract_state(state, mesh), abstract_batch(rows, length, mesh))
        return traced.lower(lowering_platforms=platforms).compile()

    mesh = Mesh(np.array(devices).reshape(shape), _AXES, axis_types=(AxisType.Explicit,) * 3)
    by_rows, whole = PartitionSpec(("data", "fsdp")), PartitionSpec()
    graph, parameters, other = split_model(nnx.eval_shape(lambda: DecoderLM(model, rngs=nnx.Rngs(0))))
    specs = {path: spec_of(path, x.shape, sizes) for path, x in nnx.to_flat_state(parameters)}

    class Reshard:
        """What a variable is read through: its value without "fsdp"."""

        def __init__(self, path: tuple[Any, ...]):
            entries = [None if entry == "fsdp" else entry for entry in specs[path]]
            # Operators, such as convolutions, do not know the type.
            sums = asked["form"] == "explicit, reduced" and path[-1] == "kernel" and "convolution" not in path
            self.spec = PartitionSpec(*entries, reduced={"data", "fsdp"} if sums else frozenset())

        def __call__(self, variable: Any, value: Any) -> Any:
            return jax.sharding.reshard(value, self.spec)

    def lying(tree: Any) -> Any:
        def one(path: Any, x: Any) -> Any:
            keys = tuple(getattr(p, "key", getattr(p, "idx", getattr(p, "name", None))) for p in path)
            own = (s for q, s in specs.items() if q in (keys[-len(q) - 1 : -1], keys[-len(q) :]))
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, PartitionSpec(*next(own, ()))))

        return jax.tree_util.tree_map_with_path(one, tree)

    def loss(parameters: Any, other: Any, batch: Any) -> Any:
        model = nnx.merge(graph, parameters, other, copy=True)
        for path, _ in nnx.to_flat_state(nnx.state(model, nnx.Param)):
            if "fsdp" in specs[path]:
                node: Any = model
                for name in path:
                    node = node[name] if isinstance(name, int) else getattr(node, str(name))
                node.set_metadata(on_get_value=(Reshard(path),))
        hidden = model.hidden(batch["inputs"], segment_ids=batch["segment_ids"], positions=batch["positions"])

        def sums(hidden: Any, head: Any, targets: Any, weights: Any) -> Any:
            own = head_loss_sums(hidden, head, targets, weights, counts)
            return jax.lax.psum(jnp.stack([own.nats, own.tokens]), ("data", "fsdp"))

        # The loss goes over blocks of tokens: an operator like others.
        mapped = jax.shard_map(sums, in_specs=(by_rows, whole, by_rows, by_rows), out_specs=whole, check_vma=False)
        head = jax.sharding.reshard(model.output_embedding, whole)
        nats, tokens = mapped(hidden, head, batch["targets"], batch["loss_weights"])
        return nats / tokens

    def explicit_step(parameters: Any, other: Any, state: Any, batch: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(parameters, other, batch)
        changes, state = optimizer.update(gradients, state, parameters)
        return optax.apply_updates(parameters, changes), state, value, gradient_norm(gradients)

    batch = {
        name: jax.ShapeDtypeStruct(
            (rows, length),
            np.float32 if name == "loss_weights" else np.int32,
            sharding=NamedSharding(mesh, by_rows),
        )
        for name in BATCH_FIELDS
    }
    state = jax.eval_shape(optimizer.init, parameters)
    with jax.set_mesh(mesh):
        traced = jax.jit(explicit_step, donate_argnums=(0, 2)).trace(
            lying(parameters), lying(other), lying(state), batch
        )
        return traced.lower(lowering_platforms=platforms).compile()


def _counted(asked: dict[str, Any]) -> dict[str, float]:
    """Arrays and megabytes by kind of collective, and memory."""
    from experiments.several_gpus.collectives import collectives

    compiled = _compiled(asked)
    found: dict[str, float] = collections.defaultdict(float)
    for one in collectives(compiled.as_text()):
        if one.devices > 1:
            # Collectives that run beside others have their operands among their results.
            found[f"{one.kind}, arrays"] += len(one.shapes) * one.times
            found[f"{one.kind}, MB"] += one.bytes * one.times / 1e6
    memory = compiled.memory_analysis()
    found["temporary MB"] = memory.temp_size_in_bytes / 1e6
    return {name: round(value, 2) for name, value in sorted(found.items())}


def main() -> int:
    """Runs the command; returns the exit code."""
    options = tyro.cli(Options, prog="python -m experiments.several_gpus.explicit_axes")
    with errors_as_lines():
        if not options.cpus and (reason := missing_packages()):
            raise ValueError(reason)
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
    variables = {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"} if options.cpus else offline_environment()
    failed = False
    for mesh in options.meshes:
        for form in FORMS:
            asked = dataclasses.asdict(options) | {"mesh": [int(n) for n in mesh.split(",")], "form": form}
            child = Child("experiments.several_gpus.explicit_axes", "compile", variables=variables)
            lines, failure = child.finish(json.dumps(asked), 3600)
            failed |= bool(failure)
            print(mesh, form, failure[-2000:] or lines[-1], flush=True)
    return int(failed)


if __name__ == "__main__":
    if sys.argv[1:] == ["compile"]:
        print(json.dumps(_counted(json.load(sys.stdin))))
    else:
        sys.exit(main())

"""Run by `test_mesh.py` in a process of its own, which has eight devices: prints what each mesh gave, as JSON."""

import collections
import dataclasses
import json
import math
import os
import shutil
import sys
import tempfile
from pathlib import Path

if __name__ == "__main__":  # before jax is imported
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"

import jax
import numpy as np
import optax
from flax import nnx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from experiments.several_gpus.collectives import collectives
from rnnlib.data import DataConfig
from rnnlib.layers import Experts
from rnnlib.layers.presets import mixer_names
from rnnlib.models import DecoderLM, ModelConfig
from rnnlib.training import (
    CheckpointConfig,
    Checkpoints,
    MeshConfig,
    OptimizerConfig,
    Progress,
    TrainConfig,
    evaluate,
    init_train_state,
    learning_rate_schedule,
    load_run,
    make_mesh,
    make_optimizer,
    make_train_step,
    plan_step,
    planned_bytes,
    put_batch,
    put_state,
    read_csv,
    train,
)
from rnnlib.training.mesh import AXES
from rnnlib.training.optimizer import alike
from rnnlib.training.step import state_shardings
from tests.training.packed import packed_batch

VOCABULARY, ROWS, LENGTH = 32, 16, 32
SIZES = {"vocabulary_size": VOCABULARY, "width": 32, "num_layers": 1, "num_heads": 2, "mlp_width": 32}
# One mixer of each kind, a hybrid, and layers in a scan; each with the meshes (data, fsdp) of eight devices.
MODELS = {
    "hybrid": (
        {"num_layers": 2, "mixers": ("gated_deltanet", "sliding_window_attention"), "window": 8, "remat": True},
        1,
    ),
    "scanned, in parts": ({"num_layers": 2, "mixers": "kda", "scan_layers": True, "remat": True}, 2),
    "offline": ({"mixers": "mamba2"}, 1),
    "ridge": ({"mixers": "gated_kalmanet"}, 1),
    "preconditioned": ({"mixers": "pgdn"}, 1),
    "trapezoidal": ({"mixers": "mamba3"}, 1),
    "attention": ({"num_layers": 2, "mixers": ("attention", "latent_attention")}, 1),
    "experts": ({"feed_forwards": Experts(4, 2, 16, shared_width=8)}, 1),
}
MESHES = {
    "hybrid": ((8, 1), (2, 4)),
    "scanned, in parts": ((2, 4),),
    "offline": ((4, 2),),
    "ridge": ((1, 8),),
    "preconditioned": ((2, 4),),
    "trapezoidal": ((1, 8),),
    "attention": ((4, 2),),
    "experts": ((2, 4),),
}
# The others are trained on meshes where slow tests run, and all are by `on_all_meshes`.
ALWAYS = ("hybrid", "scanned, in parts")


def batches(count):
    """Packed rows."""
    random = np.random.default_rng(0)
    for _ in range(count):
        yield packed_batch(random, VOCABULARY, ROWS, LENGTH)


def bytes_of_a_device(tree):
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))


def furthest(found, wanted):
    """The largest distance of an array from what it should be, as a part of its norm (tiny ones: of all arrays')."""
    pairs = list(zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True))
    least = 1e-3 * float(optax.tree.norm(wanted))
    return max(
        float(np.linalg.norm(np.asarray(x) - np.asarray(y)) / max(np.linalg.norm(np.asarray(y)), least))
        for x, y in pairs
    )


def made(config):
    """A model's graph, a function that makes its training state, and what makes its training step on a mesh."""
    settings = OptimizerConfig(learning_rate=1e-3, warmup_steps=0)
    optimizer, schedule = make_optimizer(settings, 10), learning_rate_schedule(settings, 10)
    graph = nnx.split(nnx.eval_shape(lambda: DecoderLM(config, rngs=nnx.Rngs(0))))[0]

    def state(mesh=None):
        return init_train_state(DecoderLM(config, rngs=nnx.Rngs(0)), optimizer, mesh)[1]

    def step(mesh):
        return make_train_step(graph, optimizer, schedule, np.ones(config.vocabulary_size, np.int32), mesh)

    return graph, state, step


def two_steps(options, parts, mesh):
    """What two training steps give, and the gradient of the first, clipped: Adam's first moment, scaled."""
    graph, new_state, step = made(ModelConfig(**(SIZES | options)))
    state = put_state(new_state(mesh), mesh)
    template = jax.eval_shape(new_state)
    first, second = (put_batch(batch, mesh, parts) for batch in batches(2))
    program = step(mesh).lower(state, first).compile()
    rows = []
    # It takes what lies as its first arguments did and no other, so the state that it gives lies so too.
    for batch in (first, second):
        state, metrics = program(state, batch)
        if not rows:
            gradient = jax.device_get(optax.tree.get(state.optimizer, "mu"))
        rows.append([float(metrics.nats / metrics.tokens), float(metrics.gradient_norm)])
    return graph, template, state, rows, gradient, program


def totals(found):
    """By kind and shape of a result, how often a device has part in it in a step."""
    counts = collections.Counter()
    for one in found:
        counts.update({f"{one.kind} {list(shape)}": one.times for shape in one.shapes})
    return counts


def wanted_gathers(options, parts, parameters, size):
    """The gathers and scatters of a step, from the parameters' shapes and nothing else, as `totals` has them.

    A matrix is gathered where a layer reads it and, in a block that is recomputed, once more; its gradient is
    scattered; both in each part of the batch. Vectors are whole everywhere.
    """
    counts = collections.Counter()
    for path, x in parameters:
        axes = [axis for axis, length in enumerate(x.shape) if length % size == 0]
        if len(x.shape) < 2 or not axes or size == 1:
            continue
        share = [length // size if axis == axes[0] else length for axis, length in enumerate(x.shape)]
        again = 2 if options.get("remat") and "blocks" in path else 1
        counts[f"all-gather {[n for n in x.shape if n > 1]}"] += again * parts
        counts[f"reduce-scatter {[n for n in share if n > 1]}"] += parts
    return counts


def config_of(options, parts, mesh):
    """The config of `two_steps`."""
    model = ModelConfig(**(SIZES | options))
    data = DataConfig(sequence_length=LENGTH, batch_size=ROWS)
    sizes = MeshConfig(data=mesh.shape["data"], fsdp=mesh.shape["fsdp"])
    return TrainConfig(model=model, data=data, accumulation_steps=parts, mesh=sizes)


def planned_and_found(config, program, done):
    """By kind and devices, arrays and their bytes in a step; and bytes of the step's arguments on a device."""
    plan, found = plan_step(config, 8), collections.Counter()
    for one in done:
        scattered = one.devices if one.kind == "reduce-scatter" else 1
        found[f"{one.kind} of {one.devices}, arrays"] += len(one.shapes) * one.times
        found[f"{one.kind} of {one.devices}, bytes"] += one.bytes * one.times * scattered
    planned = collections.Counter()
    for one in plan.exchanges:
        planned[f"{one.kind} of {one.devices}, arrays"] += one.count
        planned[f"{one.kind} of {one.devices}, bytes"] += one.bytes
    found["arguments"] = program.memory_analysis().argument_size_in_bytes
    # A batch of one part is passed without its positions where no attention reads them.
    reads_all = config.accumulation_steps > 1 or any("attention" in name for name in config.model.layer_mixers)
    batch, counters = (5 if reads_all else 4) * plan.rows * LENGTH * 4, 2 * 4
    planned["arguments"] = plan.parameters + plan.optimizer + batch + counters
    return planned, found


def every_mesh(names):
    results = {}
    for name in names:
        options, parts = MODELS[name]
        graph, _, state, rows, gradient, program = two_steps(options, parts, None)
        one = {"rows": rows, "bytes": program.memory_analysis().argument_size_in_bytes}
        assert not collectives(program.as_text())
        results[name] = one
        for data, fsdp in MESHES[name]:
            mesh = make_mesh(8, MeshConfig(data=data, fsdp=fsdp))
            graph, template, shared, rows, own_gradient, program = two_steps(options, parts, mesh)
            parameters = [(path, x.get_raw_value()) for path, x in nnx.to_flat_state(shared.parameters)]
            sharded = [x for _, x in parameters if "fsdp" in tuple(x.sharding.spec)]
            leaves = jax.tree.leaves(shared.parameters)
            kept = (shared.parameters, shared.optimizer)
            done = [one for one in collectives(program.as_text()) if one.devices > 1]
            reduced = [one for one in done if one.kind == "all-reduce"]
            found = {
                "rows": rows,
                "gradient": furthest(own_gradient, gradient),
                "vectors": sum(x.nbytes for _, x in parameters) - sum(x.nbytes for x in sharded),
                "shares": sum(x.nbytes for x in sharded) // fsdp,
                "sums": sum("fsdp" in tuple(leaves[first].sharding.spec) for first, *_ in alike(shared.parameters)),
                "share": bytes_of_a_device(kept) / bytes_of_a_device((state.parameters, state.optimizer)),
                "bytes": program.memory_analysis().argument_size_in_bytes,
                "collectives": totals(one for one in done if one.kind != "all-reduce"),
                "groups": sorted({one.devices for one in done if one.kind != "all-reduce"}),
                "wanted": wanted_gathers(options, parts, parameters, fsdp),
                "all-reduced": [
                    sum(one.bytes * one.times for one in reduced if one.devices == size) for size in (8, data, fsdp)
                ],
            }
            found["sent"] = planned_and_found(config_of(options, parts, mesh), program, done)
            results[f"{name} {data} {fsdp}"] = found
            if name == "hybrid" and (data, fsdp) == (2, 4):
                model, counts = nnx.merge(graph, shared.parameters, shared.other), np.ones(VOCABULARY, np.int32)
                found["evaluation"] = evaluate(model, batches(1), token_bytes=counts, mesh=mesh).loss
                model = nnx.merge(graph, state.parameters, state.other)
                one["evaluation"] = evaluate(model, batches(1), token_bytes=counts).loss
                restores_elsewhere(shared, template)
    return results


def planned_memory():
    """By XLA's plan, what a step on eight devices takes of each, at every size of "fsdp"; nothing is computed."""
    config = ModelConfig(64, 64, 4, 2, "linear_attention", mlp_width=128, remat=True)
    _, new_state, step = made(config)
    template, found = jax.eval_shape(new_state), {}
    for fsdp, tokens in ((1, 8), (2, 8), (4, 8), (8, 8), (8, 256)):
        mesh = make_mesh(8, MeshConfig(fsdp=fsdp))

        def lying(x, sharding):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

        state = jax.tree.map(lying, template, state_shardings(template, mesh))
        rows = NamedSharding(mesh, PartitionSpec(None, AXES))
        batch = {
            name: lying(jax.ShapeDtypeStruct((1, 8, tokens), x.dtype), rows) for name, x in next(batches(1)).items()
        }
        compiled = step(mesh).lower(state, batch).compile()
        plan = compiled.memory_analysis()
        sizes = {"kept": plan.argument_size_in_bytes, "temporary": plan.temp_size_in_bytes}
        data = DataConfig(sequence_length=tokens, batch_size=8)
        asked = TrainConfig(model=config, data=data, mesh=MeshConfig(fsdp=fsdp))
        sizes["planned"] = plan_step(asked, 8, compile_for=jax.devices()).compiled
        sizes["own"] = planned_bytes(compiled)
        found[f"{fsdp} {tokens}"] = sizes
    sizes = [(path, 4 * math.prod(x.shape)) for path, x in nnx.to_flat_state(template.parameters)]
    block = sum(size for path, size in sizes if path[:2] == ("blocks", 0))
    return {"by size": found, "parameters": sum(size for _, size in sizes), "block": block}


@st.composite
def drawn_models(draw):
    """A model, parts of its batch, and a mesh."""
    shapes = [(4, 1, 1), (2, 2, 2), (8, 1, 1), (1, 4, 2), (1, 1, 1), (1, 8, 1), (2, 1, 2), (1, 1, 2)]
    fsdp, context, tensor = draw(st.sampled_from(shapes))
    options = {
        "mixers": draw(st.sampled_from(mixer_names())),
        "num_layers": 1,
        "remat": draw(st.booleans()),
        "tie_embeddings": draw(st.booleans()),
    }
    data = draw(st.sampled_from([n for n in (1, 2, 4, 8) if 2 <= n * fsdp * context * tensor <= 8]))
    return options, draw(st.sampled_from([1, 2])), data, fsdp, context, tensor


def drawn(examples):
    """The largest differences from one device's losses and gradients in models and meshes that hypothesis draws."""
    found = {}

    @settings(max_examples=examples, deadline=None, derandomize=True, database=None, suppress_health_check=HealthCheck)
    @given(drawn_models())
    def compare(case):
        options, parts, *sizes = case
        if repr(case) in found:
            return
        wanted = two_steps(options, 1, None)
        state = two_steps(options, parts, make_mesh(config=MeshConfig(*sizes)))
        rows = np.max(np.abs(np.divide(state[3], wanted[3]) - 1))
        found[repr(case)] = {"rows": float(rows), "gradient": furthest(state[4], wanted[4])}

    compare()
    return found


def restores_elsewhere(state, template):
    """A checkpoint from one mesh has the same bits on every other."""
    saved = jax.device_get((state.parameters, state.optimizer))
    with tempfile.TemporaryDirectory() as folder:
        with Checkpoints(Path(folder)) as checkpoints:
            checkpoints.save(state, Progress(2, 0, {}))
        for target in (make_mesh(4, MeshConfig(fsdp=4)), make_mesh(8, MeshConfig(fsdp=2)), make_mesh(8), None):
            with Checkpoints(Path(folder), writable=False) as checkpoints:
                restored = put_state(checkpoints.restore(template)[0], target)
            jax.tree.map(np.testing.assert_array_equal, (restored.parameters, restored.optimizer), saved)


def runs(corpus):
    """A run on 2 x 4 devices, and what its second half gives again on the same mesh, on another and on one device."""
    config = TrainConfig(
        model=ModelConfig(width=16, num_layers=1, num_heads=2, mlp_width=16, mixers="kda"),
        data=DataConfig(source="text", paths=(f"{corpus}/*.txt",), split_by="tail", sequence_length=32, batch_size=8),
        checkpoint=CheckpointConfig(every=2, keep=3),
        mesh=MeshConfig(fsdp=4),
        steps=4,
    )
    found = {}
    with tempfile.TemporaryDirectory() as parent:
        whole = Path(parent) / "whole"
        train(config, whole)
        others = {"same": config.mesh, "other": MeshConfig(fsdp=2), "one": MeshConfig(data=1, fsdp=1)}
        for name in others:
            shutil.copytree(whole, Path(parent) / name)
            shutil.rmtree(Path(parent) / name / "checkpoints" / "4")
        for name, mesh in others.items():
            train(dataclasses.replace(config, mesh=mesh), Path(parent) / name, resume=True)
        for name in ("whole", *others):
            parameters = nnx.state(load_run(Path(parent) / name).model)
            losses = [row["loss"] for row in read_csv(Path(parent) / name / "metrics.csv")]
            found[name] = losses, [np.asarray(x).tobytes().hex() for x in jax.tree.leaves(parameters)]
    return {name: {"losses": losses, "bits": hash(tuple(bits))} for name, (losses, bits) in found.items()}


if __name__ == "__main__":
    asked = {
        "meshes": lambda: every_mesh(sys.argv[2:]),
        "memory": planned_memory,
        "drawn": lambda: drawn(int(sys.argv[2])),
        "runs": lambda: runs(sys.argv[2]),
    }
    json.dump(asked[sys.argv[1]](), sys.stdout)

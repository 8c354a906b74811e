"""Run by `test_mesh.py` in a process of its own, which has eight devices: prints what each mesh gave, as JSON."""

import collections
import dataclasses
import json
import os
import re
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

from rnnlib.data import DataConfig
from rnnlib.layers import Experts
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
    put_batch,
    put_state,
    read_csv,
    train,
)

VOCABULARY, ROWS, LENGTH = 32, 16, 32
KINDS = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
# One mixer of each kind, and a hybrid on every mesh of eight devices; each model with the meshes (data, fsdp).
MODELS = {
    "hybrid": ({"mixers": ("gated_deltanet", "sliding_window_attention"), "window": 8, "remat": True}, 1),
    "scanned, in parts": ({"mixers": "kda", "scan_layers": True, "remat": True}, 2),
    "offline": ({"mixers": "mamba2"}, 1),
    "ridge": ({"mixers": "gated_kalmanet"}, 1),
    "preconditioned": ({"mixers": "pgdn"}, 1),
    "trapezoidal": ({"mixers": "mamba3"}, 1),
    "attention": ({"mixers": ("attention", "latent_attention")}, 1),
    "experts": ({"feed_forwards": Experts(4, 2, 16, shared_width=8)}, 1),
}
MESHES = {
    "hybrid": ((8, 1), (4, 2), (2, 4), (1, 8)),
    "scanned, in parts": ((2, 4),),
    "offline": ((4, 2),),
    "ridge": ((1, 8),),
    "preconditioned": ((2, 4),),
    "trapezoidal": ((1, 8),),
    "attention": ((4, 2),),
    "experts": ((2, 4),),
}


def batches(count):
    """Packed rows."""
    random = np.random.default_rng(0)
    for _ in range(count):
        tokens = random.integers(0, VOCABULARY, (ROWS, LENGTH + 1)).astype(np.int32)
        ids = np.cumsum(tokens[:, :-1] % 7 == 0, 1).astype(np.int32)
        positions = np.tile(np.arange(LENGTH, dtype=np.int32), (ROWS, 1))
        weights = random.uniform(size=(ROWS, LENGTH)).astype(np.float32)
        names = ("inputs", "targets", "segment_ids", "positions", "loss_weights")
        yield dict(zip(names, (tokens[:, :-1], tokens[:, 1:], ids, positions, weights)))


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


def two_steps(options, parts, mesh):
    """What two training steps give, and the gradient of the first, clipped: Adam's first moment, scaled."""
    config = ModelConfig(vocabulary_size=VOCABULARY, width=32, num_layers=2, num_heads=2, mlp_width=32, **options)
    settings = OptimizerConfig(learning_rate=1e-3, warmup_steps=0)
    optimizer, schedule = make_optimizer(settings, 10), learning_rate_schedule(settings, 10)
    graph, state = init_train_state(DecoderLM(config, rngs=nnx.Rngs(0)), optimizer)
    template = jax.eval_shape(lambda: state)
    state = put_state(state, mesh)
    step = make_train_step(graph, optimizer, schedule, np.ones(VOCABULARY, np.int32), mesh)
    before = [x.sharding for x in jax.tree.leaves((state.parameters, state.optimizer))]
    rows, gradient = [], None
    for batch in batches(2):
        state, metrics = step(state, put_batch(batch, mesh, parts))
        rows.append([float(metrics.nats / metrics.tokens), float(metrics.gradient_norm)])
        gradient = jax.device_get(optax.tree.get(state.optimizer, "mu")) if gradient is None else gradient
    after = [x.sharding for x in jax.tree.leaves((state.parameters, state.optimizer))]
    assert before == after and step._cache_size() == 1  # lies as it was put, so the second step is the first's program
    return graph, template, state, rows, gradient, step.lower(state, put_batch(batch, mesh, parts)).compile()


def every_mesh():
    results = {}
    for name, (options, parts) in MODELS.items():
        graph, _, state, rows, gradient, program = two_steps(options, parts, None)
        one = {"rows": rows, "bytes": program.memory_analysis().argument_size_in_bytes}
        assert not re.search(KINDS, program.as_text())
        results[name] = one
        for data, fsdp in MESHES[name]:
            mesh = make_mesh(8, MeshConfig(data=data, fsdp=fsdp))
            graph, template, shared, rows, own_gradient, program = two_steps(options, parts, mesh)
            parameters = nnx.to_flat_state(shared.parameters)
            sharded = ["blocks" in path for path, x in parameters if "fsdp" in tuple(x.get_raw_value().sharding.spec)]
            kept = (shared.parameters, shared.optimizer)
            found = {
                "rows": rows,
                "gradient": furthest(own_gradient, gradient),
                "sharded in blocks": sum(sharded),
                "sharded outside": len(sharded) - sum(sharded),
                "share": bytes_of_a_device(kept) / bytes_of_a_device((state.parameters, state.optimizer)),
                "bytes": program.memory_analysis().argument_size_in_bytes,
                "collectives": collections.Counter(re.findall(rf" ({KINDS})(?:-start)?\(", program.as_text())),
            }
            results[f"{name} {data} {fsdp}"] = found
            if name == "hybrid" and (data, fsdp) == (2, 4):
                model, counts = nnx.merge(graph, shared.parameters, shared.other), np.ones(VOCABULARY, np.int32)
                found["evaluation"] = evaluate(model, batches(1), token_bytes=counts, mesh=mesh).loss
                model = nnx.merge(graph, state.parameters, state.other)
                one["evaluation"] = evaluate(model, batches(1), token_bytes=counts).loss
                restores_elsewhere(shared, template)
    return results


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
    json.dump(every_mesh() if sys.argv[1] == "meshes" else runs(sys.argv[2]), sys.stdout)

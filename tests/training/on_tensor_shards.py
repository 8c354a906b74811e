"""Run by `test_tensor_parallel.py` in a process with eight devices: prints what shared layers gave, as JSON."""

import collections
import dataclasses
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

if __name__ == "__main__":  # before jax is imported
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    os.environ["JAX_ENABLE_X64"] = "1"

import jax
import numpy as np
import optax
from flax import nnx

from experiments.several_gpus.collectives import collectives
from rnnlib.data import DataConfig
from rnnlib.layers import Experts
from rnnlib.layers.presets import mixer_names
from rnnlib.models import DecoderLM, ModelConfig
from rnnlib.models.variables import separate_columns, values_by_column
from rnnlib.training import (
    CheckpointConfig,
    Checkpoints,
    MeshConfig,
    Progress,
    TrainConfig,
    Trainer,
    evaluate,
    init_train_state,
    make_mesh,
    make_train_step,
    put_batch,
    put_state,
    read_csv,
    train,
)
from rnnlib.training.checkpoint import to_host
from rnnlib.training.step import state_shardings
from tests.training.packed import packed_batch

VOCABULARY, ROWS, LENGTH, HEADS = 16, 4, 8, 4
# The token-by-token implementation compiles fastest.
SIZES = {"vocabulary_size": VOCABULARY, "width": 16, "num_heads": HEADS, "mlp_width": 16}
WIDE = {"dtype": "float64", "param_dtype": "float64"}  # so that rounding hides nothing
SCAN = {"*": {"implementation": "scan"}}
GROUPED = {"key_heads": 2, "qk_norm": "all", "output_gate": True, "output_bias": True}
# What is summed, kept whole or counted over heads: fixed decays, one key head and a norm over all heads; grouped keys;
# latents. Rows and tokens are sharded, too.
MIXERS = ("retnet", "attention", "latent_attention")
ONE_KEY = {"key_heads": 1, "output_projection.norm": "all"}
EVERY = WIDE | {
    "num_layers": len(MIXERS),
    "mixers": MIXERS,
    "mixer_overrides": SCAN | {"retnet": ONE_KEY, "attention": GROUPED},
}
# Low ranks; blocks in a loop, recomputed; experts with a router's losses; an embedding that is the head; two parts.
LOOP = {
    "num_layers": 2,
    "mixers": ("kda",),
    "mixer_overrides": SCAN,
    "feed_forwards": Experts(4, 2, 8, load_balancing=0.1, z_loss=0.1),
    "scan_layers": True,
    "remat": True,
    "tie_embeddings": True,
}


def batch(rows=ROWS, length=LENGTH, vocabulary=VOCABULARY):
    """Packed rows."""
    return packed_batch(np.random.default_rng(0), vocabulary, rows, length)


def step_of(config, mesh, parts=1, packed=None):
    """Loss and norm of the gradient, the gradient by parameter, the state after a step, and the program."""
    packed = batch() if packed is None else packed
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(1.0, momentum=0.9))
    graph, state = init_train_state(DecoderLM(config, rngs=nnx.Rngs(0)), optimizer, mesh)
    state, rows = put_state(state, mesh), put_batch(packed, mesh, parts)
    step = make_train_step(graph, optimizer, lambda _: 1.0, np.ones(config.vocabulary_size, np.int32), mesh)
    program = step.lower(state, rows).compile()
    state, metrics = program(state, rows)
    trace = values_by_column(optax.tree.get(state.optimizer, "trace"), nnx.Param)
    gradient = {path: np.asarray(x) for path, x in trace.items()}
    return [float(metrics.nats / metrics.tokens), float(metrics.gradient_norm)], gradient, state, (graph, program)


def compared(options, mesh, parts=1):
    """The furthest from one device's loss, gradient norm and clipped gradient; and the states and programs."""
    config = ModelConfig(**(SIZES | options))
    rows, wanted, whole, _ = step_of(config, None, parts)
    own_rows, gradient, state, made = step_of(config, mesh, parts)
    return differences((rows, wanted), (own_rows, gradient)), whole, state, made


def differences(one, other):
    """Of what `step_of` gives of two: how far they are from each other, in which array, as parts of the first."""
    (rows, wanted), (own_rows, gradient) = one[:2], other[:2]
    least = 1e-3 * np.sqrt(sum(np.sum(np.square(x)) for x in wanted.values()))
    errors = {name: np.linalg.norm(gradient[name] - x) / max(np.linalg.norm(x), least) for name, x in wanted.items()}
    errors["rows"] = np.max(np.abs(np.divide(own_rows, rows) - 1))
    worst = max(errors, key=lambda name: errors[name])
    return {"worst": worst, "error": float(errors[worst])}


def bytes_of_a_device(state):
    kept = jax.tree.leaves(separate_columns((state.parameters, state.optimizer)))
    return sum(x.addressable_shards[0].data.nbytes for x in kept)


def by_name(state):
    """Parameters and the optimizer's arrays, on the host, with columns of input projections one by one."""
    return to_host(separate_columns((state.parameters, state.optimizer)))


def restored_elsewhere(state):
    """How many arrays a checkpoint of shared layers gives back bit for bit, on other meshes and one device."""
    config, optimizer = (
        ModelConfig(**(SIZES | LOOP)),
        optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(1.0, momentum=0.9)),
    )
    meshes = {"fsdp": make_mesh(8, MeshConfig(data=1, fsdp=8)), "one": None}
    meshes["tensor"] = make_mesh(8, MeshConfig(data=1, fsdp=4, tensor=2))
    found = {}
    for name, mesh in meshes.items():  # each from the one before
        template = jax.eval_shape(
            lambda mesh=mesh: init_train_state(DecoderLM(config, rngs=nnx.Rngs(0)), optimizer, mesh)[1]
        )
        with tempfile.TemporaryDirectory() as folder:
            with Checkpoints(Path(folder)) as checkpoints:
                checkpoints.save(state, Progress(2, 0, {}))
            saved = by_name(state)
            with Checkpoints(Path(folder), writable=False) as checkpoints:
                state = checkpoints.restore(template, state_shardings(template, mesh))[0]
        own, read = jax.tree.leaves((state.parameters, state.optimizer)), by_name(state)
        same = [saved[key].tobytes() == read[key].tobytes() for key in saved | read]
        found[name] = [all(same), len(same)]
        found[f"{name} over"] = sorted({axis for x in own for axis in getattr(x.sharding, "spec", ()) if axis})
    return found


def run(corpus):
    """Losses of a run that shards layers for its first half, and of one on one device."""
    config = TrainConfig(
        model=ModelConfig(258, 16, 1, 2, ("gated_deltanet",), mlp_width=16),
        data=DataConfig(source="text", paths=(f"{corpus}/*.txt",), split_by="tail", sequence_length=16, batch_size=2),
        checkpoint=CheckpointConfig(every=2, keep=3),
        mesh=MeshConfig(data=1, fsdp=1),
        steps=4,
    )
    shared = dataclasses.replace(config, mesh=MeshConfig(data=1, tensor=2))
    found = {}
    try:
        Trainer(dataclasses.replace(shared, model=shared.model.replace(num_heads=1)), read_data=False)
    except ValueError as error:
        found["refused"] = str(error)
    with tempfile.TemporaryDirectory() as folder:
        whole, both = Path(folder) / "whole", Path(folder) / "both"
        train(config, whole)
        train(shared, both)
        shutil.rmtree(both / "checkpoints" / "4")
        train(config, both, resume=True)
        for name, path in (("one", whole), ("both", both)):
            found[name] = [row["loss"] for row in read_csv(path / "metrics.csv")]
    return found


def every_axis():
    print(json.dumps(compared(EVERY, make_mesh(8, MeshConfig(data=1, fsdp=2, context=2, tensor=2)))[0]))


def main(corpus):
    found = {}
    mesh = make_mesh(4, MeshConfig(data=1, fsdp=1, tensor=4))
    found["loop"], whole, state, (graph, program) = compared(LOOP, mesh, parts=2)
    plain = nnx.graphdef(DecoderLM(ModelConfig(**(SIZES | LOOP)), rngs=nnx.Rngs(0)))
    counts = collections.Counter()
    for one in collectives(program.as_text()):
        for shape in one.shapes:
            counts[f"{one.kind} of {one.devices} {list(shape)}"] += one.times
    found["collectives"] = counts
    found["share"] = bytes_of_a_device(state) / bytes_of_a_device(whole)
    found["evaluation"] = [
        evaluate(nnx.merge(own, one.parameters, one.other), [batch()], token_bytes=np.ones(VOCABULARY), mesh=over).loss
        for own, one, over in ((plain, whole, None), (graph, state, mesh))
    ]
    found["restored"] = restored_elsewhere(state)
    found["run"] = run(corpus)
    print(json.dumps(found))


def every_mixer(names):
    """Each mixer of the table by itself: `python -m tests.training.on_tensor_shards [name ...]`."""
    mesh = make_mesh(8, MeshConfig(data=2, fsdp=2, tensor=2))
    for name in names:
        print(name, compared(WIDE | {"num_layers": 1, "mixers": (name,), "mixer_overrides": SCAN}, mesh)[0], flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["test"]:
        main(sys.argv[2])
    elif sys.argv[1:] == ["every axis"]:
        every_axis()
    else:
        every_mixer(sys.argv[1:] or mixer_names())

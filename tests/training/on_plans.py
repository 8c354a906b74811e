"""Run by `test_plans.py` in a process of its own with eight devices: planned and compiled collectives, as JSON.

Its arguments are keys of `DRAWN`; `python -m tests.training.on_plans all` is every mesh with every mixer.
"""

import collections
import json
import os
import sys

if __name__ == "__main__":  # before jax is imported
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"

import jax
import numpy as np
from flax import nnx

from experiments.several_gpus.collectives import collectives
from rnnlib.data import DataConfig
from rnnlib.models import DecoderLM, ModelConfig
from rnnlib.training import (
    MeshConfig,
    TrainConfig,
    init_train_state,
    learning_rate_schedule,
    make_mesh,
    make_optimizer,
    make_train_step,
    plan_step,
)
from rnnlib.training.batches import abstract_batch
from rnnlib.training.step import abstract_state

MIXERS = ("gated_deltanet", "attention", "gated_kalmanet", "pgdn")
MESHES = {
    "tensor 2": {"tensor": 2},
    "tensor 4": {"tensor": 4},
    "fsdp 2 x tensor 2": {"fsdp": 2, "tensor": 2},
    "context 2": {"context": 2},
    "context 4": {"context": 4},
    "context 2 x tensor 2": {"context": 2, "tensor": 2},
}
# In CI: each mixer once, and each kind of mesh; those in ALWAYS by default.
DRAWN = {
    "tensor 2": ("gated_kalmanet",),
    "tensor 4": ("attention",),
    "fsdp 2 x tensor 2": ("gated_deltanet",),
    "context 4": ("gated_deltanet",),
    "context 2 x tensor 2": ("pgdn",),
}
ALWAYS = ("tensor 4", "fsdp 2 x tensor 2", "context 4")


def compared(mesh, mixer):
    """By kind and devices, arrays and bytes of a step as planned and as compiled; and its arguments' bytes."""
    model = ModelConfig(16, 32, 1, 4, (mixer,), mlp_width=16, remat=True, tie_embeddings="fsdp" in mesh)
    if mixer != "attention":
        model = model.replace(mixer_overrides={"*": {"implementation": "scan"}})
    sizes = MeshConfig(**({"data": 1, "fsdp": 1} | MESHES[mesh]))
    config = TrainConfig(model=model, data=DataConfig(sequence_length=16, batch_size=4), mesh=sizes)
    devices = sizes.data * sizes.fsdp * sizes.context * sizes.tensor
    plan = plan_step(config, devices)
    optimizer = make_optimizer(config.optimizer, config.steps)
    schedule = learning_rate_schedule(config.optimizer, config.steps)
    real, graphs = make_mesh(devices, sizes), []

    def state():
        graph, state = init_train_state(DecoderLM(model, rngs=nnx.Rngs(0)), optimizer, real)
        graphs.append(graph)
        return state

    shapes = abstract_state(jax.eval_shape(state), real)
    step = make_train_step(graphs[0], optimizer, schedule, np.ones(16, np.int32), real)
    program = step.lower(shapes, abstract_batch(4, 16, real)).compile()
    found, planned = collections.Counter(), collections.Counter()
    for one in collectives(program.as_text()):
        if one.devices > 1:
            scattered = one.devices if one.kind == "reduce-scatter" else 1
            found[f"{one.kind} of {one.devices}, arrays"] += len(one.shapes) * one.times
            found[f"{one.kind} of {one.devices}, bytes"] += one.bytes * one.times * scattered
    for one in plan.exchanges:
        planned[f"{one.kind} of {one.devices}, arrays"] += one.count
        planned[f"{one.kind} of {one.devices}, bytes"] += one.bytes
    state = [plan.parameters + plan.optimizer, program.memory_analysis().argument_size_in_bytes]
    return {"planned": planned, "found": found, "state": state}


if __name__ == "__main__":
    every = {mesh: MIXERS for mesh in MESHES}
    asked = every if sys.argv[1:] == ["all"] else {mesh: DRAWN[mesh] for mesh in sys.argv[1:]}
    results = {}
    for mesh, mixer in ((mesh, mixer) for mesh, mixers in asked.items() for mixer in mixers):
        results[f"{mesh}, {mixer}"] = found = compared(mesh, mixer)
        print(mesh, mixer, found, file=sys.stderr, flush=True)
    print(json.dumps(results))

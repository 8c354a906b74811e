"""Adapted models on several devices: run with four CPU devices, prints the differences to one device as JSON."""

import json

import jax
import numpy as np
import optax
from flax import nnx

from rnnlib.models import DecoderLM, ModelConfig
from rnnlib.models.variables import separate_columns
from rnnlib.training import MeshConfig, init_train_state, make_mesh, make_train_step, put_batch, put_state
from rnnlib.training.adaptation import LoraConfig, make_adaptation
from rnnlib.training.checkpoint import to_host
from rnnlib.training.step import split_for_mesh

CONFIG = ModelConfig(64, width=16, num_layers=1, num_heads=2, mixers=("gated_deltanet",), mlp_width=24)
RANDOM = np.random.default_rng(0)
BATCH = {
    "inputs": RANDOM.integers(0, 64, (8, 16)),
    "targets": RANDOM.integers(0, 64, (8, 16)),
    "segment_ids": np.ones((8, 16), np.int32),
    "positions": np.broadcast_to(np.arange(16, dtype=np.int32), (8, 16)),
    "loss_weights": np.ones((8, 16), np.float32),
}


def trained(sizes: MeshConfig | None, freeze: tuple[str, ...], lora: LoraConfig) -> dict[str, np.ndarray]:
    """What is trained, after three steps in two parts each."""
    mesh = None if sizes is None else make_mesh(config=sizes)
    model = DecoderLM(CONFIG, rngs=nnx.Rngs(0))
    adaptation = make_adaptation(freeze, lora, split_for_mesh(model, mesh)[1])
    optimizer = optax.chain(optax.trace(0.9), optax.scale(-0.5))
    graph, state = init_train_state(model, optimizer, mesh, adaptation)
    state = put_state(state, mesh)
    step = make_train_step(graph, optimizer, lambda _: 0.5, np.ones(64, np.int32), mesh, adaptation=adaptation)
    for _ in range(3):
        state, _ = step(state, put_batch(BATCH, mesh, 2))
    return to_host(separate_columns(state.parameters))  # a mesh may store them apart


if __name__ == "__main__":
    assert jax.device_count() == 4
    found = {}
    for name, how in (
        ("lora", ((), LoraConfig(rank=2, alpha=4.0))),
        ("freeze", (("feed_forward",), LoraConfig())),
    ):
        whole = trained(None, *how)
        for sizes in (MeshConfig(1, 2, 1, 2), MeshConfig(2, 2, 1, 1)):
            shared = trained(sizes, *how)
            assert shared.keys() == whole.keys()
            found[f"{name} {sizes}"] = float(max(np.abs(whole[key] - shared[key]).max() for key in whole))
    print(json.dumps(found))

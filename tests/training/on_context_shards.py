"""Run by `test_context_parallel.py` in a process of its own with eight devices: prints what split rows gave, as JSON.

Its arguments are the model's mixers.
"""

import dataclasses
import functools
import json
import os
import sys

if __name__ == "__main__":  # before jax is imported
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    os.environ["JAX_ENABLE_X64"] = "1"

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from rnnlib.layers import mixer_preset, register_preset
from rnnlib.models import DecoderLM, ModelConfig
from rnnlib.ops import context_axis
from rnnlib.training import MeshConfig, init_train_state, make_mesh, make_train_step, put_batch, put_state
from tests.training.packed import packed_batch

VOCABULARY, ROWS, LENGTH = 16, 4, 24
WIDE = {"dtype": "float64", "param_dtype": "float64"}  # so that rounding hides nothing
# A recurrence of each kind: delta rule and preconditioner, ridge, trapezoidal; and both kinds of attention.
RECURRENT = ("pkda", "gated_kalmanet", "mamba3")
MIXERS = (*RECURRENT, "sliding_window_attention", "forgetting_attention", "latent_attention")
# The operators of the others are in `tests.ops.on_context_shards`.
ALWAYS = ("pkda", "sliding_window_attention")


@functools.cache
def token_by_token(mixer):
    def preset():
        """A preset of another implementation."""
        return dataclasses.replace(mixer_preset(mixer), implementation="scan")

    preset.__name__ = f"{mixer}_scan"
    register_preset(preset.__name__, "tests")(preset)
    return preset.__name__


def batch():
    """Packed rows, some of whose documents cross devices."""
    return packed_batch(np.random.default_rng(0), VOCABULARY, ROWS, LENGTH)


def step_of(mesh, names):
    """Loss, gradient norm and the parameters after a step of gradient descent."""
    # The token-by-token implementation compiles fastest, and devices exchange the same.
    mixers = tuple(token_by_token(name) if name in RECURRENT else name for name in names)
    config = ModelConfig(VOCABULARY, 16, len(mixers), 2, mixers, window=5, mlp_width=16, **WIDE)
    optimizer = optax.sgd(1.0)
    graph, state = init_train_state(DecoderLM(config, rngs=nnx.Rngs(0)), optimizer)
    before = jax.device_get(state.parameters)
    step = make_train_step(graph, optimizer, lambda _: 1.0, np.ones(VOCABULARY, np.int32), mesh)
    state, metrics = step(put_state(state, mesh), put_batch(batch(), mesh))
    gradient = jax.tree.map(lambda x, y: x - np.asarray(y), before, state.parameters)
    return float(metrics.nats / metrics.tokens), jax.tree.leaves(gradient)


def logits_without_positions():
    """The furthest from whole rows that a model's logits are on shards in a map of the user's own."""
    model = DecoderLM(ModelConfig(VOCABULARY, 16, 1, 2, ("attention",), mlp_width=16, **WIDE), rngs=nnx.Rngs(0))
    mesh, tokens = jax.make_mesh((8,), ("tokens",)), batch()["inputs"]
    by = PartitionSpec(None, "tokens")

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=by, out_specs=by)
    def split(tokens):
        with context_axis("tokens"):
            return model(tokens)

    found, whole = split(jax.device_put(tokens, NamedSharding(mesh, by))), jax.jit(lambda tokens: model(tokens))(tokens)
    return float(np.max(np.abs(np.asarray(found) - np.asarray(whole))) / np.max(np.abs(np.asarray(whole))))


def main(names):
    loss, gradient = step_of(None, names)
    found, own = step_of(make_mesh(8, MeshConfig(data=1, fsdp=2, context=4)), names)
    smallest = 1e-3 * np.sqrt(sum(np.sum(np.square(x)) for x in gradient))
    furthest = max(np.linalg.norm(x - y) / max(np.linalg.norm(y), smallest) for x, y in zip(own, gradient, strict=True))
    json.dump(
        {"loss": abs(found / loss - 1), "gradient": float(furthest), "logits": logits_without_positions()}, sys.stdout
    )


if __name__ == "__main__":
    main(sys.argv[1:])

"""Prints how many kernels an H200 runs for an update by AdamW, compiled without a card: whole, and without sharing.

Run by `test_updates.py` in a process of its own, since a described card needs variables of the environment.
"""

import json
import re

import jax
import jax.numpy as jnp
import optax

from experiments.kernel_benchmarks.offline.cards import CARDS
from rnnlib.training import OptimizerConfig, make_optimizer, optimizer

LAYERS = 15
SHAPES = {"kernel": (1024, 1024), "scale": (1024,), "gate": (1024, 8)}
OPTIMIZER = make_optimizer(OptimizerConfig(clip_norm=None), 10)


def update(parameters, state, gradients, finite):
    """New parameters and moments, or the old ones."""
    changes, after = OPTIMIZER.update(gradients, state, parameters)
    changed = optax.apply_updates(parameters, changes)
    return optimizer.where_finite(finite, (changed, after), (parameters, state), parameters)


def main() -> None:
    """Compiles the update twice."""
    sharding, mesh = CARDS["sm_90"].alone()
    layer = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in SHAPES.items()}
    like = {"layers": [layer] * LAYERS}
    arguments = (like, jax.eval_shape(OPTIMIZER.init, like), like, jax.ShapeDtypeStruct((), bool))
    arguments = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments)
    counts = {}
    for name, most in (("together", optimizer.NUMBERS_OF_A_KERNEL), ("apart", 0)):
        optimizer.NUMBERS_OF_A_KERNEL = most
        jax.clear_caches()
        with jax.sharding.use_abstract_mesh(mesh):
            lowered = jax.jit(update, donate_argnums=(0, 1)).trace(*arguments).lower(lowering_platforms=("cuda",))
            text = lowered.compile().as_text()
        entry = text[text.index("\nENTRY ") :]
        counts[name] = len(re.findall(r" (?:fusion|copy|custom-call)\(", entry))
    print(json.dumps(counts))


if __name__ == "__main__":
    main()

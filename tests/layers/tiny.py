"""Small mixers with parameters far from their initial values, and how to call them compiled."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from rnnlib.layers import mixer_preset

WIDTH, HEADS = 16, 2

# Sizes of the presets whose own do not fit a tiny model.
SMALL = {name: {"key_head_dim": 8} for name in ("mamba2", "mamba3", "mamba3_mimo")}
SMALL["sliding_window_attention"] = {"window": 5}


def randomize(module, seed=0):
    """Parameters of everyday size, so that no gate is flat and no bias, scale or skip is at a value that hides it."""
    rng = np.random.default_rng(seed)
    for path, variable in nnx.to_flat_state(nnx.state(module, nnx.Param)):
        shape, name = variable.shape, path[-1]
        if len(shape) == 2:
            new = rng.standard_normal(shape) / np.sqrt(shape[0])
        elif name == "A_log":
            new = np.log(rng.uniform(0.2, 2.0, shape))
        else:
            new = (1.0 if name in ("scale", "skip") else 0.0) + 0.3 * rng.standard_normal(shape)
        variable[...] = jnp.asarray(new, variable.dtype)
    return module


def tiny(name, **options):
    overrides = SMALL.get(name, {}) | options
    return randomize(mixer_preset(name, **overrides).build(WIDTH, HEADS, rngs=nnx.Rngs(0)))


def inputs(batch, length, seed=1):
    return jnp.asarray(np.random.default_rng(seed).standard_normal((batch, length, WIDTH)), jnp.float32)


def compiled(module):
    """`call(x, segment_ids, cache)`, compiled once per shape."""
    graph, state = nnx.split(module)

    @jax.jit
    def call(x, segment_ids=None, cache=None):
        return nnx.merge(graph, state)(x, segment_ids=segment_ids, cache=cache)

    return call


def parameters(module):
    """Nested dicts of float64 arrays."""
    pure = nnx.to_pure_dict(nnx.state(module, nnx.Param))
    return jax.tree.map(lambda p: np.asarray(p, np.float64), pure)


def relative_error(actual, expected):
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    return np.linalg.norm(actual - expected) / np.linalg.norm(expected)

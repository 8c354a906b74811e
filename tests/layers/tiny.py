"""Small mixers with parameters far from their initial values, and how to call them compiled."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from rnnlib.layers import InputProjection, RecurrentMixer, mixer_preset
from rnnlib.layers.input_projection import columns_of
from rnnlib.models.variables import assign_by_column, values_by_column

WIDTH, HEADS = 16, 2

# A packed row: boundaries inside a chunk, and a document of one token.
LENGTH = 70
DOCUMENTS = (31, 1, 38)

# Sizes of the presets whose own do not fit a tiny model.
SMALL = {name: {"key_head_dim": 8} for name in ("mamba2", "mamba3", "mamba3_mimo")}
SMALL["zamba2"] = {"key_head_dim": 8, "transformer.adapter_rank": 3, "transformer.adapts_attention": True}
SMALL["gsa"] = {"solve.num_slots": 6}
SMALL["sliding_window_attention"] = {"window": 5}


def randomize(module, seed=0):
    """Parameters of everyday size, so that no gate is flat and no bias, scale or skip is at a value that hides it."""
    rng = np.random.default_rng(seed)
    new_values = {}
    for path, variable in values_by_column(module, nnx.Param).items():
        shape, name = variable.shape, path.split(".")[-1]
        if len(shape) == 2:
            new = rng.standard_normal(shape) / np.sqrt(shape[0])
        elif name == "A_log":
            new = np.log(rng.uniform(0.2, 2.0, shape))
        else:
            new = (1.0 if name in ("scale", "skip") else 0.0) + 0.3 * rng.standard_normal(shape)
        new_values[path] = jnp.asarray(new, variable.dtype)
    assign_by_column(module, nnx.Param, new_values)
    return module


def tiny(name, **options):
    overrides = SMALL.get(name, {}) | options
    return randomize(mixer_preset(name, **overrides).build(WIDTH, HEADS, rngs=nnx.Rngs(0)))


class Alone(nnx.Module):
    """A part of a mixer with an input projection for its own columns, called with the mixer's input."""

    def __init__(self, part, shape):
        self.part = part
        self.input_projection = InputProjection(shape, columns_of(part))

    def __call__(self, x, *others):
        return self.part(self.input_projection(x), *others)


def inputs(batch, length, seed=1):
    return jnp.asarray(np.random.default_rng(seed).standard_normal((batch, length, WIDTH)), jnp.float32)


def compiled(module):
    """`call(x, segment_ids, cache)`, compiled once per shape."""
    graph, state = nnx.split(module)

    @jax.jit
    def call(x, segment_ids=None, cache=None):
        return nnx.merge(graph, state)(x, segment_ids=segment_ids, cache=cache)

    return call


# Where the formulas look for columns of a recurrent mixer's input projection: with the part that reads them.
READERS = {name: f"{name}.projection" for name in ("query", "key", "value", "decay")}
READERS |= {
    "output_gate": "output_projection.gate",
    "decay_rate": "decay.rate_projection",
    "write_gate": "gain.projection",
}
READERS |= {"erase_gate": "gain.erase_projection", "angle": "keys.angle", "alpha": "solve.alpha"}
READERS |= {"gram_decay": "keys.gram.decay.projection", "gram_write_gate": "keys.gram.gain.projection"}
READERS |= {
    f"key_{name}": READERS[name].replace("keys.", "keys.key_map.") for name in ("gram_decay", "gram_write_gate")
}


def parameters(module):
    """Nested dicts of float64 arrays, columns of the input projection with the parts that read them."""
    nested = {}
    for path, value in values_by_column(module, nnx.Param).items():
        names = path.split(".")
        if "input_projection" in names:
            at = names.index("input_projection")
            mixer = functools.reduce(getattr, names[:at], module)
            reader = READERS[names[at + 1]] if isinstance(mixer, RecurrentMixer) else names[at + 1]
            names = [*names[:at], *reader.split("."), *names[at + 2 :]]
        *owners, last = names
        owner = nested
        for name in owners:
            owner = owner.setdefault(name, {})
        owner[last] = np.asarray(value, np.float64)
    return nested


def relative_error(actual, expected):
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    return np.linalg.norm(actual - expected) / np.linalg.norm(expected)


def parallel_pass(module):
    """A mixer's compiled call, its inputs and segment ids, and what it gives in parallel.

    The first row is one document, the second three; the last of them has the first one's id again.
    """
    call, x = compiled(module), inputs(2, LENGTH)
    ids = np.stack([np.full(LENGTH, 4), np.repeat([7, 3, 7], DOCUMENTS)]).astype(np.int32)
    y, cache = call(x, ids)
    assert cache is None
    return call, x, ids, np.asarray(y)


def check_documents(layer, module, x, y):
    """The parallel pass is the layer in NumPy, alone and packed."""
    p, wide = parameters(module), np.asarray(x, np.float64)
    assert relative_error(y[0], layer(p, wide[0])) < 1e-5
    documents = np.split(wide[1], np.cumsum(DOCUMENTS)[:-1])
    assert relative_error(y[1], np.concatenate([layer(p, document) for document in documents])) < 1e-5


def check_pieces(module, call, x, ids, expected):
    """Pieces and single tokens from a cache of constant size give the parallel pass."""
    cache = module.init_cache(2, 96, np.float32)
    sizes = [leaf.shape for leaf in jax.tree.leaves(cache)]
    pieces, start = [], 0
    # The second row's documents end inside the first piece: all but the last are what left padding is.
    for length in (33, 33, 1, 1, 1, 1):
        piece = slice(start, start + length)
        y, cache = call(x[:, piece], ids[:, piece], cache)
        pieces.append(y)
        start += length
        assert [leaf.shape for leaf in jax.tree.leaves(cache)] == sizes
    actual = np.concatenate(pieces, axis=1)
    np.testing.assert_allclose(actual, expected, atol=1e-4, rtol=0)
    assert relative_error(actual, expected) < 1e-5

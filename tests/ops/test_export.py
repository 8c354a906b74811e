"""`jax.export` with symbolic sizes: one program for any batch and length."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import export

from rnnlib import ops
from rnnlib.models import DecoderLM
from tests.selection import mostly_slow
from tests.tiny_models import tiny_config

# Annotations say `int`, which a symbolic size is not.
pytestmark = pytest.mark.usefixtures("unchecked_shapes")

KEYS, HEADS, SIZE = ("q", "k", "v"), 2, 8


def arrays(batch, length, make):
    """Arguments of the delta rule: keys, `beta`, and a decay a channel."""
    shapes = {name: (batch, length, HEADS, SIZE) for name in (*KEYS, "log_decay")}
    return {name: make(name, shape) for name, shape in (shapes | {"beta": (batch, length, HEADS)}).items()}


def specs(batch, length):
    return arrays(batch, length, lambda name, shape: jax.ShapeDtypeStruct(shape, jnp.float32))


def numbers(batch, length):
    random = np.random.default_rng(length)
    x = arrays(batch, length, lambda name, shape: jnp.asarray(random.uniform(size=shape) / SIZE**0.5, jnp.float32))
    return x | {"log_decay": -x["log_decay"]}


def gradients(implementation):
    def loss(x, segment_ids):
        out, state = ops.gated_delta_rule(**x, segment_ids=segment_ids, implementation=implementation)
        return jnp.sum(out**2) + jnp.sum(state**2)

    return jax.jit(jax.value_and_grad(loss))


def read_back(exported: export.Exported) -> export.Exported:
    return export.deserialize(exported.serialize())


@pytest.mark.parametrize("implementation", ["scan", "chunked"])
def test_gradients_of_any_batch_and_length(implementation):
    b, t = export.symbolic_shape("b, t")
    exported = export.export(gradients(implementation))(specs(b, t), jax.ShapeDtypeStruct((b, t), jnp.int32))
    exported = read_back(exported)
    for batch, length in ((1, 1), (2, 64), (3, 90)):
        x = numbers(batch, length)
        ids = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32) // 40, (batch, length))
        found, expected = exported.call(x, ids), gradients("scan")(x, ids)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), found, expected)


CALLS = {
    "linear_attention": lambda x: ops.linear_attention(x["q"], x["k"], x["v"], log_decay=x["beta"] - 1),
    "dplr": lambda x: ops.dplr(**{n: x[n] for n in KEYS}, a=x["k"], b=x["k"]),
    "ridge_solve": lambda x: ops.ridge_solve(x["q"], x["k"], iterations=3),
    "preconditioner": lambda x: ops.precondition_key(x["k"], log_decay=x["beta"] - 1),
    "preconditioner_by_channel": lambda x: ops.precondition_key(x["k"], log_decay=x["log_decay"]),
    "short_convolution": lambda x: ops.short_convolution(x["q"].reshape(*x["q"].shape[:2], -1), jnp.ones((4, 16))),
    "window": lambda x: ops.causal_attention(*(x[n] for n in KEYS), window=8),
}


@pytest.mark.parametrize("name", mostly_slow(CALLS, ["preconditioner_by_channel", "short_convolution", "window"]))
def test_every_operator_has_a_symbolic_length(name):
    call = CALLS[name]
    exported = export.export(jax.jit(call))(specs(*export.symbolic_shape("b, t")))
    for length in (2, 70):
        x = numbers(2, length)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), exported.call(x), jax.jit(call)(x)
        )


def test_what_has_no_symbolic_length_says_so():
    x = specs(*export.symbolic_shape("b, t"))
    message = "gated_delta_rule: implementation 'triton' does not support symbolic sizes, as in .* for numbers"
    with pytest.raises(NotImplementedError, match=message):
        export.export(jax.jit(lambda x: ops.gated_delta_rule(**x, implementation="triton")))(x)
    refused = "does not support symbolic sizes, as in (k|x) of"
    with pytest.raises(NotImplementedError, match=refused):
        export.export(jax.jit(lambda x: ops.precondition_key(x["k"], log_decay=x["beta"], implementation="triton")))(x)
    with pytest.raises(NotImplementedError, match=refused):
        kernel = jnp.ones((4, HEADS))
        export.export(jax.jit(lambda x: ops.short_convolution(x, kernel, implementation="triton")))(x["beta"])
    message = "'chunked' does not support a decay of one number a channel over a symbolic length"
    with pytest.raises(NotImplementedError, match=message):
        export.export(jax.jit(lambda x: ops.diagonal_gram(x["k"], log_decay=x["log_decay"], implementation="chunked")))(
            x
        )


@pytest.mark.parametrize("mixer", mostly_slow(["gated_deltanet", "kda", "pkda", "sliding_window_attention"], ["kda"]))
def test_a_model_whose_state_is_a_plain_tree(mixer):
    graphdef, state = nnx.split(DecoderLM(tiny_config(mixer), rngs=nnx.Rngs(0)))
    leaves, structure = jax.tree.flatten(state)  # a list of arrays: what is exported knows of no flax

    @jax.jit
    def logits(leaves, tokens):
        return nnx.merge(graphdef, jax.tree.unflatten(structure, leaves))(tokens)

    like = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
    tokens = jax.ShapeDtypeStruct(export.symbolic_shape("b, t"), jnp.int32)
    exported = read_back(export.export(logits)(like, tokens))
    given = jnp.arange(140).reshape(2, 70) % 29
    np.testing.assert_allclose(exported.call(leaves, given), logits(leaves, given), rtol=2e-5, atol=2e-6)

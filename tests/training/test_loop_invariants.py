"""What goes before a loop, and that its turns then compute what they did, bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import rnnlib.training.step
from rnnlib.models import DecoderLM, ModelConfig
from rnnlib.training import (
    OptimizerConfig,
    init_train_state,
    learning_rate_schedule,
    make_optimizer,
    make_train_step,
    put_batch,
)
from rnnlib.training.adaptation import LoraConfig, make_adaptation
from rnnlib.training.loop_invariants import hoist
from rnnlib.training.step import split_model
from tests.selection import mostly_slow
from tests.training.packed import packed_batch

VOCABULARY = 48


@jax.jit
def _rounded_product(x, kernel):
    """As a layer multiplies: the kernel is rounded, by its largest magnitude.

    To integers: XLA may leave out that a number is rounded to bfloat16 where it sees what reads it.
    """
    largest = jnp.max(jnp.abs(kernel))
    rounded = jnp.round(kernel / largest * 127).astype(jnp.int8)
    return jnp.tanh(x @ (rounded / 127)) * largest + jnp.broadcast_to(kernel[0], x.shape)


@given(st.lists(st.sampled_from(["narrow", "wide", "elsewhere", "move"]), min_size=1, max_size=4), st.booleans())
@settings(deadline=None, max_examples=15)
def test_turns_of_drawn_functions_compute_the_same_bits(kinds, is_differentiated):
    keys = iter(jax.random.split(jax.random.key(len(kinds)), 8))
    kernels = [jax.random.normal(next(keys), (16, 16)) for _ in kinds]
    x, constant = jax.random.normal(next(keys), (4, 16)), jax.random.normal(next(keys), (16,))

    def function(kernels, x):
        for kind, kernel in zip(kinds, kernels):
            if kind == "narrow":
                x = _rounded_product(x, kernel)
            elif kind == "wide":
                x = x + jnp.sum(jnp.broadcast_to(jnp.exp(kernel), (8, 16, 16)) * x[:1, None], axis=0)[:4]
            elif kind == "move":
                x = x * kernel.T[:4] + kernel[4:8]
            else:
                x = jax.checkpoint(_rounded_product)(x, kernel * constant)
        return jnp.sum(x**2)

    whole = jax.value_and_grad(function, argnums=(0, 1)) if is_differentiated else function
    before, turn = hoist(whole, kernels, x)
    values = jax.jit(before)(kernels)
    found, expected = jax.jit(turn)(values, kernels, x), jax.jit(whole)(kernels, x)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    # Nothing that was broadcast, and nothing that was only moved.
    assert all(value.size <= 16 * 16 for value in values)
    assert bool(values) or "narrow" not in kinds


def test_rounded_weights_go_before_the_loop_also_out_of_nested_calls():
    kernels, x = [i + jnp.ones((16, 16)) for i in range(3)], jnp.ones((4, 16))

    def function(kernels, x):
        for kernel in kernels:
            x = _rounded_product(x, kernel)
        return jnp.sum(x)

    before, turn = hoist(function, kernels, x)
    values = before(kernels)
    assert sorted(v.shape for v in values) == [()] * 3 + [(16, 16)] * 3
    text = str(jax.make_jaxpr(turn)(values, kernels, x))
    assert "reduce_max" not in text and "round" not in text.replace("_rounded_product", "")
    assert text.count("name=_rounded_product") == 3 and text.count("dot_general") == 1  # one program of a block


BASE = {
    "vocabulary_size": VOCABULARY,
    "width": 128,
    "num_layers": 2,
    "num_heads": 2,
    "mlp_width": 128,
    "mixers": ("gated_deltanet", "attention"),
    "mixer_overrides": {"gated_deltanet": {"implementation": "scan"}},
    "dtype": "bfloat16",
}
FLOAT8 = {"matmul_dtype": "float8", "width": 256, "mlp_width": 256}
MODELS = {
    "bfloat16": {},
    "float8, tied head": FLOAT8 | {"tie_embeddings": True, "mixers": ("attention",)},
    "float32": {"dtype": "float32"},
    "recomputed": FLOAT8 | {"remat": True},
    "scan over layers": {"mixers": ("gated_deltanet",), "scan_layers": True},
}


def _state_and_step(config, **adapted):
    settings = OptimizerConfig(learning_rate=1e-2, warmup_steps=0)
    optimizer = make_optimizer(settings, 10)
    model = DecoderLM(config, rngs=nnx.Rngs(0))
    adaptation = make_adaptation(adapted.get("freeze", ()), LoraConfig(rank=adapted.get("rank")), split_model(model)[1])
    graph, state = init_train_state(model, optimizer, adaptation=adaptation)
    counts = np.ones(VOCABULARY, np.int32)
    return state, make_train_step(graph, optimizer, learning_rate_schedule(settings, 10), counts, adaptation=adaptation)


def _steps(config, parts, **adapted):
    state, step = _state_and_step(config, **adapted)
    losses = []
    for seed in range(2):
        batch = packed_batch(np.random.default_rng(seed), VOCABULARY, 4, 16)
        state, metrics = step(state, put_batch(batch, None, parts))
        losses.append(float(metrics.nats))
    return jax.tree.map(np.asarray, state.parameters), losses


@pytest.mark.parametrize("name", mostly_slow(list(MODELS), ["float8, tied head"]))
def test_steps_are_those_of_parts_that_round_weights_again(name, monkeypatch):
    """Parameters after two steps, of packed rows, bit for bit."""
    config = ModelConfig(**BASE | MODELS[name])
    found = _steps(config, 2)
    monkeypatch.setattr(rnnlib.training.step, "hoist", _in_every_turn)
    expected = _steps(config, 2)
    assert found[1] == expected[1]
    jax.tree.map(np.testing.assert_array_equal, found[0], expected[0])


@pytest.mark.parametrize("adapted", mostly_slow([{"freeze": ("embedding", "query")}, {"rank": 2}], [{"rank": 2}]))
def test_what_is_frozen_or_adapted_is_trained_as_before(adapted, monkeypatch):
    config = ModelConfig(**BASE | FLOAT8 | {"mixers": ("attention",)})
    found = _steps(config, 2, **adapted)
    monkeypatch.setattr(rnnlib.training.step, "hoist", _in_every_turn)
    expected = _steps(config, 2, **adapted)
    assert found[1] == expected[1]
    jax.tree.map(np.testing.assert_array_equal, found[0], expected[0])


def _in_every_turn(function, fixed, *varying):
    return lambda fixed: None, lambda values, *arguments: function(*arguments)
